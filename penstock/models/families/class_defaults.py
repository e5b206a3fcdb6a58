"""Holds the values of settings that folders may leave out, because the class that their makers wrote has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.models.config import Fields

_EPS = {"rms_norm_eps": 1e-5}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_GLM = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
}
_LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK_V3 = {
    **_LATENTS,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}

# By the family's name. The sizes that every file states are not here: without them a file is damaged. A family that
# reads a setting under several names has it under the name that it reads last, so that any name in a file wins.
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": _MISTRAL,
    "mixtral": {
        **_EPS,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rope_theta": 1_000_000.0,
    },
    "ministral3": {**_EPS, "head_dim": 128, "num_key_value_heads": 8},
    "smollm3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    "seed_oss": {"head_dim": 128, "max_position_embeddings": 524288, "num_key_value_heads": 8},
    "ernie4_5": {
        **_EPS,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "rope_theta": 500_000.0,
    },
    "helium": {
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen2_moe": {
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "num_local_experts": 60,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3": {"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
    },
    "gpt_oss": {
        **_EPS,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "deepseek_v2": {
        **_LATENTS,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "q_lora_rank": 1536,
    },
    "deepseek_v3": {**_DEEPSEEK_V3, "max_position_embeddings": 4096},
    "glm4_moe_lite": {
        **_EPS,
        **_LATENTS,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "routed_scaling_factor": 1.8,
        "v_head_dim": 256,
    },
    "deepseek_v32": {**_DEEPSEEK_V3, "max_position_embeddings": 163840},
    "glm_moe_dsa": {
        **_EPS,
        **_DEEPSEEK_V3,
        "index_n_heads": 32,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "topk_group": 1,
        "v_head_dim": 256,
    },
    "llama4": {
        **_EPS,
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rope_theta": 500_000.0,
    },
    "glm4_moe": {
        **_EPS,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
    },
    "minimax_m2": {
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "rope_theta": 5_000_000.0,
    },
    "ernie4_5_moe": {
        **_EPS,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "num_key_value_heads": 4,
        "rope_theta": 500_000.0,
    },
    "olmoe": {**_EPS, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    "granitemoe": {"num_experts_per_tok": 2, "num_local_experts": 8},
    "phimoe": {
        **_EPS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rope_theta": 1_000_000.0,
    },
    "gemma": {"max_position_embeddings": 8192, "num_key_value_heads": 16},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
    },
    "gemma4": {"max_position_embeddings": 131072, "num_key_value_heads": 4},
    "phi3": {**_EPS, "max_position_embeddings": 4096},
    "olmo2": _EPS,
    "olmo3": _EPS,
    "exaone4": {**_EPS, "num_key_value_heads": 32, "sliding_window": 4096},
    "glm": _GLM,
    "glm4": {**_GLM, "attention_bias": True},
    "cohere": {"max_position_embeddings": 8192, "rope_theta": 500_000.0},
    "cohere2": {"max_position_embeddings": 8192},
    "starcoder2": {
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
    },
    "gptj": {"rotary_dim": 64},
    "codegen": {"rotary_dim": 64},
    "stablelm": {"max_position_embeddings": 4096, "num_key_value_heads": 32},
    "internlm3": {**_EPS, "max_position_embeddings": 32768, "num_key_value_heads": 2},
    "nemotron": {"max_position_embeddings": 4096},
    "arcee": {**_EPS, "hidden_act": "relu2", "max_position_embeddings": 4096},
    "apertus": {
        **_EPS,
        "max_position_embeddings": 65536,
        "rope_theta": 12_000_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "lfm2": {"max_position_embeddings": 128000, "num_key_value_heads": 8},
    "lfm2_moe": {"max_position_embeddings": 128000, "moe_intermediate_size": 1792, "num_key_value_heads": 8},
    "jamba": {"num_key_value_heads": 8},
    "bamba": {**_EPS, "max_position_embeddings": 262144, "num_key_value_heads": 8},
    "granitemoehybrid": {"num_experts_per_tok": 2, "num_local_experts": 8},
    "falcon_h1": {**_EPS, "mamba_d_ssm": 1024, "max_position_embeddings": 8192, "num_key_value_heads": 8},
    "nemotron_h": {
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
    },
    "qwen3_5": {"max_position_embeddings": 32768, "num_key_value_heads": 4},
    "qwen3_5_moe": {
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 256,
    },
    "qwen3_next": {
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_key_value_heads": 2,
        "num_local_experts": 512,
    },
    "kimi_linear": {
        **_EPS,
        **_LATENTS,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.446,
    },
    "olmo_hybrid": {"max_position_embeddings": 65536, "rope_theta": 10000.0},
    "minimax": {**_EPS, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "zamba": {"num_key_value_heads": 16},
    "zamba2": {"max_position_embeddings": 4096},
}


def with_class_defaults(fields: Fields, family: str) -> Fields:
    """Return the settings of a folder with those that it leaves out. A null in the file stays a null: for many
    settings a null says that a model lacks something."""
    defaults = CLASS_DEFAULTS.get(family, {})
    values, text = {**defaults, **fields.values}, fields.raw("text_config")
    if isinstance(text, dict):
        values["text_config"] = {**defaults, **text}
    return Fields(values, fields.where)
