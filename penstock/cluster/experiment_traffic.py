"""Does a gateway's part in experiments: chooses the arm of a request, and notes how the request was served.

The arm follows from a hash of the session, or else of the request, so that all gateways choose alike and a
conversation stays where its prefix is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.cluster.control_messages import ActiveExperiment, ArmSample
from penstock.cluster.fleet import Fleet
from penstock.cluster.served import is_dropped
from penstock.control.experiment import Arm, arm_of
from penstock.core.request import Request
from penstock.dispatch import Attempt
from penstock.router import ReplicaState


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
        """Say whether an experiment decides about a request, and the revision that must answer it."""
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
