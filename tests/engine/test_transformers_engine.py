"""An engine serves a model by the code of transformers: batches, chunks, prefix hits, preemption and drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from penstock.cli.serve import describe_weights
from penstock.core.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.core.errors import ConfigError
from penstock.core.request import SamplingParams
from penstock.engine.offline import OfflineEngine
from penstock.engine.parallel.setup import check
from tests.models.checkpoints import SMALL, Reference, save_random
from tests.models.conftest import random_prompt


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.manual_seed(0)
    settings = {
        name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")
    }
    config = transformers.OPTConfig(**{**settings, "eos_token_id": None}, ffn_dim=96, word_embed_proj_dim=32)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return save_random("opt", model, tmp_path_factory.mktemp("opt"))


def _config(folder: Path, **parallel: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=128),
        cache=CacheConfig(num_kv_blocks=9),  # too few for four texts at once
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24),
        parallel=ParallelConfig(**parallel),
        num_threads=1,
    )


def test_many_requests_get_the_answers_of_transformers(reference: Reference) -> None:
    engine = OfflineEngine(_config(reference.folder), reference.folder)
    shared = random_prompt(32, seed=1)
    prompts = [
        shared + random_prompt(5, seed=2),
        shared + random_prompt(3, seed=3),
        random_prompt(40, seed=4),
    ]
    prompts.append(random_prompt(7, seed=5) * 3)  # repeats itself, so that tokens are drafted
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    first = engine.generate(prompts, sampling)
    again = engine.generate([prompts[0]], sampling)
    expected = [reference.greedy(prompt, 24) for prompt in prompts]
    assert [completion.token_ids for completion in first] == expected
    assert again[0].token_ids == expected[0]
    assert again[0].num_cached_tokens >= 32
    assert engine.card.implementation == "transformers"
    assert "run by the code of transformers" in describe_weights(engine.card)


def test_ranks_are_refused_before_anything_is_loaded(reference: Reference) -> None:
    with pytest.raises(ConfigError, match="cannot be sharded over ranks"):
        check(_config(reference.folder, tensor_parallel_size=2), reference.folder, 2)
