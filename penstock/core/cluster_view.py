"""Views of a fleet and of experiments for users and programs, and the orders of operators. Plain data; knows no
process and no policy.

`/admin/cluster` answers with a `ClusterView` as JSON, and `penstock top` draws one.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from penstock.core.objective import Objective, ObjectiveSettings, PolicySet


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    revision: str
    state: str
    role: str = "both"
    # The role that the leader of a shared fleet has ordered, and the host has not taken yet.
    next_role: str | None = None
    region: str = ""
    host: str = ""  # of a shared fleet
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0  # share of blocks in use
    # Share of the prompt tokens looked up since the replica started; None if none were.
    cached_share: float | None = None
    # Since the replica started, over steps of requests with drafts; None: there were none.
    accepted_share: float | None = None  # of drafted tokens
    tokens_per_draft: float | None = None  # the accepted tokens, and the token that the step sampled itself
    ttft_p50_s: float | None = None  # lately, as gateways saw it; None: nothing lately
    ttft_p95_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """Interchangeable replicas, and the autoscaler's view of them."""

    model: str
    role: str
    revision: str  # of the replicas that the autoscaler starts
    num_ready: int
    num_starting: int
    num_draining: int
    min_replicas: int
    max_replicas: int
    queued_prefill_tokens: float
    arriving_prefill_tokens_per_s: float
    drain_tokens_per_s: float | None  # of one replica; None: not known yet
    ttft_p95_s: float | None
    kv_usage: float  # mean over ready replicas
    drain_target_s: float
    ttft_target_s: float
    kv_target: float
    held_requests: int
    num_scale_ups: int = 0  # decisions, since the server started
    num_scale_downs: int = 0
    last_decision: str = ""
    last_decision_at: float | None = None  # Unix seconds
    itl_p95_s: float | None = None
    itl_target_s: float | None = None  # None: not a signal

    @property
    def num_wanted(self) -> int:
        return self.num_ready + self.num_starting

    @property
    def drain_s(self) -> float:
        """Return the seconds that the ready replicas need for the queued prefill tokens; 0 while their pace is
        unknown."""
        pace = (self.drain_tokens_per_s or 0.0) * self.num_ready
        return self.queued_prefill_tokens / pace if pace else 0.0

    @property
    def load(self) -> float:
        """Return the largest of the signals as a share of its target; above 1, the pool needs more replicas."""
        return max(
            self.drain_s / self.drain_target_s,
            (self.ttft_p95_s or 0.0) / self.ttft_target_s,
            (self.itl_p95_s or 0.0) / self.itl_target_s if self.itl_target_s else 0.0,
            self.kv_usage / self.kv_target,
            float(self.held_requests > 0),
        )


class DecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of the autoscaler for a pool, or an operator's order, with the signals at that moment."""

    at: float  # Unix seconds
    model: str
    role: str
    decision: str
    num_replicas: int
    queued_prefill_tokens: float
    ttft_p95_s: float | None
    kv_usage: float
    held_requests: int


class GateView(msgspec.Struct, frozen=True):
    gate: str
    result: str
    sentence: str


class ReleaseView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    stable: str
    candidate: str
    stage: str
    step: int
    candidate_share: float
    mirrored_share: float
    reason: str
    started_at: float  # Unix seconds
    since: float  # when this stage, or step, began
    num_stable_requests: int = 0  # in this stage
    num_candidate_requests: int = 0
    num_compared: int = 0
    num_diverged: int = 0
    gates: tuple[GateView, ...] = ()
    is_over: bool = False


class RoutingView(msgspec.Struct, frozen=True, kw_only=True):
    """Routing figures of all gateways, since each started."""

    num_gateways: int = 0
    reasons: dict[str, int] = {}  # requests by reason of their routing decision
    num_prompt_tokens: int = 0
    num_matched_tokens: int = 0  # tokens that the router expected in the cache of the chosen replica


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """One machine with engines of a shared fleet."""

    name: str
    state: str  # ready, cordoned, draining, leaving
    num_replicas: int
    max_replicas: int
    version: str = ""
    epoch: int = 0  # of the latest leader that it obeyed


class GatewayView(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway of a shared fleet."""

    name: str
    version: str = ""
    follows: bool = True  # the current directive, which sets each revision's share of requests


class LeaderView(msgspec.Struct, frozen=True, kw_only=True):
    """The control process that decides for a shared fleet."""

    name: str
    epoch: int
    version: str = ""
    since: float = 0.0  # Unix seconds


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    replicas: tuple[ReplicaView, ...]
    pools: tuple[PoolView, ...]
    releases: tuple[ReleaseView, ...]  # the active ones, and of each model the last that ended
    routing: RoutingView
    at: float  # Unix seconds
    decisions: tuple[DecisionView, ...] = ()  # the latest ones, the newest first
    object: str = "cluster"
    # Only shared fleets have hosts and gateways.
    hosts: tuple[HostView, ...] = ()
    gateways: tuple[GatewayView, ...] = ()
    leader: LeaderView | None = None  # None: there is none, or this server is no shared fleet


class ReleaseOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new revision of a served model: other weights, other engine settings, or both."""

    model: str | None = None  # the served name; None: the only model
    revision: str | None = None  # its name; None: a name made from the differences
    weights: str | None = None  # as for `penstock serve MODEL`; None: the stable revision's
    settings: dict[str, Any] = {}  # engine settings by name, such as {"max_num_seqs": 64}
    policy: dict[str, Any] = {}  # shares, times and thresholds that differ from the defaults


class HostOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An order of an operator of a shared fleet."""

    action: Literal["cordon", "uncordon", "drain", "move"]
    target: str  # a host; for move a replica
    to: str | None = None  # for move: the host that gets the replica; None: where there is room


class ReplicaOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator's order about one replica. The autoscaler stays active, and corrects the number of replicas if
    there are too few or too many."""

    action: Literal["start", "drain", "resume", "convert"]
    replica_id: str | None = None  # to drain, resume or convert
    model: str | None = None  # of a replica to start; None: the only model
    role: str = "both"  # of a replica to start, or that a replica converts to


class FleetControl(Protocol):
    """Shows operators the fleet behind a gateway, and takes their orders. A server without a fleet has no such
    object."""

    @property
    def pools(self) -> tuple[PoolView, ...]:
        """Return the pools of the control process's last report."""
        ...

    async def cluster(self) -> ClusterView: ...

    async def start_release(self, order: ReleaseOrder) -> ReleaseView: ...

    async def promote_release(self, model: str | None) -> ReleaseView: ...

    async def roll_back_release(self, model: str | None) -> ReleaseView: ...

    async def operate(self, order: HostOrder) -> ClusterView:
        """Carry out an order about hosts. Returns the fleet after that."""
        ...

    async def order_replica(self, order: ReplicaOrder) -> ClusterView:
        """Start to carry out an order. Returns the fleet at that moment."""
        ...


class ExperimentOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two policy sets to compare. The gateway has looked up their names."""

    model: str | None = None  # the served name; None: the only model
    a: str  # the names of the sets
    b: str
    policy_a: PolicySet
    policy_b: PolicySet
    objective: ObjectiveSettings
    config: dict[str, Any] = {}  # what differs from the defaults of an experiment


class ArmView(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    revision: str
    num_replicas: int  # that serve now
    num_requests: int
    objective: Objective


class DifferenceView(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of objectives, second set minus first set, with its confidence interval."""

    mean: float
    low: float
    high: float
    num_windows: int


class ExperimentView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    stage: str
    share: float
    a: ArmView
    b: ArmView
    difference: DifferenceView | None  # None: too few windows so far
    confidence: float
    num_windows: int
    min_windows: int
    guards: tuple[GateView, ...]
    verdict: str | None
    reason: str
    started_at: float  # Unix seconds
    ends_at: float  # at the latest
    is_over: bool


class ExperimentControl(Protocol):
    """Runs experiments on the fleet behind a gateway."""

    async def experiments(self) -> tuple[ExperimentView, ...]: ...

    async def start_experiment(self, order: ExperimentOrder) -> ExperimentView: ...

    async def stop_experiment(self, model: str | None) -> ExperimentView: ...
