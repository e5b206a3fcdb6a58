"""Reads the settings of DeepSeek V4, as transformers writes them and as the makers' files have them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import ModelLoadError
from penstock.kernels.operands import SILU_LIMIT
from penstock.models.config import (
    ArchitectureConfig,
    ExpertsConfig,
    Fields,
    NotNative,
    RecurrentConfig,
    RopeConfig,
    extended,
)
from penstock.models.huggingface_config import (
    common_huggingface_config,
    layer_kinds,
    rope_config,
    rope_parameters,
)

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: WINDOW, 4: SPARSE, 128: HEAVY}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config(ArchitectureConfig):
    kinds: tuple[str, ...]  # of layers
    rates: dict[str, int]  # tokens of an entry, by the kind of layer
    hashed_layers: frozenset[int]  # whose experts depend on the token alone
    vector_size: int
    query_rank: int
    window: int
    output_groups: int
    output_rank: int  # of a group
    index_heads: int
    index_size: int
    index_top_k: int
    compressed_rope: RopeConfig
    num_streams: int
    stream_rounds: int  # that make the mixing of streams doubly stochastic
    stream_eps: float


def huggingface_config(fields: Fields, architecture: str) -> DeepseekV4Config:
    """Read the settings of a folder, as transformers writes them or as the makers do."""
    fields.require_silu()
    for key, usual in (
        ("scoring_func", "sqrtsoftplus"),
        ("n_shared_experts", 1),
        ("swiglu_limit", SILU_LIMIT),
        ("norm_topk_prob", True),
        ("attention_bias", False),
        ("mlp_bias", False),
    ):
        if fields.has(key) and fields.raw(key) != usual:
            raise NotNative(f"{fields.where} has {key} {fields.raw(key)!r}; known is {usual!r} alone.")
    size = fields.integer("head_dim")
    share = fields.number("partial_rotary_factor", 0.125)
    rope_dim = fields.integer("qk_rope_head_dim", int(size * share))
    plain = {key: value for key, value in fields.values.items() if not key.startswith(("rope_", "partial_"))}
    ropes = _ropes(fields, rope_dim)
    inner = fields.integer("moe_intermediate_size")
    changed = Fields(plain, fields.where).with_usual(intermediate_size=inner)
    changed = changed.changed(head_dim=rope_dim, num_key_value_heads=1)
    base = common_huggingface_config(changed, architecture)
    kinds, hashed = _kinds(fields, base.num_layers)
    rates = {SPARSE: 4, HEAVY: 128, **_rates(fields)}
    compressed = frozenset(index for index, kind in enumerate(kinds) if kind != WINDOW)
    return extended(
        base,
        DeepseekV4Config,
        rope=ropes[0],
        attention_scale=float(size**-0.5),
        activation="limited_silu",
        recurrent=RecurrentConfig(layers=compressed, conv_width=1) if compressed else None,
        experts=ExpertsConfig(
            count=fields.integer("n_routed_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=inner,
            normalizes=False,
            shared_intermediate_size=inner,
            weight_scale=fields.number("routed_scaling_factor", 1.5),
        ),
        kinds=kinds,
        rates=rates,
        hashed_layers=hashed,
        vector_size=size,
        query_rank=fields.integer("q_lora_rank"),
        window=fields.integer("sliding_window"),
        output_groups=_divided(fields, base.num_heads),
        output_rank=fields.integer("o_lora_rank"),
        index_heads=fields.integer("index_n_heads"),
        index_size=fields.integer("index_head_dim"),
        index_top_k=fields.integer("index_topk"),
        compressed_rope=ropes[1],
        num_streams=fields.integer("hc_mult"),
        stream_rounds=fields.integer("hc_sinkhorn_iters"),
        stream_eps=fields.number("hc_eps", 1e-6),
    )


def _kinds(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return the kind of each layer's attention, and the layers whose experts depend on the token alone."""
    ratios = fields.raw("compress_ratios")
    if ratios is not None:
        listed = {"layer_types": [_BY_RATIO.get(each, each) for each in ratios][:num_layers]}
        fields = Fields({**listed, **fields.values}, fields.where)
    kinds = layer_kinds(fields, num_layers, {WINDOW, SPARSE, HEAVY})
    if kinds is None:
        kinds = tuple(SPARSE if index > 2 and index % 2 else HEAVY for index in range(num_layers))
    moe = layer_kinds(fields, num_layers, {"hash_moe", "moe"}, "mlp_layer_types")
    if moe is not None:
        return kinds, frozenset(index for index, kind in enumerate(moe) if kind == "hash_moe")
    count = fields.raw("num_hash_layers")
    return kinds, frozenset(range(min(num_layers, 3 if count is None else int(count))))


def _rates(fields: Fields) -> dict[str, int]:
    """Return the tokens of an entry, by the kind of layer, as far as the file says."""
    nested = Fields(fields.raw("compress_rates") or {}, f"compress_rates of {fields.where}")
    found = {
        kind: nested.integer(kind) if nested.has(kind) else fields.raw(f"compress_rate_{short}")
        for kind, short in ((SPARSE, "csa"), (HEAVY, "hca"))
    }
    return {kind: rate for kind, rate in found.items() if rate is not None}


def _ropes(fields: Fields, rope_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rope of layers with a window alone, and that of the others."""
    given = dict(rope_parameters(fields))
    positions = fields.integer("max_position_embeddings")
    main, compressed = given.get("main"), given.get("compress")
    if not (isinstance(main, dict) and isinstance(compressed, dict)):
        main = {"rope_theta": fields.number("rope_theta", 10000.0)}
        compressed = {**given, "rope_theta": fields.number("compress_rope_theta", 160000.0)}
        compressed.pop("partial_rotary_factor", None)
        if "yarn" in (given.get("rope_type"), given.get("type")):
            compressed.setdefault("attention_factor", 1.0)
    plain = Fields({}, fields.where)
    first, second = (
        rope_config({**each, "partial_rotary_factor": 1.0}, plain, positions, head_dim=rope_dim)
        for each in (main, compressed)
    )
    return first, second


def _divided(fields: Fields, num_heads: int) -> int:
    groups = fields.integer("o_groups")
    if num_heads % groups:
        raise ModelLoadError(f"{fields.where} has {num_heads} heads, which {groups} groups cannot share.")
    return groups
