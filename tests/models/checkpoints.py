"""Tiny checkpoints with random weights, made with transformers and read back by ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 320
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# With 64 original positions and theta 100, all three bands of llama3 scaling have frequencies in them.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# With so small a theta the band that yarn blends runs past the last frequency, and has to be cut off.
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama(**changes: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))


def _gemma3(query_pre_attn_scalar: int) -> Any:
    # Both kinds of layers, and a window shorter than the prompts.
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**SMALL, "num_hidden_layers": 4},
            query_pre_attn_scalar=query_pre_attn_scalar,
            sliding_window=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            },
        )
    )


def _qwen3_moe(**changes: Any) -> Any:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, **changes)
    )


def _qwen2_moe() -> Any:
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **SMALL,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        )
    )


def _qwen2_windowed() -> Any:
    return Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biased": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama3-rope": lambda: _llama(rope_parameters=LLAMA3_ROPE),
    "llama-yarn": lambda: _llama(rope_parameters=YARN_ROPE),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen2-windowed": _qwen2_windowed,
    "qwen2-moe": _qwen2_moe,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "head_dim": 32})),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SMALL, num_local_experts=6, num_experts_per_tok=2, sliding_window=8)
    ),
    "qwen3-moe": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-dense-layers": lambda: _qwen3_moe(norm_topk_prob=False, mlp_only_layers=[0]),
    "gemma3": lambda: _gemma3(query_pre_attn_scalar=24),
    # GGUF has no place for another scale than that of the head size.
    "gemma3-usual-scale": lambda: _gemma3(query_pre_attn_scalar=16),
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A checkpoint and the transformers model that wrote it."""

    name: str
    folder: Path
    model: Any

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0].float()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        answer: list[int] = []
        for _ in range(num_tokens):
            answer.append(int(self.logits(prompt + answer)[-1].argmax()))
        return answer


def make_reference(name: str, folder: Path, **save_settings: Any) -> Reference:
    torch.manual_seed(0)
    return save_random(name, MODELS[name](), folder, **save_settings)


def save_random(name: str, model: Any, folder: Path, **save_settings: Any) -> Reference:
    torch.manual_seed(0)
    model = model.float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder, **save_settings)
    return Reference(name, folder, model)
