"""After an engine's start no step compiles anything, whatever it is made of."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton

from penstock.engine.build import build_engine
from tests.engine.tiny import VOCAB_SIZE, request, run, write_tiny_model

rng = random.Random(1)


def prompt(length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_serving_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Any, kv_cache_dtype: Any
) -> None:
    changes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
    model = write_tiny_model(tmp_path / "tiny", **changes)
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cuda", quantization=quantization, load_format="random"),
        cache=CacheConfig(num_kv_blocks=4096, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_seqs=256),
    )
    engine = build_engine(config, model)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: compiled.append(repr)
    )
    shared = prompt(200)
    run(engine, [request("greedy", shared)])
    run(engine, [request("its sibling", [*shared, 5, 6], temperature=0.8, top_k=20, top_p=0.9)])
    run(engine, [request(f"few {n}", prompt(30), temperature=1.0) for n in range(5)])
    run(engine, [request(f"some {n}", [*shared, n + 3], min_p=0.1, temperature=1.0) for n in range(40)])
    run(engine, [request(f"many {n}", prompt(20 + n % 50)) for n in range(200)])
    assert compiled == []
