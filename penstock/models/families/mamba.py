"""State-space families: Mamba 1, Falcon Mamba and Mamba-2, whose layers have no attention and no MLP; and hybrids
with attention in some layers, each layer before an MLP: Jamba with Mamba 1, Bamba and Granite 4 with Mamba-2."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from penstock.core.errors import ModelLoadError
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, RecurrentConfig, RopeConfig
from penstock.models.experts import GRANITE_EXPERTS
from penstock.models.families.llama import with_gguf_scales, with_scales
from penstock.models.gguf_config import (
    fields_without_attention,
    gguf_experts,
    has_experts,
    has_tensor,
    hybrid_gguf_config,
    metadata_fields,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_states import gguf_mamba1_config, gguf_mamba_config, gguf_mamba_layout
from penstock.models.huggingface_config import common_huggingface_config, layer_kinds, layers_of_kind
from penstock.models.layers import LayerLoader
from penstock.models.layout import Layout, StoredRows, fused_rows
from penstock.models.mamba import (
    BAMBA_NAMES,
    Mamba1Mixer,
    Mamba2Mixer,
    load_mamba,
    load_mamba1,
    mamba1_config,
    mamba1_rows,
    mamba_config,
    mamba_rows,
    step_limits,
)
from penstock.models.recurrent import HybridDecoder, HybridLayer

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


class Mamba2(HybridDecoder):
    name = "mamba2"
    huggingface_names = ("Mamba2ForCausalLM", "mamba2")
    gguf_names = ("mamba2",)
    stored_base = "backbone"
    stored_names = MAMBA_NAMES

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

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return mamba_rows(config, "mixer")

    def load_layer(self, load: LayerLoader) -> HybridLayer:
        return HybridLayer(load.rms_norm("norm"), None, load_mamba(load, "mixer"))


_SELECTION_EPS = 1e-6  # of Falcon Mamba's norms, where files do not say


class Mamba(HybridDecoder):
    name = "mamba"
    huggingface_names: ClassVar[tuple[str, ...]] = ("MambaForCausalLM", "mamba")
    gguf_names: ClassVar[tuple[str, ...]] = ("mamba",)
    stored_base = "backbone"
    stored_names = MAMBA_NAMES
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

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return mamba1_rows(config, "mixer")

    def load_layer(self, load: LayerLoader) -> HybridLayer:
        return HybridLayer(load.rms_norm("norm"), None, load_mamba1(load, "mixer"))


class FalconMamba(Mamba):
    name = "falcon_mamba"
    huggingface_names = ("FalconMambaForCausalLM", "falcon_mamba")
    gguf_names = ()  # files name "mamba", and a setting tells
    norms_selection = True


NAMES = {
    "final_layernorm": "norm",
    "pre_ff_layernorm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "mlp.router": "mlp.gate",
}


_CONTEXT = 262144  # tokens


class Jamba(HybridDecoder):
    name = "jamba"
    huggingface_names = ("JambaForCausalLM", "jamba")
    gguf_names = ("jamba",)
    stored_names = NAMES

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        # The first files state the context under another name, or leave it to the class.
        context = fields.raw("n_ctx") or _CONTEXT
        context = fields.integer("max_position_embeddings", context)
        config = super().config_from_huggingface(fields.changed(max_position_embeddings=context))
        every = frozenset(range(config.num_layers))
        attends = _layers(fields, "attn_layer", config.num_layers, period=8, offset=4)
        experts = None
        if fields.integer("num_experts", 16) > 1:
            experts = ExpertsConfig(
                count=fields.integer("num_experts", 16),
                per_token=fields.integer("num_experts_per_tok", 2),
                intermediate_size=config.intermediate_size,
                normalizes=False,
                dense_layers=every - _layers(fields, "expert_layer", config.num_layers, period=2, offset=1),
            )
        return dataclasses.replace(
            config,
            unrotated_layers=every,
            recurrent=mamba1_config(fields, every - attends, prefix="mamba_", selection_eps=config.norm_eps),
            experts=experts,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = hybrid_gguf_config(file, cls.name, has_rope=False)
        mixes = has_tensor(file, "ffn_gate_inp.weight")  # files without experts may still count one
        return dataclasses.replace(
            config,
            recurrent=gguf_mamba1_config(file, config.norm_eps),
            experts=gguf_experts(file, config, normalizes=False) if mixes else None,
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_mamba_layout(config, "mamba")

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return mamba1_rows(config, "mamba")

    def load_mixer(self, load: LayerLoader) -> Mamba1Mixer:
        return load_mamba1(load, "mamba")


def _layers(fields: Fields, name: str, num_layers: int, *, period: int, offset: int) -> frozenset[int]:
    """Return the layers that come back after each period."""
    period = fields.integer(f"{name}_period", period)
    first = fields.raw(f"{name}_offset")
    first = offset if first is None else first
    return frozenset(index for index in range(num_layers) if index % period == first)


class Bamba(HybridDecoder):
    name = "bamba"
    huggingface_names = ("BambaForCausalLM", "bamba")
    attention_bias = False
    mlp_bias: ClassVar[bool | None] = False
    stored_names = BAMBA_NAMES

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields.changed(partial_rotary_factor=0.5))
        layers = frozenset(range(config.num_layers)) - frozenset(fields.token_ids("attn_layer_indices"))
        return dataclasses.replace(config, recurrent=mamba_config(fields, layers, config.hidden_size))

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return mamba_rows(config, "mamba")

    def load_mixer(self, load: LayerLoader) -> Mamba2Mixer:
        return load_mamba(load)


class GraniteHybrid(Bamba):
    """Granite 4. The smallest models have attention in all layers."""

    name = "granitemoehybrid"
    huggingface_names = ("GraniteMoeHybridForCausalLM", "granitemoehybrid")
    gguf_names = ("granitehybrid",)
    stacked_experts = GRANITE_EXPERTS

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        shared_size = fields.integer("shared_intermediate_size", 1024)
        inner_size = fields.integer("intermediate_size", shared_size)
        config = common_huggingface_config(
            fields.changed(intermediate_size=shared_size), cls.name, attention_bias=False
        )
        num_layers = config.num_layers
        known = {"linear_attention", "mamba", "full_attention", "attention"}
        kinds = layer_kinds(fields, num_layers, known) or ("mamba",) * num_layers
        layers = layers_of_kind(kinds, "linear_attention", "mamba")
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
            with_scales(config, fields),
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
        return Layout(names=names, cut=cut, experts=cls.stacked_experts, num_experts=config.num_experts)
