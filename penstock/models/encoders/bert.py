"""Encoders in BERT's style: BERT itself and ERNIE; ELECTRA, whose embeddings may be narrower than its layers; RoBERTa
and XLM-RoBERTa, whose positions begin after the padding token; DistilBERT, which has no token types; MPNet, whose
attention knows the distance between tokens besides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import Ops, PackedLinear
from penstock.models.config import Fields, RopeConfig
from penstock.models.encoders.base import Encoder, EncoderConfig, Texts, attend, rotated
from penstock.models.pooling_head import Head, LayerNorm, dense_layer
from penstock.models.rope import rope_table
from penstock.models.sentence_modules import DenseActivation
from penstock.models.weights import WeightLoader

_MPNET_PADDING = 1
_MPNET_DISTANCE = 128  # all distances above share a bias


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(EncoderConfig):
    num_positions: int = 0  # with an embedding
    padding_id: int | None = None  # positions of other tokens begin after it
    num_distances: int = 0  # of MPNet's biases
    embedding_size: int | None = None  # if it is another than the hidden size


Activation: TypeAlias = Callable[[Tensor], Tensor]
AttendInLayer: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of tensors within a layer."""

    layer: str = "encoder.layer"
    qkv: Sequence[str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: Sequence[str] = ("intermediate.dense",)
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"
    embedding_norm: str = "embeddings.LayerNorm"  # in front of the layers


class MLP(Protocol):
    def __call__(self, ops: Ops, texts: Texts, activation: Activation, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainMLP:
    up: PackedLinear
    down: PackedLinear

    def __call__(self, ops: Ops, texts: Texts, activation: Activation, x: Tensor) -> Tensor:
        return ops.linear(texts.each(activation, ops.linear(x, self.up)), self.down)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    up: PackedLinear  # and the gate
    down: PackedLinear
    is_gate_first: bool

    def __call__(self, ops: Ops, texts: Texts, activation: Activation, x: Tensor) -> Tensor:
        halves = ops.linear(x, self.up).chunk(2, dim=-1)
        gate, up = halves if self.is_gate_first else reversed(halves)
        return ops.linear(texts.each(activation, gate) * up, self.down)


@dataclass(frozen=True, slots=True)
class BertLayer:
    qkv: PackedLinear
    output: PackedLinear
    attention_norm: LayerNorm
    mlp: MLP
    output_norm: LayerNorm


class Bert(Encoder):
    name = "bert"
    huggingface_names: ClassVar[tuple[str, ...]] = (
        "BertModel",
        "BertForMaskedLM",
        "BertForSequenceClassification",
        "ErnieModel",
        "ErnieForMaskedLM",
        "ErnieForSequenceClassification",
    )
    prefixes: ClassVar[tuple[str, ...]] = ("bert.", "ernie.")
    names: ClassVar[LayerNames] = LayerNames()
    # A dense layer with an activation, and that of the labels; "{}" stands for the prefix.
    head_layers: ClassVar[tuple[str, DenseActivation, str]] = ("{}pooler.dense", "tanh", "classifier")
    is_gate_first: ClassVar[bool] = True  # in products that make gates, too
    is_gated: bool = False  # MLPs, whose first products then have no biases
    has_bias: bool = True  # the other products
    config: Any

    @classmethod
    def read_config(cls, fields: Fields) -> BertConfig:
        if fields.text("position_embedding_type", "absolute") != "absolute":
            raise ModelLoadError(
                f"{fields.where} has relative positions, which no known encoder of its kind has."
            )
        if fields.flag("use_task_id", False):
            raise ModelLoadError(f"{fields.where} asks for ids of tasks, which are not supported.")
        if fields.flag("is_decoder", False):
            raise ModelLoadError(f"{fields.where} describes a decoder of BERT's kind, which is not known.")
        padding_id = cls._padding_id(fields)
        num_positions = fields.integer("max_position_embeddings", 512)
        return BertConfig(
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=fields.integer("num_attention_heads"),
            vocab_size=fields.integer("vocab_size"),
            max_text_len=num_positions if padding_id is None else num_positions - padding_id - 1,
            norm_eps=fields.number("layer_norm_eps", 1e-12),
            activation=fields.text("hidden_act", "gelu"),
            num_positions=num_positions,
            num_token_types=0 if fields.raw("type_vocab_size") == 0 else fields.integer("type_vocab_size", 2),
            padding_id=padding_id,
        )

    @classmethod
    def _padding_id(cls, fields: Fields) -> int | None:
        return None

    def forward(self, texts: Texts) -> Tensor:
        linear, heads = self._ops.linear, self.config.num_heads
        x, attend_in = self._embed(texts), self._attention(texts)
        for index, layer in enumerate(self._layers):
            query, key, value = linear(x, layer.qkv).unflatten(1, (3, heads, -1)).unbind(1)
            x = layer.attention_norm(x + linear(attend_in(index, query, key, value), layer.output))
            x = layer.output_norm(x + layer.mlp(self._ops, texts, self._activation, x))
        return x

    def _attention(self, texts: Texts) -> AttendInLayer:
        """Return the attention of a layer, after its number, for queries, keys and values of some texts."""
        return lambda _, query, key, value: attend(query, key, value, texts)

    def _embed(self, texts: Texts) -> Tensor:
        x = self._words[texts.token_ids]
        if self._types is not None:
            last_type = self.config.num_token_types - 1
            x = x + self._types[texts.is_second.long().clamp(max=last_type)]
        if self._positions is not None:
            x = x + self._positions[self._position_ids(texts)]
        x = self._embedding_norm(x)
        return x if self._projection is None else self._ops.linear(x, self._projection)

    def _position_ids(self, texts: Texts) -> Tensor:
        padding_id = self.config.padding_id
        if padding_id is None:
            return texts.positions
        counts = texts.token_ids != padding_id  # padding tokens have the padding's position, and do not count
        ids = torch.full_like(texts.token_ids, padding_id)
        for start, end in texts.ranges:
            ids[start:end] += counts[start:end].cumsum(0) * counts[start:end]
        return ids

    def _load(self, loader: WeightLoader) -> None:
        config, prefix = self.config, f"{self._prefix}embeddings"
        width = config.embedding_size or config.hidden_size
        self._words = loader.table(f"{prefix}.word_embeddings.weight", config.vocab_size, width)
        self._positions: Tensor | None = None
        if config.num_positions:
            name = f"{prefix}.position_embeddings.weight"
            self._positions = loader.table(name, config.num_positions, width)
        self._types: Tensor | None = None
        if config.num_token_types:
            name = f"{prefix}.token_type_embeddings.weight"
            self._types = loader.table(name, config.num_token_types, width)
        self._embedding_norm = self._norm(self._names(loader).embedding_norm, loader, size=width)
        self._projection: PackedLinear | None = None
        if config.embedding_size is not None:
            name = f"{self._prefix}embeddings_project"
            self._projection = loader.linear([name], [config.hidden_size], width, bias=True)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]

    def _names(self, loader: WeightLoader) -> LayerNames:
        """Return the names in this checkpoint."""
        return self.names

    def _load_layer(self, index: int, loader: WeightLoader) -> BertLayer:
        hidden, names = self.config.hidden_size, self._names(loader)
        layer = f"{names.layer}.{index}"
        return BertLayer(
            qkv=self._linear(loader, layer, names.qkv, 3 * hidden, hidden),
            output=self._linear(loader, layer, [names.output], hidden, hidden),
            attention_norm=self._norm(f"{layer}.{names.attention_norm}", loader),
            mlp=self._load_mlp(index, layer, loader),
            output_norm=self._norm(f"{layer}.{names.output_norm}", loader),
        )

    def _load_mlp(self, index: int, layer: str, loader: WeightLoader) -> MLP:
        hidden, inner, names = self.config.hidden_size, self.config.intermediate_size, self._names(loader)
        down = self._linear(loader, layer, [names.down], hidden, inner)
        if not self.is_gated:
            return PlainMLP(self._linear(loader, layer, names.up, inner, hidden), down)
        up = self._linear(loader, layer, names.up, 2 * inner, hidden, bias=False)
        return GatedMLP(up, down, self.is_gate_first)

    def _linear(
        self,
        loader: WeightLoader,
        layer: str,
        parts: Sequence[str],
        rows: int,
        columns: int,
        *,
        bias: bool | None = None,
    ) -> PackedLinear:
        """Load a product that is stored in parts of the same size. A bias is there if most products have one."""
        names = [f"{self._prefix}{layer}.{part}" for part in parts]
        sizes = [rows // len(parts)] * len(parts)
        return loader.linear(names, sizes, columns, bias=self.has_bias if bias is None else bias)

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        hidden, (dense, activation, labels) = self.config.hidden_size, self.head_layers
        steps = (
            dense_layer(loader, dense.format(self._prefix), (hidden, hidden), activation),
            dense_layer(loader, labels, (num_labels, hidden)),
        )
        return Head(steps, num_labels)


class Electra(Bert):
    name = "electra"
    huggingface_names = (
        "ElectraModel",
        "ElectraForMaskedLM",
        "ElectraForPreTraining",
        "ElectraForSequenceClassification",
    )
    prefixes = ("electra.",)
    head_layers = ("classifier.dense", "gelu", "classifier.out_proj")

    @classmethod
    def read_config(cls, fields: Fields) -> BertConfig:
        config = super().read_config(fields)
        width = fields.integer("embedding_size", 128)
        return dataclasses.replace(config, embedding_size=None if width == config.hidden_size else width)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedConfig(BertConfig):
    rope: RopeConfig


class RotatedBert(Bert):
    """BERT's layers with positions by rotation."""

    config: RotatedConfig

    def _load(self, loader: WeightLoader) -> None:
        super()._load(loader)
        config = self.config
        table = rope_table(config.rope, config.hidden_size // config.num_heads, config.max_text_len)
        self._rope_table = table.to(loader.ops.device)

    def _attention(self, texts: Texts) -> AttendInLayer:
        table = self._rope_table[texts.positions]
        return lambda _, query, key, value: attend(rotated(query, table), rotated(key, table), value, texts)


# Names of XLM-RoBERTa in Jina's code.
JINA_NAMES = LayerNames(
    layer="encoder.layers",
    qkv=("mixer.Wqkv",),
    output="mixer.out_proj",
    attention_norm="norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    output_norm="norm2",
    embedding_norm="emb_ln",
)


ROBERTA_HEAD: tuple[str, DenseActivation, str] = ("classifier.dense", "tanh", "classifier.out_proj")


class Roberta(Bert):
    name = "roberta"
    huggingface_names = tuple(
        f"{family}{kind}"
        for family in ("Roberta", "XLMRoberta", "Camembert")
        for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")
    )
    prefixes = ("roberta.",)
    head_layers = ROBERTA_HEAD

    @classmethod
    def _padding_id(cls, fields: Fields) -> int | None:
        given = fields.token_ids("pad_token_id")
        return given[0] if given else 1

    def _names(self, loader: WeightLoader) -> LayerNames:
        is_jina = loader.has(f"{self._prefix}{JINA_NAMES.embedding_norm}.weight")
        return JINA_NAMES if is_jina else self.names


class DistilBert(Bert):
    name = "distilbert"
    huggingface_names = ("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification")
    prefixes = ("distilbert.",)
    names = LayerNames(
        layer="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        up=("ffn.lin1",),
        down="ffn.lin2",
        output_norm="output_layer_norm",
    )
    head_layers = ("pre_classifier", "relu", "classifier")

    @classmethod
    def read_config(cls, fields: Fields) -> BertConfig:
        num_positions = fields.integer("max_position_embeddings", 512)
        return BertConfig(
            hidden_size=fields.integer("dim"),
            intermediate_size=fields.integer("hidden_dim"),
            num_layers=fields.integer("n_layers"),
            num_heads=fields.integer("n_heads"),
            vocab_size=fields.integer("vocab_size"),
            max_text_len=num_positions,
            norm_eps=1e-12,
            activation=fields.text("activation", "gelu"),
            num_positions=num_positions,
        )


class MPNet(Roberta):
    name = "mpnet"
    huggingface_names = ("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification")
    prefixes = ("mpnet.",)
    names = LayerNames(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        attention_norm="attention.LayerNorm",
    )

    @classmethod
    def read_config(cls, fields: Fields) -> BertConfig:
        config = super().read_config(fields.changed(pad_token_id=_MPNET_PADDING))
        num_distances = fields.integer("relative_attention_num_buckets", 32)
        return dataclasses.replace(config, num_token_types=0, num_distances=num_distances)

    def _load(self, loader: WeightLoader) -> None:
        super()._load(loader)
        name = f"{self._prefix}encoder.relative_attention_bias.weight"
        self._distance_biases = loader.table(name, self.config.num_distances, self.config.num_heads)

    def _attention(self, texts: Texts) -> AttendInLayer:
        lengths = [end - start for start, end in texts.ranges]
        places = torch.arange(max(lengths), device=texts.positions.device)
        biases = self._distance_biases[_distance_class(places - places[:, None])].permute(2, 0, 1)
        of_texts = [biases[:, :length, :length] for length in lengths]
        return lambda _, query, key, value: attend(query, key, value, texts, biases=of_texts)


def _distance_class(distances: Tensor) -> Tensor:
    """Return the class of each distance, of 32: half of the classes for tokens behind, in each half the first eight
    for one distance each, and wider and wider classes after them."""
    half, exact = 16, 8
    far = distances.abs()
    share = torch.log(far.clamp(min=1).float() / exact) / math.log(_MPNET_DISTANCE / exact)
    wide = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
    return (distances > 0).long() * half + torch.where(far < exact, far, wide)
