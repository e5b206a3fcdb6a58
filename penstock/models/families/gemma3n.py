"""Gemma 3n, text: attention and embeddings of layers as in Gemma 4, beside four residual streams of which a layer
reads one and corrects all, a narrow layer beside attention, and MLPs of which most numbers are zero."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, KVStore, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, NotNative, extended
from penstock.models.decoder import BeforeLayer
from penstock.models.families.gemma4 import Gemma4, Gemma4Attention, LayerInput
from penstock.models.families.gemma4_config import Gemma4Config, huggingface_config
from penstock.models.huggingface_config import rope_parameters
from penstock.models.layers import GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout
from penstock.models.weights import WeightLoader

_LEAST_SQUARE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig(Gemma4Config):
    num_streams: int
    active: int  # the stream that layers read
    narrow_size: int  # of the layer beside attention
    zeros: tuple[float, ...]  # the share of an MLP's numbers that are zero, by layer
    scales_corrected: bool


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """A gated MLP whose gates are cut at a multiple of their deviation above their mean."""

    inner: GatedMLP
    multiple: float
    width: int  # of the MLP of all ranks

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        gate, up = ops.linear(x, self.inner.gate_up).chunk(2, dim=1)
        wide = gate.float()
        mean = ops.add_up(wide.sum(dim=1, keepdim=True)) / self.width
        square = ops.add_up((wide - mean).square().sum(dim=1, keepdim=True)) / self.width
        cut = (mean + square.sqrt() * self.multiple).to(x.dtype)
        active = ops.gated(torch.cat([F.relu(gate - cut), up], dim=1), self.inner.activation)
        return ops.add_up(ops.linear(active, self.inner.down))


@dataclass(frozen=True, slots=True)
class NarrowLayer:
    left: PackedLinear
    right: PackedLinear
    norm: RMSNorm

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return x + self.norm(ops, ops.linear(ops.linear(x, self.left), self.right))


@dataclass(frozen=True, slots=True)
class Streams:
    """Predicts the residual streams behind a layer, [S, T, H], and corrects them by what the layer has made."""

    router: PackedLinear
    norm: RMSNorm
    predicting: PackedLinear
    correcting: PackedLinear
    scale: Tensor | None  # of the active stream, where the layer's own embedding is added
    active: int

    def predict(self, ops: Ops, streams: Tensor) -> Tensor:
        count, num_tokens = streams.shape[:2]
        weights = ops.linear(self._routed(ops, streams[self.active]), self.predicting)
        # For each token: the weight of each old stream in each new one.
        mixing = weights.view(num_tokens, count, count)
        return streams + torch.einsum("tno,oth->nth", mixing, streams)

    def correct(self, ops: Ops, predicted: Tensor, made: Tensor) -> Tensor:
        factors = ops.linear(self._routed(ops, made), self.correcting) + 1.0
        return predicted + factors.T.unsqueeze(2) * (made - predicted[self.active])

    def _routed(self, ops: Ops, x: Tensor) -> Tensor:
        inputs = self.norm(ops, x) * (1.0 / x.shape[1])
        return torch.tanh(ops.linear(inputs, self.router).float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Gemma3nLayer:
    streams: Streams
    attention_norm: RMSNorm
    attention: Gemma4Attention
    after_attention_norm: RMSNorm
    beside: NarrowLayer
    mlp_norm: RMSNorm
    mlp: GatedMLP | SparseMLP
    after_mlp_norm: RMSNorm
    layer_input: LayerInput
    kv_layer: int


class Gemma3n(Gemma4):
    name = "gemma3n"
    huggingface_names = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "gemma3n_text", "gemma3n")
    gguf_names = ()
    config: Gemma3nConfig

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        text = fields.raw("text_config")
        outer = {key: fields.raw(key) for key in ("eos_token_id", "dtype", "torch_dtype") if fields.has(key)}
        fields = Fields({**_DEFAULTS, **(text or fields.values), **outer}, fields.where)
        num_layers = fields.integer("num_hidden_layers")
        kinds = fields.raw("layer_types") or [
            "sliding_attention" if (index + 1) % 5 else "full_attention" for index in range(num_layers)
        ]
        if kinds[-1] != "full_attention":
            raise NotNative(f"{fields.where} has a window in the last layer.")
        sizes = fields.raw("intermediate_size")
        if isinstance(sizes, list):
            if len(set(sizes)) != 1:
                raise NotNative(f"{fields.where} has MLPs of different sizes.")
            sizes = sizes[0]
        changed = fields.changed(
            layer_types=kinds,
            intermediate_size=sizes,
            global_head_dim=fields.integer("head_dim"),
            rope_parameters=_ropes(fields),
        )
        base = huggingface_config(changed, cls.name)
        zeros = fields.raw("activation_sparsity_pattern")
        if zeros is None:
            zeros = [0.95 if index < 10 < num_layers else 0.0 for index in range(num_layers)]
        return extended(
            base,
            Gemma3nConfig,
            num_streams=fields.integer("altup_num_inputs"),
            active=fields.raw("altup_active_idx") or 0,
            narrow_size=fields.integer("laurel_rank"),
            zeros=tuple(zeros) if isinstance(zeros, list) else (float(zeros),) * num_layers,
            scales_corrected=fields.flag("altup_correct_scale", True),
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout()

    def __init__(self, config: Gemma3nConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        size = config.hidden_size
        self._widening, self._narrowing = (
            [
                loader.linear([f"model.altup_{kind}.{index}"], [size], size)
                for index in range(config.num_streams - 1)
            ]
            for kind in ("projections", "unembed_projections")
        )
        self.num_parameters, self.weight_bytes = loader.num_parameters, loader.weight_bytes
        self.products = loader.products

    def load_layer(self, load: LayerLoader) -> Any:
        config, weights, prefix, size = self.config, load.weights, load.prefix, self.config.hidden_size
        count, zeros = config.num_streams, config.zeros[load.index]
        mlp = load.gated_mlp()
        altup, beside = f"{prefix}.altup", f"{prefix}.laurel"
        return Gemma3nLayer(
            streams=Streams(
                router=weights.linear([f"{altup}.modality_router"], [count], size),
                norm=load.rms_norm("altup.router_norm"),
                predicting=weights.linear([f"{altup}.prediction_coefs"], [count * count], count),
                correcting=weights.linear([f"{altup}.correction_coefs"], [count], count),
                scale=weights.vector(f"{altup}.correct_output_scale", size).to(weights.ops.dtype)
                if config.scales_corrected
                else None,
                active=config.active,
            ),
            attention_norm=load.rms_norm("input_layernorm"),
            attention=self.load_attention(load),
            after_attention_norm=load.rms_norm("post_attention_layernorm"),
            beside=NarrowLayer(
                left=weights.linear([f"{beside}.linear_left"], [config.narrow_size], size),
                right=weights.linear([f"{beside}.linear_right"], [size], config.narrow_size),
                norm=load.rms_norm("laurel.post_laurel_norm"),
            ),
            mlp_norm=load.rms_norm("pre_feedforward_layernorm"),
            mlp=SparseMLP(mlp, NormalDist().inv_cdf(zeros), config.intermediate_size) if zeros > 0 else mlp,
            after_mlp_norm=load.rms_norm("post_feedforward_layernorm"),
            layer_input=self.load_layer_input(load),
            kv_layer=config.kv_layer(load.index),
        )

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
    ) -> None:
        assert self._inputs is not None, "`embed` comes first"
        ops, made = self._ops, dict[int, Tensor]()
        others = [_as_large(ops.linear(residual, each), residual) for each in self._widening]
        streams = torch.stack([residual, *others])
        for index, layer in self._in_turn(before_layer):
            predicted = layer.streams.predict(ops, streams)
            active = predicted[self.config.active]
            hidden = layer.attention_norm(ops, active)
            own = layer.attention.keys_and_values(ops, hidden)
            if own is not None:
                made[index] = own
            cache, own_batch = kv.layer(layer.kv_layer), batch.of_layer(layer.kv_layer)
            attended = layer.attention(ops, hidden, made[layer.kv_layer], cache, own_batch)
            attended = active + layer.after_attention_norm(ops, attended)
            middle = (attended + layer.beside(ops, hidden)) * 2.0**-0.5
            output = middle + layer.after_mlp_norm(ops, layer.mlp(ops, layer.mlp_norm(ops, middle)))
            streams = layer.streams.correct(ops, predicted, output)
            scale = layer.streams.scale
            first = streams[self.config.active] if scale is None else streams[self.config.active] * scale
            streams[1:] += layer.layer_input(ops, first.contiguous(), self._inputs[:, index])
        whole = streams[0].clone()
        for each, stream in zip(self._narrowing, streams[1:], strict=True):
            whole += _as_large(ops.linear(stream.contiguous(), each), streams[0])
        residual.copy_(whole / self.config.num_streams)


_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "intermediate_size": 16_384,
    "num_key_value_heads": 2,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}


def _ropes(fields: Fields) -> dict[str, Any]:
    """Return the ropes of both kinds of layers, also from older files, which have them apart."""
    found = rope_parameters(fields)
    usual = {
        "full_attention": fields.number("rope_theta", 1_000_000.0),
        "sliding_attention": fields.number("rope_local_base_freq", 10_000.0),
    }
    plain = {"rope_type": "default", "partial_rotary_factor": 1.0}
    common = {"truncate": found.get("truncate", True)}  # which transformers looks for beside the kinds
    return {
        kind: {**plain, "rope_theta": theta, **(found.get(kind) or {}), **common}
        for kind, theta in usual.items()
    }


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """Scale vectors to the root mean square of others."""
    wanted = like.float().square().mean(dim=1, keepdim=True).sqrt()
    own = x.float().square().mean(dim=1, keepdim=True).clamp_min(_LEAST_SQUARE).sqrt()
    return (x.float() * wanted / own).to(x.dtype)
