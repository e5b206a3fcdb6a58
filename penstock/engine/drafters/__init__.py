"""Drafters guess the next tokens of requests, which the model then verifies in one step."""
