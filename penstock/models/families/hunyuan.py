"""Hunyuan 1, dense (0.5B to 7B, and Hunyuan-MT) and with experts (A13B): norms on query and key heads after these are
rotated, and angles that a factor of the base stretches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, NotNative, RopeConfig
from penstock.models.decoder import BlockDecoder
from penstock.models.huggingface_config import rope_parameters
from penstock.models.layers import Attention, LayerLoader, RMSNorm
from penstock.models.rope import identity_table
from penstock.models.weights import WeightLoader

_NAMES = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}


@dataclass(frozen=True, slots=True)
class NormedAfterRope:
    """Attention whose query and key heads are rotated, and then normed."""

    inner: Attention  # whose own table rotates nothing
    rope: Tensor
    query_norm: RMSNorm
    key_norm: RMSNorm

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        layer = self.inner.layer
        made = ops.linear(x, self.inner.qkv).view(len(x), -1, layer.head_dim)
        num_rotated = layer.num_heads + layer.num_kv_heads
        cosines, sines = self.rope[batch.positions].unsqueeze(1).chunk(2, dim=2)
        first, second = made[:, :num_rotated].float().chunk(2, dim=2)
        rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=2)
        rotated = rotated.to(x.dtype)
        parts = (
            self._normed(ops, self.query_norm, rotated[:, : layer.num_heads]),
            self._normed(ops, self.key_norm, rotated[:, layer.num_heads :]),
            made[:, num_rotated:].flatten(1),
        )
        attended = ops.attend(torch.cat(parts, dim=1), layer, cache, batch)
        return ops.add_up(ops.linear(attended, self.inner.output))

    def _normed(self, ops: Ops, norm: RMSNorm, heads: Tensor) -> Tensor:
        return norm(ops, heads.reshape(-1, heads.shape[2])).view(len(heads), -1)


class HunyuanDense(BlockDecoder):
    name = "hunyuan_v1_dense"
    huggingface_names: ClassVar[tuple[str, ...]] = ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")
    gguf_names: ClassVar[tuple[str, ...]] = ("hunyuan-dense",)
    attention_bias = False
    stored_names: ClassVar[Mapping[str, str]] = _NAMES

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        self._unrotated = identity_table(config.head_dim, max_model_len).to(loader.ops.device)
        super().__init__(config, loader, max_model_len)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        rope = Fields(rope_parameters(fields), fields.where)
        if rope.text("rope_type", rope.text("type", "default")) == "dynamic" and rope.has("alpha"):
            stretch = rope.number("alpha") ** (config.head_dim / (config.head_dim - 2))
            config = dataclasses.replace(config, rope=RopeConfig(config.rope.theta * stretch))
        return config

    def load_attention(self, load: LayerLoader) -> NormedAfterRope:
        plain, size, eps = load.attention(), self.config.head_dim, self.config.norm_eps
        norms = (
            RMSNorm(load.weights.vector(f"{load.prefix}.self_attn.{part}_norm.weight", size), eps)
            for part in "qk"
        )
        unrotated = dataclasses.replace(plain.layer, rope=self._unrotated)
        return NormedAfterRope(dataclasses.replace(plain, layer=unrotated), load.rope, *norms)


class HunyuanMoe(HunyuanDense):
    name = "hunyuan_v1_moe"
    huggingface_names = ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe")
    gguf_names = ("hunyuan-moe",)
    gguf_experts_normalize = True
    stored_names: ClassVar[Mapping[str, str]] = {
        "mlp.gate.wg": "mlp.gate",
        "mlp.shared_mlp": "mlp.shared_experts",
        **_NAMES,
    }

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        experts = ExpertsConfig(
            count=_of_all_layers(fields, "num_experts"),
            per_token=_of_all_layers(fields, "moe_topk"),
            intermediate_size=config.intermediate_size,
            normalizes=True,
            shared_intermediate_size=config.intermediate_size,
        )
        return dataclasses.replace(config, experts=experts)


def _of_all_layers(fields: Fields, key: str) -> int:
    """Read a number that a file may list for each layer."""
    listed = fields.raw(key)
    if not isinstance(listed, list) or not listed:
        return fields.integer(key)
    if any(each != listed[0] for each in listed):
        raise NotNative(f"{fields.where} has layers that differ in {key}.")
    return Fields({key: listed[0]}, fields.where).integer(key)
