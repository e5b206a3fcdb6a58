"""KV blocks in page-locked host memory: copies in the stream's order, and the same tokens from a real engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.plan import CacheUse
from penstock.core.request import CacheBreakpoint

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.engine.build import Engine, build_engine
from penstock.kernels.triton.ops import TritonOps
from tests.engine.tiny import VOCAB_SIZE, request, run, tokens, write_tiny_model

rng = random.Random(5)
KEPT = [rng.randrange(3, VOCAB_SIZE) for _ in range(200)]
MARK = (CacheBreakpoint(200, 300.0),)


def test_copies_take_their_place_among_writes() -> None:
    store = TritonOps(torch.device("cuda"), torch.bfloat16).allocate_kv(3, 8, 16, 2, 64)
    store.reserve_host(4)
    store.keys.normal_()
    store.values.normal_()
    keys, values = store.keys.clone(), store.values.clone()
    store.copy_to_host([5], [1])
    store.keys[:, 5].zero_()
    store.values[:, 5].zero_()
    store.copy_from_host([1], [2])
    store.copy_to_host([6], [1])
    store.copy_from_host([1], [5])
    for found, before in ((store.keys, keys), (store.values, values)):
        assert torch.equal(found[:, 2], before[:, 5])
        assert torch.equal(found[:, 5], before[:, 6])
        assert torch.equal(found[:, 0], before[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_many_blocks_are_copied_beside_what_overwrites_them(dtype: torch.dtype) -> None:
    """More than the buffer holds, over slots in any order."""
    store = TritonOps(torch.device("cuda"), torch.bfloat16, dtype).allocate_kv(4, 3000, 16, 4, 128)
    store.reserve_host(2000)
    for tensor in store.tensors:
        tensor.view(torch.uint8).random_(0, 100)
    before = [tensor.view(torch.uint8).clone() for tensor in store.tensors]
    blocks, slots = rng.sample(range(3000), 2000), rng.sample(range(2000), 2000)
    store.copy_to_host(blocks, slots)
    first = store.read_host(slots[-1])
    for tensor in store.tensors:
        tensor.view(torch.uint8).zero_()
    targets = rng.sample(range(3000), 2000)
    store.copy_from_host(slots, targets)
    for tensor, old in zip(store.tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8)[:, targets], old[:, blocks])
    store.copy_to_host([blocks[0]], [slots[0]])
    store.write_block(targets[0], first)
    for tensor, old in zip(store.tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8)[:, targets[0]], old[:, blocks[-1]])


def test_blocks_go_through_bytes() -> None:
    store = TritonOps(torch.device("cuda"), torch.bfloat16).allocate_kv(3, 8, 16, 2, 64)
    store.reserve_host(1)
    store.keys.normal_()
    store.values.normal_()
    store.copy_to_host([5], [0])
    torch.cuda.synchronize()
    store.write_block(2, store.read_host(0))
    assert torch.equal(store.keys[:, 2], store.keys[:, 5])
    assert torch.equal(store.values[:, 2], store.values[:, 5])


def cuda_engine(model: Path, num_kv_blocks: int, max_pinned_fraction: float) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(model), device="cuda", dtype="bfloat16", load_format="random"),
            cache=CacheConfig(num_kv_blocks=num_kv_blocks, max_pinned_fraction=max_pinned_fraction),
            scheduler=SchedulerConfig(itl_target_ms=None, min_cacheable_tokens=64, max_num_seqs=8),
            speculate="off",  # verified drafts are steps of more rows, which round bfloat16 in another way
        ),
        model,
    )


def test_greedy_tokens_are_the_same_with_kv_from_host_memory(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    prompt = [*KEPT, 5, 6, 7]
    engine = cuda_engine(model, 28, 0.1)
    first = run(engine, [request("first", prompt, 20, MARK)])["first"]
    for number in range(3):
        other = [rng.randrange(3, VOCAB_SIZE) for _ in range(300)]
        run(engine, [request(f"other {number}", other, 4)])
    second = run(engine, [request("second", prompt, 20, MARK)])["second"]
    assert second[0].cache_use == CacheUse(192, (0,))
    assert engine.loop.stats().num_blocks_from_host == 10
    # As if nothing had moved: a cache in which all of it was pinned.
    still = cuda_engine(model, 64, 0.5)
    run(still, [request("first", prompt, 20, MARK)])
    unmoved = run(still, [request("second", prompt, 20, MARK)])["second"]
    assert tokens(second) == tokens(unmoved)
    assert len(first) == len(second)
