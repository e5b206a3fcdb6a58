"""Penstock: a high-concurrency LLM inference platform, from the HTTP socket to the attention kernel."""

from penstock.version import __version__

__all__ = ["__version__"]
