"""Falcon-H1: every layer has attention and Mamba-2 side by side, and many factors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, extended
from penstock.models.experts import add_mlp
from penstock.models.gguf_config import common_gguf_config
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_states import gguf_mamba_config, gguf_mamba_layout
from penstock.models.layers import Attention, GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout, StoredRows
from penstock.models.mamba import BAMBA_NAMES, Mamba2Mixer, load_mamba, mamba_config, mamba_rows
from penstock.models.recurrent import HybridDecoder, LayerCache


@dataclass(frozen=True, slots=True)
class FalconH1Layer:
    norm: RMSNorm
    attention: Attention
    mixer: Mamba2Mixer
    mlp_norm: RMSNorm
    mlp: GatedMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(ArchitectureConfig):
    attention_in_scale: float
    attention_out_scale: float
    mixer_in_scale: float
    mixer_out_scale: float
    mixer_scales: tuple[float, ...]  # of gate, input, write, read and step
    mlp_gate_scale: float
    mlp_out_scale: float


class FalconH1(HybridDecoder):
    name = "falcon_h1"
    huggingface_names = ("FalconH1ForCausalLM", "falcon_h1")
    gguf_names = ("falcon-h1",)
    attention_bias = False
    mlp_bias = False
    stored_names = BAMBA_NAMES
    config: FalconH1Config

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        common = super().config_from_huggingface(fields)
        mlp_scales = _factors(fields, "mlp_multipliers", 2)
        recurrent = mamba_config(fields, frozenset(range(common.num_layers)), common.hidden_size)
        return extended(
            common,
            FalconH1Config,
            recurrent=dataclasses.replace(
                recurrent,
                has_norm=fields.flag("mamba_rms_norm", False),
                gates_first=not fields.flag("mamba_norm_before_gate", True),
                output_bias=fields.flag("projectors_bias", False),
            ),
            attention_scale=common.attention_scale * fields.number("key_multiplier", 1.0),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=fields.number("lm_head_multiplier", 1.0),
            attention_in_scale=fields.number("attention_in_multiplier", 1.0),
            attention_out_scale=fields.number("attention_out_multiplier", 1.0),
            mixer_in_scale=fields.number("ssm_in_multiplier", 1.0),
            mixer_out_scale=fields.number("ssm_out_multiplier", 1.0),
            mixer_scales=_factors(fields, "ssm_multipliers", 5),
            mlp_gate_scale=mlp_scales[0],
            mlp_out_scale=mlp_scales[1],
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        """Read the settings. Converters multiply the weights with all factors, and gate in front of the norm."""
        return extended(
            common_gguf_config(file, cls.name),
            FalconH1Config,
            recurrent=gguf_mamba_config(file),
            attention_in_scale=1.0,
            attention_out_scale=1.0,
            mixer_in_scale=1.0,
            mixer_out_scale=1.0,
            mixer_scales=(1.0,) * 5,
            mlp_gate_scale=1.0,
            mlp_out_scale=1.0,
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        # The name of this norm has no ".weight" in files.
        return gguf_mamba_layout(config, "mamba", {"ffn_norm": "post_attention_layernorm.weight"})

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return mamba_rows(config, "mamba")

    def load_layer(self, load: LayerLoader) -> FalconH1Layer:
        return FalconH1Layer(
            norm=load.rms_norm("input_layernorm"),
            attention=load.attention(),
            mixer=load_mamba(load, scales=self.config.mixer_scales),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
        )

    def run_layer(
        self, layer: FalconH1Layer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        config, normed = self.config, layer.norm(ops, residual)
        inputs = normed if config.mixer_in_scale == 1.0 else normed * config.mixer_in_scale
        mixed = layer.mixer(ops, inputs, cache.states, batch)
        if config.attention_in_scale != 1.0:
            normed = normed * config.attention_in_scale
        attended = layer.attention(ops, normed, cache.kv, batch)
        residual.add_(mixed, alpha=config.mixer_out_scale).add_(attended, alpha=config.attention_out_scale)
        if config.mlp_gate_scale == config.mlp_out_scale == 1.0:
            add_mlp(ops, residual, layer.mlp_norm, layer.mlp)
        else:
            made = self._mlp(layer.mlp, layer.mlp_norm(ops, residual), ops)
            residual.add_(made, alpha=config.mlp_out_scale)

    def _mlp(self, mlp: GatedMLP, x: Tensor, ops: Ops) -> Tensor:
        gate_up = ops.linear(x, mlp.gate_up)
        gate_up[:, : gate_up.shape[1] // 2] *= self.config.mlp_gate_scale
        return ops.add_up(ops.linear(ops.gated(gate_up, mlp.activation), mlp.down))


def _factors(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    if not fields.has(key):
        return (1.0,) * count
    factors = fields.numbers(key)
    if len(factors) != count:
        raise ModelLoadError(f"{fields.where} has {len(factors)} {key}, and the architecture needs {count}.")
    return factors
