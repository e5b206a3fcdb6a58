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
from penstock.engine.drafters.choice import DraftChoice
from penstock.engine.drafters.length import DraftLength
from tests.engine.drafting import speculate
from tests.engine.tiny import VOCAB_SIZE, request, run, write_tiny_model
from tests.models.heads import eagle_tensors, write_folder

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
rng = random.Random(1)


def prompt(length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_serving_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Any, kv_cache_dtype: Any
) -> None:
    model = write_tiny_model(tmp_path / "tiny", **SIZES)
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


@pytest.mark.parametrize("drafter", ["draft", "eagle", "eagle3"])
@pytest.mark.parametrize("trees", [False, True])
def test_drafting_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, trees: bool
) -> None:
    monkeypatch.setattr(DraftLength, "begin", lambda self, *_: 4)
    monkeypatch.setattr(DraftChoice, "_next", lambda self, *_: trees)
    monkeypatch.setattr("tests.models.heads.SIZE", SIZES["hidden_size"])
    model = write_tiny_model(tmp_path / "tiny", **SIZES)
    named = f"draft={model}"
    if drafter != "draft":
        tensors = eagle_tensors(VOCAB_SIZE, third=drafter == "eagle3", draft_vocab=100)
        changes = {"hidden_size": SIZES["hidden_size"], "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        named = f"heads={write_folder(tmp_path / 'head', tensors, VOCAB_SIZE, **changes)}"
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cuda", load_format="random"),
        cache=CacheConfig(num_kv_blocks=4096),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_seqs=256),
        speculate=named,
    )
    engine = build_engine(config, model)
    assert engine.loop.drafter is not None
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: compiled.append(repr)
    )
    speculate(engine, engine.loop.drafter, 8)
    run(engine, [request("one", prompt(100), 30)])
    for count in (3, 20, 100):
        run(engine, [request(f"{count}, {n}", prompt(10 + n), 20, temperature=0.7) for n in range(count)])
    stats = engine.loop.stats().drafters
    engine.close()
    assert compiled == []
    (found,) = (each for each in stats if each.drafter != "grammar")
    assert found.drafted[0] > 30
