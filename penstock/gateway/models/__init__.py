"""Which model answers to a name, and what the gateway builds from its card."""
