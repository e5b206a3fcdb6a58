"""Stored responses, which a workspace may look up, continue or delete. Knows no wire format: bodies are bytes."""
