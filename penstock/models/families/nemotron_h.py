"""Nemotron-H and Nemotron Nano 2: each layer is Mamba-2, attention without positions, or an MLP that squares positive
numbers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import Attention, LayerLoader, PlainMLP, RMSNorm
from penstock.models.layout import Layout
from penstock.models.recurrent import HybridDecoder, LayerCache, Mamba2Mixer, load_mamba, mamba_rows, no_gguf

# As in `hybrid_override_pattern` of older files, and as in `layers_block_type` of newer ones.
KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
OTHER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


@dataclass(frozen=True, slots=True)
class NemotronHLayer:
    norm: RMSNorm
    mixer: Mamba2Mixer | None
    attention: Attention | None
    mlp: PlainMLP | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(ArchitectureConfig):
    kinds: tuple[str, ...]  # of layers


class NemotronH(HybridDecoder):
    name = "nemotron_h"
    huggingface_names = ("NemotronHForCausalLM", "nemotron_h")
    config: NemotronHConfig

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        kinds = _kinds(fields)
        values = {
            **fields.values,
            "num_hidden_layers": len(kinds),
            "hidden_act": fields.raw("mlp_hidden_act"),
        }
        values["rms_norm_eps"] = fields.number("layer_norm_epsilon", 1e-5)
        values.setdefault("head_dim", fields.raw("attention_head_dim") or 128)
        common = common_huggingface_config(Fields(values, fields.where), cls.name, gated=False)
        has_bias = fields.flag("use_bias", False)
        recurrent = RecurrentConfig(
            layers=frozenset(index for index, kind in enumerate(kinds) if kind == "mamba"),
            conv_width=fields.integer("conv_kernel", 4),
            conv_bias=fields.flag("use_conv_bias", True),
            bias=has_bias,
            output_bias=has_bias,
            num_heads=fields.integer("mamba_num_heads", 128),
            head_dim=fields.integer("mamba_head_dim", 64),
            num_groups=fields.integer("n_groups", 8),
            state_size=fields.integer("ssm_state_size", 128),
            step_limits=(fields.number("time_step_min", 0.001), math.inf),
        )
        changed = {
            "recurrent": recurrent,
            "mlp_bias": fields.flag("mlp_bias", False),
            "unrotated_layers": frozenset(range(len(kinds))),
        }
        shared = {field.name: getattr(common, field.name) for field in dataclasses.fields(common)}
        return NemotronHConfig(**(shared | changed), kinds=kinds)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        raise no_gguf(file)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {"embeddings": "embed_tokens", "norm_f": "norm"}
        return Layout(old_base="backbone", names=names, cut=mamba_rows(config, "mixer"))

    def load_layer(self, load: LayerLoader) -> NemotronHLayer:
        kind = self.config.kinds[load.index]
        return NemotronHLayer(
            norm=load.rms_norm("norm"),
            mixer=load_mamba(load, "mixer") if kind == "mamba" else None,
            attention=load.attention(name="mixer") if kind == "attention" else None,
            mlp=load.plain_mlp("mixer") if kind == "mlp" else None,
        )

    def run_layer(
        self, layer: NemotronHLayer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        if layer.mixer is not None:
            layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
        elif layer.attention is not None:
            layer.attention.add_to(ops, residual, layer.norm, cache.kv, batch)
        elif layer.mlp is not None:
            residual += layer.mlp(ops, layer.norm(ops, residual))


def _kinds(fields: Fields) -> tuple[str, ...]:
    listed = fields.raw("layers_block_type") or fields.raw("layer_types")
    if listed is None:
        pattern = fields.text("hybrid_override_pattern", "")
        listed = [KINDS.get(letter, letter) for letter in pattern]
    kinds = tuple(OTHER_NAMES.get(str(kind), str(kind)) for kind in listed)
    if "moe" in kinds:
        raise ModelLoadError(
            "Nemotron-H with a mixture of experts is not native: its experts have no gate.",
            hint="Take a Nemotron-H model without experts.",
        )
    unknown = set(kinds) - set(KINDS.values())
    if unknown or not kinds:
        raise ModelLoadError(f"{fields.where} has layers of an unknown kind: {sorted(unknown) or 'none'}.")
    return kinds
