"""Encoders with the layers of decoders, without a causal mask: EuroBERT with Llama's, and EmbeddingGemma with those
of Gemma 3, whose windows reach to both sides of a token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import PackedLinear
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.encoders.base import Encoder, EncoderConfig, Texts, attend, rotated
from penstock.models.families.gemma import Gemma3
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.pooling_head import Head
from penstock.models.rope import rope_table
from penstock.models.weights import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderEncoderConfig(EncoderConfig):
    decoder: ArchitectureConfig  # the settings that are the same as a decoder's


def _settings(decoder: ArchitectureConfig, activation: str) -> DecoderEncoderConfig:
    return DecoderEncoderConfig(
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_layers=decoder.num_layers,
        num_heads=decoder.num_heads,
        vocab_size=decoder.vocab_size,
        max_text_len=decoder.max_positions,
        norm_eps=decoder.norm_eps,
        activation=activation,
        decoder=decoder,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: PackedLinear
    head_norms: tuple[Tensor, ...] | None  # of queries and of keys
    output: PackedLinear
    after_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    after_mlp_norm: Tensor | None
    window: int | None  # tokens on each side


class EuroBert(Encoder):
    name = "eurobert"
    huggingface_names: ClassVar[tuple[str, ...]] = (
        "EuroBertModel",
        "EuroBertForMaskedLM",
        "EuroBertForSequenceClassification",
    )
    prefixes = ("model.",)
    first_tensor = "embed_tokens.weight"
    mlp_norm_name: ClassVar[str] = "post_attention_layernorm"
    is_sandwich: ClassVar[bool] = False  # norms also after attention and MLP, and of query and key heads
    config: DecoderEncoderConfig

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderEncoderConfig:
        fields = fields.with_usual(max_position_embeddings=8192, rms_norm_eps=1e-5)
        decoder = common_huggingface_config(fields, cls.name, attention_bias=False, mlp_bias=False)
        return _settings(decoder, fields.text("hidden_act", "silu"))

    def forward(self, texts: Texts) -> Tensor:
        config, linear = self.config.decoder, self._ops.linear
        heads, kv_heads = config.num_heads, config.num_kv_heads
        whole, nearby = self._whole_rope[texts.positions], self._local_rope[texts.positions]
        x = self._embed(texts)
        for layer in self._layers:
            table = whole if layer.window is None else nearby
            states = linear(self._normed(x, layer.attention_norm), layer.qkv)
            states = states.unflatten(1, (heads + 2 * kv_heads, -1))
            query, key, value = states.split([heads, kv_heads, kv_heads], dim=1)
            if layer.head_norms is not None:
                query, key = map(self._head_normed, (query, key), layer.head_norms)
            query, key = rotated(query, table), rotated(key, table)
            attended = attend(query, key, value, texts, scale=config.attention_scale, window=layer.window)
            x = x + self._normed(linear(attended, layer.output), layer.after_attention_norm)
            gate, up = linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            made = linear(texts.each(self._activation, gate) * up, layer.down)
            x = x + self._normed(made, layer.after_mlp_norm)
        return self._normed(x, self._final_norm)

    def _embed(self, texts: Texts) -> Tensor:
        return self._words[texts.token_ids]

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self.config.norm_eps)

    def _head_normed(self, heads: Tensor, weight: Tensor) -> Tensor:
        return self._normed(heads.flatten(0, 1).contiguous(), weight).view(heads.shape)

    def _load(self, loader: WeightLoader) -> None:
        config, device = self.config.decoder, loader.ops.device
        name = f"{self._prefix}{self.first_tensor}"
        self._words = loader.table(name, config.vocab_size, config.hidden_size)
        self._whole_rope, self._local_rope = (
            rope_table(rope, config.head_dim, config.max_positions).to(device)
            for rope in (config.rope, config.local_rope or config.rope)
        )
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]
        self._final_norm = self._vector("norm", config.hidden_size, loader)

    def _vector(self, name: str, size: int, loader: WeightLoader) -> Tensor:
        return loader.vector(f"{self._prefix}{name}.weight", size, plus=self.config.decoder.norm_offset)

    def _load_layer(self, index: int, loader: WeightLoader) -> _Layer:
        config, layer = self.config.decoder, f"layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        window = config.windows[index]

        def linear(part: str, names: str, rows: list[int], columns: int, bias: bool) -> PackedLinear:
            stored = [f"{self._prefix}{layer}.{part}.{name}_proj" for name in names.split()]
            return loader.linear(stored, rows, columns, bias=bias)

        def norm(name: str, size: int = hidden) -> Tensor:
            return self._vector(f"{layer}.{name}", size, loader)

        head_norms = after_attention = after_mlp = None
        if self.is_sandwich:
            after_attention, after_mlp = norm("post_attention_layernorm"), norm("post_feedforward_layernorm")
            head_norms = tuple(norm(f"self_attn.{part}_norm", config.head_dim) for part in "qk")
        return _Layer(
            attention_norm=norm("input_layernorm"),
            qkv=linear("self_attn", "q k v", [queries, keys, keys], hidden, config.qkv_bias),
            head_norms=head_norms,
            output=linear("self_attn", "o", [hidden], queries, config.output_bias),
            after_attention_norm=after_attention,
            mlp_norm=norm(self.mlp_norm_name),
            gate_up=linear("mlp", "gate up", [inner] * 2, hidden, config.mlp_bias),
            down=linear("mlp", "down", [hidden], inner, config.mlp_bias),
            after_mlp_norm=after_mlp,
            window=None if window is None else window // 2,
        )

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        raise ModelLoadError("Classifiers of EuroBERT label each token first, which is not supported.")


class EmbeddingGemma(EuroBert):
    name = "embedding_gemma"
    huggingface_names = ("Gemma3TextModel",)  # of which those with `use_bidirectional_attention` are encoders
    mlp_norm_name = "pre_feedforward_layernorm"
    is_sandwich = True

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderEncoderConfig:
        # A decoder would refuse the setting.
        decoder = Gemma3.config_from_huggingface(fields.changed(use_bidirectional_attention=False))
        if decoder.attention_softcap is not None:
            raise ModelLoadError(f"{fields.where} caps attention, which this encoder does not.")
        if fields.flag("norms_hold_one", False):  # as in GGUF files
            decoder = dataclasses.replace(decoder, norm_offset=0.0)
        return _settings(decoder, fields.text("hidden_activation", "gelu_pytorch_tanh"))

    def _embed(self, texts: Texts) -> Tensor:
        scale: float = self.config.hidden_size**0.5
        return super()._embed(texts) * scale

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        raise ModelLoadError("No classifier of EmbeddingGemma is known.")
