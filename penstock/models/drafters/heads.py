"""Heads that draft from a model's hidden states: EAGLE 1 and 2, EAGLE 3, and Medusa.

An EAGLE head is one decoder layer. Its input at position t is the hidden state of position t and the token of
position t + 1; its output stands for the hidden state of position t + 1, and is the input of its next step. Medusa's
heads guess several tokens from one hidden state, each by itself, and have no KV.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.engine_config import Quantization
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.interface import (
    AttentionBatch,
    AttentionLayer,
    DenseWeight,
    FindsArgmax,
    KVStore,
    Ops,
    PackedEmbedding,
    PackedLinear,
)
from penstock.models.config import ArchitectureConfig
from penstock.models.drafters.files import HeadFolder, read_heads
from penstock.models.families.llama import Llama
from penstock.models.layers import GatedMLP
from penstock.models.model import StagedModel
from penstock.models.rope import rope_table
from penstock.models.weights import WeightLoader, WeightSource


@dataclass(frozen=True, slots=True)
class Target:
    """The model that heads draft for, and its weights as stored, from which a smaller vocabulary can be taken."""

    model: StagedModel
    source: WeightSource
    ops: Ops

    def head_rows(self, token_ids: Tensor) -> DenseWeight:
        """Return the rows of the output matrix for some tokens."""
        config = self.model.config
        name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        weight = self.source.matrix(name, config.vocab_size, config.hidden_size)
        values = weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
        return DenseWeight(values[token_ids.to(values.device)].contiguous())

    def argmax(self, hidden: Tensor) -> Tensor:
        chosen = self.model.argmax(hidden)
        return chosen if chosen is not None else self.model.logits(hidden).argmax(dim=1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The decoder layer of an EAGLE head. EAGLE 3 has both of the first two norms, and older heads have neither."""

    embedding_norm: Tensor | None
    hidden_norm: Tensor | None
    qkv: PackedLinear
    attention: AttentionLayer
    output: PackedLinear
    mlp_norm: Tensor
    mlp: GatedMLP


class EagleHead:
    """EAGLE's decoder layer. `taps` are the layers of the model whose inputs the head reads; with none, the head
    reads the final hidden state."""

    num_layers = 1
    records_graphs = True

    def __init__(
        self, folder: HeadFolder, target: Target, num_positions: int, quantization: Quantization | None = None
    ) -> None:
        config = Llama.config_from_huggingface(folder.fields)
        own, asked = target.model.config, config.hidden_size
        fused = folder.tensors["fc.weight"].shape[-1]
        self.is_third = "layers.0.hidden_norm.weight" in folder.tensors
        _check(folder, config, own, fused, is_third=self.is_third)
        self.config = config
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.taps = _taps(folder, own.num_layers) if self.is_third else ()
        self._ops, self._target = target.ops, target
        loader = WeightLoader(folder, target.ops, quantization=quantization)
        self._fc = loader.linear(["fc"], [asked], fused, bias=loader.has("fc.bias"))
        self._fc_norm = loader.vector("input_norm.weight", fused) if loader.has("input_norm.weight") else None
        self._norms_residual = self.is_third and folder.fields.flag("norm_before_residual", False)
        self._embedding = self._own_embedding(folder, loader)
        self._layer = _load_layer(config, loader, num_positions, is_third=self.is_third)
        self._norm = loader.vector("norm.weight", asked) if self.is_third else None
        self._token_ids = _vocabulary(folder, own.vocab_size, target.ops.device)
        self._head: PackedLinear | None = None
        if self.is_third:
            rows = own.vocab_size if self._token_ids is None else len(self._token_ids)
            self._head = loader.linear(["lm_head"], [rows], asked)
        elif self._token_ids is not None:
            shortened = replace(folder, tensors={"lm_head.weight": target.head_rows(self._token_ids).values})
            short_loader = WeightLoader(shortened, target.ops, quantization=quantization)
            self._head = short_loader.linear(["lm_head"], [len(self._token_ids)], asked)
        head_bytes = 0 if self._head is None or self.is_third else self._head.num_bytes
        self.weight_bytes = loader.weight_bytes + head_bytes

    def _own_embedding(self, folder: HeadFolder, loader: WeightLoader) -> PackedEmbedding | None:
        """Return the head's embedding where it differs from the model's; most releases hold a copy of the latter."""
        model = self._target.model.config
        if self.config.hidden_size == model.hidden_size and not folder.fields.flag(
            "embed_requires_grad", False
        ):
            return None
        weight = folder.matrix("embed_tokens.weight", model.vocab_size, self.config.hidden_size)
        return loader.ops.pack_embedding(weight)

    @property
    def num_guesses(self) -> int:
        """Return the number of tokens that the head can draft."""
        return self._target.model.config.vocab_size if self._token_ids is None else len(self._token_ids)

    def features(self, hidden: Tensor) -> Tensor:
        """Turn the hidden states of the model, joined side by side where there are several, into the head's input."""
        if not self.is_third:
            return hidden
        if self._fc_norm is not None:
            hidden = self._ops.rms_norm(hidden, self._fc_norm, self.config.norm_eps)
        return self._ops.linear(hidden, self._fc)

    def forward(self, token_ids: Tensor, features: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        """Compute int32 [T] and [T, hidden] → [T, hidden], the features of the next positions. `token_ids` are the
        tokens of the next positions. Writes keys and values to `kv`, at the positions of `batch`."""
        ops, layer, eps = self._ops, self._layer, self.config.norm_eps
        if self._embedding is not None:
            embedded = ops.embed(token_ids, self._embedding)
        else:
            embedded = self._target.model.embed(token_ids)
        if layer.hidden_norm is None or layer.embedding_norm is None:
            residual = inputs = ops.linear(torch.cat([embedded, features], dim=1), self._fc)
        else:
            normed = ops.rms_norm(features, layer.hidden_norm, eps)
            residual = normed.clone() if self._norms_residual else features.clone()
            inputs = torch.cat([ops.rms_norm(embedded, layer.embedding_norm, eps), normed], dim=1)
        made = ops.attention(inputs, layer.qkv, layer.output, layer.attention, kv.layer(0), batch)
        normed = ops.add_rms_norm(made, residual, layer.mlp_norm, eps)
        return residual.add_(ops.mlp(normed, layer.mlp.gate_up, layer.mlp.down, self.config.activation))

    def argmax(self, features: Tensor) -> Tensor:
        """Return the tokens that the features are most likely to lead to: [S, hidden] → int64 [S]."""
        ops, head = self._ops, self._head
        rows = features if self._norm is None else ops.rms_norm(features, self._norm, self.config.norm_eps)
        if head is None:
            return self._target.argmax(rows)
        chosen = (
            ops.argmax(rows, head) if isinstance(ops, FindsArgmax) else ops.logits(rows, head).argmax(dim=1)
        )
        return chosen if self._token_ids is None else self._token_ids[chosen]

    def top(self, features: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` tokens that the features are most likely to lead to, and their log-probabilities among
        the tokens that the head drafts: [S, hidden] → float32 and int64 [S, count]."""
        ops, head = self._ops, self._head
        rows = features if self._norm is None else ops.rms_norm(features, self._norm, self.config.norm_eps)
        logits = self._target.model.logits(rows) if head is None else ops.logits(rows, head)
        shares, chosen = logits.log_softmax(dim=1).topk(count, dim=1)
        return shares, chosen if self._token_ids is None else self._token_ids[chosen]


class MedusaHeads:
    """Several heads on the final hidden state. Head i guesses the token after the next i + 1 tokens."""

    taps: tuple[int, ...] = ()

    def __init__(self, folder: HeadFolder, target: Target, quantization: Quantization | None = None) -> None:
        config, self._ops, self._target = target.model.config, target.ops, target
        size, width = config.hidden_size, folder.tensors["blocks.0.layers.0.weight"].shape[-1]
        if width != size:
            raise _other_hidden_size(folder, width, size)
        loader = WeightLoader(folder, target.ops, quantization=quantization)
        self.max_tokens = _num_medusa_heads(folder)
        self._blocks: list[list[PackedLinear]] = []
        for index in range(self.max_tokens):
            prefix = f"blocks.{index}.layers."
            depth = sum(name.startswith(prefix) and name.endswith(".weight") for name in folder.tensors)
            names = [f"{prefix}{layer}" for layer in range(depth)]
            self._blocks.append(
                [loader.linear([n], [size], size, bias=loader.has(f"{n}.bias")) for n in names]
            )
        has_heads = any(name.startswith("lm_heads.") for name in folder.tensors)
        first = folder.tensors.get("lm_heads.0.weight")
        if first is not None and (rows := first.shape[0]) != config.vocab_size:
            raise _other_vocabulary(folder, rows, config.vocab_size)
        self._heads = [
            loader.linear([f"lm_heads.{index}"], [config.vocab_size], size) if has_heads else None
            for index in range(self.max_tokens)
        ]
        self.weight_bytes = loader.weight_bytes

    def draft(self, hidden: Tensor) -> Tensor:
        """Guess from final hidden states: [S, hidden] → int64 [S, heads]."""
        ops, drafted = self._ops, []
        for blocks, head in zip(self._blocks, self._heads, strict=True):
            rows = hidden
            for block in blocks:
                rows = rows + torch.nn.functional.silu(ops.linear(rows, block))
            if head is None:
                drafted.append(self._target.argmax(rows))
            elif isinstance(ops, FindsArgmax):
                drafted.append(ops.argmax(rows, head))
            else:
                drafted.append(ops.logits(rows, head).argmax(dim=1))
        return torch.stack(drafted, dim=1)


def _num_medusa_heads(folder: HeadFolder) -> int:
    """Count Medusa's heads, which must be numbered from 0 on, and raise ModelLoadError for unknown tensors."""
    for name in folder.tensors:
        if not _MEDUSA_NAME.match(name):
            raise ModelLoadError(f"The heads in {folder.path} have {name}, which no known Medusa head has.")
    count = 1 + max(int(name.split(".")[1]) for name in folder.tensors)
    for index in range(count):
        if f"blocks.{index}.layers.0.weight" not in folder.tensors:
            raise ModelLoadError(f"Of the {count} heads in {folder.path}, head {index} is missing.")
    return count


def load_heads(
    path: Path, target: Target, num_positions: int, quantization: Quantization | None = None
) -> EagleHead | MedusaHeads:
    """Load heads for a model. Heads of another model's sizes are a ConfigError."""
    folder = read_heads(path)
    if "fc.weight" in folder.tensors:
        return EagleHead(folder, target, num_positions, quantization)
    if "blocks.0.layers.0.weight" in folder.tensors:
        return MedusaHeads(folder, target, quantization)
    raise ModelLoadError(
        f"{path} holds neither an EAGLE head nor Medusa heads.",
        hint="Give a folder with a tensor fc.weight (EAGLE) or medusa_heads (Medusa).",
    )


def _other_hidden_size(folder: HeadFolder, size: int, wanted: int) -> ConfigError:
    return ConfigError(
        f"The heads in {folder.path} are for hidden states of {size} numbers; the model has {wanted}.",
        hint="Heads belong to one model: take those that were trained for it.",
    )


def _other_vocabulary(folder: HeadFolder, size: int, wanted: int) -> ConfigError:
    return ConfigError(
        f"The heads in {folder.path} are for a vocabulary of {size} tokens; the model has {wanted}.",
        hint="Heads belong to one model: take those that were trained for it.",
    )


_MEDUSA_NAME = re.compile(r"(blocks\.\d{1,3}\.layers\.\d{1,3}\.(weight|bias)|lm_heads\.\d{1,3}\.weight)$")
_LAYER = "layers.0."
_KNOWN = frozenset({
    "fc.weight", "fc.bias", "input_norm.weight", "embed_tokens.weight", "norm.weight", "lm_head.weight", "d2t",
    *(f"{_LAYER}{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"{_LAYER}self_attn.{part}_{kind}" for part in "qkvo" for kind in ("proj.weight", "proj.bias")),
    *(f"{_LAYER}self_attn.{part}_norm.weight" for part in "qk"),
    *(f"{_LAYER}mlp.{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")),
})  # fmt: skip


def _check(
    folder: HeadFolder, config: ArchitectureConfig, model: ArchitectureConfig, fused: int, *, is_third: bool
) -> None:
    """Raise ConfigError if an EAGLE head belongs to another model, and ModelLoadError if its kind is not known."""
    size = fused - config.hidden_size if not is_third else fused // 3
    if size != model.hidden_size or (not is_third and config.hidden_size != model.hidden_size):
        raise _other_hidden_size(folder, size, model.hidden_size)
    if config.vocab_size != model.vocab_size:
        raise _other_vocabulary(folder, config.vocab_size, model.vocab_size)
    unknown = sorted(set(folder.tensors) - _KNOWN)
    if unknown or config.num_layers != 1:
        found = f"a tensor {unknown[0]}" if unknown else f"{config.num_layers} layers"
        raise ModelLoadError(f"The head in {folder.path} has {found}, which no known EAGLE head has.")


def _taps(folder: HeadFolder, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs an EAGLE 3 head reads: as configured, else early, middle and late."""
    nested = folder.settings.get("eagle_config")
    settings = {**folder.settings, **(nested if isinstance(nested, dict) else {})}
    ids = settings.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    if (
        not isinstance(ids, list)
        or len(ids) != 3
        or not all(type(i) is int and 0 <= i <= num_layers for i in ids)
    ):
        raise ConfigError(f"The head in {folder.path} reads layers {ids} of a model with {num_layers}.")
    return tuple(ids)


def _vocabulary(folder: HeadFolder, vocab_size: int, device: torch.device) -> Tensor | None:
    """Return the token of each row of a head with fewer tokens than the model; None for a head with all tokens.
    `d2t` holds the difference of the two numbers."""
    if "d2t" not in folder.tensors:
        return None
    offsets = folder.tensors["d2t"].to(torch.int64).flatten()
    token_ids = offsets + torch.arange(len(offsets))
    if not len(offsets) or token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ModelLoadError(
            f"The head in {folder.path} drafts tokens beyond the vocabulary of {vocab_size}."
        )
    return token_ids.to(device)


def _load_layer(
    config: ArchitectureConfig, loader: WeightLoader, num_positions: int, *, is_third: bool
) -> _Layer:
    size, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads
    query_size, kv_size = heads * config.head_dim, config.num_kv_heads * config.head_dim
    device = loader.ops.device

    def norm(name: str, size: int) -> Tensor | None:
        return loader.vector(f"{_LAYER}{name}.weight", size) if loader.has(f"{_LAYER}{name}.weight") else None

    def linear(names: Sequence[str], rows: Sequence[int], columns: int) -> PackedLinear:
        has_bias = loader.has(f"{_LAYER}{names[0]}.bias")
        return loader.linear([_LAYER + name for name in names], rows, columns, bias=has_bias)

    return _Layer(
        embedding_norm=loader.vector(f"{_LAYER}input_layernorm.weight", size) if is_third else None,
        hidden_norm=loader.vector(f"{_LAYER}hidden_norm.weight", size) if is_third else None,
        qkv=linear(
            [f"self_attn.{part}_proj" for part in "qkv"],
            [query_size, kv_size, kv_size],
            size * 2 if is_third else size,
        ),
        attention=AttentionLayer(
            num_heads=heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=rope_table(config.rope, config.head_dim, num_positions).to(device),
            q_norm=norm("self_attn.q_norm", config.head_dim),
            k_norm=norm("self_attn.k_norm", config.head_dim),
            norm_eps=config.norm_eps,
        ),
        output=linear(["self_attn.o_proj"], [size], query_size),
        mlp_norm=loader.vector(f"{_LAYER}post_attention_layernorm.weight", size),
        mlp=GatedMLP(
            gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [inner, inner], size),
            down=linear(["mlp.down_proj"], [size], inner),
        ),
    )
