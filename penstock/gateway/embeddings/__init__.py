"""Embeddings: from texts to vectors. Knows no HTTP and no wire format."""
