"""Reads the settings of Gemma 4, whose layers differ in their heads. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, RopeConfig, extended
from penstock.models.gguf_config import (
    common_gguf_config,
    gguf_experts,
    gguf_windows,
    has_experts,
    metadata_fields,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import (
    common_huggingface_config,
    read_windows,
    rope_config,
    rope_parameters,
)

_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}


@dataclass(frozen=True, slots=True)
class HeadKind:
    """The heads of one kind of layers."""

    head_dim: int
    num_kv_heads: int
    keys_are_values: bool
    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(ArchitectureConfig):
    """`head_dim` and `num_kv_heads` are the largest of all layers."""

    whole: HeadKind  # of layers with full attention
    windowed: HeadKind
    num_sharing_layers: int  # the last layers, which have no keys and values of their own
    is_double_wide: bool  # the MLPs of these layers
    input_size: int  # of the embedding of each layer; 0 where there is none
    input_vocab_size: int
    pad_token_id: int = 0  # whose embeddings of layers image tokens have

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that its methods were written in.
        ArchitectureConfig.__post_init__(self)
        own = {window is None for window in self.windows[: max(self.num_kv_layers, 0)]}
        if not own >= {window is None for window in self.windows[max(self.num_kv_layers, 0) :]}:
            raise ModelLoadError(
                f"The last {self.num_sharing_layers} of the model's {self.num_layers} layers share keys and values "
                "of earlier ones, of which there are none of their kind."
            )

    def kind(self, index: int) -> HeadKind:
        return self.whole if self.windows[index] is None else self.windowed

    @property
    def has_equal_kv_heads(self) -> bool:
        return self.whole.num_kv_heads == self.windowed.num_kv_heads

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers - self.num_sharing_layers

    def kv_layer(self, index: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        if index < self.num_kv_layers:
            return index
        has_window = self.windows[index] is not None
        return max(i for i in range(self.num_kv_layers) if (self.windows[i] is not None) == has_window)


def huggingface_config(fields: Fields, name: str) -> Gemma4Config:
    if fields.raw("use_bidirectional_attention") == "all":
        raise ModelLoadError(
            f"{fields.where} asks for attention in both directions, which a model that writes text does not have."
        )
    ropes = rope_parameters(fields)
    plain = {key: value for key, value in fields.values.items() if not key.startswith("rope_")}
    plain_fields = Fields({**plain, "hidden_act": None}, fields.where)
    base = common_huggingface_config(plain_fields, name, attention_bias=False)
    windows = read_windows(fields, base.num_layers, 6)
    windows = (*windows[:-1], None)  # the last layer sees the whole context, whatever the file says
    keys_are_values = fields.flag("attention_k_eq_v", False)
    larger = _larger_heads(fields, windows, base.num_kv_heads if not keys_are_values else None)

    def kind(which: str, head_dim: int, num_kv_heads: int, *, shared: bool) -> HeadKind:
        parameters = {**_ROPES[which], **(ropes.get(which) or {})}
        rope = rope_config(parameters, Fields({}, fields.where), base.max_positions, head_dim=head_dim)
        return HeadKind(head_dim, num_kv_heads, shared, rope)

    whole = kind("full_attention", *larger, shared=keys_are_values)
    windowed = kind("sliding_attention", base.head_dim, base.num_kv_heads, shared=False)
    experts = None
    if fields.flag("enable_moe_block", False):
        experts = ExpertsConfig(
            count=fields.integer("num_experts"),
            per_token=fields.integer("top_k_experts"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            normalizes=True,
        )
    input_size = fields.raw("hidden_size_per_layer_input")
    return extended(
        base,
        Gemma4Config,
        head_dim=max(whole.head_dim, windowed.head_dim),
        num_kv_heads=max(whole.num_kv_heads, windowed.num_kv_heads),
        rope=windowed.rope,
        windows=windows,
        sees_images_in_windows=fields.raw("use_bidirectional_attention") == "vision",
        attention_scale=1.0,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        experts=experts,
        whole=whole,
        windowed=windowed,
        num_sharing_layers=fields.integer("num_kv_shared_layers")
        if fields.raw("num_kv_shared_layers")
        else 0,
        is_double_wide=fields.flag("use_double_wide_mlp", False),
        input_size=fields.integer("hidden_size_per_layer_input", 256) if input_size != 0 else 0,
        input_vocab_size=fields.integer("vocab_size_per_layer_input", 262144),
        pad_token_id=(fields.token_ids("pad_token_id") or (0,))[0],
    )


def gguf_config(file: GGUFFile, name: str) -> Gemma4Config:
    fields = metadata_fields(file)
    num_layers = fields.integer("block_count")
    windows = gguf_windows(fields, num_layers, 6)
    listed = fields.raw("attention.head_count_kv")
    kv_heads = (
        listed if isinstance(listed, list) else [fields.integer("attention.head_count_kv")] * num_layers
    )
    inner = fields.raw("feed_forward_length")
    inner = inner if isinstance(inner, list) else [inner]
    whole_dim = fields.integer("attention.key_length")
    windowed_dim = fields.integer("attention.key_length_swa", whole_dim)
    sizes = {
        "attention.head_count_kv": max(kv_heads),
        "feed_forward_length": inner[0],
        "attention.key_length": max(whole_dim, windowed_dim),
        "attention.value_length": max(whole_dim, windowed_dim),
        "rope.dimension_count": max(whole_dim, windowed_dim),
    }
    base = common_gguf_config(file, name, {f"{file.architecture}.{key}": size for key, size in sizes.items()})
    num_sharing = fields.raw("attention.shared_kv_layers") or 0
    own = range(num_layers - num_sharing)
    table = file.tensors.get("per_layer_token_embd.weight")

    def kind(head_dim: int, key: str, theta: float, *, has_window: bool) -> HeadKind:
        indices = [index for index in own if (windows[index] is not None) == has_window]
        shared = bool(indices) and f"blk.{indices[0]}.attn_v.weight" not in file.tensors
        heads = kv_heads[indices[0]] if indices else max(kv_heads)
        return HeadKind(head_dim, heads, shared, RopeConfig(fields.number(key, theta)))

    windowed = kind(windowed_dim, "rope.freq_base_swa", 10_000.0, has_window=True)
    return extended(
        base,
        Gemma4Config,
        rope=windowed.rope,
        windows=windows,
        attention_scale=1.0,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        activation="gelu_tanh",
        experts=gguf_experts(file, base, normalizes=True) if has_experts(file) else None,
        whole=kind(whole_dim, "rope.freq_base", 1_000_000.0, has_window=False),
        windowed=windowed,
        num_sharing_layers=num_sharing,
        is_double_wide=inner[-1] != inner[0],
        input_size=fields.raw("embedding_length_per_layer_input") or 0,
        input_vocab_size=0 if table is None else table.shape[0],
    )


def _larger_heads(
    fields: Fields, windows: tuple[int | None, ...], num_kv_heads: int | None
) -> tuple[int, int]:
    """Return the head size and the key-value heads of layers with full attention. Files have them as settings,
    or as exceptions for single layers."""
    exceptions = fields.raw("per_layer_config")
    usual = fields.integer("num_key_value_heads", fields.integer("num_attention_heads"))
    if isinstance(exceptions, dict):
        index = next((index for index, window in enumerate(windows) if window is None), None)
        # Transformers writes the numbers of layers with zeros in front, to one width.
        values = {key.lstrip("0") or "0": each for key, each in exceptions.items()}.get(str(index), {})
        if not isinstance(values, dict):
            raise ModelLoadError(f"{fields.where} has a per_layer_config whose entries are not settings.")
        own = Fields({**fields.values, **values}, fields.where)
        return own.integer("head_dim"), own.integer("num_key_value_heads", usual)
    return (
        fields.integer("global_head_dim", 512),
        num_kv_heads or fields.integer("num_global_key_value_heads", usual),
    )
