"""EmbeddingGemma: the layers of Gemma 3 without a causal mask. A layer's window reaches to both sides of a token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import PackedLinear
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.encoders.base import Encoder, EncoderConfig, Texts, attend, rotated
from penstock.models.families.gemma import Gemma3
from penstock.models.pooling_head import Head
from penstock.models.rope import rope_table
from penstock.models.weights import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingGemmaConfig(EncoderConfig):
    decoder: ArchitectureConfig  # the settings that are the same as Gemma's


@dataclass(frozen=True, slots=True)
class _Layer:
    norms: dict[str, Tensor]
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None  # tokens on each side


class EmbeddingGemma(Encoder):
    name = "embedding_gemma"
    huggingface_names = ("Gemma3TextModel",)  # of which those with `use_bidirectional_attention` are encoders
    prefixes = ("model.",)
    first_tensor = "embed_tokens.weight"
    config: EmbeddingGemmaConfig

    @classmethod
    def read_config(cls, fields: Fields) -> EmbeddingGemmaConfig:
        causal = {**fields.values, "use_bidirectional_attention": False}  # which a decoder would refuse
        decoder = Gemma3.config_from_huggingface(Fields(causal, fields.where))
        if decoder.attention_softcap is not None:
            raise ModelLoadError(f"{fields.where} caps attention, which this encoder does not.")
        if fields.flag("norms_hold_one", False):  # as in GGUF files
            decoder = dataclasses.replace(decoder, norm_offset=0.0)
        return EmbeddingGemmaConfig(
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.intermediate_size,
            num_layers=decoder.num_layers,
            num_heads=decoder.num_heads,
            vocab_size=decoder.vocab_size,
            max_text_len=decoder.max_positions,
            norm_eps=decoder.norm_eps,
            activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
            decoder=decoder,
        )

    def forward(self, texts: Texts) -> Tensor:
        config = self.config.decoder
        linear, rms_norm, eps = self._ops.linear, self._ops.rms_norm, config.norm_eps
        heads, kv_heads = config.num_heads, config.num_kv_heads
        whole, nearby = self._whole_rope[texts.positions], self._local_rope[texts.positions]
        x = self._words[texts.token_ids] * config.hidden_size**0.5
        for layer in self._layers:
            norms, table = layer.norms, whole if layer.window is None else nearby
            states = linear(rms_norm(x, norms["input_layernorm"], eps), layer.qkv)
            states = states.unflatten(1, (heads + 2 * kv_heads, -1))
            query, key, value = states.split([heads, kv_heads, kv_heads], dim=1)
            query = rotated(self._head_norm(query, norms["self_attn.q_norm"]), table)
            key = rotated(self._head_norm(key, norms["self_attn.k_norm"]), table)
            attended = attend(query, key, value, texts, scale=config.attention_scale, window=layer.window)
            x = x + rms_norm(linear(attended, layer.output), norms["post_attention_layernorm"], eps)
            gate, up = linear(rms_norm(x, norms["pre_feedforward_layernorm"], eps), layer.gate_up).chunk(
                2, dim=-1
            )
            inner = linear(texts.each(self._activation, gate) * up, layer.down)
            x = x + rms_norm(inner, norms["post_feedforward_layernorm"], eps)
        return rms_norm(x, self._final_norm, eps)

    def _head_norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        flat = heads.flatten(0, 1).contiguous()
        return self._ops.rms_norm(flat, weight, self.config.norm_eps).view(heads.shape)

    def _load(self, loader: WeightLoader) -> None:
        config, device = self.config.decoder, loader.ops.device
        name = f"{self._prefix}{self.first_tensor}"
        self._words = loader.table(name, config.vocab_size, config.hidden_size)
        local_rope = config.local_rope or config.rope
        self._whole_rope = rope_table(config.rope, config.head_dim, config.max_positions).to(device)
        self._local_rope = rope_table(local_rope, config.head_dim, config.max_positions).to(device)
        self._layers = [self._load_layer(index, loader) for index in range(config.num_layers)]
        final_norm = f"{self._prefix}norm.weight"
        self._final_norm = loader.vector(final_norm, config.hidden_size, plus=config.norm_offset)

    def _load_layer(self, index: int, loader: WeightLoader) -> _Layer:
        config = self.config.decoder
        prefix = f"{self._prefix}layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = dict.fromkeys(
            (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            hidden,
        ) | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), config.head_dim)
        window = config.windows[index]
        return _Layer(
            norms={
                name: loader.vector(f"{prefix}.{name}.weight", size, plus=config.norm_offset)
                for name, size in sizes.items()
            },
            qkv=loader.linear(
                [f"{prefix}.self_attn.{part}_proj" for part in "qkv"],
                [query_size, kv_size, kv_size],
                hidden,
                bias=config.qkv_bias,
            ),
            output=loader.linear(
                [f"{prefix}.self_attn.o_proj"], [hidden], query_size, bias=config.output_bias
            ),
            gate_up=loader.linear([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], [inner] * 2, hidden),
            down=loader.linear([f"{prefix}.mlp.down_proj"], [hidden], inner),
            window=None if window is None else window // 2,
        )

    def classifier(self, loader: WeightLoader, num_labels: int) -> Head:
        raise ModelLoadError("No classifier of EmbeddingGemma is known.")
