"""Sizes that the planner reads from settings, beside the parameters of the model that transformers builds of them."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.tiny_configs import tiny_config
from penstock.core.errors import UsageError
from penstock.planner.shapes import shape_from_config

FAMILIES = (
    *(
        "apertus",
        "bloom",
        "deepseek_v3",
        "deepseek_v32",
        "ernie4_5_moe",
        "falcon",
        "gemma3_text",
        "gemma4_text",
    ),
    *(
        "glm4_moe",
        "gpt_neox",
        "gptj",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "llama",
        "llama4_text",
    ),
    *("mixtral", "mpt", "nemotron", "nemotron_h", "phi", "qwen2_moe", "qwen3_next"),
    *("recurrent_gemma", "starcoder2", "zamba2"),
)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parameters_are_counted(model_type: str) -> None:
    """Norms, biases and learned positions are left out, which weigh more in a tiny model than in a real one."""
    config = tiny_config(model_type, 320)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    shape = shape_from_config(model_type, json.loads(config.to_json_string(use_diff=False)))
    assert shape.num_parameters == pytest.approx(expected, rel=0.02)


def nemotron(kinds: list[str] | str, **changes: object) -> dict[str, object]:
    key = "hybrid_override_pattern" if isinstance(kinds, str) else "layers_block_type"
    sizes = {"hidden_size": 64, "vocab_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8}
    shared = {"moe_shared_expert_intermediate_size": 48, "intermediate_size": 96}
    return {"model_type": "nemotron_h", key: kinds, **sizes, **experts, **mamba, **shared, **changes}


def test_layers_that_are_experts_and_nothing_else() -> None:
    shape = shape_from_config("nemotron", nemotron(["mamba", "moe", "attention", "moe", "mlp"]))
    assert shape == shape_from_config("nemotron", nemotron("ME*E-"))
    assert (shape.num_layers, shape.num_attention_layers, shape.num_expert_layers) == (5, 1, 2)
    assert (shape.num_dense_layers, shape.num_experts, shape.experts_per_token) == (1, 8, 2)
    assert shape.expert_parameters == 2 * 64 * 32
    assert shape.shared_parameters == 2 * 64 * 48
    assert shape.states is not None
    assert shape.states.num_layers == 1
    latent = shape_from_config("nemotron", nemotron("ME*E-", moe_latent_size=16))
    assert latent.expert_parameters == 2 * 16 * 32


def test_one_head_of_keys_for_all_queries() -> None:
    sizes = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320}
    assert (
        shape_from_config("falcon", {"model_type": "falcon", "multi_query": True, **sizes}).num_kv_heads == 1
    )
    shape = shape_from_config("mpt", {"attn_config": {"kv_n_heads": 2}, "model_type": "mpt", **sizes})
    assert shape.kv_numbers == 2 * 2 * 16


@pytest.mark.parametrize("kind", ["nonsense", {}, 3])
def test_an_unknown_kind_of_layer_is_refused(kind: object) -> None:
    with pytest.raises(UsageError, match="which the planner does not know"):
        shape_from_config("nemotron", nemotron(["mamba", kind]))  # type: ignore[list-item]
