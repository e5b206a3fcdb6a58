"""Requests that external servers answer: translated to their APIs, and read back as ordinary answers."""
