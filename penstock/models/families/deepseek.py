"""DeepSeek V2 and V3, R1, Kimi K2, GLM 4.7 Flash and Mistral 4: attention over latents, and experts in groups with an
expert for every token. Layers after the last one, which predict further tokens, are read for drafts alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, LatentLayer, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, LatentConfig, yarn_amplitude
from penstock.models.decoder import Decoder
from penstock.models.experts import ExpertMLP, add_mlp, load_experts
from penstock.models.gguf_config import (
    SIGMOID,
    common_gguf_config,
    gguf_experts,
    has_experts,
    metadata_fields,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import (
    common_huggingface_config,
    grouped_experts,
    growth_of_queries,
    rope_parameters,
)
from penstock.models.layers import GatedMLP, LayerLoader, RMSNorm, query_factors
from penstock.models.layout import StoredRows, by_head
from penstock.models.rope import pair_order
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart, WeightLoader

_INNER_EPS = 1e-6  # of the norms between two products, whatever the settings say of the others
# Groups of experts, and how many of them a token uses, in models whose older GGUF files do not say: by the counts of
# layers and of experts. DeepSeek V3 and R1, and V2.
_GROUPS = {(61, 256): (8, 4), (60, 160): (8, 3)}
SELECTION_BIAS = "gate.e_score_correction_bias"
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GGUF_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over latents. One product gives latents, and beside them queries, or narrow queries from which a norm
    and a second product make queries."""

    down: PackedLinear
    query_norm: RMSNorm | None
    query: PackedLinear | None
    layer: LatentLayer
    output: PackedLinear
    factors: Tensor | None = None  # of queries, by their position
    gate: PackedLinear | None = None  # one for each head

    def add_to(self, ops: Ops, residual: Tensor, norm: RMSNorm, cache: Any, batch: AttentionBatch) -> None:
        """Add the output of attention for the normed residual to the residual, in place."""
        if self.gate is None:
            both = ops.normed_linear(residual, norm.weight, norm.eps, self.down)
            made = self._attended(ops, both, cache, batch)
        else:
            made = self._gated(ops, norm(ops, residual), cache, batch)
        ops.add_linear(made, self.output, residual)

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        made = self._attended(ops, ops.linear(x, self.down), cache, batch)
        return ops.add_up(ops.linear(made, self.output))

    def _attended(self, ops: Ops, both: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        query, latent = self.parts(both)
        if self.query_norm is not None and self.query is not None:
            query = ops.linear(self.query_norm(ops, query), self.query)
        if self.factors is not None:
            query = query * self.factors[batch.positions].to(query.dtype).unsqueeze(1)
        return ops.attend_latent(query, latent, self.layer, cache, batch)

    def _gated(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        made = self._attended(ops, ops.linear(x, self.down), cache, batch)
        assert self.gate is not None
        gate = torch.sigmoid(ops.linear(x, self.gate).float()).to(made.dtype)
        gated: Tensor = made.unflatten(1, (self.layer.num_heads, -1)) * gate.unsqueeze(2)
        return gated.flatten(1)

    def parts(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Cut the first product into queries and latents."""
        width = self.layer.latent_dim + self.layer.rope_dim
        return both[:, :-width], both[:, -width:]


@dataclass(frozen=True, slots=True)
class LatentBlock:
    attention_norm: RMSNorm
    attention: LatentAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP


class DeepseekV2(Decoder):
    name = "deepseek_v2"
    huggingface_names: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM", "deepseek_v2")
    gguf_names: ClassVar[tuple[str, ...]] = ("deepseek2",)
    gguf_stored_names: ClassVar[Mapping[str, str]] = GGUF_NAMES
    has_selection_bias: ClassVar[bool] = False

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        assert config.latent is not None
        # One vector for each token, which all ranks have.
        self.num_kv_heads = 1
        self.head_dim = self.latent_width = config.latent.rank + config.latent.rope_dim

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        grouped = fields.text("topk_method", "greedy") == "group_limited_greedy"
        config = latent_config(
            fields, cls.name, scoring="softmax", normalizes=False, ranked_by=1, grouped=grouped
        )
        return dataclasses.replace(config, mlp_bias=fields.flag("mlp_bias", False))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return latent_gguf_config(file, cls.name)

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        return latent_rows(config)

    def load_layer(self, load: LayerLoader) -> LatentBlock:
        return LatentBlock(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=load_latent_attention(load),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=self.load_mlp(load),
        )

    def load_mlp(self, load: LayerLoader) -> GatedMLP | ExpertMLP:
        if self.config.is_dense(load.index):
            return load.gated_mlp()
        bias = f"{load.prefix}.mlp.{SELECTION_BIAS}"
        chooses_by_bias = self.has_selection_bias or load.weights.has(bias)
        return load_experts(load, selection_bias=SELECTION_BIAS if chooses_by_bias else None)

    def run_layer(
        self, layer: LatentBlock, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        layer.attention.add_to(ops, residual, layer.attention_norm, cache, batch)
        add_mlp(ops, residual, layer.mlp_norm, layer.mlp)


class DeepseekV3(DeepseekV2):
    name = "deepseek_v3"
    huggingface_names: ClassVar[tuple[str, ...]] = (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        "KimiK2ForCausalLM",
        "kimi_k2",
    )
    gguf_names: ClassVar[tuple[str, ...]] = ()
    has_selection_bias = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return latent_config(fields, cls.name, scoring="sigmoid", normalizes=True, ranked_by=2, grouped=True)


class Youtu(DeepseekV3):
    """Youtu-LLM: attention over latents, and no experts."""

    name = "youtu"
    huggingface_names = ("YoutuForCausalLM", "youtu")


class MiniCPM3(DeepseekV2):
    """MiniCPM 3: attention over latents, no experts, and factors of embeddings, residual additions and logits."""

    name = "minicpm3"
    huggingface_names = ("MiniCPM3ForCausalLM", "minicpm3")
    gguf_names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        size = fields.integer("hidden_size") // fields.integer("num_attention_heads")
        usual = fields.with_usual_for_nulls(v_head_dim=size, tie_word_embeddings=True)
        config = super().config_from_huggingface(usual.changed(rope_interleave=False))
        depth = fields.number("scale_depth", config.num_layers**0.5)
        return dataclasses.replace(
            config,
            embedding_scale=fields.number("scale_emb", 12.0),
            residual_scale=depth / config.num_layers**0.5,
            logit_scale=fields.number("dim_model_base", config.hidden_size) / config.hidden_size,
        )

    def run_layer(
        self, layer: LatentBlock, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        scale = self.config.residual_scale
        hidden = layer.attention(ops, layer.attention_norm(ops, residual), cache, batch)
        residual.add_(hidden, alpha=scale)
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)), alpha=scale)


class Glm4MoeLite(DeepseekV3):
    name = "glm4_moe_lite"
    huggingface_names = ("Glm4MoeLiteForCausalLM", "glm4_moe_lite")


class Mistral4(DeepseekV2):
    """Mistral 4: experts by softmax in groups, whose weights add up to one, and queries that grow with their
    position."""

    name = "mistral4"
    huggingface_names = ("Mistral4ForCausalLM", "mistral4")
    gguf_names = ("mistral4",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        rope = dict(rope_parameters(fields) or _MISTRAL4_ROPE)
        rope.pop(
            "partial_rotary_factor", None
        )  # of a whole query, whose rotated part has a size of its own here
        fields = fields.changed(rope_parameters=rope)
        config = latent_config(
            fields, cls.name, scoring="softmax", normalizes=True, ranked_by=2, grouped=True
        )
        assert config.experts is not None
        experts = dataclasses.replace(config.experts, normalizes=fields.switch("norm_topk_prob", True))
        return dataclasses.replace(config, experts=experts, **growth_of_queries(rope, fields.where))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = latent_gguf_config(file, cls.name)
        assert config.experts is not None
        return dataclasses.replace(config, experts=dataclasses.replace(config.experts, groups_ranked_by=2))


def latent_config(
    fields: Fields, name: str, *, scoring: Any, normalizes: bool, ranked_by: int, grouped: bool
) -> ArchitectureConfig:
    """Read the settings of attention over latents and of its experts."""
    heads, rope_dim = fields.integer("num_attention_heads"), fields.integer("qk_rope_head_dim")
    changed = fields.changed(head_dim=rope_dim, num_key_value_heads=heads)
    config = common_huggingface_config(changed, name, attention_bias=False)
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank"),
        query_rank=fields.optional_integer("q_lora_rank"),
        rope_dim=rope_dim,
        plain_dim=fields.integer("qk_nope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
    )
    experts = None
    if fields.has("n_routed_experts"):
        normalizes = fields.switch("norm_topk_prob", normalizes) and scoring == "sigmoid"
        experts = grouped_experts(
            fields.changed(norm_topk_prob=normalizes),
            config.num_layers,
            scoring=scoring,
            grouped=grouped,
            ranked_by=ranked_by,
        )
    return dataclasses.replace(
        config,
        latent=latent,
        attention_scale=_scale(latent) * _sharpening(Fields(rope_parameters(fields), fields.where)),
        experts=experts,
    )


def _scale(latent: LatentConfig) -> float:
    return float((latent.plain_dim + latent.rope_dim) ** -0.5)


def _sharpening(rope: Fields) -> float:
    """Return Yarn's factor of scores for contexts longer than in training."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default" or not rope.raw("mscale_all_dim"):
        return 1.0
    return yarn_amplitude(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def latent_gguf_config(file: GGUFFile, name: str) -> ArchitectureConfig:
    """Read the settings of attention over latents and of its experts."""
    fields = metadata_fields(file)
    heads, rope_dim = fields.integer("attention.head_count"), fields.integer("rope.dimension_count")
    prefix = f"{file.architecture}.attention"
    # Newer files state the sizes of the cache, and beside them those of heads.
    key, value = (
        fields.integer(f"attention.{part}_length_mla", fields.raw(f"attention.{part}_length"))
        for part in ("key", "value")
    )
    changed = {f"{prefix}.{each}": rope_dim for each in ("key_length", "value_length")}
    changed[f"{prefix}.head_count_kv"] = heads
    config = common_gguf_config(file, name, changed)
    latent = LatentConfig(
        rank=fields.integer("attention.kv_lora_rank"),
        query_rank=fields.optional_integer("attention.q_lora_rank"),
        rope_dim=rope_dim,
        plain_dim=key - rope_dim,
        value_dim=value,
    )
    rope, scale = config.rope, _scale(latent)
    if rope.scaling is not None and rope.scaling.kind == "yarn":
        # Ten times the setting is the mscale of cosines, and of scores, which cancel out but for the square.
        mscale = 10 * fields.number("rope.scaling.yarn_log_multiplier", 0.1)
        scale *= yarn_amplitude(rope.scaling.factor, mscale) ** 2
        rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, attention_factor=1.0))
    # Files of GLM do not say; only sigmoids come with a bias that chooses experts.
    has_bias = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    gating = SIGMOID if has_bias else 1
    experts = None  # of Youtu
    if has_experts(file):
        experts = gguf_experts(file, config, normalizes=False, usual_gating=gating)
    if experts is not None and not fields.has("expert_group_count"):
        groups, kept = _GROUPS.get((config.num_layers, experts.count), (1, 1))
        experts = dataclasses.replace(experts, num_groups=groups, kept_groups=kept)
    return dataclasses.replace(
        config,
        rope=rope,
        latent=latent,
        attention_scale=scale,
        experts=experts,
        query_growth=fields.optional_number("attention.temperature_scale"),
        query_step=fields.optional_integer("attention.temperature_length"),
    )


def latent_rows(config: ArchitectureConfig) -> dict[str, StoredRows]:
    """Return the rows of queries and latents such that rotated pairs are half of the rotated part apart."""
    latent = config.latent
    assert latent is not None
    if not latent.interleaved:
        return {}
    order = pair_order(latent.rope_dim, latent.rope_dim, interleaved=True)
    head = torch.cat([torch.arange(latent.plain_dim), latent.plain_dim + order])
    size = config.num_heads * len(head)
    rows = {
        f"self_attn.{name}": StoredRows(f"self_attn.{name}", size, by_head(torch.arange(size), head))
        for name in ("q_proj", "q_b_proj")
    }
    name = "self_attn.kv_a_proj_with_mqa"
    entry = torch.cat([torch.arange(latent.rank), latent.rank + order])
    return {**rows, name: StoredRows(name, len(entry), entry)}


def load_latent_attention(
    load: LayerLoader, *, is_gated: bool = False, has_query: bool = True
) -> LatentAttention:
    """Load attention. `has_query` says whether a product of its own makes queries of narrow queries."""
    config, latent, weights = load.config, load.config.latent, load.weights
    assert latent is not None
    prefix, hidden, own = f"{load.prefix}.self_attn", config.hidden_size, load.heads.queries
    query_dim = latent.plain_dim + latent.rope_dim
    query_size, query_rows = config.num_heads * query_dim, scaled(own, query_dim)
    query = query_norm = None
    name, size, part = "q_proj", query_size, query_rows
    if latent.query_rank is not None:
        norm = weights.vector(f"{prefix}.q_a_layernorm.weight", latent.query_rank)
        query_norm = RMSNorm(norm, _INNER_EPS)
        if has_query:
            query = weights.linear(
                [f"{prefix}.q_b_proj"], [query_size], latent.query_rank, part=LinearPart(rows=[query_rows])
            )
        name, size, part = "q_a_proj", latent.query_rank, range(latent.query_rank)
    width = latent.rank + latent.rope_dim
    key_up, value_up = _load_absorbed(load, prefix)
    return LatentAttention(
        down=weights.linear(
            [f"{prefix}.{name}", f"{prefix}.kv_a_proj_with_mqa"],
            [size, width],
            hidden,
            bias=config.qkv_bias,
            part=LinearPart(rows=[part, range(width)]),
            without_bias=[f"{prefix}.q_proj"],
        ),
        query_norm=query_norm,
        query=query,
        layer=LatentLayer(
            num_heads=len(own),
            latent_dim=latent.rank,
            rope_dim=latent.rope_dim,
            scale=config.attention_scale,
            rope=load.rope,
            norm=weights.vector(f"{prefix}.kv_a_layernorm.weight", latent.rank),
            norm_eps=_INNER_EPS,
            key_up=key_up,
            value_up=value_up,
        ),
        output=weights.linear(
            [f"{prefix}.o_proj"],
            [hidden],
            config.num_heads * latent.value_dim,
            bias=config.output_bias,
            part=LinearPart(columns=scaled(own, latent.value_dim)),
        ),
        factors=query_factors(load) if config.query_growth else None,
        gate=weights.linear([f"{prefix}.g_proj"], [config.num_heads], hidden, part=LinearPart(rows=[own]))
        if is_gated
        else None,
    )


def _load_absorbed(load: LayerLoader, prefix: str) -> tuple[Tensor, Tensor]:
    """Load the matrices that make keys and values of latents, for this rank's heads: [H, N, C] and [H, C, V]."""
    latent, heads, own = load.config.latent, load.config.num_heads, load.heads.queries
    assert latent is not None
    plain, value, rank = latent.plain_dim, latent.value_dim, latent.rank
    if load.weights.has(f"{prefix}.k_b_proj.weight"):  # newer GGUF files: keys [H, C, N] and values [H, V, C]
        keys = load.weights.dense(f"{prefix}.k_b_proj.weight", heads * rank, plain, scaled(own, rank))
        values = load.weights.dense(f"{prefix}.v_b_proj.weight", heads * value, rank, scaled(own, value))
        key_up = keys.view(-1, rank, plain).transpose(1, 2)
        return key_up.contiguous(), values.view(-1, value, rank).transpose(1, 2).contiguous()
    name, rows = f"{prefix}.kv_b_proj.weight", heads * (plain + value)
    both = load.weights.dense(name, rows, rank, scaled(own, plain + value)).view(-1, plain + value, rank)
    return both[:, :plain].contiguous(), both[:, plain:].transpose(1, 2).contiguous()
