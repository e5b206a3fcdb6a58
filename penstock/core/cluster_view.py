"""What users and programs see of a fleet, and what they may order. Plain data; knows no process and no policy.

`/admin/cluster` answers with a `ClusterView` as JSON, and `penstock top` draws one.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    revision: str
    state: str
    role: str = "both"
    region: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0  # share of blocks in use
    cached_share: float | None = (
        None  # of prompt tokens looked up, since the replica started; None: none were
    )
    ttft_p50_s: float | None = None  # lately, as gateways saw it; None: nothing lately
    ttft_p95_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that stand in for each other, and what the autoscaler makes of them."""

    model: str
    role: str
    revision: str  # the one that the autoscaler starts replicas of
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

    @property
    def num_wanted(self) -> int:
        return self.num_ready + self.num_starting

    @property
    def drain_s(self) -> float:
        """How long the queued prefill tokens take the ready replicas; 0 while their pace is not known."""
        pace = (self.drain_tokens_per_s or 0.0) * self.num_ready
        return self.queued_prefill_tokens / pace if pace else 0.0

    @property
    def load(self) -> float:
        """The largest of the three signals as a share of its target; above 1, more replicas are called for."""
        return max(
            self.drain_s / self.drain_target_s,
            (self.ttft_p95_s or 0.0) / self.ttft_target_s,
            self.kv_usage / self.kv_target,
            float(self.held_requests > 0),
        )


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
    """Of all gateways, since each started."""

    num_gateways: int = 0
    reasons: dict[str, int] = {}  # how many requests each reason decided
    num_prompt_tokens: int = 0
    num_matched_tokens: int = 0  # of them, that the chosen replica was thought to hold


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    replicas: tuple[ReplicaView, ...]
    pools: tuple[PoolView, ...]
    releases: tuple[ReleaseView, ...]  # the active ones, and of each model the last that ended
    routing: RoutingView
    at: float  # Unix seconds
    object: str = "cluster"


class ReleaseOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new revision of a served model: other weights, other engine settings, or both."""

    model: str | None = None  # by the name that it is served under; None: the only one
    revision: str | None = None  # a name for it; None: one is made from what differs
    weights: str | None = None  # as `penstock serve MODEL` takes it; None: those of the stable revision
    settings: dict[str, Any] = {}  # engine settings by name, such as {"max_num_seqs": 64}
    policy: dict[str, Any] = {}  # shares, times and thresholds that differ from the defaults


class FleetControl(Protocol):
    """What operators may see and order of the fleet behind a gateway. A server without a fleet has no such object."""

    @property
    def pools(self) -> tuple[PoolView, ...]:
        """The pools as the control process last reported them."""
        ...

    async def cluster(self) -> ClusterView: ...

    async def start_release(self, order: ReleaseOrder) -> ReleaseView: ...

    async def promote_release(self, model: str | None) -> ReleaseView: ...

    async def roll_back_release(self, model: str | None) -> ReleaseView: ...
