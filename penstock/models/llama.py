"""Decoders with Llama's layers: Llama 2 and 3, and SmolLM2; Mistral, whose layers may have a window; Qwen 2 and 2.5,
with a bias on queries, keys and values; Qwen 3, with norms on queries and keys. Mixtral, Qwen 2 MoE and Qwen 3 MoE
are the same with a mixture of experts; Qwen 2 MoE has one more expert for every token."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from penstock.kernels.interface import Routing
from penstock.models.config import (
    ArchitectureConfig,
    ExpertsConfig,
    Fields,
    common_gguf_config,
    common_huggingface_config,
    mixture_in_gguf,
    qwen_windows,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import GGUFLayout
from penstock.models.layers import ExpertMLP, GatedMLP, PreNormDecoder, SharedExpert
from penstock.models.weights import ExpertNames, WeightLoader


class Llama(PreNormDecoder):
    name = "llama"
    huggingface_names = ("LlamaForCausalLM", "llama")
    gguf_names: ClassVar[tuple[str, ...]] = ("llama",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return common_gguf_config(file, cls.name)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> GGUFLayout:
        return GGUFLayout(interleaved_heads={"attn_q": config.num_heads, "attn_k": config.num_kv_heads})


class Mistral(Llama):
    """GGUF files call these models "llama" too, and never had their windows."""

    name = "mistral"
    huggingface_names = ("MistralForCausalLM", "mistral")
    gguf_names = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name)
        # The first release has the key; later ones set it to null to say that there is no window.
        if not fields.has("sliding_window"):
            return config
        window = fields.integer("sliding_window")
        return dataclasses.replace(config, windows=(window,) * config.num_layers)


class Qwen2(PreNormDecoder):
    name = "qwen2"
    huggingface_names = ("Qwen2ForCausalLM", "qwen2")
    gguf_names = ("qwen2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name)
        return qwen_windows(fields, dataclasses.replace(config, qkv_bias=True))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(common_gguf_config(file, cls.name), qkv_bias=True)


_DEFAULT_HEAD_DIM = 128  # not hidden size / heads


class Qwen3(PreNormDecoder):
    name = "qwen3"
    huggingface_names = ("Qwen3ForCausalLM", "qwen3")
    gguf_names = ("qwen3",)
    has_head_norms = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        head_dim = fields.integer("head_dim", _DEFAULT_HEAD_DIM)
        config = dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            head_dim=head_dim,
            attention_scale=head_dim**-0.5,
            qkv_bias=has_bias,
            output_bias=has_bias,
        )
        return qwen_windows(fields, config)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return common_gguf_config(file, cls.name)


class ExpertDecoder(PreNormDecoder):
    """A decoder whose layers hold experts. `expert_parts` are the names of gate, up and down within an expert."""

    experts_name: ClassVar[str] = "mlp"
    expert_parts: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        raise mixture_in_gguf(file)

    def _load_mlp(self, prefix: str, index: int, loader: WeightLoader) -> GatedMLP | ExpertMLP:
        config, experts = self.config, self.config.experts
        assert experts is not None
        if index in experts.dense_layers:
            return self._load_gated_mlp(prefix, loader)
        prefix = f"model.layers.{index}.{self.experts_name}"
        names = [
            ExpertNames(*(f"{prefix}.experts.{number}.{part}" for part in self.expert_parts))
            for number in range(experts.count)
        ]
        return ExpertMLP(
            router=loader.linear([f"{prefix}.gate"], [experts.count], config.hidden_size),
            experts=loader.experts(names, experts.intermediate_size, config.hidden_size),
            routing=Routing(experts.count, experts.per_token, experts.normalizes),
            shared=self._load_shared(prefix, experts, loader),
        )

    def _load_shared(self, prefix: str, experts: ExpertsConfig, loader: WeightLoader) -> SharedExpert | None:
        if experts.shared_intermediate_size is None:
            return None
        return SharedExpert(
            mlp=self._load_gated_mlp(f"{prefix}.shared_expert", loader, experts.shared_intermediate_size),
            gate=loader.linear([f"{prefix}.shared_expert_gate"], [1], self.config.hidden_size),
        )


class Mixtral(ExpertDecoder, Mistral):
    name = "mixtral"
    huggingface_names = ("MixtralForCausalLM", "mixtral")
    experts_name = "block_sparse_moe"
    expert_parts = ("w1", "w3", "w2")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        experts = ExpertsConfig(
            count=fields.integer("num_local_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            normalizes=True,
        )
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts)


class Qwen3MoE(ExpertDecoder, Qwen3):
    name = "qwen3_moe"
    huggingface_names = ("Qwen3MoeForCausalLM", "qwen3_moe")
    gguf_names = ("qwen3moe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        return dataclasses.replace(config, experts=_qwen_experts(fields, config.num_layers))


class Qwen2MoE(ExpertDecoder, Qwen2):
    name = "qwen2_moe"
    huggingface_names = ("Qwen2MoeForCausalLM", "qwen2_moe")
    gguf_names = ("qwen2moe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        experts = dataclasses.replace(
            _qwen_experts(fields, config.num_layers),
            shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        )
        return dataclasses.replace(config, qkv_bias=fields.flag("qkv_bias", True), experts=experts)


def _qwen_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    period = fields.integer("decoder_sparse_step", 1)
    listed = fields.token_ids("mlp_only_layers")
    return ExpertsConfig(
        # Newer files use Mixtral's name.
        count=fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalizes=fields.flag("norm_topk_prob", False),
        dense_layers=frozenset(
            index for index in range(num_layers) if index in listed or (index + 1) % period
        ),
    )
