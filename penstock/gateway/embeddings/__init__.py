"""Texts to vectors: what a request for embeddings goes through. Knows no HTTP and no wire format."""
