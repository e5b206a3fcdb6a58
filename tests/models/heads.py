"""Folders of heads with random weights, in published formats, and their results in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

SIZE, INNER, HEADS, KV_HEADS, DIM = 64, 96, 4, 2, 16
SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}


def eagle_tensors(vocab_size: int, *, third: bool, draft_vocab: int | None = None) -> dict[str, Tensor]:
    """Weights under the names of the first releases."""
    torch.manual_seed(5)
    layer = "midlayer." if third else "layers.0."
    width = 2 * SIZE if third else SIZE
    shapes = {
        "fc.weight": (SIZE, 3 * SIZE if third else 2 * SIZE),
        f"{layer}self_attn.q_proj.weight": (HEADS * DIM, width),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * DIM, width),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * DIM, width),
        f"{layer}self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        f"{layer}mlp.gate_proj.weight": (INNER, SIZE),
        f"{layer}mlp.up_proj.weight": (INNER, SIZE),
        f"{layer}mlp.down_proj.weight": (SIZE, INNER),
    }
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    norms = ["post_attention_layernorm", *(("hidden_norm", "input_layernorm") if third else ())]
    tensors |= {f"{layer}{name}.weight": torch.rand(SIZE) + 0.5 for name in norms}
    if draft_vocab is not None:
        ids = torch.randperm(vocab_size)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), ids)
    if third:
        tensors["norm.weight"] = torch.rand(SIZE) + 0.5
        tensors["lm_head.weight"] = torch.randn(draft_vocab or vocab_size, SIZE) * 0.2
    return tensors


def write_folder(folder: Path, tensors: dict[str, Tensor], vocab: int, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**SETTINGS, "vocab_size": vocab, **changes}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder


def eagle_features(tensors: dict[str, Tensor], embedded: Tensor, features: Tensor, *, third: bool) -> Tensor:
    """The layer in plain torch, over one text: [T, hidden] twice → [T, hidden]."""
    layer = "midlayer." if third else "layers.0."
    weight = {name.removeprefix(layer): tensor for name, tensor in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (SIZE,), weight[f"{name}.weight"], 1e-5)

    if third:
        residual = features
        inputs = torch.cat([norm(embedded, "input_layernorm"), norm(features, "hidden_norm")], dim=1)
    else:
        residual = inputs = torch.cat([embedded, features], dim=1) @ weight["fc.weight"].T
    count = len(inputs)
    angles = torch.outer(torch.arange(count), 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))

    def heads(name: str) -> Tensor:
        return (inputs @ weight[f"self_attn.{name}_proj.weight"].T).view(count, -1, DIM).transpose(0, 1)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    repeats = HEADS // KV_HEADS
    query, key = rotated(heads("q")), rotated(heads("k")).repeat_interleave(repeats, 0)
    value = heads("v").repeat_interleave(repeats, 0)
    scores = (query @ key.transpose(1, 2) * DIM**-0.5).masked_fill(
        torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf")
    )
    made = (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)
    residual = residual + made @ weight["self_attn.o_proj.weight"].T
    normed = norm(residual, "post_attention_layernorm")
    gated = silu(normed @ weight["mlp.gate_proj.weight"].T) * (normed @ weight["mlp.up_proj.weight"].T)
    return residual + gated @ weight["mlp.down_proj.weight"].T
