"""Sizes that the planner reads from settings, beside the parameters of the model that transformers builds of them."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bench.tiny_configs import tiny_config
from penstock.core.errors import UsageError
from penstock.models.families import FAMILIES as NATIVE
from penstock.planner.layers import text_settings
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
    *("minimax", "mixtral", "mpt", "nemotron", "nemotron_h", "phi", "qwen2_moe", "qwen3_next"),
    *("recurrent_gemma", "starcoder2", "zamba", "zamba2"),
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
    assert shape.kv_numbers == 2 * 2 * (16 + 8)  # with the columns of ALiBi
    shape = shape_from_config("bloom", {"model_type": "bloom", **sizes})
    assert shape.kv_numbers == 2 * 4 * (16 + 8)


@pytest.mark.parametrize("kind", ["nonsense", {}, 3])
def test_an_unknown_kind_of_layer_is_refused(kind: object) -> None:
    with pytest.raises(UsageError, match="which the planner does not know"):
        shape_from_config("nemotron", nemotron(["mamba", kind]))  # type: ignore[list-item]


def test_layers_of_deepseek_v4_are_refused_however_a_file_lists_them() -> None:
    settings = {"model_type": "deepseek_v4", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2}
    for kinds in ({"compress_ratios": [128, 4]}, {"layer_types": ["heavily_compressed_attention"] * 2}, {}):
        with pytest.raises(UsageError, match=r"compressed_.*which the planner does not know"):
            shape_from_config("v4", {**settings, **kinds})


NATIVE_TYPES = sorted(
    name for family in NATIVE for name in family.huggingface_names if name in CONFIG_MAPPING
)


def test_the_output_head_is_the_embedding_where_transformers_ties_them() -> None:
    """Published files leave the setting out where it is the default of the family."""
    for kind in NATIVE_TYPES:
        default = CONFIG_MAPPING[kind]()
        expected = bool(getattr(default, "text_config", default).tie_word_embeddings)
        assert text_settings({"model_type": kind})["tie_word_embeddings"] == expected, kind
    assert not text_settings({"model_type": "gemma2", "tie_word_embeddings": False})["tie_word_embeddings"]
    assert text_settings({"text_config": {}, "tie_word_embeddings": True})["tie_word_embeddings"]
    assert text_settings({"model_type": "lfm2", "tie_embedding": False})["tie_word_embeddings"] is False


def test_files_as_their_makers_publish_them() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    gemma3 = shape_from_config("gemma-3-4b", {"model_type": "gemma3", "text_config": text})
    assert gemma3.num_parameters / 1e9 == pytest.approx(3.88, rel=0.01)
    assert (gemma3.kv_numbers, gemma3.window, gemma3.num_window_layers) == (2 * 4 * 256, 1024, 29)
    gemma2 = shape_from_config("gemma-2-9b", {"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42,
                               "intermediate_size": 14_336, "num_attention_heads": 16, "num_key_value_heads": 8,
                               "vocab_size": 256_000})  # fmt: skip
    assert gemma2.num_parameters / 1e9 == pytest.approx(9.24, rel=0.01)
    assert (gemma2.window, gemma2.num_window_layers) == (4096, 21)
    text = {"model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
            "num_local_experts": 16, "interleave_moe_layer_step": 1, "vocab_size": 202_048}  # fmt: skip
    scout = shape_from_config("scout", {"model_type": "llama4", "text_config": text})
    assert scout.num_parameters / 1e9 == pytest.approx(107.8, rel=0.01)
    assert (scout.window, scout.num_window_layers) == (8192, 36)
    listed = shape_from_config("scout", {**text, "no_rope_layers": [1, 0] * 24, "attention_chunk_size": 4096})
    assert (listed.window, listed.num_window_layers) == (4096, 24)


def test_windows_of_hybrids_are_those_of_their_attention() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8, "vocab_size": 320}
    griffin = shape_from_config(
        "griffin", {"model_type": "recurrent_gemma", "num_key_value_heads": 1, **sizes}
    )
    assert (griffin.window, griffin.num_window_layers, griffin.num_attention_layers) == (2048, 2, 2)
    assert griffin.kv_bytes(10_000, 2.0) == griffin.kv_bytes(2048, 2.0)
    jamba = {"model_type": "jamba", "sliding_window": 64, "attn_layer_period": 4, "attn_layer_offset": 2}
    shape = shape_from_config("jamba", {**jamba, **sizes})
    assert (shape.num_window_layers, shape.num_attention_layers) == (2, 2)
    assert shape.kv_bytes(1000, 2.0) == shape.kv_bytes(64, 2.0) > 0


def test_lightning_attention_keeps_a_state() -> None:
    settings = {"model_type": "minimax", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
                "num_hidden_layers": 5, "vocab_size": 320}  # fmt: skip
    shape = shape_from_config("minimax", settings)
    assert shape.states is not None
    assert (shape.num_attention_layers, shape.states.num_layers) == (3, 2)
    assert shape.state_bytes == 2 * 4 * 16 * 16 * 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_experts": 4, "num_experts_per_tok": 9}, "choose 9 of 4 experts"),
        ({"layer_types": ["full_attention"]}, "list the kinds of 1 layers, and it has 2"),
        ({"head_dim": 0}, "have head_dim = 0, which is not a size"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, object], sentence: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    with pytest.raises(UsageError, match=sentence):
        shape_from_config("odd", {**sizes, **changes})


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 0}, {"model_type": ["llama"]}])
def test_strange_settings_are_read(changes: dict[str, object]) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    assert shape_from_config("odd", {**sizes, **changes}).num_kv_heads >= 1
