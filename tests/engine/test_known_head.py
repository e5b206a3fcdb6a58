"""The default model with the head that comes with it."""

from __future__ import annotations

import pytest
import torch

from penstock.cli.console import fetch_model
from penstock.cli.draft import encoded
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.request import SamplingParams
from penstock.engine.learning.texts import built_in_prompts, held_out
from penstock.engine.offline import OfflineEngine
from penstock.kernels.select import preferred_cpu_dtype
from penstock.models.catalog import head_of

pytestmark = pytest.mark.e2e


def test_answers_are_the_same_with_the_head_and_its_drafts_are_accepted() -> None:
    path = fetch_model("smollm2-135m")
    head = f"heads={head_of(path)}"
    answers, drafted = {}, {}
    is_chosen = preferred_cpu_dtype() == torch.bfloat16  # by itself, where the CPU has AMX
    for speculate in ("off", "auto") if is_chosen else ("off", "auto", head):
        engine = OfflineEngine(
            EngineConfig(
                model=ModelConfig(device="cpu", max_model_len=512),
                cache=CacheConfig(num_kv_blocks=64),
                speculate=speculate,
                num_threads=1,
            ),
            path,
        )
        prompts = encoded(engine.card, held_out(built_in_prompts())[:2])
        sampling = SamplingParams(max_tokens=32, temperature=0.0)
        answers[speculate] = [each.token_ids for each in engine.generate(prompts, sampling)]
        drafted[speculate] = {each.drafter: sum(each.accepted) for each in engine.stats().drafters}
        engine.close()
    assert all(each == answers["off"] for each in answers.values())
    assert ("heads" in drafted["auto"]) is is_chosen
    assert drafted["auto" if is_chosen else head]["heads"] > 0
    assert drafted["off"] == {}
