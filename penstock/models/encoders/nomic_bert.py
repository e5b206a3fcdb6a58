"""NomicBERT: BERT's order of norms, with positions by rotation, gated MLPs and no biases in the layers; and its
second release, with biases, plain MLPs, and experts in every second layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import Ops, PackedLinear
from penstock.models.config import Fields, RopeConfig
from penstock.models.encoders.base import Encoder, EncoderConfig, Texts, attend, rotated
from penstock.models.huggingface_config import rope_config, rope_parameters
from penstock.models.pooling_head import Head, LayerNorm, dense_layer
from penstock.models.rope import rope_table
from penstock.models.weights import WeightLoader

Activation: TypeAlias = Callable[[Tensor], Tensor]

_THETA = 1000.0
_FIXED = {
    "prenorm": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "expert_choice_router": False,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "ffn_div": 1,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
}  # settings of the makers' own files, which may name variants that are not known here


# The settings of the makers' files that tell the releases apart.
_FIRST = {
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
}
_SECOND = {"activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}


@dataclass(frozen=True, slots=True)
class NomicExperts:
    count: int
    per_token: int
    period: int  # of layers, of which the second has experts

    def is_in(self, index: int) -> bool:
        return index % self.period == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(EncoderConfig):
    rope: RopeConfig
    num_token_types: int
    is_gated: bool = True  # without biases; plain MLPs have biases, as attention then has
    experts: NomicExperts | None = None


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate_up: PackedLinear
    down: PackedLinear

    def __call__(self, ops: Ops, texts: Texts, activation: Activation, x: Tensor) -> Tensor:
        gate, up = ops.linear(x, self.gate_up).chunk(2, dim=-1)
        return ops.linear(texts.each(activation, gate) * up, self.down)


@dataclass(frozen=True, slots=True)
class PlainMLP:
    up: PackedLinear
    down: PackedLinear

    def __call__(self, ops: Ops, texts: Texts, activation: Activation, x: Tensor) -> Tensor:
        return ops.linear(texts.each(activation, ops.linear(x, self.up)), self.down)


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """Experts whose weights for a token do not sum to 1. Texts are computed one by one, so that no text depends on
    the others."""

    router: Tensor  # float32 [experts, hidden]
    up: Tensor  # float32 [experts, inner, hidden]
    down: Tensor  # float32 [experts, hidden, inner]
    bias: Tensor | None  # of all experts together
    per_token: int

    def __call__(self, ops: Ops, texts: Texts, activation: Activation, x: Tensor) -> Tensor:
        return texts.each(lambda rows: self._mixed(activation, rows), x.clone())

    def _mixed(self, activation: Activation, rows: Tensor) -> Tensor:
        shares, chosen = functional.linear(rows, self.router).softmax(dim=-1).topk(self.per_token, dim=-1)
        made = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            row, place = torch.where(chosen == expert)
            if len(row):
                inner = activation(functional.linear(rows[row], self.up[expert]))
                made[row] += functional.linear(inner, self.down[expert]) * shares[row, place, None]
        return made if self.bias is None else made + self.bias


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: PackedLinear
    output: PackedLinear
    attention_norm: LayerNorm
    mlp: GatedMLP | PlainMLP | ExpertMLP
    output_norm: LayerNorm


class NomicBert(Encoder):
    name = "nomic_bert"
    huggingface_names = ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification")
    prefixes = ("nomic_bert.", "bert.")
    config: NomicBertConfig

    @classmethod
    def read_config(cls, fields: Fields) -> NomicBertConfig:
        for key, expected in _FIXED.items():
            if fields.has(key) and fields.raw(key) != expected:
                raise ModelLoadError(
                    f"{fields.where} has {key} = {fields.raw(key)!r}; known is {expected!r}."
                )
        is_own = fields.has("n_embd")  # the makers' files use GPT-2's names
        stated = {key: fields.raw(key) for key in _FIRST if fields.has(key)}
        is_gated = stated.get("activation_function", "swiglu") == "swiglu"
        for key, usual in (_FIRST if is_gated else _SECOND).items():
            if stated.get(key, usual) != usual:
                raise ModelLoadError(f"{fields.where} has {key} = {stated[key]!r}; known is {usual!r}.")

        def integer(theirs: str, own: str, default: int | None = None) -> int:
            return fields.integer(own if is_own else theirs, default)

        hidden_size = integer("hidden_size", "n_embd")
        max_positions = integer("max_position_embeddings", "n_positions", 2048)
        num_heads = integer("num_attention_heads", "n_head")
        rope = rope_config(
            rope_parameters(fields),
            fields,
            max_positions,
            head_dim=hidden_size // num_heads,
            default_theta=fields.number("rotary_emb_base", _THETA),
        )
        return NomicBertConfig(
            hidden_size=hidden_size,
            intermediate_size=integer("intermediate_size", "n_inner", 4 * hidden_size),
            num_layers=integer("num_hidden_layers", "n_layer"),
            num_heads=num_heads,
            vocab_size=fields.integer("vocab_size"),
            max_text_len=max_positions,
            norm_eps=fields.number("layer_norm_epsilon" if is_own else "layer_norm_eps", 1e-12),
            activation=fields.text("hidden_act", "silu") if is_gated else "gelu",
            rope=rope,
            num_token_types=fields.integer("type_vocab_size", 2),
            is_gated=is_gated,
            experts=_experts(fields) if fields.raw("num_experts") else None,
        )

    def forward(self, texts: Texts) -> Tensor:
        linear, heads = self._ops.linear, self.config.num_heads
        table = self._rope[texts.positions]
        types = self._types[texts.is_second.long().clamp(max=self.config.num_token_types - 1)]
        x = self._embedding_norm(self._words[texts.token_ids] + types)
        for layer in self._layers:
            query, key, value = linear(x, layer.qkv).unflatten(1, (3, heads, -1)).unbind(1)
            attended = attend(rotated(query, table), rotated(key, table), value, texts)
            x = layer.attention_norm(x + linear(attended, layer.output))
            x = layer.output_norm(x + layer.mlp(self._ops, texts, self._activation, x))
        return x

    def _load(self, loader: WeightLoader) -> None:
        config, hidden = self.config, self.config.hidden_size
        prefix = f"{self._prefix}embeddings"
        self._words = loader.table(f"{prefix}.word_embeddings.weight", config.vocab_size, hidden)
        self._types = loader.table(f"{prefix}.token_type_embeddings.weight", config.num_token_types, hidden)
        table = rope_table(config.rope, hidden // config.num_heads, config.max_text_len)
        self._rope = table.to(loader.ops.device)
        # Checkpoints have the names of the makers' code, or those of transformers.
        self._is_own = loader.has(f"{self._prefix}emb_ln.weight")
        self._embedding_norm = self._norm("emb_ln" if self._is_own else "embeddings.LayerNorm", loader)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]

    def _load_layer(self, index: int, loader: WeightLoader) -> _Layer:
        hidden, is_own = self.config.hidden_size, self._is_own
        layer = f"encoder.layers.{index}" if is_own else f"layers.{index}"
        prefix = f"{self._prefix}{layer}"
        bias = not self.config.is_gated
        if is_own:
            qkv = loader.linear([f"{prefix}.attn.Wqkv"], [3 * hidden], hidden, bias=bias)
        else:
            qkv = loader.linear([f"{prefix}.self_attn.{part}_proj" for part in "qkv"], [hidden] * 3, hidden)
        output = "attn.out_proj" if is_own else "self_attn.o_proj"
        norms = ("norm1", "norm2") if is_own else ("post_attention_layernorm", "post_mlp_layernorm")
        return _Layer(
            qkv=qkv,
            output=loader.linear([f"{prefix}.{output}"], [hidden], hidden, bias=bias),
            attention_norm=self._norm(f"{layer}.{norms[0]}", loader),
            mlp=self._load_mlp(index, f"{prefix}.mlp", loader),
            output_norm=self._norm(f"{layer}.{norms[1]}", loader),
        )

    def _load_mlp(self, index: int, prefix: str, loader: WeightLoader) -> GatedMLP | PlainMLP | ExpertMLP:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        if config.experts is not None and config.experts.is_in(index):
            return _load_experts(config, config.experts, prefix, loader)
        if not config.is_gated:
            return PlainMLP(
                up=loader.linear([f"{prefix}.fc1"], [inner], hidden, bias=True),
                down=loader.linear([f"{prefix}.fc2"], [hidden], inner, bias=True),
            )
        gate_up, down = (("fc12", "fc11"), "fc2") if self._is_own else (("gate_proj", "up_proj"), "down_proj")
        return GatedMLP(
            gate_up=loader.linear([f"{prefix}.{part}" for part in gate_up], [inner] * 2, hidden),
            down=loader.linear([f"{prefix}.{down}"], [hidden], inner),
        )

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        hidden = self.config.hidden_size
        steps = (
            dense_layer(loader, f"{self._prefix}pooler.dense", (hidden, hidden), "tanh"),
            dense_layer(loader, "classifier", (num_labels, hidden)),
        )
        return Head(steps, num_labels)


def _experts(fields: Fields) -> NomicExperts:
    experts = NomicExperts(
        fields.integer("num_experts"), fields.integer("moe_top_k"), fields.integer("moe_every_n_layers")
    )
    if experts.per_token > experts.count or experts.period < 2:
        raise ModelLoadError(f"{fields.where} describes experts that cannot be: {experts}.")
    return experts


def _load_experts(
    config: NomicBertConfig, experts: NomicExperts, prefix: str, loader: WeightLoader
) -> ExpertMLP:
    """Load the experts. Folders have both matrices of an expert with one row for each inner number, GGUF files have
    the second one the other way round."""
    count, hidden, inner = experts.count, config.hidden_size, config.intermediate_size
    if loader.has(f"{prefix}.experts.mlp.w1"):
        up, down = (
            loader.table(f"{prefix}.experts.mlp.{name}", count * inner, hidden).view(count, inner, hidden)
            for name in ("w1", "w2")
        )
        down = down.transpose(1, 2).contiguous()
    else:
        up = loader.table(f"{prefix}.experts.up.weight", count * inner, hidden).view(count, inner, hidden)
        down = loader.table(f"{prefix}.experts.down.weight", count * hidden, inner).view(count, hidden, inner)
    bias = f"{prefix}.experts.bias"
    return ExpertMLP(
        router=loader.table(f"{prefix}.router.layer.weight", count, hidden),
        up=up,
        down=down,
        bias=loader.vector(bias, hidden) if loader.has(bias) else None,
        per_token=experts.per_token,
    )
