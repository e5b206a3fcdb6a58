"""Every part of a model has its ranks, and no rank has nothing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.models.config import ArchitectureConfig, ExpertsConfig, RecurrentConfig, RopeConfig
from penstock.models.sharding import Shard, balanced


def ranks(size: int) -> list[Shard]:
    return [Shard(tensor_rank=rank, tensor_size=size) for rank in range(size)]


def architecture(**changes: object) -> ArchitectureConfig:
    config = ArchitectureConfig(
        architecture="llama",
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=9,
        num_kv_heads=3,
        head_dim=16,
        vocab_size=100,
        max_positions=64,
        norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        windows=(None,) * 3,
        attention_scale=0.25,
    )
    return dataclasses.replace(config, **changes)


@given(st.integers(0, 500), st.integers(1, 16))
def test_balanced_ranges_follow_each_other(total: int, parts: int) -> None:
    ranges = balanced(total, parts)
    assert [index for part in ranges for index in part] == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 16))
def test_every_query_head_has_one_rank_that_also_has_its_keys(
    num_kv_heads: int, per_kv_head: int, size: int
) -> None:
    num_heads = num_kv_heads * per_kv_head
    config = architecture(num_heads=num_heads, num_kv_heads=num_kv_heads)
    try:
        ranks(size)[0].check(config)
    except ConfigError:
        assert size > num_kv_heads, "there is a key-value head for every rank"
        return
    parts = [rank.heads(num_heads, num_kv_heads) for rank in ranks(size)]
    assert [head for part in parts for head in part.queries] == list(range(num_heads))
    for part in parts:
        assert part.queries
        # Kernels take the queries of a key-value head to be neighbours, equally many for each.
        group, rest = divmod(len(part.queries), len(part.keys))
        assert not rest
        assert [part.keys[index // group] for index in range(len(part.queries))] == [
            head // per_kv_head for head in part.queries
        ]


@given(st.integers(16, 3000), st.integers(1, 8))
def test_the_wide_side_is_cut_between_groups(size: int, num_ranks: int) -> None:
    parts = [rank.inner(size) for rank in ranks(num_ranks)]
    assert [index for part in parts for index in part] == list(range(size))
    assert all(parts)
    if size % (32 * num_ranks) == 0:
        assert {len(part) for part in parts} == {size // num_ranks}
        assert all(part.start % 32 == 0 for part in parts)


def test_layers_are_shared_out_over_stages() -> None:
    shards = [Shard(stage=stage, num_stages=3) for stage in range(3)]
    assert [list(shard.layers(7)) for shard in shards] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [shard.is_first_stage for shard in shards] == [True, False, False]
    assert [shard.is_last_stage for shard in shards] == [False, False, True]


def test_experts_are_placed_whole_or_cut() -> None:
    placed = Shard(tensor_rank=1, tensor_size=4, places_experts=True)
    assert list(placed.experts(6)) == [2, 3]
    assert placed.expert_inner(64) == range(64)
    copied = [
        Shard(rank, 2, places_experts=True, balances_experts=True, redundant_experts=4) for rank in (0, 1)
    ]
    assert [list(shard.experts(6)) for shard in copied] == [[0, 1, 2, 3, 4], [5, 0, 1, 2, 3]]
    cut = Shard(tensor_rank=1, tensor_size=4)
    assert cut.experts(6) == range(6)
    assert cut.expert_inner(64) == range(16, 32)


FOUR = ExpertsConfig(count=4, per_token=1, intermediate_size=32, normalizes=True)


@pytest.mark.parametrize(
    ("shard", "changes", "words"),
    [
        (Shard(tensor_size=10), {}, "9 attention heads"),
        (Shard(num_stages=4), {}, "3 layers"),
        (
            Shard(num_stages=2),
            {"recurrent": RecurrentConfig(layers=frozenset({0}), conv_width=3)},
            "cannot be cut into stages",
        ),
        (Shard(tensor_size=2, places_experts=True), {}, "needs a mixture of experts"),
        (
            Shard(tensor_size=4, places_experts=True),
            {"experts": ExpertsConfig(count=3, per_token=1, intermediate_size=32, normalizes=True)},
            "3 experts",
        ),
        (Shard(tensor_size=2, balances_experts=True), {}, "placed whole"),
        (Shard(tensor_size=2, places_experts=True, redundant_experts=2), {}, "needs --enable-eplb"),
        (
            Shard(3, 3, balances_experts=True, places_experts=True),
            {"experts": FOUR},
            "cannot be shared out evenly",
        ),
        (
            Shard(2, 3, balances_experts=True, places_experts=True, redundant_experts=11),
            {"experts": FOUR},
            "11 redundant experts are more",
        ),
        (
            Shard(0, 2, 0, 2, balances_experts=True, places_experts=True),
            {"experts": FOUR},
            "pipeline stages",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(shard: Shard, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shard.check(architecture(**changes))
