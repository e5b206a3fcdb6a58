"""Log-probabilities of prompt tokens against transformers: random models of every architecture, and the real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.cli.console import fetch_model
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.build import Engine, build_engine
from tests.engine.tiny import request, run, unpacked
from tests.models.checkpoints import MODELS, make_reference
from tests.models.conftest import random_prompt

TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. Water boils at one hundred degrees. "
    "def add(a, b):\n    return a + b\n"
)


def engine_of(path: Path, max_num_batched_tokens: int) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(path), device="cpu", dtype="float32"),
            cache=CacheConfig(num_kv_blocks=64),
            scheduler=SchedulerConfig(
                itl_target_ms=None, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8
            ),
        ),
        path,
    )


def expected_logprobs(logits: torch.Tensor, prompt: list[int]) -> NDArray[np.float32]:
    logprobs = torch.log_softmax(logits[:-1].float(), dim=-1)
    found: NDArray[np.float32] = logprobs.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1).numpy()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_random_models(name: str, tmp_path: Path) -> None:
    reference = make_reference(name, tmp_path)
    prompt = random_prompt(50, seed=11)
    engine = engine_of(reference.folder, max_num_batched_tokens=17)
    values, _ = unpacked(run(engine, [request("scored", prompt, 0, prompt_logprobs=1)])["scored"])
    assert values[:, 0] == pytest.approx(expected_logprobs(reference.logits(prompt), prompt), abs=1e-3)


@pytest.mark.e2e
def test_the_real_model() -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from penstock.models.load import load_tokenizer

    path = fetch_model("smollm2-135m")
    files = load_tokenizer(path)
    assert files is not None
    prompt = Tokenizer.from_buffer(files.tokenizer_json).encode(TEXT, add_special_tokens=False).ids
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    engine = engine_of(path, max_num_batched_tokens=24)
    values, ids = unpacked(run(engine, [request("scored", prompt, 0, prompt_logprobs=1)])["scored"])
    assert values[:, 0] == pytest.approx(expected_logprobs(logits, prompt), abs=1e-3)
    assert (ids[:, 1] == logits[:-1].argmax(dim=-1).numpy()).all()
