"""Embeddings of a served model: the pooled hidden states, whatever the batch and however a prompt is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.request import FinishReason, Pooling, Request, SamplingParams
from penstock.engine.build import Engine
from penstock.kernels.select import select_ops
from penstock.models.load import load_model
from penstock.simulator.replay import replay
from tests.models.paged import PagedRunner

from .tiny import VOCAB_SIZE, request, run, teach_short_answers, tiny_engine, tokens, write_tiny_model

rng = random.Random(5)
PROMPTS = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 15, 16, 17, 40, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def embed(request_id: str, prompt: list[int], pooling: Pooling) -> Request:
    return Request(
        id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=1),
        pooling=pooling,
    )


def vectors(engine: Engine, requests: list[Request]) -> dict[str, np.ndarray]:
    found = {}
    for request_id, events in run(engine, requests).items():
        (event,) = events
        assert event.finish_reason is FinishReason.STOP
        assert event.token_ids == ()
        assert event.embedding is not None
        found[request_id] = np.frombuffer(event.embedding, dtype="<f4")
    return found


@pytest.fixture(scope="module")
def hidden_states(model: Path) -> list[np.ndarray]:
    """Of every prompt, computed whole and alone."""
    ops = select_ops("cpu", torch.float32)
    loaded = load_model(model, ops, load_format="random")
    loaded.logits = lambda rows: rows  # type: ignore[method-assign]
    return [PagedRunner(loaded, ops).prompt_logits(prompt).numpy().astype(np.float64) for prompt in PROMPTS]


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 17},
        {"steps_in_flight": 2},
        {"num_kv_blocks": 8, "max_num_batched_tokens": 23},
    ],
    ids=str,
)
def test_vectors_are_the_pooled_hidden_states(
    model: Path, hidden_states: list[np.ndarray], pooling: Pooling, settings: dict[str, Any], tmp_path: Path
) -> None:
    engine = tiny_engine(model, record_plans=str(tmp_path / "log"), **settings)
    found = vectors(engine, [embed(str(n), prompt, pooling) for n, prompt in enumerate(PROMPTS)])
    for n, states in enumerate(hidden_states):
        wanted = {"mean": states.mean(axis=0), "last": states[-1], "first": states[0]}[pooling]
        np.testing.assert_allclose(found[str(n)], wanted / np.linalg.norm(wanted), atol=1e-6)
    engine.close()
    with (tmp_path / "log").open("rb") as lines:
        assert replay(lines).mismatch is None


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_is_the_same_to_the_bit_in_any_batch_and_after_any_prefix(
    model: Path, pooling: Pooling
) -> None:
    alone = {
        str(n): vectors(tiny_engine(model), [embed("x", prompt, pooling)])["x"]
        for n, prompt in enumerate(PROMPTS)
    }
    engine = tiny_engine(model)
    requests = [embed(str(n), prompt, pooling) for n, prompt in enumerate(PROMPTS)]
    for _ in range(2):  # the second time every prefix is cached
        for request_id, vector in vectors(engine, requests).items():
            assert np.array_equal(vector, alone[request_id])


def test_only_a_mean_must_see_cached_tokens_again(model: Path) -> None:
    engine = tiny_engine(model)
    run(engine, [embed("a", PROMPTS[5], "mean")])
    (mean,) = run(engine, [embed("b", PROMPTS[5], "mean")])["b"]
    (last,) = run(engine, [embed("c", PROMPTS[5], "last")])["c"]
    assert (mean.num_cached_tokens, last.num_cached_tokens) == (0, 80)


def test_embeddings_beside_answers_change_neither(model: Path) -> None:
    free = [request(f"free-{n}", prompt, 20) for n, prompt in enumerate(PROMPTS)]
    alone = {name: tokens(events) for name, events in run(tiny_engine(model), free).items()}
    engine = tiny_engine(model, num_kv_blocks=24, max_num_batched_tokens=37)
    teach_short_answers(engine)
    mixed = [each for n, own in enumerate(free) for each in (own, embed(f"e{n}", PROMPTS[n], "mean"))]
    events = run(engine, mixed)
    assert {name: tokens(each) for name, each in events.items() if name.startswith("free")} == alone
    assert all(len(events[f"e{n}"]) == 1 for n in range(len(PROMPTS)))
    assert engine.loop.stats().num_kv_blocks_used == 0


def test_a_flood_of_texts_does_not_hold_up_a_stream(model: Path) -> None:
    engine = tiny_engine(model, max_num_batched_tokens=32)
    engine.loop.add(request("stream", PROMPTS[1], 20))
    while not any(event.request_id == "stream" for event in engine.loop.step()):
        pass
    for n in range(40):
        engine.loop.add(embed(f"e{n}", PROMPTS[5], "last" if n % 2 else "mean"))
    seen: list[bool] = []
    while not seen or seen[-1]:
        seen.append(any(event.request_id == "stream" for event in engine.loop.step()))
        if len(seen) == 15:
            break
    assert all(seen), "every step beside waiting texts has a token of the stream"
    assert engine.loop.stats().num_waiting, "texts were waiting all the time"
    engine.close()
