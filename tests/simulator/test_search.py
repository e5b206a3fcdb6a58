"""The search for faults: what it draws, and what it checks."""

from __future__ import annotations

import re

import msgspec
import pytest

from penstock.cli import simulate as command
from penstock.core.request import Request
from penstock.scheduler.keyed_heap import KeyedHeap
from penstock.scheduler.tenants import TenantAccount
from penstock.simulator import Fixed, ReplicaConfig, Report, SimulationConfig, Workload, simulate
from penstock.simulator.fleet import SimulatedFleet
from penstock.simulator.report import Outcome
from penstock.simulator.search import TenantLimits, random_case, shrink, violation
from penstock.simulator.workload import Fault, RestartGateway, StepClock

WORKLOAD = Workload(num_requests=40, requests_per_s=40.0, prompt_tokens=Fixed(50), output_tokens=Fixed(100))


def run(*faults: Fault, gateways: int = 2, **replica: object) -> Report:
    config = SimulationConfig(
        workload=WORKLOAD,
        replica=ReplicaConfig(**replica),  # type: ignore[arg-type]
        num_replicas=2,
        num_gateways=gateways,
        faults=faults,
    )
    return simulate(config)


@pytest.mark.parametrize("counts_decodes", [True, False])
def test_a_gateway_that_restarts_loses_its_requests_and_no_others(counts_decodes: bool) -> None:
    report = run(RestartGateway(0.5, 1), counts_decodes=counts_decodes)
    lost = report.rejected["gateway_restarted"]
    assert 0 < lost < 20  # of the requests that it had, and none of the other gateway's
    assert report.num_answered == 40 - lost
    assert report == run(RestartGateway(0.5, 1), counts_decodes=not counts_decodes)


def test_a_clock_that_jumps_loses_no_request() -> None:
    report = run(StepClock(0.3, 0, 50.0), StepClock(0.4, 0, 1.0), counts_decodes=False)
    assert report.num_answered == 40
    with pytest.raises(ValueError, match="simulation's clock"):
        run(StepClock(0.3, 0, 50.0))


def test_every_kind_of_fault_is_drawn_and_breaks_nothing() -> None:
    cases = [random_case(seed, 30) for seed in range(40)]
    for name in ("kills", "slow", "lost", "restarts", "clock_steps", "num_host_blocks"):
        assert any(getattr(case, name) for case in cases), name
    for case in cases[:12]:
        assert violation(case) is None, case


def test_replicas_are_looked_at_after_every_event() -> None:
    seen: list[int] = []

    def look(fleet: SimulatedFleet) -> None:
        seen.append(max(member.replica.scheduler.num_running for member in fleet.members.values()))

    simulate(SimulationConfig(workload=WORKLOAD), on_event=look)
    assert len(seen) > 80
    assert max(seen) > 1


def test_a_limit_that_is_exceeded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.simulator.search._exceeded", lambda fleet, case: "too much of it")
    assert violation(random_case(1, 5)) == "too much of it"


def test_smaller_cases_keep_the_gateways_that_restart() -> None:
    case = msgspec.structs.replace(random_case(1, 8), num_gateways=3, restarts=((0.1, 2),))
    smallest = shrink(case, lambda each: len(each.restarts) == 1)
    assert (smallest.num_gateways, smallest.num_requests, smallest.num_faults) == (3, 1, 1)


def test_an_answer_may_end_with_the_context_of_the_model() -> None:
    """The long conversation of this case leaves its last answer less room than it asks for."""
    case = msgspec.structs.replace(
        random_case(1_000_253, 86), num_replicas=1, kills=(), slow=(), lost=(), restarts=()
    )
    case = msgspec.structs.replace(
        case, requests_per_s=40.0, num_blocks=4000, max_num_seqs=256, session_share=0.5
    )
    case = msgspec.structs.replace(
        case, num_gateways=1, timeout_s=None, mean_patience_s=None, message_delay_s=0.0
    )
    assert violation(case) is None


@pytest.mark.parametrize("counts_decodes", [True, False])
def test_a_scheduler_that_favours_one_tenant_is_found(
    counts_decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = msgspec.structs.replace(
        random_case(1, 400), requests_per_s=80.0, num_replicas=1, num_gateways=1, num_blocks=4000, max_num_seqs=4,
        timeout_s=None, mean_patience_s=None, kills=(), slow=(), lost=(), restarts=(), clock_steps=(),
        draft_acceptance=None, num_host_blocks=0, counts_decodes=counts_decodes,
    )  # fmt: skip
    assert violation(case) is None

    def most_served(accounts: KeyedHeap[TenantAccount]) -> TenantAccount | None:
        return max(accounts.items(), key=lambda account: account.service, default=None)

    monkeypatch.setattr("penstock.scheduler.queue.least_served", most_served)
    assert re.search("gave . [0-9]+ more service than ., which waited", str(violation(case)))


class Gateway:
    """Limits that admit and refuse as they are told."""

    def __init__(self, refusal: str | None) -> None:
        self._refusal = refusal

    def admit(self, request: Request, now: float) -> str | None:
        return self._refusal

    def ended(self, outcome: Outcome, now: float) -> None: ...


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (TenantLimits(requests_per_minute=10), "10 requests per minute"),
        (TenantLimits(input_tokens_per_minute=900), "900 input tokens per minute"),
        (TenantLimits(output_tokens_per_minute=100), "100 output tokens per minute"),
        (TenantLimits(concurrent_requests=1), "1 concurrent requests"),
    ],
)
def test_a_gateway_that_admits_too_much_or_too_little_is_found(limits: TenantLimits, named: str) -> None:
    case = msgspec.structs.replace(random_case(1, 60), limits=limits)
    assert f"was admitted beyond {named} of" in str(violation(case, lambda _: Gateway(None)))
    assert "was refused within all limits" in str(violation(case, lambda _: Gateway("rate_limit_exceeded")))
    assert violation(case) is None  # nothing is limited


def test_the_limits_that_serve_keep_their_promise() -> None:
    limited = [case for seed in range(60) if (case := random_case(seed, 40)).limits is not None]
    assert len(limited) > 10
    for case in limited[:8]:
        assert command._violation(case) is None, case


def test_a_place_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.GatewayLimits, "ended", lambda self, outcome, now: None)
    case = msgspec.structs.replace(random_case(1, 60), limits=TenantLimits(concurrent_requests=2))
    assert "was refused within all limits" in str(command._violation(case))


def test_a_request_that_fits_but_for_rounding_may_be_admitted_or_refused() -> None:
    """In this case a request comes when its tenant's minute is refilled for it, but for a few millionths."""
    assert command._violation(random_case(7_000_134, 100)) is None
