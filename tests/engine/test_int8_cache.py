"""An engine with its KV cache in int8: prefixes reused, preempted and moved are the same prefixes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from penstock.kernels.tensor_kv import LARGEST_CODE, to_codes
from tests.engine.tiny import VOCAB_SIZE, request, run, tiny_engine, tokens, write_tiny_model

rng = random.Random(2)
SHARED = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("int8") / "tiny")


def test_codes_are_as_close_as_eight_bits_allow() -> None:
    entries = torch.randn(50, 3, 64) * torch.logspace(-6, 4, 50).view(50, 1, 1)
    codes, scales = to_codes(entries)
    assert int(codes.abs().max()) == LARGEST_CODE
    error = (codes.float() * scales.unsqueeze(-1) - entries).abs()
    assert bool((error <= scales.unsqueeze(-1) * 0.501).all())
    assert bool((to_codes(torch.zeros(2, 4))[0] == 0).all())


def test_a_reused_prefix_gives_the_same_tokens(model: Path) -> None:
    engine = tiny_engine(model, kv_cache_dtype="int8")
    requests = [request("first", [*SHARED, 5]), request("second", [*SHARED, 9])]
    (first,) = run(engine, requests[:1]).values()
    (second,) = run(engine, requests[1:]).values()
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 64)
    fresh = run(tiny_engine(model, kv_cache_dtype="int8"), requests[1:])["second"]
    assert tokens(second) == tokens(fresh)


def test_memory_is_counted_with_its_scales(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "wide", head_dim=64)
    small, large = (
        tiny_engine(model, num_kv_blocks=None, kv_cache_memory="1MiB", kv_cache_dtype=dtype)
        for dtype in ("auto", "int8")
    )
    # Heads of 64 entries: 256 bytes of float32, or 64 and a scale of 4.
    assert large.ready.num_kv_blocks == pytest.approx(small.ready.num_kv_blocks * 256 / 68, abs=4)
