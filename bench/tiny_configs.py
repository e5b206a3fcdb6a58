"""Small settings for any model type of the transformers library: every size of the default settings that is in the
table below becomes small, in nested settings too. Windows are shorter than the prompts of the sweep, and of each kind
of layer there is at least one."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.models.tiny_families import TINY

NUM_LAYERS = 4
LEFT_OUT = object()  # a setting that keeps its default
SIZES: dict[str, Any] = {
    # Widths.
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "word_embed_proj_dim", "embedding_size",
         "input_embedding_size", "output_embedding_size", "lru_width", "attention_hidden_size"), 64
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "dff", "ffn_hidden_size",
         "intermediate_size_mlp", "dense_intermediate_size", "d_inner", "feed_forward_size",
         "shared_intermediate_size"), 96
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size",
         "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32
    ),
    # Layers and heads.
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks",
         "num_decoder_layers", "num_encoder_layers"), NUM_LAYERS
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads",
         "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
         "swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads"), 4
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads", "num_kv_heads"), 2
    ),
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "kv_channels", "dim_head", "d_head", "attention_head_size", "global_head_dim",
         "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim", "qk_nope_head_dim",
         "index_head_dim", "query_pre_attn_scalar", "attention_head_dim"), 16
    ),
    "qk_rope_head_dim": 8, "qk_head_dim": 24, "rotary_dim": 8,
    "q_lora_rank": 32, "kv_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2,
    # Experts.
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    "n_group": 2, "num_expert_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "zero_expert_num": 2,
    "moe_num_shared_experts": 1, "n_shared_experts": 1, "num_shared_experts": 1, "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    # Windows and positions.
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention",
         "local_attention_window_len", "keep_window_size"), 8
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length",
         "max_target_positions"), 256
    ),
    "attention_chunk_size": 16, "floor_scale": 8, "rel_extent": 16, "log_scaling_n_floor": 16, "index_topk": 16,
    "index_block_size": 8, "index_topk_blocks": 2, "prompt_length": 4, "prompt_types": 4, "segment_types": 4,
    # States.
    "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "n_mamba_heads": 2, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_n_groups": 2, "n_groups": 2,
    "mamba_d_ssm": 128, "mamba_headdim": 16, "mamba_chunk_size": 16, "chunk_size": 16, "time_step_rank": 4,
    "mamba_dt_rank": 4, "num_query_groups": 4,
    # Others.
    "hidden_size_per_layer_input": 8, "laurel_rank": 8, "num_kv_shared_layers": 1, "adapter_rank": 4,
    "router_hidden_size": 16, "hc_lowrank": 8, "ple_embed_dim": 16, "ngram_vocab_size_base": 512,
    "split_ngram_parts": 1, "d_rel": 8, "gated_norm_rank": 4, "block_multiple_of": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "sep_token_id": 2,
    "cls_token_id": 1,
}  # fmt: skip
# The kind of each layer. Distinct kinds take turns.
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")
# Settings that decide whether the model is a decoder, and whether its answers vary.
FLAGS = {"is_decoder": True, "tie_word_embeddings": False}
# What the rules above do not find.
_LATENTS = {"head_dim": LEFT_OUT, "num_key_value_heads": 4}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
SPECIAL: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": LEFT_OUT},
    "hunyuan_v1_dense": {"head_dim": 16}, "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}},
    "zaya": {"num_experts_per_tok": 1},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 16)},
    "xmod": {"default_language": "en_XX"},
    "longcat_flash": {"head_dim": 8, "num_key_value_heads": 4},
    "axk1": _LATENTS, "axk2": _LATENTS, "bailing_hybrid": _LATENTS, "deepseek_v32": _LATENTS, "glm_moe_dsa": _LATENTS,
    "kimi_linear": _LATENTS, "minicpm3": _LATENTS, "youtu": _LATENTS, "dots3_note": _LATENTS,
    "dots3_note_text": _LATENTS, "hy_v4": _LATENTS, "mistral_large4_text": _LATENTS,
    "glm5_next_text": {**_LATENTS, "qk_rope_head_dim": 0, "qk_head_dim": LEFT_OUT},
    # Models that see images, and that get texts alone.
    "muse_spark_audio": {"out_hidden_size": 64}, "muse_spark_vision": {"out_hidden_size": 64},
    "glm5_next_vision": {"out_hidden_size": 64}, "granite_docling_vision": {"out_hidden_size": 64},
    "molmo2_adapter": {"vision_feature_layer": [3, 2]},
    "chameleon": {"vocabulary_map": {"<image>": 5}}, "unlimited_ocr_text": {"num_key_value_heads": 4},
    "step3p5": {"share_expert_dim": 32, "num_sliding_attention_heads": 4, "sliding_window": 8},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 16], "rope_parameters": _AXES},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": _AXES}, "cosmos3_edge_text": {"rope_parameters": _AXES},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
                       "indexer_compress_ratio": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")}},
}  # fmt: skip


def small_settings(default: PretrainedConfig, vocab_size: int, model_type: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    known = {**default.to_dict(), **vars(default)}
    for name, value in known.items():
        if isinstance(value, PretrainedConfig):
            made[name] = small_settings(value, vocab_size, value.model_type)
        elif name in FLAGS:
            made[name] = FLAGS[name]
        elif name in (
            "vocab_size",
            "vocab_size_per_layer_input",
            "decoder_vocab_size",
            "unpadded_vocab_size",
        ):
            made[name] = vocab_size
        elif name in SIZES and isinstance(value, int | list | tuple) and not isinstance(value, bool):
            made[name] = SIZES[name]
        elif name in KINDS and isinstance(value, list | tuple) and value:
            distinct = list(dict.fromkeys(value))
            made[name] = [distinct[index % len(distinct)] for index in range(NUM_LAYERS)]
    made |= SPECIAL.get(model_type, {})
    return {name: value for name, value in made.items() if value is not LEFT_OUT}


def tiny_config(model_type: str, vocab_size: int) -> Any:
    """Return small settings: those of the tests, if they have the model type."""
    for tiny in TINY.values():
        if tiny.model_type == model_type:
            return tiny.config()
    kind = CONFIG_MAPPING[model_type]
    return kind(**small_settings(kind(), vocab_size, model_type))
