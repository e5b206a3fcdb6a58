"""Log-probabilities of prompt tokens on a GPU are those of the sampler, also when a prompt is computed in chunks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.engine.build import Engine, build_engine
from tests.engine.tiny import VOCAB_SIZE, request, run, unpacked, write_tiny_model

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
PROMPT = [random.Random(9).randrange(3, VOCAB_SIZE) for _ in range(100)]


def engine_of(model: Path, dtype: Literal["float32", "bfloat16"], max_num_batched_tokens: int) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cuda", dtype=dtype, load_format="random"),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_batched_tokens=max_num_batched_tokens),
    )
    return build_engine(config, model)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.1)])
def test_scores_are_the_sampler_s_log_probabilities(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"], tolerance: float
) -> None:
    model = write_tiny_model(tmp_path / "tiny", **SIZES)
    engine = engine_of(model, dtype, 2048)
    expected = []
    for end in range(1, 40):
        asked = request(f"end-{end}", PROMPT[:end], 1, logprobs=0, logit_bias={PROMPT[end]: 100.0})
        (event,) = run(engine, [asked])[asked.id]
        expected.append(event.logprobs[0].logprob)
    whole, whole_ids = unpacked(run(engine, [request("whole", PROMPT, 3, prompt_logprobs=4)])["whole"])
    engine.close()
    assert whole.shape == (99, 5)
    assert np.abs(whole[:39, 0] - np.array(expected)).max() < tolerance
    chunked = engine_of(model, dtype, 24)
    asked = [request(f"scored-{n}", PROMPT, 3, prompt_logprobs=4) for n in range(3)]
    events = run(chunked, asked)
    chunked.close()
    for each in asked:
        values, ids = unpacked(events[each.id])
        assert np.abs(values - whole).max() < tolerance
        assert np.abs(ids[:, 0] - whole_ids[:, 0]).max() <= (0 if dtype == "float32" else VOCAB_SIZE // 20)
