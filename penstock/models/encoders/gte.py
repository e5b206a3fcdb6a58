"""Encoders with BERT's order of norms, biases, and positions by rotation: GTE, whose MLPs are gated, and Jina 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import PackedLinear
from penstock.models.config import Fields, RopeConfig, RopeScaling
from penstock.models.encoders.base import Encoder, EncoderConfig, Texts, attend, rotated
from penstock.models.huggingface_config import rope_config, rope_parameters
from penstock.models.pooling_head import Head, LayerNorm, dense_layer
from penstock.models.rope import rope_table
from penstock.models.weights import WeightLoader

_FIXED = {
    "pack_qkv": True,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "position_embedding_type": "rope",
}  # settings of the makers' own files, which may name variants that are not known here


@dataclass(frozen=True, slots=True, kw_only=True)
class GteConfig(EncoderConfig):
    rope: RopeConfig
    num_token_types: int


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of tensors, which are the makers' also in files that transformers writes."""

    layer: str
    qkv: str
    output: str
    attention_norm: str
    up: str
    down: str
    output_norm: str
    embedding_norm: str = "embeddings.LayerNorm"  # in front of the layers


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: PackedLinear
    output: PackedLinear
    attention_norm: LayerNorm
    up: PackedLinear
    down: PackedLinear
    output_norm: LayerNorm


class Gte(Encoder):
    name = "gte"
    huggingface_names: ClassVar[tuple[str, ...]] = tuple(
        f"{family}{kind}"
        for family in ("Gte", "New")
        for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")
    )
    prefixes: ClassVar[tuple[str, ...]] = ("gte.", "new.")
    default_theta: ClassVar[float] = 160_000.0
    default_eps: ClassVar[float] = 1e-12
    default_positions: ClassVar[int] = 8192
    is_gated: ClassVar[bool] = True  # MLPs; with one bias behind them
    names: ClassVar[_Names] = _Names(
        "encoder.layer",
        "attention.qkv_proj",
        "attention.o_proj",
        "attn_ln",
        "mlp.up_gate_proj",
        "mlp.down_proj",
        "mlp_ln",
    )
    config: GteConfig

    @classmethod
    def read_config(cls, fields: Fields) -> GteConfig:
        for key, expected in _FIXED.items():
            if fields.has(key) and fields.raw(key) != expected:
                raise ModelLoadError(
                    f"{fields.where} has {key} = {fields.raw(key)!r}; known is {expected!r}."
                )
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        max_positions = fields.integer("max_position_embeddings", cls.default_positions)
        return GteConfig(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            vocab_size=fields.integer("vocab_size"),
            max_text_len=max_positions,
            norm_eps=fields.number("layer_norm_eps", cls.default_eps),
            activation=fields.text("hidden_act", "gelu"),
            rope=cls._rope(fields, max_positions, hidden_size // num_heads),
            num_token_types=0 if fields.raw("type_vocab_size") == 0 else fields.integer("type_vocab_size", 1),
        )

    @classmethod
    def _rope(cls, fields: Fields, max_positions: int, head_dim: int) -> RopeConfig:
        """Read the rope. NTK scaling in the makers' files is another theta, and the same factor for all pairs."""
        parameters = rope_parameters(fields)
        scaling = Fields(parameters, f"The rope settings of {fields.where}")
        if scaling.raw("type") != "ntk":
            return rope_config(
                parameters, fields, max_positions, head_dim=head_dim, default_theta=cls.default_theta
            )
        if scaling.has("mixed_b"):
            raise ModelLoadError(f"{fields.where} asks for mixed NTK scaling, which is not known.")
        factor = scaling.number("factor")
        theta = fields.number("rope_theta", cls.default_theta) * factor
        return RopeConfig(theta, RopeScaling(kind="linear", factor=factor ** (2 / head_dim)))

    def forward(self, texts: Texts) -> Tensor:
        linear, heads = self._ops.linear, self.config.num_heads
        table = self._rope_table[texts.positions]
        x = self._words[texts.token_ids]
        if self._types is not None:
            x = x + self._types[texts.is_second.long().clamp(max=self.config.num_token_types - 1)]
        x = self._embedding_norm(x)
        for layer in self._layers:
            query, key, value = linear(x, layer.qkv).unflatten(1, (3, heads, -1)).unbind(1)
            attended = attend(rotated(query, table), rotated(key, table), value, texts)
            x = layer.attention_norm(x + linear(attended, layer.output))
            x = layer.output_norm(x + linear(self._inner(texts, linear(x, layer.up)), layer.down))
        return x

    def _inner(self, texts: Texts, x: Tensor) -> Tensor:
        if not self.is_gated:
            return texts.each(self._activation, x)
        up, gate = x.chunk(2, dim=-1)
        return texts.each(self._activation, gate) * up

    def _load(self, loader: WeightLoader) -> None:
        config, hidden = self.config, self.config.hidden_size
        prefix = f"{self._prefix}embeddings"
        self._words = loader.table(f"{prefix}.word_embeddings.weight", config.vocab_size, hidden)
        self._types: Tensor | None = None
        if config.num_token_types:
            name = f"{prefix}.token_type_embeddings.weight"
            self._types = loader.table(name, config.num_token_types, hidden)
        table = rope_table(config.rope, hidden // config.num_heads, config.max_text_len)
        self._rope_table = table.to(loader.ops.device)
        self._embedding_norm = self._norm(self.names.embedding_norm, loader)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]

    def _load_layer(self, index: int, loader: WeightLoader) -> _Layer:
        hidden, inner, names = self.config.hidden_size, self.config.intermediate_size, self.names
        layer = f"{names.layer}.{index}"

        def linear(name: str, rows: int, columns: int, *, bias: bool = True) -> PackedLinear:
            return loader.linear([f"{self._prefix}{layer}.{name}"], [rows], columns, bias=bias)

        return _Layer(
            qkv=linear(names.qkv, 3 * hidden, hidden),
            output=linear(names.output, hidden, hidden),
            attention_norm=self._norm(f"{layer}.{names.attention_norm}", loader),
            up=linear(names.up, (1 + self.is_gated) * inner, hidden, bias=not self.is_gated),
            down=linear(names.down, hidden, inner),
            output_norm=self._norm(f"{layer}.{names.output_norm}", loader),
        )

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        hidden = self.config.hidden_size
        steps = (
            dense_layer(loader, f"{self._prefix}pooler.dense", (hidden, hidden), "tanh"),
            dense_layer(loader, "classifier", (num_labels, hidden)),
        )
        return Head(steps, num_labels)


class JinaV3(Gte):
    """Jina 3 as transformers has it, without the adapters for tasks."""

    name = "jina_embeddings_v3"
    huggingface_names = tuple(
        f"JinaEmbeddingsV3{kind}" for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")
    )
    prefixes = ("roberta.",)
    default_theta = 20_000.0
    default_eps = 1e-5
    default_positions = 8194
    is_gated = False
    names = _Names(
        "encoder.layers",
        "mixer.Wqkv",
        "mixer.out_proj",
        "norm1",
        "mlp.fc1",
        "mlp.fc2",
        "norm2",
        embedding_norm="emb_ln",
    )

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        hidden = self.config.hidden_size
        steps = (
            dense_layer(loader, "classifier.dense", (hidden, hidden), "tanh"),
            dense_layer(loader, "classifier.out_proj", (num_labels, hidden)),
        )
        return Head(steps, num_labels)
