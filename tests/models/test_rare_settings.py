"""Settings that few published models have: each gives transformers' logits, or is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import Ops
from penstock.kernels.reference import TorchOps
from penstock.models.load import load_model, open_checkpoint
from tests.models.checkpoints import Reference
from tests.models.conftest import random_prompt
from tests.models.paged import PagedRunner
from tests.models.tiny_families import EXPERTS, Tiny, save_tiny, varied

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
           "llama_4_scaling_beta": 0.4}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 1.5, "original_max_position_embeddings": 64}
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def plain_ops() -> Ops:
    return TorchOps("cpu", torch.float32)


TWO = {"num_hidden_layers": 2}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "num_experts": 4, **EXPERTS, **TWO}


@pytest.mark.parametrize(
    "tiny",
    [
        varied("phi", tie_word_embeddings=True, **TWO),
        varied("falcon_h1", mamba_proj_bias=True, projectors_bias=True, ssm_in_multiplier=0.5, **TWO),
        varied("ministral3", rope_parameters=DYNAMIC, **TWO),
        varied("zamba2", rms_norm_eps=1e-2),
        varied("deepseek_v2", mlp_bias=True, attention_bias=True),
        varied(
            "olmo3",
            rope_parameters={"full_attention": {**YARN, "truncate": False}, "sliding_attention": YARN},
        ),
        Tiny("qwen3_moe", WINDOWS),
        varied("bailing_hybrid", kda_safe_gate=False),
        varied("gemma", hidden_act="gelu", **TWO),
        # By the code of transformers: activations, rotated pairs and scales that no native family has, ...
        varied("gemma", hidden_act="relu", **TWO),
        varied("glm", head_dim=6, **TWO),
        varied("gpt2", scale_attn_by_inverse_layer_idx=True, num_hidden_layers=2),
        # ... a bias that is tied, and no shared expert.
        Tiny("bert", {"is_decoder": True, "tie_word_embeddings": True, **TWO}),
        Tiny(
            "dots1",
            {"n_routed_experts": 4, "n_shared_experts": 0, "first_k_dense_replace": 1, **EXPERTS, **TWO},
        ),
    ],
    ids=lambda tiny: tiny.model_type,
)
def test_the_logits_of_transformers(tiny: Tiny, tmp_path: Path, plain_ops: Ops) -> None:
    made = save_tiny(tiny.model_type, tmp_path, tiny)
    prompt = random_prompt(40, seed=1)
    logits = PagedRunner(load_model(tmp_path, plain_ops), plain_ops).prompt_logits(prompt)
    torch.testing.assert_close(logits, made.logits(prompt), atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("family", ["axk1", "deepseek_v3", "dots1"])
def test_a_null_means_that_weights_of_experts_are_not_normalized(
    family: str, tmp_path: Path, plain_ops: Ops
) -> None:
    save_tiny(family, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "norm_topk_prob": None}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    prompt = random_prompt(20, seed=1)
    logits = PagedRunner(load_model(tmp_path, plain_ops), plain_ops).prompt_logits(prompt)
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0], atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("family", ["mamba2", "bamba", "qwen3_next", "minimax"])
def test_another_activation_of_layers_with_a_state_is_refused(family: str, tmp_path: Path) -> None:
    varied(family, hidden_act="gelu_new").config().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="hidden_act 'gelu_new'"):
        open_checkpoint(tmp_path)


def changed(folder: Path, change: Callable[[Tensors], None], **settings: Any) -> None:
    """Change the tensors and the settings of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Reference:
    return save_tiny("llama", tmp_path, varied("llama", num_hidden_layers=1))


def test_a_stored_head_that_differs_from_the_embedding_is_used(tiny_llama: Reference, plain_ops: Ops) -> None:
    changed(tiny_llama.folder, lambda tensors: None, tie_word_embeddings=True)
    prompt = random_prompt(5, seed=1)
    logits = PagedRunner(load_model(tiny_llama.folder, plain_ops), plain_ops).prompt_logits(prompt)
    torch.testing.assert_close(logits, tiny_llama.logits(prompt), atol=3e-4, rtol=3e-4)


def test_a_stored_copy_of_the_embedding_is_tied(tiny_llama: Reference, plain_ops: Ops) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    changed(tiny_llama.folder, copy, tie_word_embeddings=True)
    assert load_model(tiny_llama.folder, plain_ops).config.tie_embeddings


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_stored_bias_that_the_settings_deny_is_refused_unless_it_is_zero(
    value: float, tiny_llama: Reference, plain_ops: Ops
) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"

    def add(tensors: Tensors) -> None:
        tensors[name] = torch.full((tensors[name.replace("bias", "weight")].shape[0],), value)

    changed(tiny_llama.folder, add)
    if not value:
        load_model(tiny_llama.folder, plain_ops)
        return
    with pytest.raises(ModelLoadError, match=name):
        load_model(tiny_llama.folder, plain_ops)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("lfm3", {"rope_parameters": {"sliding_attention": "full_attention", "full_attention": {}}}),
        ("gpt_neo", {"attention_types": True}),
        ("llama4", {"moe_layers": -0.5}),
        ("gemma4", {"num_kv_shared_layers": 7}),
        ("helium", {"head_dim": 15, "model_type": [1, 2]}),
    ],
)
def test_settings_of_unexpected_types_are_refused(
    family: str, settings: dict[str, Any], tmp_path: Path, plain_ops: Ops
) -> None:
    save_tiny(family, tmp_path)
    changed(tmp_path, lambda tensors: None, **settings)
    with pytest.raises(ModelLoadError):
        load_model(tmp_path, plain_ops)
