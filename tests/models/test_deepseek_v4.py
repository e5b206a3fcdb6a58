"""DeepSeek V4 as its makers publish it: their names and settings, float8 and float4 matrices, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.interface import SILU_LIMIT
from penstock.kernels.reference import TorchOps, gated_reference
from penstock.models.config import NotNative
from penstock.models.load import load_model, open_checkpoint
from tests.models.checkpoints import Reference
from tests.models.conftest import random_prompt
from tests.models.paged import PagedRunner, Sequence
from tests.models.ranks import run_ranks
from tests.models.test_mxfp4 import random_mxfp4
from tests.models.tiny_families import save_tiny

PROMPT = random_prompt(60, seed=4)
TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}
BLOCK = 16
# Keys of transformers' newer files, which the makers' do not have.
_NEWER = (
    "layer_types",
    "compress_rates",
    "mlp_layer_types",
    "rope_parameters",
    "partial_rotary_factor",
    "rope_theta",
)


def in_float8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in float8, a power of two for each block, and the values."""
    rows, columns = weight.shape
    exponents = torch.randint(-3, 0, (-(-rows // BLOCK), -(-columns // BLOCK))).float()
    scales = torch.exp2(exponents)
    wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    values = (weight / wide).to(torch.float8_e4m3fn)
    return values, scales.to(torch.float8_e8m0fnu), values.float() * wide


@pytest.fixture
def published(tmp_path: Path) -> Reference:
    reference = save_tiny("deepseek_v4", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for name in _NEWER:
        settings.pop(name)
    settings |= {
        "compress_ratios": [128, 4, 0, 4, 128, 0],  # the last one is of the layer for drafts
        "compress_rate_hca": 12,
        "num_hash_layers": 1,
        "qk_rope_head_dim": 8,
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "expert_dtype": "fp4",
        },
    }
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        own = name.removeprefix("model.").replace("attn.norm.", "attn.kv_norm.")
        own = own.replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        tensors[own] = tensor
    layers = reference.model.model.layers
    tensors["layers.3.ffn.gate.bias"] = torch.zeros(8)
    layers[3].mlp.is_hash, table = False, tensors.pop("layers.3.ffn.gate.tid2eid")
    router = layers[1].mlp.gate.__class__(reference.model.config)
    router.weight = layers[3].mlp.gate.weight
    layers[3].mlp.gate = router.eval()
    assert len(table) == reference.model.config.vocab_size
    with torch.no_grad():
        for index, layer in enumerate(layers):
            values, scales, wide = in_float8(layer.self_attn.q_b_proj.weight)
            tensors[f"layers.{index}.attn.wq_b.weight"] = values
            tensors[f"layers.{index}.attn.wq_b.scale"] = scales
            layer.self_attn.q_b_proj.weight.copy_(wide)
            for number in range(8):
                for part, rows, columns in (("w1", 32, 64), ("w3", 32, 64), ("w2", 64, 32)):
                    packed, exponents, made = random_mxfp4(1, rows, columns)
                    stem = f"layers.{index}.ffn.experts.{number}.{part}"
                    tensors[f"{stem}.weight"] = packed[0].flatten(1).view(torch.int8)
                    tensors[f"{stem}.scale"] = torch.exp2(exponents[0].float() - 127).to(torch.float8_e8m0fnu)
                    experts = layer.mlp.experts
                    if part == "w2":
                        experts.down_proj[number].copy_(made[0])
                    else:
                        experts.gate_up_proj[number].chunk(2)[part == "w3"].copy_(made[0])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return reference


def test_the_makers_names_settings_and_matrices(published: Reference) -> None:
    ops = TorchOps()
    expected = published.logits(PROMPT)
    made = PagedRunner(load_model(published.folder, ops), ops).prompt_logits(PROMPT, 23)
    torch.testing.assert_close(made, expected, **TOLERANCE)
    shared = run_ranks(published.folder, ops, 2, lambda runner: runner.prompt_logits(PROMPT))
    torch.testing.assert_close(shared, expected, **TOLERANCE)


def test_several_requests_in_one_step(tmp_path: Path) -> None:
    reference, ops = save_tiny("deepseek_v4", tmp_path), TorchOps()
    runner = PagedRunner(load_model(tmp_path, ops), ops)
    texts = [random_prompt(size, seed=size) for size in (37, 5, 52)]
    sequences = [Sequence() for _ in texts]
    parts: list[list[Tensor]] = [[] for _ in texts]
    for start, end in ((0, 3), (3, 4), (4, 31), (31, 60)):
        here = [(n, text[start:end]) for n, text in enumerate(texts) if text[start:end]]
        for (number, _), logits in zip(
            here, runner.step([(sequences[n], part) for n, part in here]), strict=True
        ):
            parts[number].append(logits)
    for text, made in zip(texts, parts, strict=True):
        torch.testing.assert_close(torch.cat(made), reference.logits(text), **TOLERANCE)


def test_gates_are_limited_as_transformers_limits_them() -> None:
    gate_up = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)) * 15
    experts = DeepseekV4Experts.__new__(DeepseekV4Experts)
    torch.nn.Module.__init__(experts)
    experts.limit, experts.act_fn = SILU_LIMIT, torch.nn.functional.silu
    torch.testing.assert_close(gated_reference(gate_up, "limited_silu"), experts._apply_gate(gate_up))


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"scoring_func": "softmax"}, NotNative, "scoring_func 'softmax'"),
        ({"swiglu_limit": 7.0}, NotNative, "swiglu_limit 7.0"),
        ({"hidden_act": "gelu_new"}, NotNative, "hidden_act"),
        ({"o_groups": 3}, ModelLoadError, "which 3 groups cannot share"),
        ({"layer_types": ["full_attention"] * 5}, ModelLoadError, "unknown kind"),
        ({"mlp_layer_types": ["moe"]}, ModelLoadError, "do not match its 5 layers"),
        (
            {"compress_rates": {"heavily_compressed_attention": 0}},
            ModelLoadError,
            "heavily_compressed_attention",
        ),
    ],
)
def test_settings_that_no_published_model_has(
    changes: dict[str, Any], kind: type[ModelLoadError], said: str, tmp_path: Path
) -> None:
    save_tiny("deepseek_v4", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(kind, match=said):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (torch.full((320, 2), 8), "outside of 0 to 7"),
        (torch.zeros(320, 2), "whole numbers are expected"),
        (torch.zeros(300, 2, dtype=torch.int64), "shape"),
    ],
)
def test_a_damaged_table_of_experts(table: Tensor, said: str, tmp_path: Path) -> None:
    save_tiny("deepseek_v4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.ffn.gate.tid2eid"] = table
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=said):
        load_model(tmp_path, TorchOps())


def test_a_cache_of_8_bits_is_refused(tmp_path: Path) -> None:
    save_tiny("deepseek_v4", tmp_path)
    with pytest.raises(ConfigError, match="cannot hold the entries"):
        load_model(tmp_path, TorchOps(kv_dtype=torch.int8))


def test_random_weights_choose_experts_within_bounds(tmp_path: Path) -> None:
    save_tiny("deepseek_v4", tmp_path)
    ops = TorchOps()
    model = load_model(tmp_path, ops, load_format="random")
    assert bool(PagedRunner(model, ops).prompt_logits(PROMPT).isfinite().all())
