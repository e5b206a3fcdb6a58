"""Settings as makers publish them, with the sizes of a tiny model, against transformers: files leave out what their
class assumes, keep names of older releases, and store heads and norms in forms of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.core.errors import ModelLoadError
from penstock.kernels.reference import TorchOps
from penstock.models.config import Fields
from penstock.models.load import load_model, open_checkpoint
from penstock.models.vision_load import load_vision
from tests.models.checkpoints import Reference, save_random
from tests.models.conftest import random_prompt
from tests.models.paged import PagedRunner

PROMPT = random_prompt(30, seed=11)
TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
LONGROPE = {"short_factor": [1.0 + index / 50 for index in range(8)], "long_factor": [1.5] * 8}
# SmolLM3 3B does not say that its head is tied.
SMOLLM3 = {
    **SIZES,
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}
# LFM2 350M has the width of its MLPs under another name, before the width is adjusted.
LFM2 = {
    **{key: value for key, value in SIZES.items() if key not in ("intermediate_size", "hidden_act")},
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 64,
    "block_ff_dim": 144,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 32,
    "block_norm_eps": 1e-05,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [1, 3],
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "rope_theta": 1000000.0,
}
# Phi 3.5 MoE states how long each of the two lists makes cosines and sines.
PHIMOE = {
    **SIZES,
    "architectures": ["PhiMoEForCausalLM"],
    "model_type": "phimoe",
    "attention_bias": True,
    "lm_head_bias": True,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "original_max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        **LONGROPE,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 64,
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
}
# StableLM 2 12B has layer norms of single heads.
STABLELM = {
    **SIZES,
    "architectures": ["StableLmForCausalLM"],
    "model_type": "stablelm",
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "qk_layernorm": True,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "use_qkv_bias": False,
}
PUBLISHED = {"smollm3": SMOLLM3, "lfm2": LFM2, "phimoe": PHIMOE, "stablelm": STABLELM}


def settings_only(settings: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    ops = TorchOps()
    return PagedRunner(load_model(folder, ops, max_model_len=64), ops).prompt_logits(PROMPT)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_mean_what_their_class_assumes(name: str, tmp_path: Path) -> None:
    settings = PUBLISHED[name]
    config = transformers.AutoConfig.from_pretrained(settings_only(settings, tmp_path / "read"))
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    reference = save_random(name, made, tmp_path / "model")
    settings_only(settings, reference.folder)
    torch.testing.assert_close(logits_of(reference.folder), reference.logits(PROMPT), **TOLERANCE)


# Kimi K2.5 and K2.6: the text model within, and names of tensors before transformers knew the class.
KIMI_TEXT = {
    **SIZES, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 16,
}  # fmt: skip
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
    "dtype": "bfloat16",
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "text_config": KIMI_TEXT,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "vision_config": {"model_type": "kimi_k25"},
}


def test_the_text_model_within_kimi_runs_without_its_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.AutoConfig.for_model(**{**KIMI_TEXT, "model_type": "deepseek_v3"})
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    reference = save_random("kimi", made, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {f"language_model.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors"
    )
    settings_only(KIMI, tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), reference.logits(PROMPT), **TOLERANCE)
    fields = Fields(KIMI, "config.json")
    assert load_vision(tmp_path, fields, b"{}", TorchOps()) is None
    assert "has no preprocessor_config.json: the model takes text only" in caplog.text


# DeepSeek MoE 16B, which transformers knows as the text model of DeepSeek-OCR 2 alone.
DEEPSEEK_MOE = {
    **SIZES,
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "model_type": "deepseek",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
}


def deepseek_moe(folder: Path, has_bias: bool = False) -> Reference:
    names = (*SIZES, "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")
    text = {name: DEEPSEEK_MOE[name] for name in names if name != "torch_dtype"}
    text |= {"attention_bias": has_bias, "mlp_bias": has_bias, "mlp_layer_types": ["dense"] + ["sparse"] * 3}
    heads = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    towers = {"sam_config": {**heads, "output_channels": 8, "image_size": 64, "downsample_channels": [8, 16]},
              "encoder_config": {**heads, "num_key_value_heads": 1}}  # fmt: skip
    config = transformers.DeepseekOcr2Config(text_config=text, vision_config=towers, image_token_id=319)
    made = transformers.DeepseekOcr2ForConditionalGeneration._from_config(config, attn_implementation="eager")
    reference = save_random("deepseek", made, folder)
    weights = {
        name.replace("model.language_model.", "model."): tensor.clone()
        for name, tensor in reference.model.state_dict().items()
        if name.startswith(("model.language_model.", "lm_head."))
    }
    save_file(weights, folder / "model.safetensors")
    settings_only(DEEPSEEK_MOE | {"attention_bias": has_bias, "mlp_bias": has_bias}, folder)
    return reference


@pytest.mark.parametrize("has_bias", [False, True])
def test_deepseek_moe(has_bias: bool, tmp_path: Path) -> None:
    reference = deepseek_moe(tmp_path, has_bias)
    torch.testing.assert_close(logits_of(tmp_path), reference.logits(PROMPT), **TOLERANCE)


def test_the_long_list_has_a_length_of_its_own(tmp_path: Path) -> None:
    scaling = open_checkpoint(settings_only(PHIMOE, tmp_path)).config.rope.scaling
    assert scaling is not None
    assert (scaling.short_amplitude, scaling.long_amplitude) == (1.243163121016122, 1.3)


def test_a_head_that_is_not_stored_is_the_embedding(tmp_path: Path) -> None:
    tied = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    config = transformers.LlamaConfig(**tied, tie_word_embeddings=True)
    reference = save_random("llama", transformers.LlamaForCausalLM(config), tmp_path / "model")
    settings_only({**tied, "tie_word_embeddings": False}, reference.folder)
    torch.testing.assert_close(logits_of(reference.folder), reference.logits(PROMPT), **TOLERANCE)
    file = reference.folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, file)
    torch.testing.assert_close(logits_of(reference.folder), reference.logits(PROMPT) * 2, **TOLERANCE)


INTERNLM2_NAMES = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}
EXAONE_NAMES = {
    "model.": "transformer.",
    "layers": "h",
    "self_attn": "attn.attention",
    "o_proj": "out_proj",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "embed_tokens": "wte",
    "transformer.norm": "transformer.ln_f",
}
CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
LLAMA = {**SIZES, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": False}


def renamed(name: str, names: dict[str, str]) -> str:
    for usual, own in names.items():
        name = name.replace(usual, own)
    return name


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    settings_only({**settings, **CODE}, folder)


def llama(name: str, folder: Path, **changes: Any) -> Reference:
    config = transformers.LlamaConfig(**{**LLAMA, **changes})
    return save_random(name, transformers.LlamaForCausalLM(config), folder)


def internlm2(folder: Path) -> Reference:
    """Queries are grouped by key head."""
    reference = llama("internlm2", folder, rope_theta=1000000.0)
    stored = load_file(folder / "model.safetensors")
    made = {renamed(name, INTERNLM2_NAMES): tensor for name, tensor in stored.items()}
    for index in range(4):
        prefix = f"model.layers.{index}.self_attn"
        query, key, value = (made.pop(f"{prefix}.{part}_proj.weight").view(2, -1, 64) for part in "qkv")
        grouped = torch.cat([query, key, value], dim=1)
        made[f"model.layers.{index}.attention.wqkv.weight"] = grouped.view(-1, 64)
    named = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    rope = {"rope_theta": 1000000.0, "rope_scaling": {"factor": 2.0, "type": "dynamic"}}
    rewrite(folder, made, {**LLAMA, **named, **rope})
    return reference


def internlm3(folder: Path) -> Reference:
    """Llama with other settings."""
    reference = llama("internlm3", folder, attention_bias=True, mlp_bias=True)
    stored = load_file(folder / "model.safetensors")
    named = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    rewrite(folder, stored, {**LLAMA, **named, "bias": True, "qkv_bias": True, "head_dim": 16})
    return reference


def exaone(folder: Path) -> Reference:
    """EXAONE 3 has the names of GPT-2."""
    reference = llama("exaone", folder)
    stored = load_file(folder / "model.safetensors")
    made = {renamed(name, EXAONE_NAMES): tensor for name, tensor in stored.items()}
    settings = {key: value for key, value in LLAMA.items() if key not in ("num_hidden_layers", "hidden_act")}
    named = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_layers": 4}
    del settings["rms_norm_eps"]
    rewrite(folder, made, {**settings, **named, "layer_norm_epsilon": 1e-5, "activation_function": "silu"})
    return reference


MINICPM = {
    **{key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"},
    "architectures": ["MiniCPMForCausalLM"],
    "model_type": "minicpm",
    **CODE,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 16,
}


def minicpm(folder: Path, *, tied: bool = True) -> Reference:
    """MiniCPM has the factors of Granite."""
    config = transformers.GraniteConfig(
        **{**LLAMA, "tie_word_embeddings": tied},
        attention_multiplier=0.25,
        embedding_multiplier=12.0,
        residual_multiplier=0.7,
        logits_scaling=4.0,
    )
    reference = save_random("minicpm", transformers.GraniteForCausalLM(config), folder)
    settings_only(MINICPM if tied else MINICPM | {"tie_word_embeddings": False}, folder)
    return reference


def mimo(folder: Path) -> Reference:
    """Qwen 2 under another name; tests/engine/test_mtp_drafts.py has its layer for drafts."""
    config = transformers.Qwen2Config(**LLAMA)
    reference = save_random("mimo", transformers.Qwen2ForCausalLM(config), folder)
    named = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    settings_only({**LLAMA, **named}, folder)
    return reference


# Families that transformers has under other names, by our name. A tied random model would repeat its last token.
RENAMED: dict[str, Callable[[Path], Reference]] = {
    each.__name__: each for each in (internlm2, internlm3, exaone, mimo)
}
RENAMED |= {"deepseek": deepseek_moe, "minicpm": partial(minicpm, tied=False)}


@pytest.mark.parametrize("write", [internlm2, internlm3, exaone, minicpm, mimo])
def test_layers_of_another_family(write: Callable[[Path], Reference], tmp_path: Path) -> None:
    reference = write(tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), reference.logits(PROMPT), **TOLERANCE)


def test_minicpm_with_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="MiniCPM with experts"):
        open_checkpoint(settings_only({**MINICPM, "num_experts": 8}, tmp_path))


def test_jamba_states_its_context_under_another_name(tmp_path: Path) -> None:
    settings = {**SIZES, "architectures": ["JambaForCausalLM"], "model_type": "jamba", "num_experts": 1}
    settings |= {"attn_layer_period": 2, "attn_layer_offset": 1}
    for stated, context in (({"n_ctx": 65536}, 65536), ({}, 262144)):
        folder = settings_only({**settings, **stated}, tmp_path)
        assert open_checkpoint(folder).config.max_positions == context


def test_command_r_has_the_context_that_it_was_made_for(tmp_path: Path) -> None:
    settings = {
        **SIZES,
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "max_position_embeddings": 8192,
        "model_max_length": 131072,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
    }
    assert open_checkpoint(settings_only(settings, tmp_path)).config.max_positions == 131072
