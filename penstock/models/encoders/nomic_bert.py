"""NomicBERT: BERT's order of norms, with positions by rotation, gated MLPs and no biases in the layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import PackedLinear
from penstock.models.config import Fields, RopeConfig
from penstock.models.encoders.base import Encoder, EncoderConfig, Texts, attend, rotated
from penstock.models.huggingface_config import rope_config, rope_parameters
from penstock.models.pooling_head import Head, LayerNorm, dense_layer
from penstock.models.rope import rope_table
from penstock.models.weights import WeightLoader

_THETA = 1000.0
_FIXED = {
    "prenorm": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "activation_function": "swiglu",
}  # settings of the makers' own files, which may name variants that are not known here


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(EncoderConfig):
    rope: RopeConfig
    num_token_types: int


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: PackedLinear
    output: PackedLinear
    attention_norm: LayerNorm
    gate_up: PackedLinear
    down: PackedLinear
    output_norm: LayerNorm


class NomicBert(Encoder):
    name = "nomic_bert"
    huggingface_names = ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification")
    prefixes = ("nomic_bert.", "bert.")
    config: NomicBertConfig

    @classmethod
    def read_config(cls, fields: Fields) -> NomicBertConfig:
        for key, expected in _FIXED.items():
            if fields.has(key) and fields.raw(key) != expected:
                raise ModelLoadError(
                    f"{fields.where} has {key} = {fields.raw(key)!r}; known is {expected!r}."
                )
        is_own = fields.has("n_embd")  # the makers' files use GPT-2's names

        def integer(theirs: str, own: str, default: int | None = None) -> int:
            return fields.integer(own if is_own else theirs, default)

        hidden_size = integer("hidden_size", "n_embd")
        max_positions = integer("max_position_embeddings", "n_positions", 2048)
        num_heads = integer("num_attention_heads", "n_head")
        rope = rope_config(
            rope_parameters(fields),
            fields,
            max_positions,
            head_dim=hidden_size // num_heads,
            default_theta=fields.number("rotary_emb_base", _THETA),
        )
        return NomicBertConfig(
            hidden_size=hidden_size,
            intermediate_size=integer("intermediate_size", "n_inner", 4 * hidden_size),
            num_layers=integer("num_hidden_layers", "n_layer"),
            num_heads=num_heads,
            vocab_size=fields.integer("vocab_size"),
            max_text_len=max_positions,
            norm_eps=fields.number("layer_norm_epsilon" if is_own else "layer_norm_eps", 1e-12),
            activation=fields.text("hidden_act", "silu"),
            rope=rope,
            num_token_types=fields.integer("type_vocab_size", 2),
        )

    def forward(self, texts: Texts) -> Tensor:
        linear, heads = self._ops.linear, self.config.num_heads
        table = self._rope[texts.positions]
        types = self._types[texts.is_second.long().clamp(max=self.config.num_token_types - 1)]
        x = self._embedding_norm(self._words[texts.token_ids] + types)
        for layer in self._layers:
            query, key, value = linear(x, layer.qkv).unflatten(1, (3, heads, -1)).unbind(1)
            attended = attend(rotated(query, table), rotated(key, table), value, texts)
            x = layer.attention_norm(x + linear(attended, layer.output))
            gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
            x = layer.output_norm(x + linear(texts.each(self._activation, gate) * up, layer.down))
        return x

    def _load(self, loader: WeightLoader) -> None:
        config, hidden = self.config, self.config.hidden_size
        prefix = f"{self._prefix}embeddings"
        self._words = loader.table(f"{prefix}.word_embeddings.weight", config.vocab_size, hidden)
        self._types = loader.table(f"{prefix}.token_type_embeddings.weight", config.num_token_types, hidden)
        table = rope_table(config.rope, hidden // config.num_heads, config.max_text_len)
        self._rope = table.to(loader.ops.device)
        # Checkpoints have the names of the makers' code, or those of transformers.
        self._is_own = loader.has(f"{self._prefix}emb_ln.weight")
        self._embedding_norm = self._norm("emb_ln" if self._is_own else "embeddings.LayerNorm", loader)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]

    def _load_layer(self, index: int, loader: WeightLoader) -> _Layer:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        is_own = self._is_own
        layer = f"encoder.layers.{index}" if is_own else f"layers.{index}"
        prefix = f"{self._prefix}{layer}"
        if is_own:
            qkv = loader.linear([f"{prefix}.attn.Wqkv"], [3 * hidden], hidden)
        else:
            qkv = loader.linear([f"{prefix}.self_attn.{part}_proj" for part in "qkv"], [hidden] * 3, hidden)
        output, down = ("attn.out_proj", "mlp.fc2") if is_own else ("self_attn.o_proj", "mlp.down_proj")
        gate_up = ("fc12", "fc11") if is_own else ("gate_proj", "up_proj")
        norms = ("norm1", "norm2") if is_own else ("post_attention_layernorm", "post_mlp_layernorm")
        return _Layer(
            qkv=qkv,
            output=loader.linear([f"{prefix}.{output}"], [hidden], hidden),
            attention_norm=self._norm(f"{layer}.{norms[0]}", loader),
            gate_up=loader.linear([f"{prefix}.mlp.{part}" for part in gate_up], [inner] * 2, hidden),
            down=loader.linear([f"{prefix}.{down}"], [hidden], inner),
            output_norm=self._norm(f"{layer}.{norms[1]}", loader),
        )

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        hidden = self.config.hidden_size
        steps = (
            dense_layer(loader, f"{self._prefix}pooler.dense", (hidden, hidden), "tanh"),
            dense_layer(loader, "classifier", (num_labels, hidden)),
        )
        return Head(steps, num_labels)
