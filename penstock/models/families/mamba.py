"""Mamba 1 and Falcon Mamba: every layer is a state-space layer, and there is no attention and no MLP. Falcon Mamba
norms the steps, writes and reads of its scans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.families.mamba2 import MAMBA_NAMES, config_without_attention
from penstock.models.gguf_config import fields_without_attention, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_states import gguf_mamba1_config, gguf_mamba_layout
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import Layout
from penstock.models.mamba1 import Mamba1Mixer, load_mamba1, mamba1_config, mamba1_rows
from penstock.models.recurrent import HybridDecoder, LayerCache

_SELECTION_EPS = 1e-6  # of Falcon Mamba's norms, where files do not say


@dataclass(frozen=True, slots=True)
class MambaLayer:
    norm: RMSNorm
    mixer: Mamba1Mixer
    attention: None = None


class Mamba(HybridDecoder):
    name = "mamba"
    huggingface_names: ClassVar[tuple[str, ...]] = ("MambaForCausalLM", "mamba")
    gguf_names: ClassVar[tuple[str, ...]] = ("mamba",)
    norms_selection: ClassVar[bool] = False

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        eps = fields.number("mixer_rms_eps", _SELECTION_EPS) if cls.norms_selection else None
        layers = frozenset(range(fields.integer("num_hidden_layers")))
        recurrent = mamba1_config(fields, layers, selection_eps=eps)
        return config_without_attention(
            fields, cls.name, recurrent, num_shares=recurrent.num_channels, is_tied=True
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        norms_selection = metadata_fields(file).flag("ssm.dt_b_c_rms", False)
        recurrent = gguf_mamba1_config(file, _SELECTION_EPS if norms_selection else None)
        fields = fields_without_attention(file)
        return config_without_attention(
            fields, cls.name, recurrent, num_shares=recurrent.num_channels, is_tied=True
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_mamba_layout(config, "mixer", {"attn_norm": "norm"})

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(base="backbone", names=MAMBA_NAMES, cut=mamba1_rows(config, "mixer"))

    def load_layer(self, load: LayerLoader) -> MambaLayer:
        return MambaLayer(norm=load.rms_norm("norm"), mixer=load_mamba1(load, "mixer"))

    def run_layer(
        self, layer: MambaLayer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)


class FalconMamba(Mamba):
    name = "falcon_mamba"
    huggingface_names = ("FalconMambaForCausalLM", "falcon_mamba")
    gguf_names = ()  # files name "mamba", and a setting tells
    norms_selection = True
