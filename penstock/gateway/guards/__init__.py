"""Safety: what may go into a model and what may come out of it, by written policies.

Knows text, prompts and answers; knows no HTTP and no engine. `policies.GuardPolicies` is the way in.
"""
