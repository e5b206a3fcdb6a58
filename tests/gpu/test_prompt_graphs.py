"""Steps that are replayed compute what steps that are launched do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.engine.batch import HostStep
from penstock.engine.build import build_engine
from penstock.engine.graphs import PromptGraphs
from tests.engine.tiny import VOCAB_SIZE, request, run, write_tiny_model

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "mxfp4"},
}


def _engine(folder: Path, changes: dict[str, Any], **settings: Any) -> Any:
    model = write_tiny_model(folder / "tiny", **(SIZES | changes))
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cuda", load_format="random", **settings),
        cache=CacheConfig(num_kv_blocks=4096),
        scheduler=SchedulerConfig(itl_target_ms=None, max_num_seqs=64, max_num_batched_tokens=1024),
    )
    return build_engine(config, model)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        (QWEN3, {}),
        (EXPERTS, {}),
        ({}, {"quantization": "fp8"}),
        ({}, {"quantization": "int4"}),
        (EXPERTS, {"quantization": "fp8"}),
        (EXPERTS, {"quantization": "int4"}),
        (GPT_OSS, {}),
    ],
    ids=["llama", "qwen3", "experts", "fp8", "int4", "fp8 experts", "int4 experts", "mxfp4 experts"],
)
def test_replayed_steps_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    engine = _engine(tmp_path, changes, **settings)
    replay = PromptGraphs.hidden
    errors: list[float] = []
    mixed: list[bool] = []

    def compared(self: PromptGraphs, step: HostStep, *slots: Any) -> torch.Tensor | None:
        replayed = replay(self, step, *slots)
        if replayed is None:
            return None
        kept = replayed.float()
        rows = self._rows
        launched = self._model.forward(rows.token_ids(step), rows.attention_batch(step), self._kv).float()
        errors.append(float((kept - launched).norm() / launched.norm()))
        mixed.append(0 < step.num_decodes < len(step.rows) and bool(step.in_flight_at.size))
        return replayed

    monkeypatch.setattr(PromptGraphs, "hidden", compared)
    rng = random.Random(1)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(150)]
    for turn in range(4):
        requests = [
            request(
                f"{turn}-{n}", [*shared[: 40 * (n % 4)], *rng.choices(range(3, VOCAB_SIZE), k=7 + 23 * n)]
            )
            for n in range(12)
        ]
        for each in requests[:4]:
            run(engine, [each])
        run(engine, requests[4:])
    assert len(errors) > 10
    # Eight bits round activations where rows are many, and padding may make them so.
    assert max(errors) < (0.06 if settings else 0.02)
    # Requests that come while others are answered: some of a step's tokens are not known yet when it is submitted.
    assert any(mixed)
