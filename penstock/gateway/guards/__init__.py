"""Safety policies for the inputs and the outputs of models.

Knows text, prompts and answers; knows no HTTP and no engine. `policies.GuardPolicies` is the entry point.
"""
