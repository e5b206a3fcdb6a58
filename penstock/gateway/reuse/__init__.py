"""Answers given before, given again: the response cache and idempotency keys."""
