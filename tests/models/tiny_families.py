"""Tiny random models of every family, one line each, made with transformers.

Windows, original contexts and factors are small, so that prompts of a few dozen tokens reach past them.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.build import Engine, build_engine
from tests.engine.tiny import request
from tests.models.checkpoints import SMALL, Reference
from tests.models.conftest import random_prompt

SHARED = random_prompt(20, seed=1)
PROMPTS = [[*SHARED, *random_prompt(25, seed=2)], [*SHARED, *random_prompt(3, seed=3)]]
GLOBAL_EVERY_SECOND = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Tiny:
    """A tiny model. `changes` are settings that differ from `SMALL`; a None leaves a setting out."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    attention: str = "eager"  # that transformers runs
    auto: Any = AutoModelForCausalLM  # the list of transformers that has the class

    def config(self) -> Any:
        # A tied random model only repeats its last token.
        settings = {**SMALL, "tie_word_embeddings": False, **self.changes}
        settings = {key: value for key, value in settings.items() if value is not None}
        return AutoConfig.for_model(self.model_type, **settings)

    def make(self) -> Any:
        return self.auto.from_config(self.config(), attn_implementation=self.attention)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "partial_rotary_factor": 0.75,
}
TWO_PARTIAL_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
GROWING_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "llama_4_scaling_beta": 0.4,
}
FOUR = {"num_hidden_layers": 4}
NO_HEAD_DIM = {"head_dim": None}
NO_KV_HEADS = {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None,
               "max_position_embeddings": None}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENTS = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32,
           "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": None,
           "num_key_value_heads": 4}  # fmt: skip
# With many heads, no two tokens have a score of 0.
SPARSE = {**LATENTS, "q_lora_rank": 64, "index_topk": 16, "index_n_heads": 16, "index_head_dim": 12}
NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}

MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 1, "chunk_size": 16,
          "intermediate_size": None, "num_attention_heads": None, "num_key_value_heads": None}  # fmt: skip

MAMBA1 = {"state_size": 12, "intermediate_size": None, "num_attention_heads": None, "num_key_value_heads": None,
          "head_dim": None}  # fmt: skip

HYBRID = {
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "head_dim": None,
}
MAMBA_AND_ATTENTION = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]

DELTA = {"layer_types": MAMBA_AND_ATTENTION, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4}  # fmt: skip

NEMOTRON_EXPERTS = {**EXPERTS, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
                    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2, "chunk_size": 16,
                    "num_hidden_layers": None, "n_routed_experts": 8, "routed_scaling_factor": 2.5,
                    "moe_shared_expert_intermediate_size": 48}  # fmt: skip

ZAMBA = {"num_hidden_layers": 5, "n_mamba_heads": 8,
         "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
         "mamba_d_state": 12, "mamba_ngroups": 2, "chunk_size": 16, "head_dim": None,
         "num_key_value_heads": 4}  # fmt: skip

COMPRESSED = ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention",
              "compressed_sparse_attention", "heavily_compressed_attention"]  # fmt: skip

TINY: dict[str, Tiny] = {
    "llama": Tiny("llama"),
    "llama-dynamic": Tiny("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "smollm3": Tiny("smollm3", FOUR),
    "seed_oss": Tiny("seed_oss", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5": Tiny("ernie4_5", {"use_bias": True}),
    "helium": Tiny("helium"),
    "ministral": Tiny("ministral", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND}),
    "ministral3": Tiny("ministral3", {"rope_parameters": GROWING_ROPE}),
    "gemma": Tiny("gemma"),
    "gemma2": Tiny("gemma2", {**FOUR, "sliding_window": 8, "query_pre_attn_scalar": 16,
                              "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3n": Tiny("gemma3n_text", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND,
                                     "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                                     "vocab_size_per_layer_input": 320, "laurel_rank": 8,
                                     "activation_sparsity_pattern": [0.9, 0.7, 0.0, 0.0]}),
    "gemma4": Tiny("gemma4_text", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND,
                                   "global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
                                   "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}),
    "gemma4-keys-as-values": Tiny("gemma4_text", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND,
                                                  "num_key_value_heads": 4, "global_head_dim": 32,
                                                  "num_global_key_value_heads": 2, "attention_k_eq_v": True,
                                                  "hidden_size_per_layer_input": 0}),
    "gemma4_unified": Tiny("gemma4_unified_text", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND,
                                                   "global_head_dim": 32, "num_kv_shared_layers": 1}),
    "gemma4-experts": Tiny("gemma4_text", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND,
                                           "global_head_dim": 32, "hidden_size_per_layer_input": 0,
                                           "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
                                           "moe_intermediate_size": 32}),
    "phi3": Tiny("phi3", {"sliding_window": 30, "partial_rotary_factor": 0.5}),
    "phi3-longrope": Tiny("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi": Tiny("phi", {"partial_rotary_factor": 0.5}),
    "olmo": Tiny("olmo", {"clip_qkv": 0.7}),
    "olmo2": Tiny("olmo2"),
    "olmo3": Tiny("olmo3", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND}),
    "exaone4": Tiny("exaone4", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND}),
    "granite": Tiny("granite", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                                "logits_scaling": 3.0}),
    "glm": Tiny("glm", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm4": Tiny("glm4", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "cohere": Tiny("cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": Tiny("cohere2", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND}),
    "gpt2": Tiny("gpt2", {"intermediate_size": None, "num_key_value_heads": None, "head_dim": None}),
    "gpt_neox": Tiny("gpt_neox", {"num_key_value_heads": None, "head_dim": None}),
    "gpt_neo": Tiny("gpt_neo", {**NO_KV_HEADS, **FOUR, "attention_types": [[["global", "local"], 2]],
                                "window_size": 8}),
    "opt": Tiny("opt", {**NO_KV_HEADS, "ffn_dim": 96, "max_position_embeddings": 256, "word_embed_proj_dim": 64}),
    "gpt_bigcode": Tiny("gpt_bigcode", {**NO_KV_HEADS, "n_positions": 256}),
    "gpt_bigcode-heads": Tiny("gpt_bigcode", {**NO_KV_HEADS, "n_positions": 256, "multi_query": False}),
    "jais2": Tiny("jais2"),
    "cwm": Tiny("cwm", {**FOUR, "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND}),
    "youtu": Tiny("youtu", {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                            "v_head_dim": 16, "head_dim": None, "num_key_value_heads": 4}),
    "minicpm3": Tiny("minicpm3", {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 16,
                                  "qk_rope_head_dim": 8, "head_dim": None, "num_key_value_heads": 4, "v_head_dim": 12,
                                  "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 40, "attention_bias": True,
                                  "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0,
                                                      "original_max_position_embeddings": 256,
                                                      "short_factor": [1.0, 1.2, 1.5, 2.0],
                                                      "long_factor": [1.0, 2.0, 3.0, 4.0]}}),
    "gptj": Tiny("gptj", {**NO_KV_HEADS, "rotary_dim": 8}),
    "codegen": Tiny("codegen", {**NO_KV_HEADS, "rotary_dim": 8}),
    "starcoder2": Tiny("starcoder2", {"sliding_window": 8}),
    "falcon": Tiny("falcon", {"num_key_value_heads": None, "head_dim": None, "alibi": False}),
    "falcon-new": Tiny("falcon", {"num_key_value_heads": None, "head_dim": None, "num_kv_heads": 2, "alibi": False,
                                  "new_decoder_architecture": True, "bias": True}),
    "falcon-alibi": Tiny("falcon", {"num_key_value_heads": None, "head_dim": None, "alibi": True, "bias": True,
                                    "multi_query": False, "parallel_attn": False, **FOUR}, "sdpa"),
    "bloom": Tiny("bloom", {**NO_KV_HEADS, "num_attention_heads": 6, "hidden_size": 96}),
    "mpt": Tiny("mpt", {**NO_KV_HEADS, "max_seq_len": 256, "attn_config": {"clip_qkv": 0.9}}),
    "stablelm": Tiny("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "stablelm-parallel": Tiny("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": Tiny("nemotron", {"partial_rotary_factor": 0.5}),
    "arcee": Tiny("arcee", {"attention_bias": True}),
    "apertus": Tiny("apertus"),
    "mixtral": Tiny("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": Tiny("qwen2_moe", {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": Tiny("qwen3_moe", {**EXPERTS, "num_experts": 6, "norm_topk_prob": True}),
    "gpt_oss": Tiny("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8,
                                "rope_parameters": {**YARN, "truncate": False}}),
    "deepseek_v2": Tiny("deepseek_v2", {**LATENTS, "topk_method": "group_limited_greedy", "n_group": 4,
                                        "topk_group": 2, "routed_scaling_factor": 2.0,
                                        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v3": Tiny("deepseek_v3", {**LATENTS, "q_lora_rank": 64, "n_group": 4, "topk_group": 2,
                                        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v32": Tiny("deepseek_v32", {**SPARSE, "n_group": 4, "topk_group": 2,
                                          "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "glm_moe_dsa": Tiny("glm_moe_dsa", {**SPARSE, **FOUR, "indexer_types": ["full", "shared", "full", "shared"]}),
    "axk1": Tiny("axk1", {**LATENTS, "q_lora_rank": 64, "n_group": 4, "topk_group": 2,
                          "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "axk2": Tiny("axk2", {**SPARSE, "n_group": 4, "topk_group": 2, "gated_norm_rank": 8,
                          "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "llama4": Tiny("llama4_text", {**FOUR, "num_local_experts": 4, "num_experts_per_tok": 1, "floor_scale": 8,
                                   "attention_chunk_size": 16, "intermediate_size_mlp": 80,
                                   "interleave_moe_layer_step": 2}),
    "glm4_moe": Tiny("glm4_moe", {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
                                  "use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1,
                                  "routed_scaling_factor": 1.5}),
    "dots1": Tiny("dots1", {**FOUR, **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 2,
                            "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
                            "norm_topk_prob": True, "attention_bias": True, "sliding_window": None}),
    "dots1-windows": Tiny("dots1", {**FOUR, **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2,
                                    "sliding_window": 8, "max_window_layers": 2}),
    "solar_open": Tiny("solar_open", {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "attention_bias": True,
                                      "routed_scaling_factor": 1.5}),
    "hunyuan_v1_dense": Tiny("hunyuan_v1_dense", {"attention_bias": True, "rope_parameters": NTK_ALPHA}),
    "hunyuan_v1_moe": Tiny("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 2, "rope_parameters": NTK_ALPHA}),
    "hy_v3": Tiny("hy_v3", {**EXPERTS, "num_experts": 6, "num_shared_experts": 1, "attention_bias": True,
                            "mlp_bias": True}),
    "exaone_moe": Tiny("exaone_moe", {**FOUR, **EXPERTS, "num_experts": 8, "n_group": 2, "topk_group": 1,
                                      "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND}),
    "afmoe": Tiny("afmoe", {**FOUR, **EXPERTS, "num_experts": 6, "num_shared_experts": 1, "route_scale": 1.5,
                            "sliding_window": 8, "layer_types": GLOBAL_EVERY_SECOND, "mup_enabled": True}),
    "minimax_m2": Tiny("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "mimo_v2_flash": Tiny("mimo_v2_flash", {**FOUR, **EXPERTS, "num_attention_heads": 8, "num_key_value_heads": 2,
                                            "head_dim": 16, "v_head_dim": 10, "n_routed_experts": 6,
                                            "attention_bias": True, "sliding_window": 8,
                                            "layer_types": GLOBAL_EVERY_SECOND,
                                            "rope_parameters": TWO_PARTIAL_ROPES}),
    "ernie4_5_moe": Tiny("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32,
                                          "moe_num_shared_experts": 1, "moe_layer_start_index": 1}),
    "olmoe": Tiny("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.7}),
    "granitemoe": Tiny("granitemoe", {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.3,
                                      "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 3}),
    "granitemoe-shared": Tiny("granitemoeshared", {"num_local_experts": 6, "num_experts_per_tok": 2,
                                                   "shared_intermediate_size": 64, "attention_multiplier": 0.3,
                                                   "residual_multiplier": 0.4, "logits_scaling": 3}),
    "phimoe": Tiny("phimoe", {"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
                              "lm_head_bias": True, "attention_bias": True}),
    "mistral4": Tiny("mistral4", {**LATENTS, "q_lora_rank": 64, "n_group": 4, "topk_group": 2,
                                  "rope_parameters": {**GROWING_ROPE, "mscale": 0.7}},
                     auto=AutoModelForImageTextToText),
    "glm4_moe_lite": Tiny("glm4_moe_lite", {**LATENTS, "q_lora_rank": 64, "n_group": 1, "topk_group": 1}),
    "lfm2": Tiny("lfm2", {**FOUR, **NO_HEAD_DIM, "layer_types": ["conv", "full_attention", "conv", "conv"],
                          "conv_bias": True, "block_multiple_of": 16}),
    "lfm3": Tiny("lfm3", {**FOUR, "sliding_window": 8, "attention_bias": True,
                          "layer_types": ["conv", "sliding_attention", "full_attention", "conv"]}),
    "lfm2_moe": Tiny("lfm2_moe", {**FOUR, **NO_HEAD_DIM, **EXPERTS, "num_experts": 6, "num_dense_layers": 1,
                                  "layer_types": ["conv", "full_attention", "conv", "conv"],
                                  "routed_scaling_factor": 1.5}),
    "mamba": Tiny("mamba", {**MAMBA1, "use_bias": True}),
    "falcon_mamba": Tiny("falcon_mamba", {**MAMBA1, "intermediate_size": 96, "use_conv_bias": False}),
    "jamba": Tiny("jamba", {**FOUR, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6,
                            "num_experts_per_tok": 2, "mamba_d_state": 12, "mamba_dt_rank": 4,
                            "mamba_proj_bias": True}),
    "mamba2": Tiny("mamba2", {**MAMBA2, "use_bias": True}),
    "bamba": Tiny("bamba", {**FOUR, **HYBRID, "attn_layer_indices": [1], "mamba_proj_bias": True}),
    "granite-hybrid": Tiny("granitemoehybrid", {**FOUR, **HYBRID, "layer_types": MAMBA_AND_ATTENTION,
                                                "num_local_experts": 0, "shared_intermediate_size": 96,
                                                "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
                                                "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "granite-hybrid-experts": Tiny("granitemoehybrid", {**FOUR, **HYBRID, "layer_types": MAMBA_AND_ATTENTION,
                                                        "num_local_experts": 6, "num_experts_per_tok": 2,
                                                        "intermediate_size": 32, "shared_intermediate_size": 96,
                                                        "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "granite-attention": Tiny("granitemoehybrid", {**HYBRID, "layer_types": ["full_attention"] * 2,
                                                   "num_local_experts": 0, "shared_intermediate_size": 96,
                                                   "residual_multiplier": 0.5, "attention_multiplier": 0.3,
                                                   "position_embedding_type": "rope"}),
    "falcon_h1": Tiny("falcon_h1", {**HYBRID, "mamba_d_ssm": 96, "key_multiplier": 0.7, "mlp_multipliers": [0.8, 1.3],
                                    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "attention_in_multiplier": 0.9,
                                    "attention_out_multiplier": 1.1, "ssm_in_multiplier": 1.2,
                                    "ssm_out_multiplier": 0.8, "lm_head_multiplier": 0.5,
                                    "embedding_multiplier": 2.0}),
    "falcon_h1-norm": Tiny("falcon_h1", {**HYBRID, "mamba_d_ssm": 96, "mamba_rms_norm": True}),
    "qwen3_5": Tiny("qwen3_5_text", {**FOUR, **DELTA, "attention_bias": True}),
    "qwen3_5_moe": Tiny("qwen3_5_moe_text", {**FOUR, **DELTA, **EXPERTS, "num_experts": 6,
                                             "shared_expert_intermediate_size": 48}),
    "qwen3_next": Tiny("qwen3_next", {**FOUR, **DELTA, **EXPERTS, "num_experts": 6,
                                      "shared_expert_intermediate_size": 48}),
    "kimi_linear": Tiny("kimi_linear", {**LATENTS, **FOUR, "layer_types": MAMBA_AND_ATTENTION, "linear_num_heads": 4,
                                        "linear_head_dim": 12, "num_experts": 8, "n_group": 4, "topk_group": 2,
                                        "n_routed_experts": None, "first_k_dense_replace": 1}),
    "bailing_hybrid": Tiny("bailing_hybrid", {**LATENTS, **FOUR, "layer_types": MAMBA_AND_ATTENTION, "head_dim": 16,
                                              "num_local_experts": 8, "n_group": 2, "topk_group": 1,
                                              "n_routed_experts": None}),
    "deepseek_v4": Tiny("deepseek_v4", {**EXPERTS, "num_hidden_layers": 5, "num_key_value_heads": 1,
                                        "n_routed_experts": 8, "intermediate_size": None, "q_lora_rank": 24,
                                        "sliding_window": 10,
                                        "layer_types": COMPRESSED, "partial_rotary_factor": 0.5, "hc_mult": 3,
                                        "compress_rates": {COMPRESSED[0]: 12, COMPRESSED[1]: 4}, "o_groups": 2,
                                        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe", "moe"],
                                        "o_lora_rank": 12, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 5,
                                        "rope_parameters": YARN}),
    "olmo_hybrid": Tiny("olmo_hybrid", {**FOUR, **DELTA, "head_dim": None, "linear_value_head_dim": 4,
                                        "rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "olmo_hybrid-rope": Tiny("olmo_hybrid", {**FOUR, **DELTA, "head_dim": None, "linear_value_head_dim": 4,
                                             "attention_bias": True, "linear_allow_neg_eigval": False}),
    "minimax": Tiny("minimax", {**FOUR, "layer_types": MAMBA_AND_ATTENTION, "num_local_experts": 6, "block_size": 16,
                                "num_experts_per_tok": 2, "linear_attn_alpha_factor": 0.8,
                                "linear_attn_beta_factor": 0.5, "full_attn_alpha_factor": 1.1,
                                "full_attn_beta_factor": 0.9, "mlp_alpha_factor": 0.7, "mlp_beta_factor": 1.2}),
    "nemotron_h": Tiny("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp",
                                                            "linear_attention"], "mamba_num_heads": 8,
                                      "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2, "chunk_size": 16,
                                      "num_hidden_layers": None}),
    "nemotron_h-experts": Tiny("nemotron_h", {**NEMOTRON_EXPERTS, "n_group": 2, "topk_group": 1}),
    "nemotron_h-latents": Tiny("nemotron_h", {**NEMOTRON_EXPERTS, "moe_latent_size": 24}),
    "zamba2": Tiny("zamba2", {**ZAMBA, "num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 6,
                              "use_mem_rope": True, "add_bias_linear": True, "tie_word_embeddings": True}),
    "zamba": Tiny("zamba", {**ZAMBA, "n_mamba_heads": 2, "mamba_ngroups": None, "chunk_size": None,
                            "mamba_dt_rank": 12, "mamba_d_conv": 6, "attention_head_dim": 32,
                            "attention_hidden_size": 128, "mamba_proj_bias": True, "tie_word_embeddings": True}),
    "zaya": Tiny("zaya", {**FOUR, "num_experts": 4, "num_experts_per_tok": None, "moe_intermediate_size": 32,
                          "router_hidden_size": 16, "intermediate_size": None, "sliding_window": 8,
                          "layer_types": ["hybrid", "hybrid_sliding"] * 2, "cca_time1": 3, "attention_bias": True}),
    "recurrent_gemma": Tiny("recurrent_gemma", {**FOUR, **NO_HEAD_DIM, "attention_window_size": 8, "lru_width": 96,
                                                "attention_bias": True}),
    "mamba2-groups": Tiny("mamba2", {**MAMBA2, "n_groups": 4, "use_conv_bias": False}),
}  # fmt: skip


def varied(name: str, **changes: Any) -> Tiny:
    return replace(TINY[name], changes={**TINY[name].changes, **changes})


def save_tiny(name: str, folder: Path, tiny: Tiny | None = None) -> Reference:
    """Save a model whose norms are near those of a fresh model, and whose other weights and biases are random."""
    torch.manual_seed(0)
    model = (tiny or TINY[name]).make().float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("hidden_states_bias", "residual_bias")):  # larger ones make all tokens alike
                parameter.normal_(0.0, 0.03)
            elif parameter.ndim < 2 and not bool((parameter == 0).all() and _is_bias(model, parameter)):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0.0, 0.15)
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.fill_(0.8)
            if key.endswith(("e_score_correction_bias", "expert_bias", "balancing_biases")):
                buffer.normal_(0.0, 0.1)
            if key.endswith("tid2eid"):
                buffer.copy_(
                    torch.rand(len(buffer), model.config.n_routed_experts).argsort()[:, : buffer.shape[1]]
                )
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder)
    return Reference(name, folder, model)


def _is_bias(model: Any, parameter: torch.Tensor) -> bool:
    return any(each is parameter and name.endswith("bias") for name, each in model.named_parameters())


def family_engine(
    folder: Path, num_blocks: int, model: dict[str, Any] | None = None, **scheduling: Any
) -> Engine:
    """Return an engine in float32 that drafts nothing; on the CPU, unless `model` has another device."""
    config = EngineConfig(
        model=ModelConfig(**{"model": str(folder), "device": "cpu", "dtype": "float32", **(model or {})}),
        cache=CacheConfig(num_kv_blocks=num_blocks),
        scheduler=SchedulerConfig(**{"itl_target_ms": None, **scheduling}),
        speculate="off",
        num_threads=1,
    )
    return build_engine(config, folder)


def answers(engine: Engine, prefix: str, length: int) -> list[list[int]]:
    """Answer all `PROMPTS` at once."""
    requests = [request(f"{prefix}-{n}", prompt, length) for n, prompt in enumerate(PROMPTS)]
    made: dict[str, list[int]] = {each.id: [] for each in requests}
    for each in requests:
        engine.loop.add(each)
    while engine.loop.has_work:
        for event in engine.loop.step():
            made[event.request_id] += event.token_ids
    engine.loop.scheduler.check_integrity()
    return list(made.values())
