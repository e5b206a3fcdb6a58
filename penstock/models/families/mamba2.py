"""Mamba-2: every layer is a state-space layer, and there is no attention, no MLP and no limit of positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig, RopeConfig
from penstock.models.gguf_config import fields_without_attention
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_states import gguf_mamba_config, gguf_mamba_layout
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import Layout
from penstock.models.mamba2 import Mamba2Mixer, load_mamba, mamba_rows, step_limits
from penstock.models.recurrent import HybridDecoder, LayerCache

MAX_POSITIONS = 1 << 15  # the model has no limit; requests need one
MAMBA_NAMES = {"embeddings": "embed_tokens", "norm_f": "norm"}


def config_without_attention(
    fields: Fields, name: str, recurrent: RecurrentConfig, *, num_shares: int, is_tied: bool
) -> ArchitectureConfig:
    """Read the settings of a model of state-space layers alone, which up to `num_shares` ranks can share out.
    `is_tied` says whether embedding and head are one matrix where the file does not say."""
    hidden, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    bos_token_ids = fields.token_ids("bos_token_id")
    return ArchitectureConfig(
        architecture=name,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_layers=num_layers,
        # There is no attention: these heads only bound the number of ranks of the model.
        num_heads=num_shares,
        num_kv_heads=num_shares,
        head_dim=2,
        vocab_size=fields.integer("vocab_size"),
        max_positions=MAX_POSITIONS,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        rope=RopeConfig(10_000.0),
        windows=(None,) * num_layers,
        attention_scale=1.0,
        recurrent=recurrent,
        tie_embeddings=fields.flag("tie_word_embeddings", is_tied),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        checkpoint_dtype=fields.raw("dtype") or fields.raw("torch_dtype"),
    )


@dataclass(frozen=True, slots=True)
class MambaLayer:
    norm: RMSNorm
    mixer: Mamba2Mixer
    attention: None = None


class Mamba2(HybridDecoder):
    name = "mamba2"
    huggingface_names = ("Mamba2ForCausalLM", "mamba2")
    gguf_names = ("mamba2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields.require_silu()
        num_heads, has_bias = fields.integer("num_heads", 128), fields.flag("use_bias", False)
        recurrent = RecurrentConfig(
            layers=frozenset(range(fields.integer("num_hidden_layers"))),
            conv_width=fields.integer("conv_kernel", 4),
            conv_bias=fields.flag("use_conv_bias", True),
            bias=has_bias,
            output_bias=has_bias,
            num_heads=num_heads,
            head_dim=fields.integer("head_dim", 64),
            num_groups=fields.integer("n_groups", 8),
            state_size=fields.integer("state_size", 128),
            step_limits=step_limits(fields),
        )
        return config_without_attention(fields, cls.name, recurrent, num_shares=num_heads, is_tied=False)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        recurrent = gguf_mamba_config(file)
        return config_without_attention(
            fields_without_attention(file),
            cls.name,
            recurrent,
            num_shares=recurrent.num_heads,
            is_tied=False,
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_mamba_layout(config, "mixer", {"attn_norm": "norm"})

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(base="backbone", names=MAMBA_NAMES, cut=mamba_rows(config, "mixer"))

    def load_layer(self, load: LayerLoader) -> MambaLayer:
        return MambaLayer(norm=load.rms_norm("norm"), mixer=load_mamba(load, "mixer"))

    def run_layer(
        self, layer: MambaLayer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
