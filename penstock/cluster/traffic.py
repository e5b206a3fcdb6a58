"""A gateway's part in releases and experiments: chooses the revision that answers a request, mirrors requests,
compares answers, and notes how requests were served.

The arm of an experiment follows from a hash of the session, or else of the request, so that all gateways choose alike
and a conversation stays where its prefix is cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.cluster.control_messages import ActiveExperiment, ActiveRelease, ArmSample, ModelReport, Sample
from penstock.cluster.fleet import Fleet
from penstock.control.experiment import Arm, arm_of
from penstock.control.release import Releases, Stage
from penstock.core.errors import DeadlineExceeded, InvalidRequest, PenstockError, RateLimited, ShuttingDown
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.dispatch import Attempt
from penstock.router import ReplicaState

MAX_MIRRORED = 64  # at a time
MIRROR_TIMEOUT_S = 120.0
# When a near-tie between two tokens is decided differently, two good answers share nothing after that token.
COMPARED_TOKENS = 16
_MIRROR_PREFIX = "mirror-"
# Errors that the caller or the deadline caused, not the revision.
_CALLERS_FAULT = (InvalidRequest, RateLimited, DeadlineExceeded, ShuttingDown)
_CALLERS_ENDS = (None, FinishReason.ABORT, FinishReason.INVALID)
# In these stages the candidate gets no client's request at all.
_HIDDEN = (Stage.WARMING, Stage.SHADOW)


@dataclass(slots=True)
class _Pair:
    """A request and its mirrored copy, until both are answered."""

    stage_number: int
    since_s: float
    answer: tuple[int, ...] | None = None
    mirrored: tuple[int, ...] | None = None


class ReleaseTraffic:
    """Implements `fleet.FleetObserver`, and chooses the revision of every attempt."""

    def __init__(self, fleet: Fleet, only_model: Callable[[], str | None]) -> None:
        self._fleet = fleet
        self._only_model = only_model  # the model of a request that names none
        self._releases: dict[str, ActiveRelease] = {}
        self._stages: dict[str, int] = {}  # by request id: the stage that it began in, if that is not over
        self._pairs: dict[str, _Pair] = {}  # by the id of the client's request
        self._samples: list[Sample] = []
        self._arrived_tokens: dict[str, int] = {}
        self._compared: dict[str, tuple[int, int, int]] = {}  # by model: stage, compared, diverged

    def follow(self, releases: Iterable[ActiveRelease]) -> None:
        self._releases = {release.model: release for release in releases}
        present = {release.state.stage_number for release in self._releases.values()}
        # Requests that began in a past stage prove nothing.
        self._stages = {name: stage for name, stage in self._stages.items() if stage in present}
        self._pairs = {name: pair for name, pair in self._pairs.items() if pair.stage_number in present}

    def choose_revision(self, request: Request) -> str | None:
        """Return the revision that must answer an attempt; None: any."""
        release = self._releases.get(self._model(request))
        if release is None:
            return None
        state = release.state
        self._stages.setdefault(request.id, state.stage_number)
        if request.id.startswith(_MIRROR_PREFIX):
            return state.candidate
        key = request.affinity_key or request.id
        chosen = Releases(release.config).revision_for(state, key)
        other = state.stable if chosen == state.candidate else state.candidate
        if state.stage not in _HIDDEN and not self._is_ready(chosen) and self._is_ready(other):
            return other
        return chosen

    def arrived(self, request: Request, uncached_tokens: int) -> None:
        if request.id.startswith(_MIRROR_PREFIX):
            return
        model = self._model(request)
        self._arrived_tokens[model] = self._arrived_tokens.get(model, 0) + uncached_tokens
        release = self._releases.get(model)
        if (
            release is not None
            and release.state.stage is Stage.SHADOW
            and self._has_room()
            and Releases(release.config).mirrors(release.state, request.id)
            and self._is_ready(release.state.candidate)
        ):
            self._mirror(request, release.state.stage_number)

    def first_token(self, request: Request, replica_id: str, revision: str, ttft_s: float) -> None:
        """Nothing to do: the end of the attempt reports this time too."""

    def ended(self, attempt: Attempt) -> None:
        request = attempt.request
        model = self._model(request)
        # The caller's, not the revision's: the client has left, or its own grammar ended the answer.
        is_callers = attempt.error is None and attempt.finish_reason in _CALLERS_ENDS
        stage_number = self._stages.pop(request.id, None)
        if not is_callers and not isinstance(attempt.error, _CALLERS_FAULT):
            self._samples.append(
                Sample(
                    attempt.replica_id,
                    model,
                    attempt.revision,
                    stage_number,
                    attempt.ttft_s,
                    attempt.itl_s,
                    attempt.error is not None or attempt.finish_reason is FinishReason.ERROR,
                )
            )
        self._pair_up(attempt, model)

    def take_samples(self) -> tuple[Sample, ...]:
        samples, self._samples = self._samples, []
        return tuple(samples)

    def take_report(self, model: str, held_requests: int, held_tokens: int) -> ModelReport:
        stage_number, num_compared, num_diverged = self._compared.pop(model, (None, 0, 0))
        return ModelReport(
            arrived_tokens=self._arrived_tokens.pop(model, 0),
            held_requests=held_requests,
            held_tokens=held_tokens,
            stage_number=stage_number,
            num_compared=num_compared,
            num_diverged=num_diverged,
        )

    def _mirror(self, request: Request, stage_number: int) -> None:
        self._pairs[request.id] = _Pair(stage_number, time.monotonic())
        mirrored = replace(request, id=_MIRROR_PREFIX + request.id)

        def ignore(_: TokenEvent) -> None:
            """Nothing to do: `ended` gets the whole answer."""

        def give_up(_: PenstockError) -> None:
            self._pairs.pop(request.id, None)

        self._fleet.add(mirrored, timeout_s=MIRROR_TIMEOUT_S, on_event=ignore, on_error=give_up)

    def _has_room(self) -> bool:
        """Return whether one more request may be mirrored. Copies that timed out are dropped."""
        if len(self._pairs) >= MAX_MIRRORED:
            latest_s = time.monotonic() - MIRROR_TIMEOUT_S
            self._pairs = {name: pair for name, pair in self._pairs.items() if pair.since_s > latest_s}
        return len(self._pairs) < MAX_MIRRORED

    def _pair_up(self, attempt: Attempt, model: str) -> None:
        request = attempt.request
        is_mirrored = request.id.startswith(_MIRROR_PREFIX)
        original_id = request.id.removeprefix(_MIRROR_PREFIX)
        pair = self._pairs.get(original_id)
        if pair is None:
            return
        if attempt.error is not None and not is_mirrored and not attempt.output_token_ids:
            return  # it is tried elsewhere, from the beginning
        is_whole = attempt.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not is_whole:
            del self._pairs[original_id]
            if not is_mirrored:
                self._fleet.abort(_MIRROR_PREFIX + original_id)
            return
        answer = attempt.output_token_ids[:COMPARED_TOKENS]
        if is_mirrored:
            pair.mirrored = answer
        else:
            pair.answer = answer
        if pair.answer is not None and pair.mirrored is not None:
            del self._pairs[original_id]
            if _is_repeatable(request):
                self._count(model, pair)

    def _count(self, model: str, pair: _Pair) -> None:
        stage_number, num_compared, num_diverged = self._compared.get(model, (pair.stage_number, 0, 0))
        if stage_number != pair.stage_number:
            num_compared = num_diverged = 0
        has_diverged = pair.answer != pair.mirrored
        self._compared[model] = pair.stage_number, num_compared + 1, num_diverged + has_diverged

    def _model(self, request: Request) -> str:
        return request.model or self._only_model() or ""

    def _is_ready(self, revision: str) -> bool:
        return any(
            member.replica.revision == revision and member.replica.state is ReplicaState.READY
            for member in self._fleet.members
        )


def is_mirrored(request: Request) -> bool:
    """Return whether a request is a copy whose answer no client reads."""
    return request.id.startswith(_MIRROR_PREFIX)


def _is_repeatable(request: Request) -> bool:
    """Return whether the same request gets the same answer twice, from the same weights."""
    return request.sampling.temperature == 0.0 or request.sampling.seed is not None


# Errors that the caller or an operator caused.
_NOT_OURS = (InvalidRequest, RateLimited, ShuttingDown)


def is_dropped(attempt: Attempt) -> bool | None:
    """Return whether an attempt counts as a dropped request; None: it does not count, because its client has left,
    its error or its grammar is the caller's, or it is a mirrored copy. A request that was too late counts as dropped:
    the scheduler decides how long requests wait. So does an attempt that another replica then answered."""
    error, reason = attempt.error, attempt.finish_reason
    if is_mirrored(attempt.request) or isinstance(error, _NOT_OURS):
        return None
    if error is None and reason in (None, FinishReason.ABORT, FinishReason.INVALID):
        return None
    return error is not None or reason in (FinishReason.ERROR, FinishReason.DEADLINE)


class ExperimentTraffic:
    """Implements `fleet.FleetObserver`."""

    def __init__(self, fleet: Fleet, only_model: Callable[[], str | None]) -> None:
        self._fleet = fleet
        self._only_model = only_model  # the model of a request that names none
        self._active: dict[str, ActiveExperiment] = {}  # by model
        self._samples: list[ArmSample] = []

    def follow(self, experiments: Iterable[ActiveExperiment]) -> None:
        active = {each.model: each for each in experiments}
        if active != self._active:
            self._active = active
            self._fleet.route_by(
                {name: weights for each in active.values() for name, weights in each.routing.items()}
            )

    def choose_revision(self, request: Request) -> tuple[bool, str | None]:
        """Return whether an experiment decides about a request, and the revision that must answer it."""
        experiment = self._of(request)
        if experiment is None:
            return False, None
        if not experiment.is_running:
            # Until replicas of the arms are ready, and while they leave, the revision from before answers.
            return True, experiment.base if self._is_ready(experiment.base) else None
        arm = arm_of(_key(request), experiment.id, experiment.share)
        chosen = experiment.revision_of(arm)
        other = experiment.revision_of(Arm.B if arm is Arm.A else Arm.A)
        return True, other if not self._is_ready(chosen) and self._is_ready(other) else chosen

    def arrived(self, request: Request, uncached_tokens: int) -> None:
        """Nothing to do: a request counts when it ends."""

    def first_token(self, request: Request, replica_id: str, revision: str, ttft_s: float) -> None:
        """Nothing to do: the end of the attempt reports this time too."""

    def ended(self, attempt: Attempt) -> None:
        request = attempt.request
        experiment, dropped = self._of(request), is_dropped(attempt)
        if experiment is None or not experiment.is_running or dropped is None:
            return
        arm = arm_of(_key(request), experiment.id, experiment.share)
        if attempt.revision != experiment.revision_of(arm):
            return  # begun before the experiment, or the arm had no replica
        num_tokens = len(request.prompt_token_ids) + len(attempt.output_token_ids)
        self._samples.append(
            ArmSample(experiment.id, arm, request.tier, attempt.ttft_s, attempt.itl_s, dropped, num_tokens)
        )

    def take_samples(self) -> tuple[ArmSample, ...]:
        samples, self._samples = self._samples, []
        return tuple(samples)

    def _of(self, request: Request) -> ActiveExperiment | None:
        if not self._active:
            return None
        return self._active.get(request.model or self._only_model() or "")

    def _is_ready(self, revision: str) -> bool:
        return any(
            member.replica.revision == revision and member.replica.state is ReplicaState.READY
            for member in self._fleet.members
        )


def _key(request: Request) -> str:
    """Return the key that keeps requests in one arm: the session, if the client named one. The key of an adapter is
    no session: all its requests would go to one arm."""
    key = request.affinity_key
    if key and (request.adapter is None or key != request.adapter.digest):
        return f"{request.tenant}\0{key}"
    return request.id
