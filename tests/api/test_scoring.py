"""Reranking, scores, labels and pooled vectors over HTTP, on an engine that makes vectors from token ids."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from tokenizers import Tokenizer, processors

from penstock.api.openai.moderations import is_harmless
from penstock.core.errors import PenstockError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.messages import ModelCard, PoolerCard
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.gateway.accounts import Accounts
from penstock.gateway.embeddings import service
from penstock.gateway.gateway import Gateway
from tests.api.conftest import Serve, direct_client
from tests.api.test_embeddings import RecordingLedger
from tests.gateway.fake_engine import BOS_ID, EOS_ID, FakeEngine, byte_tokenizer, engine_ready, model_card

CROSS = PoolerCard(labels=("LABEL_0",), scores_pairs=True, normalizes=False, source="config.json")
LABELS = PoolerCard(labels=("safe", "toxic", "spam"), normalizes=False, source="config.json")


def pair_tokenizer() -> Tokenizer:
    """Bytes, with BERT's special tokens around a text and between the texts of a pair."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>",
        pair="<|begin|> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[("<|begin|>", BOS_ID), ("<|end|>", EOS_ID)],
    )
    return tokenizer


def engine_for(
    numbers: Callable[[Request], list[float]], pooler: PoolerCard, size: int = 1, **card: Any
) -> FakeEngine:
    def script(request: Request) -> list[TokenEvent | PenstockError]:
        assert request.pooling is not None
        made = numbers(request)
        vector = struct.pack(f"<{len(made)}f", *made)
        return [
            TokenEvent(
                request.id,
                finish_reason=FinishReason.STOP,
                num_cached_tokens=0,
                queue_s=0.0,
                embedding=vector,
            )
        ]

    settings: dict[str, Any] = {"tokenizer": pair_tokenizer(), "is_encoder": True, "generates": False} | card
    ready = engine_ready(model_card(embedding_size=size, pooler=pooler, **settings))
    return FakeEngine(script, ready)


def overlap(request: Request) -> list[float]:
    """The logit of a pair: bytes of the second text that the first has too."""
    first = request.prompt_token_ids[1 : request.second_text_at - 1]
    second = request.prompt_token_ids[request.second_text_at : -1]
    return [float(sum(token in first for token in second)) - 2.0]


def cross_encoder(**pooler: Any) -> FakeEngine:
    changes = {name: getattr(CROSS, name) for name in CROSS.__struct_fields__} | pooler
    return engine_for(overlap, PoolerCard(**changes))


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


DOCUMENTS = ["xyz", "abc", "ab"]
RERANK = {"model": "bytes", "query": "abcd", "documents": DOCUMENTS}


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_are_ranked_by_a_cross_encoder(path: str) -> None:
    async with direct_client(engine := cross_encoder()) as client:
        answer = (await client.post(path, json=RERANK)).json()
        best = (await client.post(path, json={**RERANK, "top_n": 1, "return_documents": True})).json()
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    for result, logit in zip(answer["results"], (1.0, 0.0, -2.0), strict=True):
        assert result["relevance_score"] == pytest.approx(sigmoid(logit))
    assert ("document" in answer["results"][0]) == (path != "/v2/rerank")
    assert [result["document"]["text"] for result in best["results"]] == ["abc"]
    num_tokens = sum(4 + len(text) + 3 for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer["meta"]["billed_units"] == {"input_tokens": num_tokens, "search_units": 1}
    assert answer["meta"]["api_version"]["version"] == ("2" if path == "/v2/rerank" else "1")
    assert engine.added[1].prompt_token_ids == (BOS_ID, *b"abcd", EOS_ID, *b"abc", EOS_ID)
    assert engine.added[1].second_text_at == 6
    assert len(engine.added) == 3, "the second request found all pairs in the cache"


async def test_the_models_own_activation_and_documents_as_objects() -> None:
    async with direct_client(cross_encoder(score_activation="none")) as client:
        body = {**RERANK, "documents": [{"text": "abc"}, {"text": "x"}], "rank_fields": ["text"]}
        (first, second) = (await client.post("/v1/rerank", json=body)).json()["results"]
    assert (first["relevance_score"], second["relevance_score"]) == (1.0, -2.0)
    async with direct_client(cross_encoder()) as client:
        body = {"text_1": "abcd", "text_2": "abc", "use_activation": False}
        (score,) = (await client.post("/score", json=body)).json()["data"]
    assert score == {"index": 0, "score": 1.0, "object": "score"}


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_scores_of_pairs(names: tuple[str, str]) -> None:
    async with direct_client(cross_encoder()) as client:
        one = (await client.post("/v1/score", json={names[0]: "abcd", names[1]: ["abc", "x"]})).json()
        many = (await client.post("/v1/score", json={names[0]: ["ab", "cd"], names[1]: ["ab", "ab"]})).json()
    assert [entry["score"] for entry in one["data"]] == pytest.approx([sigmoid(1.0), sigmoid(-2.0)])
    assert [entry["score"] for entry in many["data"]] == pytest.approx([sigmoid(0.0), sigmoid(-2.0)])
    assert (one["object"], one["model"], one["id"][:6]) == ("list", "bytes", "score-")


def letters(request: Request) -> list[float]:
    """An embedding: how often the text has each of four bytes."""
    return [float(request.prompt_token_ids.count(byte)) for byte in b"abcq"]


async def test_embedding_models_compare_vectors_of_prompted_texts() -> None:
    pooler = PoolerCard(prompts={"query": "q", "passage": "b"}, source="1_Pooling/config.json")
    async with direct_client(engine := engine_for(letters, pooler, 4)) as client:
        body = {"query": "a", "documents": ["a", "c"]}
        answer = (await client.post("/v1/rerank", json=body)).json()
    assert [bytes(request.prompt_token_ids[1:-1]) for request in engine.added] == [b"ba", b"bc", b"qa"]
    assert [result["index"] for result in answer["results"]] == [0, 1]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx([0.5, 0.0])
    for similarity, expected in (("dot", 1.0), ("euclidean", -math.sqrt(2)), ("manhattan", -2.0)):
        pooler = PoolerCard(prompts=pooler.prompts, similarity=similarity)
        async with direct_client(engine_for(letters, pooler, 4)) as client:
            (score,) = (await client.post("/score", json={"text_1": "a", "text_2": "a"})).json()["data"]
        assert score["score"] == pytest.approx(expected), similarity


def logits(request: Request) -> list[float]:
    return [
        0.0,
        float(request.prompt_token_ids.count(ord("t"))),
        float(request.prompt_token_ids.count(ord("s"))),
    ]


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_labels_of_texts(path: str) -> None:
    async with direct_client(engine_for(logits, LABELS, 3)) as client:
        answer = (await client.post(path, json={"input": ["ttt", "x"]})).json()
        raw = (await client.post(path, json={"input": [116, 115], "use_activation": False})).json()
    odds = [1.0, math.exp(3.0), 1.0]
    assert answer["data"][0]["probs"] == pytest.approx([each / sum(odds) for each in odds])
    assert [entry["label"] for entry in answer["data"]] == ["toxic", "safe"]
    assert [entry["num_classes"] for entry in answer["data"]] == [3, 3]
    assert raw["data"][0]["probs"] == [0.0, 1.0, 1.0]
    several = PoolerCard(labels=LABELS.labels, is_multi_label=True, normalizes=False)
    async with direct_client(engine_for(logits, several, 3)) as client:
        (entry,) = (await client.post(path, json={"input": "tt"})).json()["data"]
    assert entry["probs"] == pytest.approx([0.5, sigmoid(2.0), 0.5])


def test_a_classifier_moderates(serve: Serve) -> None:
    client = serve(engine_for(lambda request: [2.0, *logits(request)[1:]], LABELS, 3)).sdk()
    for model in ("bytes", "omni-moderation-latest"):
        answer = client.moderations.create(input=["tttt", "fine", "ttss"], model=model)
        assert answer.model == "bytes"
        flagged = [result.flagged for result in answer.results]
        assert flagged == [True, False, True], "the last is harmful in one way or the other"
        categories = answer.results[0].categories.to_dict()
        assert [name for name, is_found in categories.items() if is_found] == ["toxic"]
        assert answer.results[0].category_applied_input_types.to_dict()["toxic"] == ["text"]
    with pytest.raises(openai.NotFoundError, match="no classifier"):
        client.moderations.create(input="x", model="other")


async def test_pooled_vectors() -> None:
    def states(request: Request) -> list[float]:
        rows = [[float(token), 1.0] for token in request.prompt_token_ids]
        return [number for row in rows for number in row] if request.pooling == "all" else rows[0]

    async with direct_client(engine := engine_for(states, PoolerCard(), 2)) as client:
        (whole,) = (await client.post("/pooling", json={"input": "ab"})).json()["data"]
        (tokens,) = (await client.post("/pooling", json={"input": "ab", "task": "token_embed"})).json()[
            "data"
        ]
        body = {"input": "ab", "encoding_format": "base64", "normalize": False}
        (encoded,) = (await client.post("/pooling", json=body)).json()["data"]
    assert whole == {"index": 0, "data": [float(BOS_ID), 1.0], "object": "pooling"}
    assert tokens["data"] == [[float(token), 1.0] for token in (BOS_ID, 97, 98, EOS_ID)]
    assert struct.unpack("<2f", base64.b64decode(encoded["data"])) == (float(BOS_ID), 1.0)
    assert [request.normalizes for request in engine.added] == [None, None, False]
    async with direct_client(engine_for(logits, LABELS, 3)) as client:
        (labels,) = (await client.post("/pooling", json={"input": "x"})).json()["data"]
        refused = await client.post("/pooling", json={"input": "x", "task": "embed"})
    assert labels["data"] == pytest.approx([1 / 3] * 3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")


async def test_long_pairs_are_refused_or_cut() -> None:
    long = {**RERANK, "documents": ["abc", "b" * 300]}
    async with direct_client(engine := cross_encoder()) as client:
        refused = await client.post("/v1/rerank", json=long)
        assert not engine.added
        cut = await client.post("/v1/rerank", json={**long, "truncate_prompt_tokens": 20})
        whole = await client.post("/v1/rerank", json={**long, "truncate_prompt_tokens": -1})
        documents = await client.post("/v1/rerank", json={**long, "max_tokens_per_doc": 7})
        cohere = await client.post("/v2/rerank", json=long)
        left = {**long, "truncate_prompt_tokens": 20, "truncation_side": "left"}
        await client.post("/v1/rerank", json=left)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "documents[1]" in refused.json()["error"]["message"]
    assert [answer.status_code for answer in (cut, whole, documents, cohere)] == [200] * 4
    lengths = [len(request.prompt_token_ids) for request in engine.added]
    assert lengths[:8] == [10, 20, 10, 256, 10, 14, 10, 256]
    assert engine.added[1].prompt_token_ids == (BOS_ID, *b"abcd", EOS_ID, *b"b" * 13, EOS_ID)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_texts_are_cut_on_either_side_and_keep_their_special_tokens(side: str) -> None:
    async with direct_client(engine := engine_for(letters, PoolerCard(), 4)) as client:
        body = {"input": "abcdefgh", "truncate_prompt_tokens": 5, "truncation_side": side}
        await client.post("/v1/embeddings", json=body)
        await client.post("/v1/embeddings", json={**body, "add_special_tokens": False})
    kept = b"abc" if side == "right" else b"fgh"
    assert engine.added[0].prompt_token_ids == (BOS_ID, *kept, EOS_ID)
    assert bytes(engine.added[1].prompt_token_ids) == (b"abcde" if side == "right" else b"defgh")


async def test_prompts_of_the_models_files() -> None:
    pooler = PoolerCard(prompts={"query": "Q:", "code": "C:"}, default_prompt="code", lower_cases=True)
    async with direct_client(engine := engine_for(letters, pooler, 4)) as client:
        for more in ({}, {"prompt_name": "query"}, {"input_type": "query"}, {"input_type": "document"}):
            assert (await client.post("/v1/embeddings", json={"input": "X", **more})).status_code == 200
        unknown = await client.post("/v1/embeddings", json={"input": "x", "prompt_name": "none"})
        both = {"input": "x", "prompt_name": "code", "input_type": "query"}
        contradiction = await client.post("/v1/embeddings", json=both)
    texts = [bytes(request.prompt_token_ids[1:-1]) for request in engine.added]
    assert texts == [b"c:x", b"q:x", b"q:x", b"x"]
    assert unknown.status_code == contradiction.status_code == 400
    assert "code, query" in unknown.json()["error"]["message"]


async def test_a_language_model_is_asked_yes_or_no() -> None:
    pooler = PoolerCard(labels=("LABEL_0",), scores_pairs=True, asks_yes_or_no=True, normalizes=False)
    plain = {"is_encoder": False, "tokenizer": byte_tokenizer(), "max_model_len": 600}
    engine = engine_for(lambda _: [0.0], pooler, **plain)
    async with direct_client(engine) as client:
        body = {"query": "who", "documents": ["he <|end|>"], "instruction": "find"}
        answer = await client.post("/v1/rerank", json=body)
        assert answer.json()["results"][0]["relevance_score"] == 0.5
        await client.post(
            "/v1/rerank", json={**RERANK, "documents": ["d" * 900], "truncate_prompt_tokens": 400}
        )
        long = {**RERANK, "documents": ["d"], "instruction": "i" * 10_000, "truncate_prompt_tokens": 400}
        refused = await client.post("/v1/rerank", json=long)
    assert refused.status_code == 400
    assert "at least" in refused.json()["error"]["message"], "it was not tokenized"
    asked = bytes(token for token in engine.added[0].prompt_token_ids if token < 256).decode()
    assert "Judge whether the Document" in asked
    assert "<Instruct>: find\n<Query>: who\n<Document>: he <|end|>" in asked
    assert asked.endswith("<think>\n\n</think>\n\n")
    assert EOS_ID not in engine.added[0].prompt_token_ids, "a document cannot write special tokens"
    cut = bytes(engine.added[1].prompt_token_ids).decode()
    assert len(cut) == 400
    assert cut.endswith("d<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    template = "{% for m in messages if m.role in ('query', 'document') %}[{{ m.content }}]{% endfor %}"
    engine = engine_for(lambda _: [0.0], pooler, chat_template=template, **plain)
    async with direct_client(engine) as client:
        await client.post("/v1/rerank", json={**RERANK, "documents": ["d"]})
        cut_too = {**RERANK, "documents": ["d" * 50], "truncate_prompt_tokens": 20}
        assert (await client.post("/v1/rerank", json=cut_too)).status_code == 200
    assert bytes(engine.added[0].prompt_token_ids) == b"[abcd][d]"
    assert bytes(engine.added[1].prompt_token_ids) == b"[abcd][" + b"d" * 12 + b"]"


BAD = [
    ("/v1/rerank", {"query": "a"}, None),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "topn": 1}, "topn"),
    ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 257},
        "truncate_prompt_tokens",
    ),
    ("/v1/score", {"text_1": "a"}, "text_2"),
    ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ("/v1/score", {"text_1": "a", "text_2": [7]}, "text_2"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "priority": 3}, "priority"),
    ("/v1/classify", {"input": []}, "input"),
    ("/v1/classify", {"input": "a", "messages": [{"role": "user"}]}, "messages"),
    ("/pooling", {"input": "a", "task": "guess"}, "task"),
    ("/v1/embeddings", {"input": "a", "task": "retrieval.query"}, "task"),
    ("/v1/embeddings", {"input": "a", "pooling": "all"}, "pooling"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=map(str, range(len(BAD))))
async def test_bad_requests(path: str, body: dict[str, Any], param: str | None) -> None:
    async with direct_client(engine := cross_encoder()) as client:
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        if path == "/v1/rerank":
            cohere = await client.post("/v2/rerank", json=body)
            assert cohere.status_code == 400
            assert cohere.json().keys() == {"id", "message"}
    assert not engine.added


async def test_models_that_cannot_do_it() -> None:
    for pooler, size, generates in ((LABELS, 3, False), (PoolerCard(), 4, True)):
        async with direct_client(engine_for(letters, pooler, size, generates=generates)) as client:
            answer = await client.post("/v1/rerank", json=RERANK)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    async with direct_client(engine_for(letters, PoolerCard(), 4)) as client:
        answer = await client.post("/v1/classify", json={"input": "a"})
        assert "no labels" in answer.json()["error"]["message"]
    async with direct_client(cross_encoder()) as client:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        refused = (await client.post("/v1/chat/completions", json=chat)).json()["error"]["message"]
        assert "makes scores" in refused
        assert (await client.get("/v2/rerank")).json().keys() == {"id", "message"}


@pytest.mark.parametrize(
    ("sizes", "asked", "message"),
    [
        (None, 3, "do not say"),
        ((2, 4), 3, "one of 2, 4"),
        ((), 9, "between 1 and 8"),
        ((), 0, "between 1 and 8"),
    ],
)
async def test_sizes_that_vectors_cannot_be_cut_to(
    sizes: tuple[int, ...] | None, asked: int, message: str
) -> None:
    engine = engine_for(lambda _: [1.0] * 8, PoolerCard(matryoshka=sizes), 8)
    async with direct_client(engine) as client:
        answer = await client.post("/v1/embeddings", json={"input": "a", "dimensions": asked})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")
        assert message in answer.json()["error"]["message"]
        whole = await client.post("/v1/embeddings", json={"input": "a", "dimensions": 8})
        assert len(whole.json()["data"][0]["embedding"]) == 8


async def test_a_small_request_cannot_ask_for_endless_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_PAIR_TOKENS", 100)
    monkeypatch.setattr(service, "MAX_NUMBERS", 100)
    async with direct_client(engine := cross_encoder()) as client:
        answer = await client.post("/v1/rerank", json={**RERANK, "documents": ["abc"] * 11})
        assert answer.status_code == 400
        assert "100 tokens of pairs" in answer.json()["error"]["message"]
        assert not engine.added
    async with direct_client(engine_for(letters, PoolerCard(), 4)) as client:
        answer = await client.post("/pooling", json={"input": "a" * 30, "task": "token_embed"})
        assert "100 numbers" in answer.json()["error"]["message"]


async def test_every_request_is_in_the_ledger_under_its_endpoint() -> None:
    ledger = RecordingLedger()
    engine = cross_encoder()
    gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(ledger=ledger))
    async with direct_client(engine, gateway) as client:
        await client.post("/v1/rerank", json=RERANK)
        await client.post("/v1/score", json={"text_1": "a", "text_2": "b"})
        await client.post("/pooling", json={"input": "a"})
        await client.post("/classify", json={"input": "a"})
    assert [claim.endpoint for claim in ledger.claims] == ["rerank", "score", "pooling", "classify"]
    assert [outcome.usage.prompt_tokens for outcome in ledger.settled] == [29, 5, 3, 3]
    assert {outcome.status for outcome in ledger.settled} == {"completed"}


def test_a_card_survives_the_wire() -> None:
    card: ModelCard = engine_ready(model_card(pooler=LABELS, generates=False)).model
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(card), type=ModelCard) == card


async def test_texts_are_embedded_in_coheres_shape() -> None:
    engine = engine_for(letters, PoolerCard(prompts={"query": "q: "}, source="modules.json"), 4)
    async with direct_client(engine) as client:
        body = {"model": "bytes", "texts": ["a", "bb"], "input_type": "search_query"}
        whole = (await client.post("/v2/embed", json={**body, "embedding_types": ["float", "base64"]})).json()
        parts = [{"content": [{"type": "text", "text": text}]} for text in ("a", "bb")]
        same = (await client.post("/v2/embed", json={"inputs": parts, "input_type": "search_query"})).json()
        refused = [
            await client.post("/v2/embed", json=bad)
            for bad in (
                {"model": "bytes"},
                {**body, "inputs": parts},
                {**body, "embedding_types": ["int8"]},
                {**body, "images": ["data:"]},
                {"inputs": [{"content": [{"type": "image_url"}]}]},
                {**body, "texts": ["x" * 9000], "truncate": "NONE"},
            )
        ]
        cut = await client.post("/v2/embed", json={**body, "texts": ["x" * 9000]})
    assert bytes(engine.added[0].prompt_token_ids[1:-1]) == b"q: a"
    assert whole["embeddings"]["float"] == same["embeddings"]["float"]
    for vector, text in zip(whole["embeddings"]["float"], whole["embeddings"]["base64"], strict=True):
        assert list(struct.unpack("<4f", base64.b64decode(text))) == pytest.approx(vector)
    assert (whole["response_type"], whole["texts"]) == ("embeddings_by_type", ["a", "bb"])
    assert whole["meta"]["billed_units"]["input_tokens"] > 0
    assert {(each.status_code, *each.json()) for each in refused} == {(400, "id", "message")}
    assert cut.status_code == 200


@pytest.mark.parametrize(
    ("label", "harmless"),
    [
        *(
            (label, True)
            for label in ("nothate", "NEITHER", "sfw", "unharmful", "not hate speech", "Non-Toxic")
        ),
        *((label, False) for label in ("hate speech", "inappropriate", "nsfw", "harmful", "not safe")),
    ],
)
def test_labels_of_published_classifiers_that_mean_nothing_is_wrong(label: str, harmless: bool) -> None:
    card = model_card(pooler=PoolerCard(labels=("x", label)))
    assert is_harmless(label, 1, card) == harmless
