"""Cohere's SDK: reranking and embeddings."""

from __future__ import annotations

import cohere
from report import API_KEY, BASE_URL, MODEL, capability, status_of

client = cohere.ClientV2(api_key=API_KEY, base_url=BASE_URL)
DOCUMENTS = ["A cat sleeps.", "Paris is the capital of France.", "It rains."]

with capability("other", "rerank, embed"):
    ranked = client.rerank(model=MODEL, query="What is the capital of France?", documents=DOCUMENTS, top_n=2)
    assert ranked.results[0].index == 1, ranked
    assert len(ranked.results) == 2
    first_version = cohere.Client(api_key=API_KEY, base_url=BASE_URL)
    same = first_version.rerank(
        model=MODEL, query="What is the capital of France?", documents=DOCUMENTS, return_documents=True
    )
    assert same.results[0].document.text == DOCUMENTS[1]
    assert same.results[0].relevance_score == ranked.results[0].relevance_score
    embedded = client.embed(
        model=MODEL, texts=DOCUMENTS, input_type="search_document", embedding_types=["float", "base64"]
    )
    assert len(embedded.embeddings.float_) == len(embedded.embeddings.base64) == len(DOCUMENTS)
    assert len({len(vector) for vector in embedded.embeddings.float_}) == 1

with capability("errors"):
    stranger = cohere.ClientV2(api_key="wrong", base_url=BASE_URL)
    assert status_of(lambda: stranger.rerank(model=MODEL, query="a", documents=["b"])) == 401
    assert status_of(lambda: client.rerank(model="nothing", query="a", documents=["b"])) == 404
    assert status_of(lambda: client.rerank(model=MODEL, query="a", documents=[])) == 400

    def embed_in_bytes() -> None:
        client.embed(model=MODEL, texts=["a"], input_type="search_query", embedding_types=["int8"])

    assert status_of(embed_in_bytes) == 400
