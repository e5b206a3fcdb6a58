"""ModernBERT: norms before each half of a layer, positions by rotation, and windows on most layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import PackedLinear
from penstock.models.config import Fields, RopeConfig
from penstock.models.encoders.base import Encoder, EncoderConfig, Texts, attend, rotated
from penstock.models.huggingface_config import layer_windows, rope_config, rope_parameters
from penstock.models.pooling_head import Head, LayerNorm, dense_layer
from penstock.models.rope import rope_table
from penstock.models.weights import WeightLoader

_WHOLE_THETA = 160_000.0
_LOCAL_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    rope: RopeConfig
    local_rope: RopeConfig
    windows: tuple[int | None, ...]  # tokens on each side that a layer attends to; None: all
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    classifier_bias: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: LayerNorm | None  # the first layer reads the normed embedding as it is
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: LayerNorm
    up: PackedLinear
    down: PackedLinear
    window: int | None


class ModernBert(Encoder):
    name = "modernbert"
    huggingface_names = ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification")
    prefixes = ("model.",)
    first_tensor = "embeddings.tok_embeddings.weight"
    config: ModernBertConfig

    @classmethod
    def read_config(cls, fields: Fields) -> ModernBertConfig:
        if fields.text("classifier_activation", "gelu") != "gelu":
            raise ModelLoadError(f"{fields.where} asks for a classifier_activation other than gelu.")
        num_layers = fields.integer("num_hidden_layers")
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim = hidden_size // num_heads
        max_positions = fields.integer("max_position_embeddings", 8192)
        ropes = rope_parameters(fields)
        window = fields.integer("local_attention", 128) // 2
        windows = layer_windows(fields, num_layers, window)
        if windows is None:
            period = fields.integer("global_attn_every_n_layers", 3)
            windows = tuple(window if index % period else None for index in range(num_layers))

        def rope(kind: str, key: str, default: float) -> RopeConfig:
            theta = fields.number(key, default)
            given = ropes.get(kind) or {}
            return rope_config(given, fields, max_positions, head_dim=head_dim, default_theta=theta)

        return ModernBertConfig(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            vocab_size=fields.integer("vocab_size"),
            max_text_len=max_positions,
            norm_eps=fields.number("norm_eps", 1e-5),
            activation=fields.text("hidden_activation", "gelu"),
            rope=rope("full_attention", "global_rope_theta", _WHOLE_THETA),
            local_rope=rope("sliding_attention", "local_rope_theta", _LOCAL_THETA),
            windows=windows,
            norm_bias=fields.flag("norm_bias", False),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            classifier_bias=fields.flag("classifier_bias", False),
        )

    def forward(self, texts: Texts) -> Tensor:
        linear, heads = self._ops.linear, self.config.num_heads
        whole, nearby = self._whole_rope[texts.positions], self._local_rope[texts.positions]
        x = self._embedding_norm(self._words[texts.token_ids])
        for layer in self._layers:
            table = whole if layer.window is None else nearby
            normed = x if layer.attention_norm is None else layer.attention_norm(x)
            query, key, value = linear(normed, layer.qkv).unflatten(1, (3, heads, -1)).unbind(1)
            query, key = rotated(query, table), rotated(key, table)
            x = x + linear(attend(query, key, value, texts, window=layer.window), layer.output)
            inner, gate = linear(layer.mlp_norm(x), layer.up).chunk(2, dim=-1)
            x = x + linear(texts.each(self._activation, inner) * gate, layer.down)
        return self._final_norm(x)

    def _load(self, loader: WeightLoader) -> None:
        config, device = self.config, loader.ops.device
        head_dim = config.hidden_size // config.num_heads
        name = f"{self._prefix}{self.first_tensor}"
        self._words = loader.table(name, config.vocab_size, config.hidden_size)
        self._whole_rope = rope_table(config.rope, head_dim, config.max_text_len).to(device)
        self._local_rope = rope_table(config.local_rope, head_dim, config.max_text_len).to(device)
        self._embedding_norm = self._norm("embeddings.norm", loader, has_bias=config.norm_bias)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]
        self._final_norm = self._norm("final_norm", loader, has_bias=config.norm_bias)

    def _load_layer(self, index: int, loader: WeightLoader) -> _Layer:
        config = self.config
        hidden, inner, prefix = config.hidden_size, config.intermediate_size, f"layers.{index}"

        def linear(name: str, rows: int, columns: int, bias: bool) -> PackedLinear:
            return loader.linear([f"{self._prefix}{prefix}.{name}"], [rows], columns, bias=bias)

        def norm(name: str) -> LayerNorm:
            return self._norm(f"{prefix}.{name}", loader, has_bias=config.norm_bias)

        return _Layer(
            attention_norm=norm("attn_norm") if index else None,
            qkv=linear("attn.Wqkv", 3 * hidden, hidden, config.attention_bias),
            output=linear("attn.Wo", hidden, hidden, config.attention_bias),
            mlp_norm=norm("mlp_norm"),
            up=linear("mlp.Wi", 2 * inner, hidden, config.mlp_bias),
            down=linear("mlp.Wo", hidden, inner, config.mlp_bias),
            window=config.windows[index],
        )

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        config, hidden = self.config, self.config.hidden_size
        bias = loader.vector("head.norm.bias", hidden) if config.norm_bias else None
        steps = (
            dense_layer(loader, "head.dense", (hidden, hidden), "gelu", has_bias=config.classifier_bias),
            LayerNorm(loader.vector("head.norm.weight", hidden), bias, config.norm_eps),
            dense_layer(loader, "classifier", (num_labels, hidden)),
        )
        return Head(steps, num_labels)
