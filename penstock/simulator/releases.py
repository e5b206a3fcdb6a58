"""Runs a release in a simulated fleet: candidates start, requests are mirrored and split, gates judge, and the
revision that lost is drained. `control/release` decides, as it does for a live fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from penstock.control.gates import EvidenceCollector
from penstock.control.release import ReleaseConfig, ReleaseEvent, Releases, ReleaseState, Stage
from penstock.core.errors import EngineUnavailable
from penstock.core.request import FinishReason, Request
from penstock.dispatch import Attempt
from penstock.router import ReplicaState
from penstock.simulator.driver import MIRROR_PREFIX, Driver, Rank
from penstock.simulator.fleet import Member
from penstock.simulator.report import ReleaseChange

STABLE, CANDIDATE = "stable", "candidate"
LOST_AFTER_S = 30.0  # without a ready replica of the candidate, as in a live fleet
_ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRelease:
    """A release that begins while a fleet serves, and how the candidate differs from the stable revision."""

    at_s: float
    config: ReleaseConfig = field(default_factory=ReleaseConfig)
    slowdown: float = 1.0  # of the candidate's steps
    error_share: float = 0.0  # of the attempts that the candidate gets
    diverging_share: float = 0.0  # of its answers to mirrored requests


@dataclass(frozen=True, slots=True)
class _Sample:
    revision: str
    stage_number: int | None
    ttft_s: float | None
    itl_s: float | None
    has_failed: bool


class ReleaseRun:
    def __init__(self, driver: Driver, release: SimulatedRelease, interval_s: float, rng: Random) -> None:
        self._driver = driver
        self._fleet = driver.fleet
        self._release = release
        self._rules = Releases(release.config)
        self._interval_s = interval_s
        self._rng = rng
        self._state: ReleaseState | None = None
        self._next: ReleaseState | None = None  # the next stage, which waits for replicas of the candidate
        self._collector = EvidenceCollector(STABLE, CANDIDATE, release.config.gates)
        self._stages: dict[str, int] = {}  # by request: the stage in which the request began
        self._num_at_first = 0
        self._ready_s = 0.0  # when a replica of the candidate was last ready
        self.changes: list[ReleaseChange] = []

    def begin(self) -> None:
        self._driver.release = self
        self._driver.events.at(self._release.at_s, Rank.CONTROL, self._start)

    # Methods that the driver calls.

    def choose_revision(self, request: Request) -> str | None:
        """Return the revision that must answer an attempt; None: any."""
        state = self._state
        if state is None or state.is_over:
            return None
        self._stages.setdefault(request.id, state.stage_number)
        if request.id.startswith(MIRROR_PREFIX):
            return CANDIDATE
        chosen = self._rules.revision_for(state, request.affinity_key or request.id)
        if state.stage is Stage.CANARY and not self._ready(chosen):
            return STABLE if chosen == CANDIDATE else CANDIDATE
        return chosen

    def mirrors(self, request: Request) -> bool:
        """Return whether a copy of a new request goes to the candidate."""
        state = self._state
        return (
            state is not None
            and state.stage is Stage.SHADOW
            and self._rules.mirrors(state, request.id)
            and bool(self._ready(CANDIDATE))
        )

    def check(self, member: Member) -> None:
        """Raise for an attempt that the candidate fails."""
        if member.revision == CANDIDATE and self._rng.random() < self._release.error_share:
            raise EngineUnavailable("The candidate failed.", retry_after_s=1.0)

    def ended(self, attempt: Attempt) -> None:
        """Take an attempt as evidence."""
        stage_number = self._stages.pop(attempt.request.id, None)
        if attempt.error is None and attempt.finish_reason in (None, FinishReason.ABORT):
            return
        has_failed = attempt.error is not None
        self._collector.add(
            _Sample(attempt.revision, stage_number, attempt.ttft_s, attempt.itl_s, has_failed)
        )
        if attempt.request.id.startswith(MIRROR_PREFIX) and attempt.finish_reason in _ANSWERED:
            has_diverged = self._rng.random() < self._release.diverging_share
            self._collector.add_comparisons(stage_number, 1, int(has_diverged))

    # The stages.

    def _start(self, now: float) -> None:
        self._num_at_first = len(self._ready(STABLE))
        state = self._rules.start(STABLE, CANDIDATE, now)
        self._enter(state, now)
        for dispatcher in self._driver.dispatchers:
            dispatcher.choose_revision = self.choose_revision
        self._start_missing(state, now)
        self._look(now)

    def _look(self, now: float) -> None:
        assert self._state is not None
        steps: dict[Stage, Callable[[ReleaseState, float], None]] = {
            Stage.WARMING: self._warm_up,
            Stage.SHADOW: self._watch,
            Stage.CANARY: self._watch,
            Stage.LAME_DUCK: self._retire_stable,
            Stage.ROLLING_BACK: self._retire_candidate,
        }
        steps[self._state.stage](self._state, now)
        if not self._state.is_over and not self._driver.is_done:
            self._driver.events.at(now + self._interval_s, Rank.CONTROL, self._look)

    def _warm_up(self, state: ReleaseState, now: float) -> None:
        if self._has_replicas(state):
            self._happen(ReleaseEvent.WARMED_UP, now)

    def _watch(self, state: ReleaseState, now: float) -> None:
        if self._ready(CANDIDATE):
            self._ready_s = now
        elif now - max(self._ready_s, state.since_s) >= LOST_AFTER_S:
            self._happen(ReleaseEvent.CANDIDATE_LOST, now, "no replica of it is ready")
            return
        if self._next is None:
            after = self._rules.judged(state, self._collector.evidence(), now)
            if after is state:
                return
            self._next = after
        if self._next.stage is Stage.CANARY:  # the share grows only after the replicas for it are ready
            self._start_missing(self._next, now)
            if not self._has_replicas(self._next):
                return
        self._enter(self._next, now)

    def _retire_stable(self, state: ReleaseState, now: float) -> None:
        self._start_missing(state, now)
        if self._has_replicas(state) and self._drain(STABLE, now):
            self._happen(ReleaseEvent.DRAINED, now, state.reason)

    def _retire_candidate(self, state: ReleaseState, now: float) -> None:
        if self._drain(CANDIDATE, now):
            self._happen(ReleaseEvent.DRAINED, now, state.reason)

    def _happen(self, happening: ReleaseEvent, now: float, reason: str = "") -> None:
        assert self._state is not None
        self._enter(self._rules.happened(self._state, happening, now, reason), now)

    def _enter(self, state: ReleaseState, now: float) -> None:
        self._state, self._next = state, None
        self._collector.begin(state.stage_number)
        share = self._rules.split(state).candidate_share
        self.changes.append(ReleaseChange(now, state.stage.value, share, state.reason))

    # Replicas.

    def _members(self, revision: str) -> list[Member]:
        return [
            member
            for member in self._fleet.members.values()
            if member.revision == revision and member.is_alive
        ]

    def _ready(self, revision: str) -> list[Member]:
        return [member for member in self._members(revision) if member.state is ReplicaState.READY]

    def _has_replicas(self, state: ReleaseState) -> bool:
        return len(self._ready(CANDIDATE)) >= self._rules.num_replicas(state, self._num_at_first)

    def _start_missing(self, state: ReleaseState, now: float) -> None:
        """Start the replicas that the candidate needs in this stage."""
        missing = self._rules.num_replicas(state, self._num_at_first) - len(self._members(CANDIDATE))
        for _ in range(missing):
            self._driver.start_replica(now, CANDIDATE)

    def _drain(self, revision: str, now: float) -> bool:
        """Let replicas finish their requests, and remove those that have finished. Returns whether none is left."""
        members = self._members(revision)
        for member in members:
            self._driver.settle(member, now)
            if member.state is ReplicaState.STARTING or (
                member.state is ReplicaState.DRAINING and not member.replica.num_requests
            ):
                del self._fleet.members[member.id]
                member.is_alive = False
            else:
                member.state = ReplicaState.DRAINING
        if members:
            self._driver.update(now)
        return not self._members(revision)
