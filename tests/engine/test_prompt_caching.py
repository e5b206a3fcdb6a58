"""Prompt caching on a real model: KV that comes back from host memory gives the same tokens as KV that never left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.core.engine_config import CacheConfig, EngineConfig
from penstock.core.plan import CacheUse
from penstock.core.request import CacheBreakpoint
from penstock.engine import device
from penstock.engine.build import Engine
from penstock.engine.device import num_host_blocks
from penstock.kernels.reference import TorchOps
from penstock.simulator.replay import replay

from .tiny import VOCAB_SIZE, request, run, tiny_engine, tokens, write_tiny_model

rng = random.Random(11)
KEPT = [rng.randrange(3, VOCAB_SIZE) for _ in range(200)]
MARK = (CacheBreakpoint(200, 300.0),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["native float32", "native bfloat16", "torch float32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    backend, dtype = request.param.split()
    if backend == "torch":
        monkeypatch.setattr(device, "select_ops", lambda place, dtype, *_, **__: TorchOps(place, dtype))
    return dtype


def flood(engine: Engine, name: str) -> None:
    """Prompts that together need more blocks than there are."""
    for number in range(3):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(300)]
        run(engine, [request(f"{name} {number}", prompt, 4)])


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_greedy_tokens_are_the_same_with_kv_from_host_memory(
    model: Path, dtype: str, steps_in_flight: int, tmp_path: Path
) -> None:
    log = tmp_path / "plans.jsonl"
    prompt = [*KEPT, 5, 6, 7]
    alone = tokens(run(tiny_engine(model, dtype=dtype), [request("alone", prompt, 20)])["alone"])
    engine = tiny_engine(
        model,
        dtype=dtype,
        num_kv_blocks=28,
        max_pinned_fraction=0.1,
        min_cacheable_tokens=64,
        steps_in_flight=steps_in_flight,
        record_plans=str(log),
    )
    first = run(engine, [request("first", prompt, 20, MARK)])["first"]
    assert first[0].cache_use == CacheUse(0, (192,))
    flood(engine, "one")
    assert engine.loop.stats().num_host_blocks_used >= 10
    second = run(engine, [request("second", prompt, 20, MARK)])["second"]
    assert second[0].cache_use == CacheUse(192, (0,))
    assert second[0].num_cached_tokens == 192
    flood(engine, "two")
    third = run(engine, [request("third", prompt, 20)])["third"]
    assert third[0].num_cached_tokens == 192, "a request without breakpoints reuses what is kept, too"
    assert tokens(first) == tokens(second) == tokens(third) == alone
    stats = engine.loop.stats()
    assert stats.num_blocks_from_host >= 20
    assert stats.num_kept_blocks_lost == 0
    engine.close()
    with log.open("rb") as lines:
        assert replay(lines).mismatch is None


def test_without_host_memory_what_is_not_pinned_is_computed_again(model: Path) -> None:
    engine = tiny_engine(
        model, num_kv_blocks=28, max_pinned_fraction=0.1, min_cacheable_tokens=64, kv_host_memory="0"
    )
    event = run(engine, [request("first", [*KEPT, 5], 4, MARK)])["first"][0]
    assert event.cache_use == CacheUse(0, (32,)), "two of 28 blocks may be pinned, and usage says so"
    flood(engine, "one")
    event = run(engine, [request("second", [*KEPT, 5], 4, MARK)])["second"][0]
    assert event.num_cached_tokens == 32
    assert engine.loop.stats().num_host_blocks == 0
    assert engine.loop.stats().num_kept_blocks_lost == 10


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 28),
        ({"kv_host_memory": "0"}, 0),
        ({"kv_host_memory": "40KiB"}, 5),
        ({"enable_prefix_caching": False}, 0),
    ],
)
def test_host_memory_is_sized_like_the_cache_or_as_asked(settings: dict[str, Any], expected: int) -> None:
    store = TorchOps().allocate_kv(2, num_blocks=28, block_size=16, num_kv_heads=2, head_dim=16)
    assert store.block_bytes == 8 << 10
    assert num_host_blocks(EngineConfig(cache=CacheConfig(**settings)), store) == expected
