"""EuroBERT: the layers of Llama without a causal mask."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import PackedLinear
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.encoders.base import Encoder, EncoderConfig, Texts, attend, rotated
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.pooling_head import Head
from penstock.models.rope import rope_table
from penstock.models.weights import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class EuroBertConfig(EncoderConfig):
    decoder: ArchitectureConfig  # the settings that are the same as Llama's
    attention_bias: bool
    mlp_bias: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class EuroBert(Encoder):
    name = "eurobert"
    huggingface_names = ("EuroBertModel", "EuroBertForMaskedLM", "EuroBertForSequenceClassification")
    prefixes = ("model.",)
    first_tensor = "embed_tokens.weight"
    config: EuroBertConfig

    @classmethod
    def read_config(cls, fields: Fields) -> EuroBertConfig:
        fields = Fields(
            {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, **fields.values}, fields.where
        )
        decoder = common_huggingface_config(fields, cls.name)
        return EuroBertConfig(
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.intermediate_size,
            num_layers=decoder.num_layers,
            num_heads=decoder.num_heads,
            vocab_size=decoder.vocab_size,
            max_text_len=decoder.max_positions,
            norm_eps=decoder.norm_eps,
            activation=fields.text("hidden_act", "silu"),
            decoder=decoder,
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
        )

    def forward(self, texts: Texts) -> Tensor:
        config, eps = self.config.decoder, self.config.norm_eps
        linear, rms_norm = self._ops.linear, self._ops.rms_norm
        heads, kv_heads = config.num_heads, config.num_kv_heads
        table = self._rope[texts.positions]
        x = self._words[texts.token_ids]
        for layer in self._layers:
            states = linear(rms_norm(x, layer.attention_norm, eps), layer.qkv)
            states = states.unflatten(1, (heads + 2 * kv_heads, -1))
            query, key, value = states.split([heads, kv_heads, kv_heads], dim=1)
            attended = attend(rotated(query, table), rotated(key, table), value, texts)
            x = x + linear(attended, layer.output)
            gate, up = linear(rms_norm(x, layer.mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(texts.each(self._activation, gate) * up, layer.down)
        return rms_norm(x, self._final_norm, eps)

    def _load(self, loader: WeightLoader) -> None:
        config = self.config.decoder
        name = f"{self._prefix}{self.first_tensor}"
        self._words = loader.table(name, config.vocab_size, config.hidden_size)
        self._rope = rope_table(config.rope, config.head_dim, config.max_positions).to(loader.ops.device)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]
        self._final_norm = loader.vector(f"{self._prefix}norm.weight", config.hidden_size)

    def _load_layer(self, index: int, loader: WeightLoader) -> _Layer:
        config, prefix = self.config.decoder, f"{self._prefix}layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(names: list[str], rows: list[int], columns: int, bias: bool) -> PackedLinear:
            return loader.linear([f"{prefix}.{name}_proj" for name in names], rows, columns, bias=bias)

        attends, mlp = self.config.attention_bias, self.config.mlp_bias
        parts = [f"self_attn.{part}" for part in "qkv"]
        return _Layer(
            attention_norm=loader.vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=linear(parts, [queries, keys, keys], hidden, attends),
            output=linear(["self_attn.o"], [hidden], queries, attends),
            mlp_norm=loader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=linear(["mlp.gate", "mlp.up"], [inner] * 2, hidden, mlp),
            down=linear(["mlp.down"], [hidden], inner, mlp),
        )

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        raise ModelLoadError("Classifiers of EuroBERT label each token first, which is not supported.")
