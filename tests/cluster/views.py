"""A fleet as operators see it, made up."""

from __future__ import annotations

from penstock.core.cluster_view import ClusterView, GateView, PoolView, ReleaseView, ReplicaView, RoutingView

POOL = PoolView(
    model="m",
    role="both",
    revision="v1",
    num_ready=2,
    num_starting=1,
    num_draining=0,
    min_replicas=1,
    max_replicas=4,
    queued_prefill_tokens=3000.0,
    arriving_prefill_tokens_per_s=100.0,
    drain_tokens_per_s=500.0,
    ttft_p95_s=0.5,
    kv_usage=0.25,
    drain_target_s=2.0,
    ttft_target_s=1.0,
    kv_target=0.5,
    held_requests=0,
    num_scale_ups=3,
    last_decision="start 1: queued prefill tokens",
    last_decision_at=90.0,
)
RELEASE = ReleaseView(
    id="rel_1",
    model="m",
    stable="v1",
    candidate="v2",
    stage="canary",
    step=1,
    candidate_share=0.25,
    mirrored_share=0.0,
    reason="gates_passed",
    started_at=1.0,
    since=50.0,
    gates=(GateView("ttft", "undecided", "3 of 200 requests"),),
)
VIEW = ClusterView(
    replicas=(
        ReplicaView(
            id="replica-1",
            model="m",
            revision="v1",
            state="ready",
            num_running=3,
            accepted_share=0.62,
            tokens_per_draft=2.44,
            ttft_p50_s=0.012,
        ),
        ReplicaView(id="replica-2", model="m", revision="v2", state="starting"),
    ),
    pools=(POOL,),
    releases=(RELEASE,),
    routing=RoutingView(
        num_gateways=2, reasons={"prefix": 3, "load": 1}, num_prompt_tokens=100, num_matched_tokens=60
    ),
    at=100.0,
)
