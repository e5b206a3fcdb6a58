"""The commands. The only room that reads environment variables, writes to a terminal and ends the process.

Modules here import quickly: torch is never imported in the process of a command except by `generate` and
`bench offline`, which run a model in it, and anything slow is imported inside the function that needs it.
"""
