"""Mixtures whose experts stay packed on the GPU: the bytes of loaded models, shards, and what the log says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from penstock.core.engine_config import Quantization
from penstock.kernels.triton.expert_weights import unpacked
from penstock.kernels.triton.ops import TritonOps
from penstock.models.decoder import Decoder
from penstock.models.experts import ExpertMLP
from penstock.models.load import load_model
from penstock.models.sharding import Shard
from tests.engine.tiny import write_tiny_model

HIDDEN, INNER, COUNT, LAYERS = 128, 256, 4, 1  # the interpreter is slow
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_experts": COUNT,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_local_experts": COUNT,
    "num_experts_per_tok": 2,
    "intermediate_size": INNER,
    "quantization_config": {"quant_method": "mxfp4"},
}
BLOCKS = QWEN3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
GPTQ = QWEN3 | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}


def load(folder: Path, settings: dict[str, Any], quantization: Quantization | None, shard: Shard) -> Decoder:
    ops = TritonOps(torch.device("cpu"), torch.float16)
    path = write_tiny_model(folder, **settings)
    model = load_model(path, ops, load_format="random", quantization=quantization, shard=shard)
    assert isinstance(model, Decoder)
    return model


def experts(model: Decoder) -> list[ExpertMLP]:
    return [layer.mlp for layer in model._layers]


@pytest.mark.parametrize(
    ("settings", "quantization", "bits"),
    [
        (QWEN3, None, 16.0),
        (QWEN3, "fp8", 8.0),
        (QWEN3, "int8", 8.5),
        (QWEN3, "int4", 4.25),
        (GPT_OSS, None, 4.25),
        (BLOCKS, None, 8.125),
        (GPTQ, None, 5.0),
    ],
    ids=["bf16", "fp8", "int8", "int4", "mxfp4", "fp8 blocks", "gptq"],
)
def test_memory_shrinks_as_the_format_says(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    quantization: Quantization | None,
    bits: float,
) -> None:
    caplog.set_level(logging.WARNING)
    model = load(tmp_path / "model", settings, quantization, Shard())
    assert not caplog.records  # nothing is unpacked
    num_weights = LAYERS * COUNT * 3 * HIDDEN * INNER
    num_bytes = sum(mlp.experts.num_bytes for mlp in experts(model))
    beside = LAYERS * COUNT * 4 * 2 * (2 * INNER + HIDDEN)  # at most: scales and biases of rows, in float32
    assert num_weights * bits / 8 <= num_bytes <= num_weights * bits / 8 + beside
    # The card of the model, and so the banner, counts the same bytes.
    dense = load(tmp_path / "dense", {**settings, "quantization_config": None}, None, Shard())
    saved = sum(mlp.experts.num_bytes for mlp in experts(dense)) - num_bytes
    assert dense.weight_bytes - model.weight_bytes >= saved
    if settings is GPT_OSS:
        assert dense.weight_bytes - model.weight_bytes == saved


@pytest.mark.parametrize("places_experts", [False, True], ids=["slices", "whole experts"])
@pytest.mark.parametrize(
    ("settings", "quantization"),
    [(GPT_OSS, None), (BLOCKS, None), (QWEN3, "int4"), (QWEN3, "int8")],
    ids=["mxfp4", "fp8 blocks", "int4", "int8"],
)
def test_ranks_hold_packed_parts(
    tmp_path: Path, settings: dict[str, Any], quantization: Quantization | None, places_experts: bool
) -> None:
    whole = experts(load(tmp_path / "whole", settings, quantization, Shard()))[0].experts
    shards = [Shard(rank, 2, places_experts=places_experts) for rank in range(2)]
    ranks = [experts(load(tmp_path / "rank", settings, quantization, shard))[0].experts for shard in shards]
    assert sum(rank.num_bytes for rank in ranks) <= 1.1 * whole.num_bytes
    gate_ups = [unpacked(rank.gate_up) for rank in ranks]
    downs = [unpacked(rank.down) for rank in ranks]
    if places_experts:
        gate_up, down = torch.cat(gate_ups), torch.cat(downs)
    else:
        halves = zip(*(each.chunk(2, dim=1) for each in gate_ups), strict=True)  # gates, then ups
        gate_up, down = torch.cat([part for half in halves for part in half], dim=1), torch.cat(downs, dim=2)
    # A row of one group has its scale in 32 bits, not in 16.
    assert torch.allclose(gate_up, unpacked(whole.gate_up), rtol=1e-3)
    assert torch.allclose(down, unpacked(whole.down), rtol=1e-3)
