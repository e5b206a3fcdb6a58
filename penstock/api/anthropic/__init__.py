"""Anthropic's dialect: messages, token counts and message batches."""
