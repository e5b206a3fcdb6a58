"""The WebSocket /v1/stream and its messages."""
