"""Decoders whose layers are Mamba-2 or attention, each before an MLP: Bamba, and Granite 4, whose
residual is scaled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields
from penstock.models.experts import GRANITE_EXPERTS, ExpertMLP, add_mlp, load_experts, num_experts
from penstock.models.families.granite import with_gguf_scales
from penstock.models.gguf_config import gguf_experts, has_experts, hybrid_gguf_config, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_states import gguf_mamba_config, gguf_mamba_layout
from penstock.models.huggingface_config import common_huggingface_config, layer_kinds
from penstock.models.layers import Attention, GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout, fused_rows, rotated_rows
from penstock.models.mamba2 import Mamba2Mixer, load_mamba, mamba_config, mamba_rows
from penstock.models.recurrent import HybridDecoder, LayerCache


@dataclass(frozen=True, slots=True)
class BambaLayer:
    norm: RMSNorm
    attention: Attention | None
    mixer: Mamba2Mixer | None
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP


class Bamba(HybridDecoder):
    name = "bamba"
    huggingface_names = ("BambaForCausalLM", "bamba")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = Fields({**fields.values, "partial_rotary_factor": 0.5}, fields.where)
        config = common_huggingface_config(fields, cls.name)
        has_bias = fields.flag("attention_bias", False)
        attends = fields.token_ids("attn_layer_indices")
        layers = frozenset(range(config.num_layers)) - frozenset(attends)
        return dataclasses.replace(
            config,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", False),
            recurrent=mamba_config(fields, layers, config.hidden_size),
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "final_layernorm": "norm",
            "pre_ff_layernorm": "post_attention_layernorm",
            "feed_forward": "mlp",
        }
        return Layout(names=names, cut=mamba_rows(config, "mamba"), rows=rotated_rows(config))

    def load_layer(self, load: LayerLoader) -> BambaLayer:
        config = self.config
        is_mamba = config.recurrent is not None and load.index in config.recurrent.layers
        return BambaLayer(
            norm=load.rms_norm("input_layernorm"),
            attention=None if is_mamba else load.attention(),
            mixer=load_mamba(load) if is_mamba else None,
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp() if config.experts is None else load_experts(load),
        )

    def run_layer(
        self, layer: BambaLayer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        scale = self.config.residual_scale
        if scale == 1.0:
            if layer.attention is not None:
                layer.attention.add_to(ops, residual, layer.norm, cache.kv, batch)
            elif layer.mixer is not None:
                layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
            add_mlp(ops, residual, layer.mlp_norm, layer.mlp)
            return
        normed = layer.norm(ops, residual)
        if layer.attention is not None:
            residual.add_(layer.attention(ops, normed, cache.kv, batch), alpha=scale)
        elif layer.mixer is not None:
            residual.add_(layer.mixer(ops, normed, cache.states, batch), alpha=scale)
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)), alpha=scale)


class GraniteHybrid(Bamba):
    """Granite 4. The smallest models have attention in all layers."""

    name = "granitemoehybrid"
    huggingface_names = ("GraniteMoeHybridForCausalLM", "granitemoehybrid")
    gguf_names = ("granitehybrid",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        shared_size = fields.integer("shared_intermediate_size", 1024)
        inner_size = fields.integer("intermediate_size", shared_size)
        fields = Fields({**fields.values, "intermediate_size": shared_size}, fields.where)
        config = common_huggingface_config(fields, cls.name)
        num_layers, has_bias = config.num_layers, fields.flag("attention_bias", False)
        known = {"linear_attention", "mamba", "full_attention", "attention"}
        kinds = layer_kinds(fields, num_layers, known) or ("mamba",) * num_layers
        layers = frozenset(index for index, kind in enumerate(kinds) if kind in ("linear_attention", "mamba"))
        experts = None
        if fields.raw("num_local_experts"):
            experts = ExpertsConfig(
                count=fields.integer("num_local_experts"),
                per_token=fields.integer("num_experts_per_tok"),
                intermediate_size=inner_size,
                normalizes=True,  # the softmax of the chosen logits
                shared_intermediate_size=shared_size,
            )
        rotates = fields.raw("position_embedding_type") == "rope"
        return dataclasses.replace(
            config,
            qkv_bias=has_bias,
            output_bias=has_bias,
            attention_scale=fields.number("attention_multiplier", 1.0),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            logit_scale=1.0 / fields.number("logits_scaling", 1.0),
            unrotated_layers=frozenset() if rotates else frozenset(range(num_layers)),
            recurrent=mamba_config(fields, layers, config.hidden_size) if layers else None,
            experts=experts,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = hybrid_gguf_config(file, cls.name, has_rope=False), metadata_fields(file)
        if fields.flag("rope.scaling.finetuned", True):  # the setting says whether there is rope at all
            raise ModelLoadError(
                f"{file.path.name} is a hybrid with rope, as Bamba is, which is read from safetensors only.",
                hint="Give the folder of the original checkpoint.",
            )
        return dataclasses.replace(
            with_gguf_scales(config, file),
            recurrent=gguf_mamba_config(file),
            experts=gguf_experts(file, config, normalizes=True) if has_experts(file) else None,
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_mamba_layout(config, "mamba")

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        mlp = "mlp" if config.experts is None else "mlp.shared_experts"
        names = {
            "shared_mlp.input_linear": f"{mlp}.gate_up_proj",
            "shared_mlp.output_linear": f"{mlp}.down_proj",
            "block_sparse_moe": "mlp",
            "router.layer": "gate",
        }
        halves = {f"{mlp}.{part}_proj": config.intermediate_size for part in ("gate", "up")}
        cut = fused_rows(f"{mlp}.gate_up_proj", halves)
        if config.recurrent is not None:
            cut |= mamba_rows(config, "mamba")
        return Layout(names=names, cut=cut, experts=GRANITE_EXPERTS, num_experts=num_experts(config))
