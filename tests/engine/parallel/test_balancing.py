"""Experts move between the ranks of an engine that serves, by the tokens that were counted, and no answer changes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.engine_config import ParallelConfig
from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.messages import EngineStats
from penstock.engine.build import Engine
from penstock.engine.parallel.experts import BalancedExperts, ExpertBalance, ExpertBalancer
from penstock.engine.parallel.placement import imbalance, on_ranks
from tests.copies import copied_ranks
from tests.engine.parallel.test_engine import PROMPTS, SETTINGS, step_for_a_while
from tests.engine.tiny import request, run, teach_short_answers, tiny_engine, tokens, write_tiny_model

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
BALANCED = ParallelConfig(
    tensor_parallel_size=2,
    enable_expert_parallel=True,
    enable_eplb=True,
    num_redundant_experts=2,
    eplb_step_interval=7,
)


@pytest.mark.parametrize("family", [QWEN3_MOE, DEEPSEEK_V3], ids=["qwen3-moe", "deepseek-v3"])
def test_answers_stay_the_same_while_experts_move(family: dict[str, Any], tmp_path: Path) -> None:
    """In chunks, with shared prefixes, preemptions and an abort; then a rank is killed."""
    model = write_tiny_model(tmp_path / "model", **family)
    one = tiny_engine(model, **SETTINGS)
    with copied_ranks():
        several = tiny_engine(model, parallel=BALANCED, **SETTINGS)
    try:
        _check_answers(one, several)
        weights = several.ready.model.weight_bytes - one.ready.model.weight_bytes
        assert weights > 0, "copies of experts are counted as memory"
        assert several.ready.model.num_parameters == one.ready.model.num_parameters
        _check_killed_rank(several)
    finally:
        several.close()


def _check_answers(one: Engine, several: Engine) -> None:
    teach_short_answers(one)
    teach_short_answers(several)
    for turn in range(2):
        requests = [request(f"{turn}-{n}", prompt, 32) for n, prompt in enumerate(PROMPTS)]
        expected = run(one, requests)
        several.loop.add(request("dropped", PROMPTS[1][::-1], 100))
        several.loop.step()
        several.loop.abort("dropped")
        given = run(several, requests)
        for each in requests:
            assert tokens(given[each.id]) == tokens(expected[each.id])
    stats = several.loop.stats()
    assert stats.num_experts_moved > 0
    assert 1 <= stats.expert_imbalance_placed < stats.expert_imbalance
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0


def _check_killed_rank(several: Engine) -> None:
    several.loop.add(request("unfinished", PROMPTS[0], 400))
    several.loop.step()
    assert several.ranks is not None
    os.kill(several.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=r"Rank 1 of 2 .* by signal 9"):
        step_for_a_while(several)


def test_one_rank_has_nothing_to_balance(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", **QWEN3_MOE)
    for settings in ({"enable_eplb": True}, {"num_redundant_experts": 2}):
        with pytest.raises(ConfigError, match="there is one rank"):
            tiny_engine(model, parallel=ParallelConfig(**settings, enable_expert_parallel=True))


@dataclass
class LoneGroup:
    """One of several ranks, without the others."""

    rank: int = 0
    size: int = 2


@dataclass
class NoExperts:
    """Packed experts without weights."""

    num_bytes: int = 0
    moved: list[int] = field(default_factory=list)

    def memory(self, index: int) -> list[tuple[str, torch.Tensor]]:
        return []


@pytest.fixture
def balance() -> ExpertBalance:
    """Two layers of four experts, with two more slots, on the first of two ranks."""
    group: Any = LoneGroup()
    made = ExpertBalance(group, 2, torch.device("cpu"))
    for _ in range(2):
        made.add(NoExperts(), 3)
    return made


def count(layer: BalancedExperts, balance: ExpertBalance, chosen: list[list[int]], num_rows: int) -> None:
    balance.begin_step(num_rows)
    layer.count(torch.tensor(chosen))


def test_tokens_of_the_step_are_counted_and_padding_is_not(balance: ExpertBalance) -> None:
    first, second = balance.layers
    count(first, balance, [[0, 1], [0, 2], [3, 3]], 2)
    count(first, balance, [[0, 1]], 1)
    count(second, balance, [[3], [2], [1]], 9)  # a step in pieces has fewer rows than the step
    assert balance.take_loads() == [[3, 2, 1, 0], [0, 1, 1, 1]]
    assert balance.take_loads() == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_copies_take_turns(balance: ExpertBalance) -> None:
    layer = balance.layers[0]
    assert layer.placement == (0, 1, 2, 3, 0, 1)
    chosen = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    slots = layer.slots_of(chosen)
    assert torch.equal(torch.tensor(layer.placement)[slots], chosen), "each slot holds the expert"
    assert slots[:, 0].tolist() == [0, 4, 0, 4]
    layer.place((3, 1, 0, 2, 0, 3))
    slots = layer.slots_of(chosen)
    assert torch.equal(torch.tensor(layer.placement)[slots], chosen)


def test_layers_move_one_after_the_other_if_that_is_worth_it(balance: ExpertBalance) -> None:
    balancer = ExpertBalancer(balance, interval=3)
    first, second = balance.layers
    count(first, balance, [[2]] * 90 + [[3]] * 6, 96)
    count(second, balance, [[0], [1], [2], [3]], 4)
    assert [balancer.next_move() for _ in range(3)] == [None] * 3
    move = balancer.next_move()
    assert move is not None
    assert move.layer == 0
    assert all(2 in part for part in on_ranks(move.experts, 2)), "the busy expert is on both ranks"
    first.place(move.experts)
    assert balancer.next_move() is None, "the other layer is even"
    stats = balancer.add_stats(EngineStats())
    loads = [0, 0, 90, 6]
    before, after = (imbalance(loads, each, 2) for each in ((0, 1, 2, 3, 0, 1), move.experts))
    assert stats.expert_imbalance == pytest.approx((before + 1) / 2)
    assert stats.expert_imbalance_placed == pytest.approx((after + 1) / 2)
    assert stats.num_experts_moved > 0
    count(first, balance, [[2]] * 90 + [[3]] * 6, 96)
    assert [balancer.next_move() for _ in range(6)] == [None] * 6, "nothing better is left"
