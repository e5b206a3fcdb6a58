"""DeBERTa 2 and 3: layers in BERT's style. Their attention adds two products to those of queries and keys: of queries
with keys of distances, and of keys with queries of distances. Far distances share classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.config import Fields
from penstock.models.encoders.base import Texts, attend
from penstock.models.encoders.bert import AttendInLayer, Bert, BertConfig, LayerNames
from penstock.models.weights import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class DebertaConfig(BertConfig):
    has_positions: bool  # embeddings of positions, beside those of words
    products: tuple[str, ...]  # "c2p": queries with keys of distances; "p2c": keys with queries of distances
    num_classes: int  # of distances in one direction; 0 without products
    max_distance: int
    has_buckets: bool  # far distances share classes
    shares_projections: bool  # queries and keys of distances are made as those of tokens
    norms_distances: bool


class DebertaV2(Bert):
    name = "deberta_v2"
    huggingface_names = ("DebertaV2Model", "DebertaV2ForMaskedLM", "DebertaV2ForSequenceClassification")
    prefixes = ("deberta.",)
    head_layers = ("pooler.dense", "gelu", "classifier")
    names = LayerNames(qkv=[f"attention.self.{part}_proj" for part in ("query", "key", "value")])
    config: DebertaConfig

    @classmethod
    def read_config(cls, fields: Fields) -> DebertaConfig:
        if fields.raw("conv_kernel_size"):
            raise ModelLoadError(f"{fields.where} asks for a convolution, which is not supported.")
        hidden, num_positions = fields.integer("hidden_size"), fields.integer("max_position_embeddings", 512)
        sizes = {
            "pooler_hidden_size": hidden,
            "attention_head_size": hidden // fields.integer("num_attention_heads"),
        }
        for key, size in sizes.items():
            if fields.integer(key, size) != size:
                raise ModelLoadError(f"{fields.where} has {key} = {fields.raw(key)}; supported is {size}.")
        listed = fields.raw("pos_att_type") or []
        products = [each.strip() for each in listed.lower().split("|")] if isinstance(listed, str) else listed
        unknown = set(products) - {"c2p", "p2c", "p2p", ""}
        if unknown or not isinstance(products, list):
            raise ModelLoadError(f"{fields.where} has pos_att_type = {listed!r}, which is not known.")
        has_buckets = (fields.raw("position_buckets") or -1) > 0
        max_distance = fields.raw("max_relative_positions") or -1
        max_distance = num_positions if max_distance < 1 else max_distance
        num_classes = fields.integer("position_buckets") if has_buckets else max_distance
        width = fields.integer("embedding_size", hidden)
        return DebertaConfig(
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=fields.integer("num_attention_heads"),
            vocab_size=fields.integer("vocab_size"),
            max_text_len=num_positions,
            norm_eps=fields.number("layer_norm_eps", 1e-7),
            activation=fields.text("hidden_act", "gelu"),
            num_positions=num_positions,
            num_token_types=fields.raw("type_vocab_size") or 0,
            embedding_size=None if width == hidden else width,
            has_positions=fields.flag("position_biased_input", True),
            products=tuple(each for each in ("c2p", "p2c") if each in products),
            num_classes=num_classes if fields.flag("relative_attention", False) else 0,
            max_distance=max_distance,
            has_buckets=has_buckets,
            shares_projections=fields.flag("share_att_key", False),
            norms_distances="layer_norm" in fields.text("norm_rel_ebd", "none").lower(),
        )

    def _attention(self, texts: Texts) -> AttendInLayer:
        device = texts.positions.device
        classes = [self._classes(end - start, device) for start, end in texts.ranges]

        def attend_in(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scale = ((1 + len(self.config.products)) * query.shape[-1]) ** -0.5
            distances = self._distances[index]
            biases = None
            if distances:
                biases = [
                    _distance_scores(query[start:end], key[start:end], distances, at) * scale
                    for (start, end), at in zip(texts.ranges, classes, strict=True)
                ]
            return attend(query, key, value, texts, scale=scale, biases=biases)

        return attend_in

    def _embed(self, texts: Texts) -> Tensor:
        x = self._words[texts.token_ids]
        if self.config.has_positions:
            assert self._positions is not None
            x = x + self._positions[texts.positions]
        if self._types is not None:
            x = x + self._types[texts.is_second.long().clamp(max=self.config.num_token_types - 1)]
        return self._embedding_norm(x if self._projection is None else self._ops.linear(x, self._projection))

    def _classes(self, length: int, device: torch.device) -> Tensor:
        """Return the class of the distance from each token to each other one, int64 [length, length]."""
        config, places = self.config, torch.arange(length)
        distances = places[:, None] - places
        if config.has_buckets:
            half = config.num_classes // 2
            far = distances.abs().clamp(min=max(1, half - 1)).float()
            share = torch.log(far / half) / math.log((config.max_distance - 1) / half)
            shared = (torch.ceil(share * (half - 1)) + half).long() * distances.sign()
            distances = torch.where(distances.abs() <= half, distances, shared)
        return distances.to(device)

    def _load(self, loader: WeightLoader) -> None:
        config, prefix = self.config, f"{self._prefix}embeddings"
        width = config.embedding_size or config.hidden_size
        self._words = loader.table(f"{prefix}.word_embeddings.weight", config.vocab_size, width)
        if config.has_positions:
            name = f"{prefix}.position_embeddings.weight"
            self._positions = loader.table(name, config.num_positions, width)
        self._types = None
        if config.num_token_types:
            name = f"{prefix}.token_type_embeddings.weight"
            self._types = loader.table(name, config.num_token_types, width)
        self._projection = None
        if config.embedding_size is not None:
            self._projection = loader.linear([f"{prefix}.embed_proj"], [config.hidden_size], width)
        self._embedding_norm = self._norm("embeddings.LayerNorm", loader)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]
        self._distances: list[dict[str, Tensor]] = [{} for _ in self._layers]
        if config.num_classes and config.products:
            name = f"{self._prefix}encoder.rel_embeddings.weight"
            table = loader.table(name, 2 * config.num_classes, config.hidden_size)
            if config.norms_distances:
                table = self._norm("encoder.LayerNorm", loader)(table)
            self._distances = [self._project(index, table, loader) for index in range(config.num_layers)]

    def _project(self, index: int, table: Tensor, loader: WeightLoader) -> dict[str, Tensor]:
        """Return the keys ("c2p") and queries ("p2c") of distances in a layer, [classes, heads, D] each."""
        config, hidden = self.config, self.config.hidden_size
        if config.shares_projections:
            query, key, _ = self._ops.linear(table, self._layers[index].qkv).chunk(3, dim=1)
        made: dict[str, Tensor] = {}
        for product, part in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj")):
            if product not in config.products:
                continue
            if config.shares_projections:
                projected = key if product == "c2p" else query
            else:
                name = f"{self._prefix}encoder.layer.{index}.attention.self.{part}"
                projected = self._ops.linear(table, loader.linear([name], [hidden], hidden, bias=True))
            made[product] = projected.unflatten(1, (config.num_heads, -1)).contiguous()
        return made


def _distance_scores(query: Tensor, key: Tensor, distances: dict[str, Tensor], classes: Tensor) -> Tensor:
    """Queries and keys of a text, [L, heads, D] → [heads, L, L]."""
    heads, length = query.shape[1], query.shape[0]
    total = query.new_zeros(heads, length, length)
    for product, positions in distances.items():
        tokens, signed = (query, classes) if product == "c2p" else (key, -classes)
        half = positions.shape[0] // 2
        places = (signed + half).clamp(0, 2 * half - 1)
        scores = tokens.transpose(0, 1) @ positions.permute(1, 2, 0)  # [heads, L, classes]
        found = scores.gather(2, places.expand(heads, -1, -1))
        total += found if product == "c2p" else found.transpose(1, 2)
    return total
