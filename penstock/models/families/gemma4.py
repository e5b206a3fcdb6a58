"""Gemma 4, text: layers with full attention have larger heads than layers with a window, and may use keys as values;
the last layers may share keys and values of earlier ones; each layer may read an embedding of its own, and may have
experts beside its MLP. Reads the text part of multimodal checkpoints, also of Gemma 4 12B (`gemma4_unified`).

All layers share one KV cache. Smaller heads are padded with zeros, and fewer key-value heads are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.kernels.interface import AttentionBatch, AttentionLayer, KVStore, Ops, PackedLinear
from penstock.models.config import ActivationName, ArchitectureConfig, Fields
from penstock.models.decoder import BeforeLayer, Decoder
from penstock.models.experts import ExpertMLP, load_experts
from penstock.models.families.gemma import rounded_scale
from penstock.models.families.gemma4_config import Gemma4Config, HeadKind, gguf_config, huggingface_config
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout, StoredRows
from penstock.models.rope import rope_table
from penstock.models.sharding import HeadPart, scaled
from penstock.models.weights import LinearPart, WeightLoader

GGUF_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_down_exps.scale": "mlp.expert_scales",
}
FOLDER_NAMES = {
    "router.proj": "mlp.gate",
    "router.scale": "mlp.gate.scale",
    "router.per_expert_scale": "mlp.expert_scales",
    "experts": "mlp.experts",
}


@dataclass(frozen=True, slots=True)
class Gemma4Attention:
    query: PackedLinear
    query_norm: RMSNorm
    key_value: PackedLinear | None  # keys, and values if they differ; None for a layer that shares another's
    key_norm: RMSNorm | None
    value_norm: RMSNorm
    head_dim: int
    num_kv_heads: int  # of this layer; `layer` has those of the cache
    layer: AttentionLayer
    output: PackedLinear

    def keys_and_values(self, ops: Ops, x: Tensor) -> Tensor | None:
        """Return keys and values as the cache holds them, but not rotated; None if another layer makes them."""
        if self.key_value is None or self.key_norm is None:
            return None
        made = ops.linear(x, self.key_value).view(len(x), -1, self.head_dim)
        keys, values = made[:, : self.num_kv_heads], made[:, -self.num_kv_heads :]
        keys, values = self._normed(ops, self.key_norm, keys), self._normed(ops, self.value_norm, values)
        repeats = self.layer.num_kv_heads // self.num_kv_heads
        return torch.cat(
            [self._padded(each.repeat_interleave(repeats, dim=1)) for each in (keys, values)], dim=1
        )

    def __call__(self, ops: Ops, x: Tensor, shared: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        query = ops.linear(x, self.query).view(len(x), -1, self.head_dim)
        query = self._padded(self._normed(ops, self.query_norm, query))
        made = ops.attend(torch.cat([query, shared], dim=1), self.layer, cache, batch)
        halves = made.view(len(x), self.layer.num_heads, 2, self.layer.head_dim // 2)
        made = halves[..., : self.head_dim // 2].reshape(len(x), -1)
        return ops.add_up(ops.linear(made, self.output))

    def _normed(self, ops: Ops, norm: RMSNorm, heads: Tensor) -> Tensor:
        return norm(ops, heads.reshape(-1, self.head_dim)).view(heads.shape)

    def _padded(self, heads: Tensor) -> Tensor:
        """Widen heads so that rotated pairs stay half a head apart: [T, heads, D] → [T, heads × wide D]."""
        halves = heads.reshape(*heads.shape[:2], 2, self.head_dim // 2)
        return F.pad(halves, (0, (self.layer.head_dim - self.head_dim) // 2)).flatten(1)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Adds a layer's output for its own embedding."""

    gate: PackedLinear
    projection: PackedLinear
    norm: RMSNorm
    activation: ActivationName

    def __call__(self, ops: Ops, x: Tensor, embedded: Tensor) -> Tensor:
        gated = ops.gated(torch.cat([ops.linear(x, self.gate), embedded], dim=1), self.activation)
        return self.norm(ops, ops.linear(gated, self.projection))


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Experts that see what the MLP sees, each of the two with a norm behind it. The router has a norm of its own."""

    router_norm: RMSNorm
    norm: RMSNorm
    experts: ExpertMLP
    after_norm: RMSNorm
    after_mlp_norm: RMSNorm

    def __call__(self, ops: Ops, residual: Tensor, made_by_mlp: Tensor) -> Tensor:
        mixture = self.experts
        logits = ops.router_logits(self.router_norm(ops, residual), mixture.router)
        x = self.norm(ops, residual)
        made = ops.moe(x, logits, mixture.experts, mixture.routing, mixture.activation)
        return self.after_mlp_norm(ops, made_by_mlp) + self.after_norm(ops, made)


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    attention_norm: RMSNorm
    attention: Gemma4Attention
    after_attention_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    experts: ExpertsBeside | None
    after_mlp_norm: RMSNorm
    layer_input: LayerInput | None
    kv_layer: int
    scale: float


class Gemma4(Decoder):
    name = "gemma4"
    huggingface_names: ClassVar[tuple[str, ...]] = (
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "gemma4_text",
        "gemma4",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text",
        "gemma4_unified",
    )
    gguf_names: ClassVar[tuple[str, ...]] = ("gemma4",)
    stored_names = FOLDER_NAMES
    gguf_stored_names = GGUF_NAMES
    config: Gemma4Config

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        text = fields.raw("text_config")
        outer = {key: fields.raw(key) for key in ("eos_token_id", "dtype", "torch_dtype") if fields.has(key)}
        defaults: dict[str, Any] = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 512}
        defaults["max_position_embeddings"] = 131_072
        if str(fields.raw("model_type")).startswith("gemma4_unified"):
            defaults |= {
                "sliding_window": 1024,
                "max_position_embeddings": 262_144,
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
            }
        fields = Fields({**defaults, **(text or fields.values), **outer}, fields.where)
        return huggingface_config(fields, cls.name)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return gguf_config(file, cls.name)

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        return {}

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout() if config.experts is None else super().layout(config)

    def __init__(self, config: Gemma4Config, loader: WeightLoader, max_model_len: int) -> None:
        if loader.shard.num_stages > 1:
            raise ConfigError(
                "Gemma 4 cannot be cut into stages.", hint="Use --tensor-parallel-size instead."
            )
        divisors = None  # of the layers with full attention, in GGUF files
        if loader.has("model.rope_divisors.weight"):
            divisors = loader.vector("model.rope_divisors.weight", config.whole.head_dim // 2)
        self._tables = {
            kind: _wide_table(kind, config.head_dim, max_model_len, of_kind).to(loader.ops.device)
            for kind, of_kind in ((config.windowed, None), (config.whole, divisors))
        }
        super().__init__(rounded_scale(config, loader), loader, max_model_len)
        self.num_layers = config.num_kv_layers  # in the cache
        self._inputs: Tensor | None = None  # of the layers, from `embed` to `run_layers`
        if config.input_size:
            columns = config.num_layers * config.input_size
            self._input_embedding = loader.embedding(
                "model.embed_tokens_per_layer.weight", config.input_vocab_size, columns, config.vocab_size
            )
            self._input_projection = loader.linear(
                ["model.per_layer_model_projection"], [columns], config.hidden_size
            )
            self._input_norm = RMSNorm(
                loader.vector("model.per_layer_projection_norm.weight", config.input_size), config.norm_eps
            )
            self._input_scale = float(torch.tensor(config.input_size**0.5, dtype=loader.ops.dtype))
            self.num_parameters, self.weight_bytes = loader.num_parameters, loader.weight_bytes
            self.products = loader.products

    def with_distinct_layers(self) -> Self:
        return self  # layers that share keys and values need the layers before them

    def embed(self, token_ids: Tensor) -> Tensor:
        residual = super().embed(token_ids)
        if self.config.input_size:
            self._inputs = self._layer_inputs(token_ids, residual)
        return residual

    def rows_replaced(self, token_ids: Tensor, at: Tensor, residual: Tensor) -> None:
        if self.config.input_size:
            self._inputs = self._layer_inputs(token_ids.index_fill(0, at, self.config.pad_token_id), residual)

    def _layer_inputs(self, token_ids: Tensor, residual: Tensor) -> Tensor:
        """Return [tokens, layers, size]."""
        config, ops = self.config, self._ops
        looked_up = ops.embed(token_ids, self._input_embedding).mul_(self._input_scale)
        projected = ops.linear(residual, self._input_projection).mul_(config.hidden_size**-0.5)
        projected = self._input_norm(ops, projected.view(-1, config.input_size)).view(looked_up.shape)
        inputs = (projected + looked_up).mul_(2.0**-0.5)
        return inputs.view(len(token_ids), config.num_layers, config.input_size)

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
    ) -> None:
        ops, made = self._ops, dict[int, Tensor]()
        for index, layer in self._in_turn(before_layer):
            hidden = layer.attention_norm(ops, residual)
            own = layer.attention.keys_and_values(ops, hidden)
            if own is not None:
                made[index] = own
            cache = kv.layer(layer.kv_layer)
            own_batch = batch.of_layer(layer.kv_layer)
            hidden = layer.attention(ops, hidden, made[layer.kv_layer], cache, own_batch)
            residual.add_(layer.after_attention_norm(ops, hidden))
            hidden = layer.mlp(ops, layer.mlp_norm(ops, residual))
            if layer.experts is not None:
                hidden = layer.experts(ops, residual, hidden)
            residual.add_(layer.after_mlp_norm(ops, hidden))
            if layer.layer_input is not None:
                assert self._inputs is not None, "`embed` comes first"
                residual.add_(layer.layer_input(ops, residual, self._inputs[:, index]))
            residual.mul_(layer.scale)

    def run_layer(self, layer: Any, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        raise NotImplementedError("layers that share keys and values run together")

    def load_layer(self, load: LayerLoader) -> Any:
        config, weights, prefix = self.config, load.weights, load.prefix
        is_wide = config.is_double_wide and load.index >= config.num_kv_layers
        scale = f"{prefix}.layer_scalar"
        if weights.has(f"{scale}.weight"):  # GGUF
            scale = f"{scale}.weight"
        return Gemma4Layer(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=self.load_attention(load),
            after_attention_norm=load.rms_norm("post_attention_layernorm"),
            mlp_norm=load.rms_norm("pre_feedforward_layernorm"),
            mlp=load.gated_mlp(intermediate_size=config.intermediate_size * (2 if is_wide else 1)),
            experts=None if config.experts is None else self._load_experts(load),
            after_mlp_norm=load.rms_norm("post_feedforward_layernorm"),
            layer_input=self.load_layer_input(load) if config.input_size else None,
            kv_layer=config.kv_layer(load.index),
            scale=float(weights.vector(scale, 1)) if weights.has(scale) else 1.0,
        )

    def load_layer_input(self, load: LayerLoader) -> LayerInput:
        config, prefix = self.config, load.prefix
        return LayerInput(
            load.weights.linear([f"{prefix}.per_layer_input_gate"], [config.input_size], config.hidden_size),
            load.weights.linear([f"{prefix}.per_layer_projection"], [config.hidden_size], config.input_size),
            load.rms_norm("post_per_layer_input_norm"),
            config.activation,
        )

    def _load_experts(self, load: LayerLoader) -> ExpertsBeside:
        config, weights, prefix = self.config, load.weights, f"{load.prefix}.mlp"
        experts = config.experts
        assert experts is not None
        scales = weights.vector(f"{prefix}.expert_scales", experts.count).cpu()
        router_scale = weights.vector(f"{prefix}.gate.scale", config.hidden_size) * config.hidden_size**-0.5
        return ExpertsBeside(
            router_norm=RMSNorm(router_scale, config.norm_eps),
            norm=load.rms_norm("pre_feedforward_layernorm_2"),
            experts=load_experts(load, scales=scales),
            after_norm=load.rms_norm("post_feedforward_layernorm_2"),
            after_mlp_norm=load.rms_norm("post_feedforward_layernorm_1"),
        )

    def load_attention(self, load: LayerLoader) -> Gemma4Attention:
        config, weights, prefix = self.config, load.weights, f"{load.prefix}.self_attn"
        kind = config.kind(load.index)
        heads, size = weights.shard.heads(config.num_heads, kind.num_kv_heads), kind.head_dim
        queries, keys = scaled(heads.queries, size), scaled(heads.keys, size)
        widths = config.num_heads * size, kind.num_kv_heads * size
        key_value = key_norm = None
        if load.index < config.num_kv_layers:
            parts = "k" if kind.keys_are_values else "kv"
            key_value = weights.linear(
                [f"{prefix}.{part}_proj" for part in parts],
                [widths[1]] * len(parts),
                config.hidden_size,
                bias=config.qkv_bias,
                part=LinearPart(rows=[keys] * len(parts)),
            )
            key_norm = RMSNorm(weights.vector(f"{prefix}.k_norm.weight", size), config.norm_eps)
        ones = torch.ones(size, device=weights.ops.device)
        return Gemma4Attention(
            query=weights.linear(
                [f"{prefix}.q_proj"],
                [widths[0]],
                config.hidden_size,
                bias=config.qkv_bias,
                part=LinearPart(rows=[queries]),
            ),
            query_norm=RMSNorm(weights.vector(f"{prefix}.q_norm.weight", size), config.norm_eps),
            key_value=key_value,
            key_norm=key_norm,
            value_norm=RMSNorm(ones, config.norm_eps),
            head_dim=size,
            num_kv_heads=len(heads.keys),
            layer=self._attention_layer(load, kind, heads),
            output=weights.linear(
                [f"{prefix}.o_proj"],
                [config.hidden_size],
                widths[0],
                bias=config.output_bias,
                part=LinearPart(columns=queries),
            ),
        )

    def _attention_layer(self, load: LayerLoader, kind: HeadKind, heads: HeadPart) -> AttentionLayer:
        num_cached = len(load.heads.keys)
        if num_cached % len(heads.keys) or len(heads.queries) % num_cached:
            raise ConfigError(
                f"The {kind.num_kv_heads} key-value heads of a layer cannot be shared out beside the "
                f"{self.config.num_kv_heads} of another.",
                hint="Use another --tensor-parallel-size.",
            )
        return AttentionLayer(
            num_heads=len(heads.queries),
            num_kv_heads=num_cached,
            head_dim=self.config.head_dim,
            scale=1.0,
            rope=self._tables[kind],
            window=self.config.windows[load.index],
        )


def _wide_table(kind: HeadKind, head_dim: int, num_positions: int, divisors: Tensor | None) -> Tensor:
    """Return a rotary table for padded heads, whose padding is not rotated."""
    cosines, sines = rope_table(kind.rope, kind.head_dim, num_positions, divisors).chunk(2, dim=1)
    padding = (0, (head_dim - kind.head_dim) // 2)
    return torch.cat([F.pad(cosines, padding, value=1.0), F.pad(sines, padding)], dim=1)
