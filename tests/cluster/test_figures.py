from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.control_messages import RecentRate, RecentTimes, Sample
from penstock.control.gates import EvidenceCollector, GateConfig
from penstock.core.figures import percentile


@given(
    st.lists(st.floats(0.0, 1e3), min_size=1),
    st.floats(0.01, 1.0),
)
def test_a_percentile_is_one_of_the_values_and_enough_are_below(values: list[float], share: float) -> None:
    found = percentile(sorted(values), 100.0 * share)
    assert found in values
    at_most = sum(value <= found for value in values)
    below = sum(value < found for value in values)
    assert at_most >= share * len(values) * (1 - 1e-12)
    assert below <= share * len(values) * (1 + 1e-12)


def test_old_times_and_amounts_are_forgotten() -> None:
    times, rate = RecentTimes(10.0), RecentRate(10.0)
    times.add(5.0, now=0.0)
    times.add(1.0, now=8.0)
    rate.add(100.0, now=0.0)
    rate.add(50.0, now=8.0)
    assert (times.percentile(100, now=9.0), rate.per_s(now=9.0)) == (5.0, 15.0)
    assert (times.percentile(100, now=11.0), rate.per_s(now=11.0)) == (1.0, 5.0)
    assert (times.percentile(100, now=30.0), rate.per_s(now=30.0)) == (None, 0.0)


def sample(revision: str, stage_number: int | None, ttft_s: float | None = 0.1) -> Sample:
    return Sample("replica-1", "m", revision, stage_number, ttft_s, 0.01, ttft_s is None)


def test_evidence_is_of_one_stage_and_two_revisions() -> None:
    collector = EvidenceCollector("v1", "v2", GateConfig(min_requests=1))
    collector.begin(3)
    for known in (sample("v1", 3), sample("v2", 3), sample("v2", 3, None), sample("v2", 2), sample("v3", 3)):
        collector.add(known)
    collector.add(sample("v1", None))
    collector.add_comparisons(3, 4, 1)
    collector.add_comparisons(2, 9, 9)
    evidence = collector.evidence()
    assert (evidence.stage_number, evidence.num_compared, evidence.num_diverged) == (3, 4, 1)
    assert (evidence.num_stable_requests, evidence.num_candidate_requests) == (1, 2)
    assert evidence.ttft is not None
    assert evidence.ttft.figure == 0.1
    collector.begin(4)
    assert collector.evidence().num_candidate_requests == 0
