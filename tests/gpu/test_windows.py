"""Layers with windows that give blocks back: steps from graphs, and steps that are launched, say what layers say that
keep everything."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.build import Engine, build_engine
from penstock.engine.graphs import DecodeGraphs, PromptGraphs
from tests.engine.test_windows import ALL, MIXED
from tests.engine.tiny import VOCAB_SIZE, request, run, tokens, write_tiny_model

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "sliding_window": 40}
CHUNKS = {**MIXED, "layer_types": ["sliding_attention", "full_attention"] * 2}


def _engine(folder: Path, changes: dict[str, Any], speculate: str) -> Engine:
    gc.collect()  # no graph of an earlier engine may go while another one is recorded
    model = write_tiny_model(folder / "tiny", **(changes | SIZES))
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cuda", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_seqs=8, max_num_batched_tokens=200),
        speculate=speculate,
    )
    return build_engine(config, model)


@pytest.mark.parametrize("speculate", ["off", "lookup"])
@pytest.mark.parametrize("changes", [MIXED, ALL, CHUNKS], ids=["mixed", "all windows", "halves"])
def test_windows_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], speculate: str
) -> None:
    used: dict[str, int] = {}
    decode, prompt = DecodeGraphs.logits, PromptGraphs.hidden

    def decoded(self: DecodeGraphs, *arguments: Any) -> Any:
        used["decode"] = used.get("decode", 0) + 1
        return decode(self, *arguments)

    def prompted(self: PromptGraphs, *arguments: Any) -> Any:
        made = prompt(self, *arguments)
        used["prompt"] = used.get("prompt", 0) + (made is not None)
        return made

    monkeypatch.setattr(DecodeGraphs, "logits", decoded)
    monkeypatch.setattr(PromptGraphs, "hidden", prompted)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (300, 30, 170, 90)]

    def answers(engine: Engine) -> list[list[int]]:
        made = []
        for turn in range(2):  # the second time from cached prefixes
            requests = [request(f"{turn} {n}", each, 48) for n, each in enumerate(prompts)]
            made += [tokens(events) for _, events in sorted(run(engine, requests).items())]
        return made

    engine = _engine(tmp_path, changes, speculate)
    assert engine.loop.scheduler.cache.windows is not None
    found = answers(engine)
    del engine
    assert used["decode"] > 20
    assert used["prompt"] > 0
    monkeypatch.setattr("penstock.engine.cache_memory.lay_out", lambda *_: None)
    assert found == answers(_engine(tmp_path, changes, speculate))
