"""Penstock: a high-concurrency LLM inference platform, from the HTTP socket to the attention kernel."""

__version__ = "0.1.0"  # The build reads this line without importing the package.
