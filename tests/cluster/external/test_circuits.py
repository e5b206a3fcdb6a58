"""Failures that requests may have caused close a server to the workspace that sent them, and to nobody else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.external import circuits as module
from penstock.cluster.external.circuits import NUM_FAILING, ServerCircuits
from penstock.dispatch.health import BreakerConfig, Circuit, CircuitBreaker

CONFIG = BreakerConfig(max_failures=3, probes=2, first_pause_s=10.0, max_pause_s=80.0)


def fail(circuits: ServerCircuits, tenant: str, now: float, times: int = CONFIG.max_failures) -> None:
    for _ in range(times):
        circuits.sent(tenant, now)
        circuits.failed(tenant, now, now)


def test_failures_of_one_workspace_are_its_own() -> None:
    circuits = ServerCircuits(CircuitBreaker(CONFIG))
    fail(circuits, "theirs", 0.0)
    assert circuits.circuit is Circuit.OPEN, "as far as anybody knows"
    assert not circuits.allows("theirs", 9.0)
    assert circuits.allows("others", 9.0)
    circuits.sent("others", 9.0)
    circuits.succeeded("others")
    assert circuits.circuit is Circuit.CLOSED
    assert not circuits.allows("theirs", 9.0)
    assert circuits.allows("theirs", 10.0), "after the pause"


def test_where_workspace_after_workspace_fails_the_next_ones_begin_with_a_request_or_two() -> None:
    circuits = ServerCircuits(CircuitBreaker(CONFIG))
    for number in range(NUM_FAILING):
        assert circuits.allows(str(number), 0.0)
        fail(circuits, str(number), 0.0)
    for _ in range(CONFIG.probes):
        assert circuits.allows("new", 0.0)
        circuits.sent("new", 0.0)
    assert not circuits.allows("new", 0.0), "the outcome of two is awaited"
    assert circuits.allows("newer", 0.0)
    circuits.succeeded("new")
    assert all(circuits.allows(f"newest {number}", 0.0) for number in range(9))


def test_a_server_that_cannot_be_connected_to_is_left_alone_until_it_can() -> None:
    circuits = ServerCircuits(CircuitBreaker(CONFIG))
    for _ in range(CONFIG.max_failures):
        circuits.sent("theirs", 0.0)
        circuits.unreachable("theirs", 0.0)
    assert circuits.circuit is Circuit.OPEN
    assert not circuits.allows("others", 9.0)
    circuits.reached()  # by a probe
    assert circuits.allows("others", 9.0)
    assert circuits.allows("theirs", 9.0)


def test_requests_that_fail_together_count_once() -> None:
    circuits = ServerCircuits(CircuitBreaker(CONFIG))
    for _ in range(20):
        circuits.sent("theirs", 0.0)
    for _ in range(20):
        circuits.failed("theirs", 0.0, 1.0)
    assert circuits.allows("theirs", 1.0)


def test_few_workspaces_are_remembered() -> None:
    circuits = ServerCircuits(CircuitBreaker(CONFIG))
    for number in range(module.MAX_STATES + 50):
        fail(circuits, f"workspace {number}", 0.0, 1)
    assert len(circuits._tenants) == len(circuits._last_failures) == module.MAX_STATES


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "succeed", "fail", "abandon"]),
            st.sampled_from(["bad", "worse"]),
            st.floats(0.0, 30.0),
        ),
        max_size=120,
    )
)
@settings(deadline=None)
def test_whatever_two_workspaces_do_a_third_is_served(steps: list[tuple[str, str, float]]) -> None:
    circuits, now = ServerCircuits(CircuitBreaker(CONFIG)), 0.0
    under_way: dict[str, list[float]] = {"bad": [], "worse": []}
    for verb, tenant, elapsed_s in steps:
        now += elapsed_s
        if verb == "send":
            if circuits.allows(tenant, now):
                circuits.sent(tenant, now)
                under_way[tenant].append(now)
        elif under_way[tenant]:
            sent_s = under_way[tenant].pop(0)
            if verb == "succeed":
                circuits.succeeded(tenant)
            elif verb == "fail":
                circuits.failed(tenant, sent_s, now)
            else:
                circuits.abandoned(tenant)
        assert circuits.allows("good", now)
        assert circuits.allows(tenant, now + CONFIG.max_pause_s) or len(under_way[tenant]) >= CONFIG.probes


@given(st.integers(NUM_FAILING, 9), st.integers(0, 30))
@settings(deadline=None)
def test_whatever_many_workspaces_do_another_may_always_ask(num_failing: int, num_under_way: int) -> None:
    circuits = ServerCircuits(CircuitBreaker(CONFIG))
    for number in range(num_failing):
        fail(circuits, str(number), 0.0)
        for _ in range(num_under_way):  # which never end
            if circuits.allows(str(number), 10.0):
                circuits.sent(str(number), 10.0)
    assert circuits.allows("good", 10.0)
