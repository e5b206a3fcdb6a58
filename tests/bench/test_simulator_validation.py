"""The parts of `bench/simulator_validation.py` that need no engine."""

from __future__ import annotations

from dataclasses import replace

from bench.simulator_loads import LOADS
from bench.simulator_validation import errors_by_chance, shortened
from penstock.simulator.cost import LinearCost, SpreadCost

COST = LinearCost(base_s=2e-3, per_token_s=1e-4, per_sequence_s=1e-4, per_context_token_s=1e-7)


def test_errors_by_chance_come_from_the_spread_of_steps_alone() -> None:
    load = shortened(LOADS[0], 0.1)
    even = SpreadCost(COST, (1.0,), (1.0,), {})
    assert errors_by_chance(load, 0, even) == [0.0] * 7
    uneven = replace(even, decode_ratios=(0.5, 1.0, 1.5), other_ratios=(0.5, 1.0, 1.5))
    assert any(abs(error) > 0.01 for error in errors_by_chance(load, 0, uneven))
