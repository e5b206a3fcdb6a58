"""The commands. The only room that writes to a terminal and ends the process.

Modules here import quickly: only `generate` and `bench offline`, which run a model, import torch in the process of
the command, and anything slow is imported inside the function that needs it.
"""
