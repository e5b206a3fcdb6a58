"""The statistics of gates: how often they are wrong, and that looking often does not make them wrong more often."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb, exp
from random import Random

import pytest

from penstock.control.gates import (
    CheckSchedule,
    Evidence,
    EvidenceCollector,
    GateConfig,
    GateResult,
    chance_of_more,
    chance_of_share,
    chance_of_slower,
    judge,
    overall,
)

GATES = GateConfig(min_requests=20, min_compared=0)


@dataclass(frozen=True, slots=True)
class Sample:
    revision: str
    ttft_s: float | None
    itl_s: float | None = 0.01
    has_failed: bool = False
    stage_number: int = 0


def result(evidence: Evidence, config: GateConfig = GATES) -> GateResult:
    return overall(judge(config, evidence, compares_answers=False))


def ends(
    rng: Random, ratio: float, sigma: float, most: int = 2000, least: int = 20
) -> tuple[GateResult, int]:
    """Return the first result other than undecided, judging after each request, and how many that took."""
    collector = EvidenceCollector("stable", "candidate", GateConfig(min_requests=least))
    for count in range(1, most + 1):
        collector.add(Sample("stable", 0.1 * exp(sigma * rng.gauss(0.0, 1.0))))
        collector.add(Sample("candidate", 0.1 * ratio * exp(sigma * rng.gauss(0.0, 1.0))))
        found = result(collector.evidence())
        if found is not GateResult.UNDECIDED:
            return found, count
    return GateResult.UNDECIDED, most


def never_passes(rng: Random, ratio: float, num_requests: int) -> bool:
    """Say whether a gate fails at some look, in a stage that does not end."""
    collector = EvidenceCollector("stable", "candidate", GATES)
    has_failed = False
    for _ in range(num_requests):
        collector.add(Sample("stable", 0.1 * exp(rng.gauss(0.0, 1.0))))
        collector.add(Sample("candidate", 0.1 * ratio * exp(rng.gauss(0.0, 1.0))))
        has_failed = has_failed or result(collector.evidence()) is GateResult.FAILED
    return has_failed


def test_chances_are_those_of_counted_cases() -> None:
    assert chance_of_share(3, 5, 0.3) == pytest.approx(
        sum(comb(5, k) * 0.3**k * 0.7 ** (5 - k) for k in (3, 4, 5))
    )
    assert (chance_of_share(0, 5, 0.3), chance_of_share(1, 5, 0.0), chance_of_share(5, 5, 1.0)) == (1, 0, 1)
    ways = list(
        combinations(range(9), 3)
    )  # where three events strike, of four requests of ours and five others
    at_least_two = sum(sum(place < 4 for place in way) >= 2 for way in ways) / len(ways)
    assert chance_of_more(2, 4, 1, 5) == pytest.approx(at_least_two)
    assert chance_of_more(0, 4, 0, 5) == pytest.approx(1.0)


def test_the_chance_of_slower_times_is_that_of_all_orders() -> None:
    """Two of three of ours exceed the third of four others: by chance as often as in all orders of seven times."""
    others, ours = [1.0, 2.0, 3.0, 4.0], [5.0, 0.5, 3.5]
    wanted = 0
    for places in combinations(range(7), 3):
        rest = [place for place in range(7) if place not in places]
        wanted += sum(place > rest[2] for place in places) >= 2
    assert chance_of_slower(ours, others, 75) == pytest.approx(wanted / comb(7, 3))


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_an_identical_candidate_is_hardly_ever_failed_with_few_requests(sigma: float) -> None:
    rng = Random(11)
    found = [ends(rng, 1.0, sigma) for _ in range(200)]
    assert sum(each is GateResult.FAILED for each, _ in found) <= 2
    assert sum(each is GateResult.PASSED for each, _ in found) >= 198
    assert sum(count for _, count in found) / 200 < 60, "it does not take long either"


def test_looking_after_every_request_keeps_the_chance_of_a_false_alarm() -> None:
    """A candidate exactly at the limit of 1.25 is the worst that may pass."""
    rng = Random(12)
    assert sum(never_passes(rng, 1.25, 500) for _ in range(80)) <= 0.05 * 80


@pytest.mark.parametrize(("ratio", "least"), [(1.5, 100), (3.0, 20)])
def test_a_slow_candidate_is_failed(ratio: float, least: int) -> None:
    rng = Random(13)
    found = [ends(rng, ratio, 0.5, 5000, least)[0] for _ in range(30)]
    assert found.count(GateResult.FAILED) >= 25
    assert GateResult.UNDECIDED not in found


def test_slow_requests_in_a_row_say_less_than_as_many_apart() -> None:
    rng = Random(14)
    others = [rng.random() for _ in range(200)]
    slow = [2.0] * 40
    in_a_row = [rng.random() * 0.9 for _ in range(160)]
    apart = list(in_a_row)
    for place in range(40):
        apart.insert(place * 5, slow[place])
    assert chance_of_slower(in_a_row + slow, others, 95) > 100 * chance_of_slower(apart, others, 95)


def test_a_few_errors_are_chance_and_many_are_not() -> None:
    def after(num_requests: int, num_errors: int) -> GateResult:
        collector = EvidenceCollector("stable", "candidate", GATES)
        for number in range(num_requests):
            collector.add(Sample("stable", 0.1))
            collector.add(Sample("candidate", 0.1, has_failed=number < num_errors))
        return result(collector.evidence())

    assert after(20, 0) is GateResult.PASSED
    assert after(20, 1) is GateResult.UNDECIDED, "one error of twenty is not enough to roll back"
    assert after(20, 12) is GateResult.FAILED
    assert after(400, 24) is GateResult.FAILED


def test_errors_of_identical_revisions_hardly_ever_fail() -> None:
    rng = Random(15)
    failed = 0
    for _ in range(100):
        collector = EvidenceCollector("stable", "candidate", GATES)
        results = set()
        for _ in range(300):
            for revision in ("stable", "candidate"):
                collector.add(Sample(revision, 0.1, has_failed=rng.random() < 0.02))
            results.add(result(collector.evidence()))
        failed += GateResult.FAILED in results
    assert failed <= 5


def test_answers_that_differ_are_judged_when_their_number_has_grown() -> None:
    config = GateConfig(min_requests=1, min_compared=10)
    collector = EvidenceCollector("stable", "candidate", config)

    def divergence() -> tuple[GateResult, str]:
        report = judge(config, collector.evidence(), num_stages=5, compares_answers=True)[-1]
        return report.result, report.sentence

    assert divergence() == (GateResult.UNDECIDED, "0 of 10 answers compared")
    collector.add_comparisons(0, 10, 3)
    assert divergence()[0] is GateResult.UNDECIDED, "three of ten, where two may"
    collector.add_comparisons(0, 4, 4)
    assert "30.0%" in divergence()[1], "not looked at yet"
    collector.add_comparisons(0, 26, 26)
    assert divergence()[0] is GateResult.FAILED


def test_looks_come_when_samples_have_grown_by_half() -> None:
    looks = CheckSchedule(20)
    assert [count for count in range(1, 110) if looks.is_due(count)] == [20, 30, 45, 68, 102]
    assert looks.number == 5
