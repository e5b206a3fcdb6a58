"""Searches for faults that break a promise: random fleets under random faults, checked request by request.

A case is defined by a seed alone. A case that breaks a promise is made smaller, as long as the promise stays broken:
fewer faults, fewer requests, fewer replicas.

The limits of gateways are checked while a simulation runs: none may be exceeded, and no request may be refused that
all limits allow. `CheckedLimits` implements the rules of docs/limits.md a second time, without the buckets of the
gateway. A limit per minute allows the amount of one minute at once, and refills evenly over time. The use beyond the
refill is added up, and may not exceed the amount of one minute when a request is admitted. A running request counts
with the reserved tokens, and an ended request with the used tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from random import Random

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.request import FinishReason, Request, Tier
from penstock.scheduler.tenants import OUTPUT_TOKEN_WEIGHT, PROMPT_TOKEN_WEIGHT
from penstock.simulator.control import ControlTimes
from penstock.simulator.cost import LLAMA_8B_ON_H200
from penstock.simulator.driver import Admission
from penstock.simulator.fleet import SimulatedFleet
from penstock.simulator.report import Outcome
from penstock.simulator.simulation import ReplicaConfig, SimulationConfig, simulate
from penstock.simulator.workload import (
    Fault,
    Kill,
    LogNormal,
    LoseKVEvents,
    RestartGateway,
    SlowDown,
    StepClock,
    Tenant,
    Workload,
)

_SECONDS = 60.0
_TOLERANCE = 1e-3  # of a request or token: sums are rounded
_MAX_RESERVED_OUTPUT_TOKENS = 1024


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of every tenant, as the settings of a gateway name them; None is no limit."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def reserved(self, request: Request) -> tuple[int, int, int]:
        """Return the requests, input tokens and output tokens that a request reserves."""
        most = _MAX_RESERVED_OUTPUT_TOKENS
        if self.output_tokens_per_minute is not None:
            most = min(most, max(1, self.output_tokens_per_minute // 4))
        return 1, len(request.prompt_token_ids), min(request.sampling.max_tokens, most)


@dataclass(slots=True)
class _Used:
    """The use of a tenant beyond the refill, for each limit per minute."""

    amounts: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    num_running: int = 0
    at_s: float = 0.0


class CheckedLimits:
    """Passes every request on to the limits of a gateway, and notes decisions that are wrong."""

    def __init__(self, limits: TenantLimits, gateway: Admission, wrong: list[str]) -> None:
        self._limits = limits
        self._per_minute = (
            limits.requests_per_minute,
            limits.input_tokens_per_minute,
            limits.output_tokens_per_minute,
        )
        self._gateway = gateway
        self._wrong = wrong
        self._used: dict[str, _Used] = {}
        self._running: dict[str, tuple[int, int, int]] = {}  # what each request reserved

    def admit(self, request: Request, now: float) -> str | None:
        refusal = self._gateway.admit(request, now)
        used = self._at(request.tenant, now)
        reserved = self._limits.reserved(request)
        if refusal is None:
            exceeded = self._exceeded(used, reserved, _TOLERANCE)
            if exceeded is not None:
                self._wrong.append(f"{request.id} was admitted beyond {exceeded} of {request.tenant}")
            self._add(used, reserved)
            used.num_running += 1
            self._running[request.id] = reserved
        elif self._exceeded(used, reserved, -_TOLERANCE) is None:
            self._wrong.append(f"{request.id} was refused within all limits of {request.tenant}")
        return refusal

    def ended(self, outcome: Outcome, now: float) -> None:
        self._gateway.ended(outcome, now)
        request = outcome.arrival.request
        reserved = self._running.pop(request.id, None)
        if reserved is None:
            return
        used = self._at(request.tenant, now)
        used.num_running -= 1
        has_begun = outcome.queue_s is not None
        num_input = len(request.prompt_token_ids) - outcome.num_cached_tokens if has_begun else 0
        self._add(used, (0, num_input - reserved[1], len(outcome.token_ids) - reserved[2]))

    def _at(self, tenant: str, now: float) -> _Used:
        used = self._used.setdefault(tenant, _Used(at_s=now))
        for place, limit in enumerate(self._per_minute):
            if limit is not None:
                share = limit * (now - used.at_s) / _SECONDS
                used.amounts[place] = max(0.0, used.amounts[place] - share)
        used.at_s = now
        return used

    def _exceeded(self, used: _Used, reserved: tuple[int, int, int], slack: float) -> str | None:
        """Return the limit that one more request would exceed by more than `slack`, in words."""
        most = self._limits.concurrent_requests
        if most is not None and used.num_running >= most:
            return f"{most} concurrent requests"
        names = ("requests", "input tokens", "output tokens")
        for name, limit, amount, more in zip(names, self._per_minute, used.amounts, reserved, strict=True):
            if limit is not None and amount + more > limit + slack:
                return f"{limit} {name} per minute"
        return None

    def _add(self, used: _Used, amounts: tuple[int, int, int]) -> None:
        used.amounts = [max(0.0, amount + more) for amount, more in zip(used.amounts, amounts, strict=True)]


_MOST_SHRINKS = 200
_MAX_STEP_TOKENS = 512
_MAX_MODEL_LEN = 1400
_MAX_QUEUE_REQUESTS = 40
_MAX_ANSWER = 200
_LIMITED_SHARE = 0.3  # of cases: requests that are refused find no other fault
_FAULTS = ("kills", "slow", "lost", "restarts", "clock_steps")


class FaultCase(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet, its traffic and its faults."""

    seed: int
    num_requests: int
    requests_per_s: float
    num_replicas: int
    num_gateways: int
    num_blocks: int
    max_num_seqs: int
    message_delay_s: float
    draft_acceptance: float | None
    timeout_s: float | None
    mean_patience_s: float | None
    session_share: float
    kills: tuple[tuple[float, int, float | None], ...]  # time, replica, seconds until a restart
    slow: tuple[
        tuple[float, int, float, float], ...
    ]  # time, replica, factor, end; a large factor is a freeze
    lost: tuple[tuple[float, float, float], ...]  # time, end, share of KV events
    restarts: tuple[tuple[float, int], ...] = ()  # time, gateway
    clock_steps: tuple[tuple[float, int, float], ...] = ()  # time, replica, seconds
    num_host_blocks: int = 0
    counts_decodes: bool = True
    limits: TenantLimits | None = None  # of the gateways

    @property
    def num_faults(self) -> int:
        return sum(len(getattr(self, name)) for name in _FAULTS)

    @property
    def faults(self) -> tuple[Fault, ...]:
        return (
            *(Kill(at_s, replica, restarts_after_s=after_s) for at_s, replica, after_s in self.kills),
            *(SlowDown(at_s, replica, factor, end_s) for at_s, replica, factor, end_s in self.slow),
            *(LoseKVEvents(at_s, end_s, share) for at_s, end_s, share in self.lost),
            *(RestartGateway(at_s, gateway) for at_s, gateway in self.restarts),
            *(StepClock(at_s, replica, seconds) for at_s, replica, seconds in self.clock_steps),
        )


CASE_DECODER = msgspec.json.Decoder(FaultCase)


def random_case(seed: int, num_requests: int) -> FaultCase:
    rng = Random(seed)
    num_replicas = rng.randint(1, 5)
    rate = rng.choice((5.0, 20.0, 80.0)) * num_replicas
    duration_s = num_requests / rate

    def moment() -> float:
        return rng.uniform(0.0, 1.2 * duration_s)

    def replica() -> int:
        return rng.randrange(num_replicas)

    def slow_down() -> tuple[float, int, float, float]:
        at_s = moment()
        return at_s, replica(), rng.choice((2.0, 8.0, 300.0)), at_s + rng.uniform(0.1, duration_s)

    def loss() -> tuple[float, float, float]:
        at_s = moment()
        return at_s, at_s + rng.uniform(0.1, duration_s), rng.random()

    num_gateways = rng.choice((1, 1, 3))
    # Clocks jump, and host memory fills, where every token is planned by itself.
    counts_decodes = rng.random() < 0.5
    clock_steps = tuple(
        (moment(), replica(), rng.choice((0.01, 1.0, 100.0)))
        for _ in range(0 if counts_decodes else rng.choice((0, 1, 3)))
    )
    return FaultCase(
        seed=seed,
        num_requests=num_requests,
        requests_per_s=rate,
        num_replicas=num_replicas,
        num_gateways=num_gateways,
        num_blocks=rng.choice((96, 400, 4000)),
        max_num_seqs=rng.choice((4, 32, 256)),
        message_delay_s=rng.choice((0.0, 0.02, 0.5)),
        draft_acceptance=None if counts_decodes else rng.choice((None, 0.3, 0.9)),
        timeout_s=rng.choice((None, None, 2.0)),
        mean_patience_s=rng.choice((None, None, 3.0)),
        session_share=rng.choice((0.0, 0.5)),
        kills=tuple(
            (moment(), replica(), rng.choice((None, 0.5, 5.0))) for _ in range(rng.choice((0, 1, 4)))
        ),
        slow=tuple(slow_down() for _ in range(rng.choice((0, 1, 3)))),
        lost=tuple(loss() for _ in range(rng.choice((0, 1)))),
        restarts=tuple((moment(), rng.randrange(num_gateways)) for _ in range(rng.choice((0, 0, 1, 2)))),
        clock_steps=clock_steps,
        num_host_blocks=0 if counts_decodes else rng.choice((0, 8, 200)),
        counts_decodes=counts_decodes,
        limits=_random_limits(rng) if rng.random() < _LIMITED_SHARE else None,
    )


def _random_limits(rng: Random) -> TenantLimits:
    """Draw limits of which some refuse many requests, and others few."""
    return TenantLimits(
        requests_per_minute=rng.choice((None, 20, 60)),
        input_tokens_per_minute=rng.choice((None, 3_000, 20_000)),
        output_tokens_per_minute=rng.choice((None, 500, 2_000)),
        concurrent_requests=rng.choice((None, 2, 8)),
    )


def violation(
    case: FaultCase, gateway_limits: Callable[[TenantLimits], Admission] | None = None
) -> str | None:
    """Run a case; return the promise that was broken, in words, or None. `gateway_limits` makes the limits that admit
    requests; without it, nothing is limited."""
    ended: dict[str, Outcome] = {}
    wrong: list[str] = []

    def check(outcome: Outcome) -> None:
        request_id = outcome.arrival.request.id
        if request_id in ended:
            wrong.append(f"{request_id} ended twice")
        ended[request_id] = outcome
        if (problem := _problem(outcome)) is not None:
            wrong.append(f"{request_id} {problem}")

    fairness = _Fairness(case)

    def check_limits(fleet: SimulatedFleet) -> None:
        if wrong:
            return
        problem = _exceeded(fleet, case) or fairness.exceeded(fleet)
        if problem is not None:
            wrong.append(problem)

    admission: Admission | None = None
    if case.limits is not None and gateway_limits is not None:
        admission = CheckedLimits(case.limits, gateway_limits(case.limits), wrong)
    try:
        report = simulate(_simulation(case), on_outcome=check, on_event=check_limits, admission=admission)
    except Exception as error:  # whatever a broken promise raises is what the search looks for
        return f"{type(error).__name__}: {error}"
    if not wrong and report.num_requests != case.num_requests:
        wrong.append(f"{case.num_requests - report.num_requests} requests never ended")
    return wrong[0] if wrong else None


def _exceeded(fleet: SimulatedFleet, case: FaultCase) -> str | None:
    """Return the limit that a replica exceeds, in words."""
    for member in fleet.members.values():
        scheduler, (step_tokens, _) = member.replica.scheduler, member.replica.last_step
        if scheduler.num_running > case.max_num_seqs:
            return f"{member.id} runs {scheduler.num_running} requests of {case.max_num_seqs}"
        if scheduler.num_waiting > _MAX_QUEUE_REQUESTS + case.max_num_seqs:
            return f"{scheduler.num_waiting} requests wait in {member.id}"
        if step_tokens > _MAX_STEP_TOKENS:
            return f"{member.id} computed {step_tokens} tokens in a step of {_MAX_STEP_TOKENS}"
        if not 0 <= member.replica.cache.num_available <= case.num_blocks:
            return (
                f"{member.id} has {member.replica.cache.num_available} blocks available of {case.num_blocks}"
            )
    return None


class _Fairness:
    """Checks that of two tenants whose requests wait in the same tier of a replica, neither gets much more service
    than the other.

    The tenant with less service goes first. The service of the other tenant therefore grows only by the prompt that
    was admitted last and by the answers of running requests; the difference may have been as large in the other
    direction when both began to wait. A preempted request resumes first, and its prompt counts a second time."""

    def __init__(self, case: FaultCase) -> None:
        most_running = min(case.max_num_seqs, case.num_blocks)
        self._bound = 2 * (
            PROMPT_TOKEN_WEIGHT * _MAX_MODEL_LEN + OUTPUT_TOKEN_WEIGHT * _MAX_ANSWER * most_running
        )
        self._since: dict[str, dict[tuple[int, str, str], tuple[int, int]]] = {}  # by replica

    def exceeded(self, fleet: SimulatedFleet) -> str | None:
        for member in fleet.members.values():
            scheduler = member.replica.scheduler
            if scheduler.num_waiting < 2:
                self._since.pop(member.id, None)
                continue
            before = self._since.get(member.id, {})
            now: dict[tuple[int, str, str], tuple[int, int]] = {}
            for rank, services in enumerate(scheduler.services()):
                for first, second in permutations(services, 2) if len(services) > 1 else ():
                    lead = services[first] - services[second]
                    pair = rank, first, second
                    began = now[pair] = before.get(pair) or (lead, scheduler.num_preemptions)
                    again = PROMPT_TOKEN_WEIGHT * _MAX_MODEL_LEN * (scheduler.num_preemptions - began[1])
                    if lead - began[0] > self._bound + again:
                        return f"{member.id} gave {first} {lead - began[0]} more service than {second}, which waited"
            self._since[member.id] = now
        return None


def _problem(outcome: Outcome) -> str | None:
    arrival, tokens = outcome.arrival, outcome.token_ids
    if any(token != arrival.output_token(index) for index, token in enumerate(tokens)):
        return "got a wrong, lost or repeated token"
    if (outcome.rejection is None) == (outcome.finish_reason is None):
        return "ended both in an answer and in an error, or in neither"
    if outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        room = _MAX_MODEL_LEN - len(arrival.request.prompt_token_ids)
        expected = min(arrival.num_output_tokens, arrival.request.sampling.max_tokens, room)
        if len(tokens) != expected:
            return f"was answered with {len(tokens)} of {expected} tokens"
    times = [arrival.time_s, *outcome.token_times_s]
    if any(later < earlier for earlier, later in pairwise(times)):
        return "got tokens before their time"
    return None


def _simulation(case: FaultCase) -> SimulationConfig:
    return SimulationConfig(
        workload=Workload(
            num_requests=case.num_requests,
            requests_per_s=case.requests_per_s,
            prompt_tokens=LogNormal(median=60, sigma=1.0, maximum=900),
            output_tokens=LogNormal(median=20, sigma=0.8, maximum=_MAX_ANSWER),
            tenants=(Tenant("a", 3.0), Tenant("b"), Tenant("c", tier=Tier.BATCH)),
            prefix_tokens=LogNormal(median=100, sigma=0.5, maximum=300),
            prefixes_per_tenant=3,
            session_share=case.session_share,
            mean_think_s=0.5,
            max_prompt_tokens=900,
            timeout_s=case.timeout_s,
            mean_patience_s=case.mean_patience_s,
        ),
        replica=ReplicaConfig(
            num_blocks=case.num_blocks,
            max_model_len=_MAX_MODEL_LEN,
            cost=LLAMA_8B_ON_H200,
            scheduler=SchedulerConfig(
                max_num_seqs=case.max_num_seqs,
                max_num_batched_tokens=_MAX_STEP_TOKENS,
                max_queue_requests=_MAX_QUEUE_REQUESTS,
            ),
            draft_acceptance=case.draft_acceptance,
            num_host_blocks=case.num_host_blocks,
            block_copy_s=1e-5 if case.num_host_blocks else None,
            counts_decodes=case.counts_decodes,
        ),
        num_replicas=case.num_replicas,
        num_gateways=case.num_gateways,
        faults=case.faults,
        times=ControlTimes(message_delay_s=case.message_delay_s, start_s=1.0),
        seed=case.seed,
    )


def shrink(case: FaultCase, breaks: Callable[[FaultCase], bool]) -> FaultCase:
    """Return the smallest case found that still breaks a promise."""
    for _ in range(_MOST_SHRINKS):
        for smaller in _smaller(case):
            if breaks(smaller):
                case = smaller
                break
        else:
            return case
    return case


def _smaller(case: FaultCase) -> Iterator[FaultCase]:
    replace = msgspec.structs.replace
    if case.num_requests > 1:
        yield replace(case, num_requests=case.num_requests // 2)
        yield replace(case, num_requests=case.num_requests - 1)
    for name in _FAULTS:
        faults = getattr(case, name)
        for index in range(len(faults)):
            yield replace(case, **{name: faults[:index] + faults[index + 1 :]})
    named = [kill[1] for kill in case.kills] + [slow[1] for slow in case.slow]
    named += [step[1] for step in case.clock_steps]
    if case.num_replicas > max([0, *named]) + 1:
        yield replace(case, num_replicas=case.num_replicas - 1)
    simple = {"num_host_blocks": 0, "session_share": 0.0, "timeout_s": None, "mean_patience_s": None,
              "draft_acceptance": None, "message_delay_s": 0.0, "limits": None}  # fmt: skip
    if not case.restarts:
        simple["num_gateways"] = 1
    for name, value in simple.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
