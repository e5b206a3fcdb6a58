"""Ollama's dialect: chat, generate, embeddings, and what is served. Answers stream as lines of JSON."""
