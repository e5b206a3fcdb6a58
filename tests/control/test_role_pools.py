"""The prefill and the decode pool of a model, sized together: by which signals, and with which bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control.autoscaler import (
    ROLES,
    AutoscalerConfig,
    AutoscalerState,
    Convert,
    Drain,
    PairActions,
    Phase,
    PoolRole,
    ReplicaSignal,
    Resume,
    RolePools,
    Signals,
    Start,
    Stop,
    signals_of,
)

TARGETS = AutoscalerConfig(up_cooldown_s=10.0, down_cooldown_s=40.0, ttft_target_s=1.0, itl_target_s=0.1)
MAX = 6


def ready(count: int, name: str = "r", **changes: object) -> tuple[ReplicaSignal, ...]:
    return tuple(ReplicaSignal(f"{name}{n}", Phase.READY, **changes) for n in range(count))  # type: ignore[arg-type]


def decide(prefill: Signals, decode: Signals, *, since_s: float = -100.0, most: int = MAX) -> PairActions:
    """The decision for pools that have been roomy since then, where they are."""
    state = AutoscalerState(roomy_since_s=since_s)
    pools = RolePools({"prefill": TARGETS, "decode": TARGETS}, most)
    return pools.decide({"prefill": prefill, "decode": decode}, dict.fromkeys(ROLES, state), 0.0)[0]


BUSY_PREFILL = Signals(replicas=ready(2, "p"), queued_prefill_tokens=60_000, drain_tokens_per_s=10_000.0)
BUSY_DECODE = Signals(replicas=ready(2, "d", kv_utilisation=0.95))
# Both have requests and hardly anything to do.
CALM_PREFILL = Signals(replicas=ready(2, "p"), drain_tokens_per_s=10_000.0, arriving_prefill_tokens_per_s=1.0)
CALM_DECODE = Signals(replicas=ready(2, "d", kv_utilisation=0.1), arriving_prefill_tokens_per_s=1.0)


def test_a_pool_takes_what_the_other_can_spare() -> None:
    assert decide(BUSY_PREFILL, CALM_DECODE)["prefill"] == (Convert(("d1",), "queued prefill tokens"),)
    assert decide(CALM_PREFILL, BUSY_DECODE)["decode"] == (Convert(("p1",), "KV utilisation"),)
    slow = Signals(replicas=ready(2, "d", kv_utilisation=0.1), itl_p95_s=0.2)
    assert decide(CALM_PREFILL, slow)["decode"] == (Convert(("p1",), "time between tokens"),)


def test_a_replica_that_cannot_change_its_role_is_not_taken() -> None:
    kept = ReplicaSignal("d2", Phase.READY, can_convert=False)  # it has the least to do
    decode = Signals(replicas=(*ready(2, "d", num_requests=1), kept))
    assert decide(BUSY_PREFILL, decode)["prefill"] == (Convert(("d1",), "queued prefill tokens"),)
    none = Signals(replicas=ready(2, "d", can_convert=False))
    assert decide(BUSY_PREFILL, none)["prefill"] == (Start(1, "queued prefill tokens"),)


def test_it_starts_a_replica_where_the_other_has_none_to_spare() -> None:
    actions = decide(BUSY_PREFILL, BUSY_DECODE)
    assert actions == {
        "prefill": (Start(1, "queued prefill tokens"),),
        "decode": (Start(1, "KV utilisation"),),
    }
    just_now = decide(BUSY_PREFILL, CALM_DECODE, since_s=-1.0)
    assert just_now["prefill"] == (Start(1, "queued prefill tokens"),), "not long enough to be sure"


def test_at_the_ceiling_only_the_needier_pool_grows_and_only_by_a_conversion() -> None:
    assert decide(BUSY_PREFILL, BUSY_DECODE, most=4) == {"prefill": (), "decode": ()}
    one_left = decide(BUSY_PREFILL, BUSY_DECODE, most=5)
    assert one_left == {"prefill": (Start(1, "queued prefill tokens"),), "decode": ()}
    assert decide(BUSY_PREFILL, CALM_DECODE, most=4)["prefill"] == (
        Convert(("d1",), "queued prefill tokens"),
    )


def test_the_last_replica_of_a_pool_stays() -> None:
    alone = Signals(replicas=ready(1, "d"))
    assert decide(BUSY_PREFILL, alone)["prefill"] == (Start(1, "queued prefill tokens"),)


def test_signals_of_the_other_role_do_not_count() -> None:
    everything = Signals(
        replicas=ready(2, kv_utilisation=0.99),
        queued_prefill_tokens=1e9,
        drain_tokens_per_s=1.0,
        ttft_p95_s=9.0,
        itl_p95_s=9.0,
    )
    prefill, decode = signals_of("prefill", everything), signals_of("decode", everything)
    assert (prefill.itl_p95_s, [each.kv_utilisation for each in prefill.replicas]) == (None, [0.0, 0.0])
    assert (decode.ttft_p95_s, decode.queued_prefill_tokens) == (None, 0.0)
    assert signals_of("decode", decode) == decode


def test_too_low_a_ceiling_is_refused() -> None:
    floors = AutoscalerConfig(min_replicas=2)
    with pytest.raises(ValueError, match="fewer than the floors"):
        RolePools({"prefill": floors, "decode": floors}, 3)


@dataclass
class Plant:
    """Two pools under a load, in virtual time: a queue that fills, and KV that is in use."""

    prompt_tokens_per_s: float
    kv_needed: float  # replicas' worth
    sizes: dict[PoolRole, int]
    most: int
    queue: float = 0.0
    now: float = 0.0
    starting: list[tuple[float, PoolRole]] = field(default_factory=list)
    states: dict[PoolRole, AutoscalerState] = field(
        default_factory=lambda: dict.fromkeys(ROLES, AutoscalerState())
    )
    changes: list[float] = field(default_factory=list)

    RATE = 1000.0

    def signals(self) -> dict[PoolRole, Signals]:
        def replicas(role: PoolRole, kv: float) -> tuple[ReplicaSignal, ...]:
            coming = sum(each == role for _, each in self.starting)
            return ready(self.sizes[role], role, num_requests=1, kv_utilisation=kv) + tuple(
                ReplicaSignal(f"new-{role}{n}", Phase.STARTING) for n in range(coming)
            )

        arriving = self.prompt_tokens_per_s
        capacity = self.RATE * self.sizes["prefill"]
        wait_s = self.queue / capacity
        return {
            "prefill": Signals(
                replicas=replicas("prefill", 0.0),
                queued_prefill_tokens=self.queue,
                arriving_prefill_tokens_per_s=arriving,
                drain_tokens_per_s=self.RATE,
                ttft_p95_s=0.1 + wait_s,
            ),
            "decode": Signals(
                replicas=replicas("decode", min(1.0, self.kv_needed / self.sizes["decode"])),
                arriving_prefill_tokens_per_s=arriving,
            ),
        }

    def step(self) -> None:
        self.now += 1.0
        self.queue = max(0.0, self.queue + self.prompt_tokens_per_s - self.RATE * self.sizes["prefill"])
        for due_s, role in [each for each in self.starting if each[0] <= self.now]:
            self.starting.remove((due_s, role))
            self.sizes[role] += 1
        configs = dict.fromkeys(ROLES, TARGETS)
        actions, self.states = RolePools(configs, self.most).decide(self.signals(), self.states, self.now)
        for role in ROLES:
            other: PoolRole = "decode" if role == "prefill" else "prefill"
            for action in actions[role]:
                self.changes.append(self.now)
                match action:
                    case Start(count=count):
                        self.starting += [(self.now + 5.0, role)] * count
                    case Convert(replica_ids=ids):
                        assert all(name.startswith(other) for name in ids), (
                            "only a ready one of the other pool"
                        )
                        assert len(set(ids)) == len(ids)
                        self.sizes[role] += len(ids)
                        self.sizes[other] -= len(ids)
                    case Drain(replica_ids=ids):
                        gone = [name for name in ids if name.startswith("new-")]
                        for _ in gone:
                            self.starting.remove(next(each for each in self.starting if each[1] == role))
                        self.sizes[role] -= len(ids) - len(gone)
                    case Resume() | Stop():
                        raise AssertionError("nothing drains for longer than a moment here")
        total = sum(self.sizes.values()) + len(self.starting)
        assert total <= self.most
        assert all(size >= 1 for size in self.sizes.values())


@settings(max_examples=settings.default.max_examples // 3, deadline=None)
@given(
    prompt_tokens_per_s=st.floats(0, 8000),
    kv_needed=st.floats(0, 6),
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    spare=st.integers(0, 4),
)
def test_a_constant_load_leads_to_constant_pools_that_are_enough_where_the_ceiling_allows(
    prompt_tokens_per_s: float, kv_needed: float, prefill: int, decode: int, spare: int
) -> None:
    plant = Plant(
        prompt_tokens_per_s, kv_needed, {"prefill": prefill, "decode": decode}, prefill + decode + spare
    )
    for _ in range(1500):
        plant.step()
    assert not [at for at in plant.changes if at > 1000.0], "it never settles"
    for_prompts = prompt_tokens_per_s / plant.RATE
    for_answers = kv_needed / TARGETS.kv_target
    if -(-for_prompts // 1) + -(-for_answers // 1) + 2 <= plant.most:
        assert plant.sizes["prefill"] >= for_prompts
        assert plant.sizes["decode"] >= for_answers
