"""The wire: OpenAI's shapes over HTTP, SSE, and the chat page. The only room that knows the HTTP framework."""
