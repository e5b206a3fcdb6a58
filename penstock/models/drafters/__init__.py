"""Heads that draft tokens from a model's hidden states, in the formats in which they are published."""
