"""Scores and labels of texts: the reranking APIs of Jina and Cohere, and the pooling APIs of vLLM."""
