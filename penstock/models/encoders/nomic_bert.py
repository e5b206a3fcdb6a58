"""NomicBERT: BERT's order of norms, with positions by rotation, gated MLPs and no biases in the layers; and its
second release, with biases, plain MLPs, and experts in every second layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import Ops
from penstock.models.config import Fields
from penstock.models.encoders.base import Texts, require_known
from penstock.models.encoders.bert import MLP, Activation, LayerNames, RotatedBert, RotatedConfig
from penstock.models.huggingface_config import rope_config, rope_parameters
from penstock.models.weights import WeightLoader

_THETA = 1000.0
_FIXED = {
    "prenorm": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "expert_choice_router": False,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "ffn_div": 1,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
}  # settings of the makers' own files, which may name variants that are not known here


# The settings of the makers' files that tell the releases apart.
_FIRST = {
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
}
_SECOND = {"activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}


@dataclass(frozen=True, slots=True)
class NomicExperts:
    count: int
    per_token: int
    period: int  # of layers, of which the second has experts

    def is_in(self, index: int) -> bool:
        return index % self.period == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(RotatedConfig):
    is_gated: bool = True  # without biases; plain MLPs have biases, as attention then has
    experts: NomicExperts | None = None


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """Experts whose weights for a token do not sum to 1. Texts are computed one by one, so that no text depends on
    the others."""

    router: Tensor  # float32 [experts, hidden]
    up: Tensor  # float32 [experts, inner, hidden]
    down: Tensor  # float32 [experts, hidden, inner]
    bias: Tensor | None  # of all experts together
    per_token: int

    def __call__(self, ops: Ops, texts: Texts, activation: Activation, x: Tensor) -> Tensor:
        return texts.each(lambda rows: self._mixed(activation, rows), x.clone())

    def _mixed(self, activation: Activation, rows: Tensor) -> Tensor:
        shares, chosen = functional.linear(rows, self.router).softmax(dim=-1).topk(self.per_token, dim=-1)
        made = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            row, place = torch.where(chosen == expert)
            if len(row):
                inner = activation(functional.linear(rows[row], self.up[expert]))
                made[row] += functional.linear(inner, self.down[expert]) * shares[row, place, None]
        return made if self.bias is None else made + self.bias


# The names of tensors in the makers' code, and those of transformers, which has the first release alone.
_OWN_NAMES = LayerNames(
    layer="encoder.layers",
    qkv=("attn.Wqkv",),
    output="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    output_norm="norm2",
    embedding_norm="emb_ln",
)
_NAMES = LayerNames(
    layer="layers",
    qkv=[f"self_attn.{part}_proj" for part in "qkv"],
    output="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    output_norm="post_mlp_layernorm",
)


class NomicBert(RotatedBert):
    name = "nomic_bert"
    huggingface_names = ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification")
    prefixes = ("nomic_bert.", "bert.")
    config: NomicBertConfig

    @classmethod
    def read_config(cls, fields: Fields) -> NomicBertConfig:
        require_known(fields, _FIXED)
        is_own = fields.has("n_embd")  # the makers' files use GPT-2's names
        stated = {key: fields.raw(key) for key in _FIRST if fields.has(key)}
        is_gated = stated.get("activation_function", "swiglu") == "swiglu"
        for key, usual in (_FIRST if is_gated else _SECOND).items():
            if stated.get(key, usual) != usual:
                raise ModelLoadError(f"{fields.where} has {key} = {stated[key]!r}; known is {usual!r}.")

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
            activation=fields.text("hidden_act", "silu") if is_gated else "gelu",
            rope=rope,
            num_token_types=fields.integer("type_vocab_size", 2),
            is_gated=is_gated,
            experts=_experts(fields) if fields.raw("num_experts") else None,
        )

    def _load(self, loader: WeightLoader) -> None:
        self.is_gated, self.has_bias = self.config.is_gated, not self.config.is_gated
        super()._load(loader)

    def _names(self, loader: WeightLoader) -> LayerNames:
        if not loader.has(f"{self._prefix}{_OWN_NAMES.embedding_norm}.weight"):
            return _NAMES
        return replace(_OWN_NAMES, up=("mlp.fc12", "mlp.fc11")) if self.is_gated else _OWN_NAMES

    def _load_mlp(self, index: int, layer: str, loader: WeightLoader) -> MLP:
        experts = self.config.experts
        if experts is None or not experts.is_in(index):
            return super()._load_mlp(index, layer, loader)
        return _load_experts(self.config, experts, f"{self._prefix}{layer}.mlp", loader)


def _experts(fields: Fields) -> NomicExperts:
    experts = NomicExperts(
        fields.integer("num_experts"), fields.integer("moe_top_k"), fields.integer("moe_every_n_layers")
    )
    if experts.per_token > experts.count or experts.period < 2:
        raise ModelLoadError(f"{fields.where} describes experts that cannot be: {experts}.")
    return experts


def _load_experts(
    config: NomicBertConfig, experts: NomicExperts, prefix: str, loader: WeightLoader
) -> ExpertMLP:
    """Load the experts. Folders have both matrices of an expert with one row for each inner number, GGUF files have
    the second one the other way round."""
    count, hidden, inner = experts.count, config.hidden_size, config.intermediate_size
    if loader.has(f"{prefix}.experts.mlp.w1"):
        up, down = (
            loader.table(f"{prefix}.experts.mlp.{name}", count * inner, hidden).view(count, inner, hidden)
            for name in ("w1", "w2")
        )
        down = down.transpose(1, 2).contiguous()
    else:
        up = loader.table(f"{prefix}.experts.up.weight", count * inner, hidden).view(count, inner, hidden)
        down = loader.table(f"{prefix}.experts.down.weight", count * hidden, inner).view(count, hidden, inner)
    bias = f"{prefix}.experts.bias"
    return ExpertMLP(
        router=loader.table(f"{prefix}.router.layer.weight", count, hidden),
        up=up,
        down=down,
        bias=loader.vector(bias, hidden) if loader.has(bias) else None,
        per_token=experts.per_token,
    )
