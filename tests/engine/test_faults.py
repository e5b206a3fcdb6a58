"""A step that lacks memory, a model that produces no numbers, a device that breaks: who ends, and who does not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from msgspec.structs import replace
from torch import Tensor

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.messages import AddRequest, Codec, EngineFailed, EngineReady, Hello
from penstock.core.plan import NOT_A_NUMBER, OUT_OF_MEMORY, Chunk
from penstock.core.request import FinishReason
from penstock.engine.forward import SMALLEST_PIECE_TOKENS, halves
from penstock.kernels.interface import AttentionBatch, KVStore, SamplingBatch
from penstock.kernels.native import NativeOps
from penstock.models.families.llama import Llama
from penstock.simulator.replay import replay
from tests.engine.tiny import request, run, tiny_engine, tokens, unpacked, write_tiny_model

Forward = Callable[..., Tensor]
POISON = 299


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("faults") / "tiny")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device that has room for so many tokens at once, and for none at all with POISON among them."""
    limits = {"max_tokens": 10**9, "passes": 0}
    forward: Forward = Llama.forward

    def limited(self: Llama, token_ids: Tensor, *rest: Any) -> Tensor:
        limits["passes"] += 1
        if len(token_ids) > limits["max_tokens"] or bool((token_ids == POISON).any()):
            raise torch.OutOfMemoryError("injected")
        return forward(self, token_ids, *rest)

    monkeypatch.setattr(Llama, "forward", limited)
    return limits


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, POISON) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_step_without_room_is_computed_in_pieces(
    model: Path, memory: dict[str, int], steps_in_flight: int
) -> None:
    requests = [request(f"{n}", prompt) for n, prompt in enumerate(prompts(150, 3, 90, 16))]
    requests.append(request("drawn", [5, 6, 7], temperature=1.0, seed=4, logprobs=2))
    requests.append(request("scored", prompts(70)[0], prompt_logprobs=2))
    unhurt = run(tiny_engine(model, steps_in_flight=steps_in_flight), requests)
    memory["max_tokens"] = 40
    engine = tiny_engine(model, steps_in_flight=steps_in_flight)
    in_pieces = run(engine, requests)
    assert {name: tokens(events) for name, events in in_pieces.items()} == {
        name: tokens(events) for name, events in unhurt.items()
    }
    values, _ = unpacked(in_pieces["scored"])
    assert values == pytest.approx(unpacked(unhurt["scored"])[0], abs=1e-4)
    assert engine.loop.stats().num_out_of_memory == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_draws_without_room_take_turns(
    model: Path, monkeypatch: pytest.MonkeyPatch, steps_in_flight: int
) -> None:
    requests = [
        request(f"{n}", prompt, temperature=1.0, seed=n, top_k=20 * n)
        for n, prompt in enumerate(prompts(9, 8, 7, 6, 5))
    ]
    unhurt = run(tiny_engine(model, steps_in_flight=steps_in_flight), requests)
    engine = tiny_engine(model, steps_in_flight=steps_in_flight)
    sample = NativeOps.sample
    drawn: list[int] = []

    def limited(self: NativeOps, logits: Tensor, batch: SamplingBatch) -> Tensor:
        if len(logits) > 2:
            raise torch.OutOfMemoryError("injected")
        drawn.append(len(logits))
        return sample(self, logits, batch)

    monkeypatch.setattr(NativeOps, "sample", limited)
    events = run(engine, requests)
    assert {name: tokens(answer) for name, answer in events.items()} == {
        name: tokens(answer) for name, answer in unhurt.items()
    }
    assert max(drawn) == 2


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_has_no_room_at_all_ends_alone(
    model: Path, memory: dict[str, int], steps_in_flight: int, tmp_path: Path
) -> None:
    good = [request(f"{n}", prompt) for n, prompt in enumerate(prompts(60, 200, 3))]
    expected = run(tiny_engine(model), good)
    log = tmp_path / "plans.jsonl"
    engine = tiny_engine(model, steps_in_flight=steps_in_flight, record_plans=str(log))
    bad = [
        request("in the middle", [*prompts(40)[0], POISON, 5]),
        request("at the beginning", [7, POISON, *prompts(70)[0]]),
        request("in its last token", [9, 8, 7, POISON]),
    ]
    events = run(engine, [good[0], bad[0], good[1], bad[1], bad[2], good[2]])
    for each in bad:
        (only,) = events[each.id]
        assert (only.finish_reason, only.error) == (FinishReason.ERROR, OUT_OF_MEMORY)
    assert {each.id: tokens(events[each.id]) for each in good} == {
        name: tokens(answer) for name, answer in expected.items()
    }
    stats = engine.loop.stats()
    assert (stats.num_out_of_memory, stats.num_nan_logits, stats.num_running) == (3, 0, 0)
    engine.close()
    with log.open("rb") as lines:
        assert replay(lines).mismatch is None


def test_blocks_that_were_not_filled_are_never_found(model: Path, memory: dict[str, int]) -> None:
    """Siblings that were to share them end too; those that come later compute the prefix themselves."""
    shared = prompts(64)[0]
    expected = tokens(run(tiny_engine(model), [request("alone", [*shared, 4])])["alone"])
    engine = tiny_engine(model)
    memory["max_tokens"] = 0
    events = run(engine, [request("first", [*shared, 4]), request("sibling", [*shared, 4])])
    assert [events[name][-1].error for name in ("first", "sibling")] == [OUT_OF_MEMORY] * 2
    memory["max_tokens"] = 10**9
    (first, *rest) = run(engine, [request("later", [*shared, 4])])["later"]
    assert first.num_cached_tokens == 0
    assert tokens([first, *rest]) == expected


def test_embeddings_are_computed_in_pieces_too(model: Path, memory: dict[str, int]) -> None:
    texts = [*prompts(90, 5), [4, POISON, 6]]
    requests = [replace(request(f"{n}", text, 1), pooling="mean") for n, text in enumerate(texts)]
    unhurt = run(tiny_engine(model), requests[:2])
    memory["max_tokens"] = 40
    events = run(tiny_engine(model), requests)
    assert [event.error for event in events["2"]] == [OUT_OF_MEMORY]
    for name in ("0", "1"):
        made, expected = (np.frombuffer(found[name][0].embedding or b"", "<f4") for found in (events, unhurt))
        np.testing.assert_allclose(made, expected, atol=1e-5)


def test_pieces_cover_a_step_in_order() -> None:
    chunks = [Chunk("a", 10, 1, True, (), in_flight=1), Chunk("b", 0, 100, True, (3, 4), begins=True)]
    first, second = halves(chunks) or ((), ())
    assert (list(first), list(second)) == (chunks[:1], chunks[1:])
    assert halves(first) is None
    front, back = halves(second) or ((), ())
    assert [(c.start, c.num_tokens, c.samples, c.begins) for c in (*front, *back)] == [
        (0, 50, False, False),
        (50, 50, True, False),
    ]
    assert halves([Chunk("c", 0, 2 * SMALLEST_PIECE_TOKENS - 1, True, ())]) is None


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "seed": 1}], ids=["argmax", "drawn"])
def test_a_nan_ends_its_request_and_is_counted(
    model: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    forward: Forward = Llama.forward

    def broken(self: Llama, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        hidden = forward(self, token_ids, batch, kv)
        if batch.num_requests == 3:
            hidden[batch.query_starts[2] - 1, 0] = float("nan")
        return hidden

    requests = [request(f"{n}", prompt, **sampling) for n, prompt in enumerate(prompts(5, 6, 7))]
    expected = run(tiny_engine(model), requests)
    monkeypatch.setattr(Llama, "forward", broken)
    engine = tiny_engine(model)
    events = run(engine, requests)
    (only,) = events["1"]
    assert (only.finish_reason, only.error) == (FinishReason.ERROR, NOT_A_NUMBER)
    assert [tokens(events[name]) for name in "02"] == [tokens(expected[name]) for name in "02"]
    assert engine.loop.stats().num_nan_logits == 1


_BROKEN_WORKER = """
import sys
import torch
from penstock.cluster import worker
from penstock.models.families.llama import Llama

forward = Llama.forward

def breaks(self, token_ids, *rest):
    if bool((token_ids == 299).any()):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return forward(self, token_ids, *rest)

Llama.forward = breaks
sys.exit(worker.main())
"""


def test_a_broken_device_ends_the_process_with_a_retryable_error(model: Path, tmp_path: Path) -> None:
    """Whoever watches the process starts it again (tests/cluster); its requests hear why it went."""
    endpoint = f"ipc://{tmp_path / 'engine.sock'}"
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=64),
        num_threads=1,
    )
    command = [sys.executable, "-c", _BROKEN_WORKER, "--endpoint", endpoint, "--model-path", str(model)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    codec = Codec()
    try:
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode(config))
        worker.stdin.close()
        socket.connect(endpoint)
        socket.send(codec.encode(Hello()))
        wanted: type = EngineReady
        while True:
            assert socket.poll(240_000), f"no {wanted.__name__}"
            message = codec.decode_from_engine(socket.recv())
            if isinstance(message, EngineReady):
                wanted = EngineFailed
                socket.send(codec.encode(AddRequest(request("doomed", [5, POISON]))))
            if isinstance(message, EngineFailed):
                break
        assert message.code == "engine_unavailable"
        assert "illegal memory access" in message.message
        assert worker.wait(240) == 1
    finally:
        worker.kill()
        worker.wait()
        socket.close(0)
        context.term()
