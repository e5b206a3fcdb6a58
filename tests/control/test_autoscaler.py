from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control.autoscaler import (
    Action,
    Autoscaler,
    AutoscalerConfig,
    AutoscalerState,
    Drain,
    Phase,
    ReplicaSignal,
    Resume,
    Signals,
    Start,
    Stop,
)

CONFIG = AutoscalerConfig(min_replicas=1, max_replicas=10)
DRAIN_RATE = 10_000.0


def ready(count: int, **changes: object) -> tuple[ReplicaSignal, ...]:
    return tuple(ReplicaSignal(f"r{number}", Phase.READY, **changes) for number in range(count))  # type: ignore[arg-type]


def decide(signals: Signals, config: AutoscalerConfig = CONFIG, now: float = 0.0) -> tuple[Action, ...]:
    return Autoscaler(config).decide(signals, AutoscalerState(), now)[0]


@pytest.mark.parametrize(
    ("signals", "reason"),
    [
        (
            Signals(replicas=ready(2), queued_prefill_tokens=60_000, drain_tokens_per_s=DRAIN_RATE),
            "queued prefill tokens",
        ),
        (Signals(replicas=ready(2), ttft_p95_s=1.1), "time to first token"),
        (Signals(replicas=ready(2, kv_utilisation=0.9)), "KV utilisation"),
    ],
)
def test_each_signal_alone_scales_up(signals: Signals, reason: str) -> None:
    assert decide(signals) == (Start(1, reason),)


def test_growth_is_as_large_as_the_queue_asks_up_to_a_limit() -> None:
    config = AutoscalerConfig(max_replicas=10, max_growth=2.0)
    signals = Signals(replicas=ready(4), queued_prefill_tokens=130_000, drain_tokens_per_s=DRAIN_RATE)
    assert decide(signals, config) == (Start(3, "queued prefill tokens"),)
    signals = Signals(replicas=ready(4), queued_prefill_tokens=1e6, drain_tokens_per_s=DRAIN_RATE)
    assert decide(signals, config) == (Start(4, "queued prefill tokens"),)
    assert decide(signals) == (Start(6, "queued prefill tokens"),)


def test_replicas_that_are_starting_count() -> None:
    starting = (ReplicaSignal("new", Phase.STARTING),)
    signals = Signals(
        replicas=ready(2) + starting, queued_prefill_tokens=50_000, drain_tokens_per_s=DRAIN_RATE
    )
    assert decide(signals) == ()
    assert decide(Signals(replicas=ready(2) + starting, ttft_p95_s=5.0)) == ()


def test_a_draining_replica_is_taken_back_before_another_is_started() -> None:
    draining = (ReplicaSignal("old", Phase.DRAINING),)
    assert decide(Signals(replicas=ready(2) + draining, ttft_p95_s=5.0)) == (
        Resume(("old",), "time to first token"),
    )


def test_a_drained_replica_is_stopped_and_a_busy_one_is_not() -> None:
    draining = (ReplicaSignal("done", Phase.DRAINING), ReplicaSignal("busy", Phase.DRAINING, 3))
    assert decide(Signals(replicas=ready(2) + draining)) == (Stop(("done",)),)


def test_the_least_loaded_replica_drains_first() -> None:
    replicas = (
        ReplicaSignal("a", Phase.READY, 5),
        ReplicaSignal("b", Phase.READY, 1),
        ReplicaSignal("c", Phase.READY, 9),
    )
    signals = Signals(replicas=replicas, drain_tokens_per_s=DRAIN_RATE, arriving_prefill_tokens_per_s=1.0)
    scaler, state = Autoscaler(CONFIG), AutoscalerState()
    for now in range(0, 300, 10):
        actions, state = scaler.decide(signals, state, float(now))
        if actions:
            break
    assert actions == (Drain(("b",), "fewer are enough"),)
    assert now >= CONFIG.down_cooldown_s


def test_scale_to_zero_and_back() -> None:
    config = AutoscalerConfig(min_replicas=0, max_replicas=4, idle_to_zero_s=100.0, down_cooldown_s=10.0)
    scaler, state = Autoscaler(config), AutoscalerState()
    actions, state = scaler.decide(Signals(replicas=ready(1)), state, 0.0)
    assert actions == ()
    actions, state = scaler.decide(Signals(replicas=ready(1)), state, 100.0)
    assert actions == (Drain(("r0",), "idle"),)
    actions, state = scaler.decide(Signals(replicas=()), state, 110.0)
    assert actions == ()
    actions, state = scaler.decide(Signals(replicas=(), held_requests=1), state, 111.0)
    assert actions == (Start(1, "requests are held"),)


def test_one_request_keeps_the_last_replica() -> None:
    config = AutoscalerConfig(min_replicas=0, idle_to_zero_s=10.0, down_cooldown_s=1.0)
    scaler, state = Autoscaler(config), AutoscalerState()
    for now in range(100):
        actions, state = scaler.decide(Signals(replicas=ready(1, num_requests=1)), state, float(now))
        assert actions == ()


phases = st.sampled_from(list(Phase))
anything = st.builds(
    Signals,
    replicas=st.lists(
        st.builds(
            ReplicaSignal,
            id=st.just(""),
            phase=phases,
            num_requests=st.integers(0, 9),
            kv_utilisation=st.floats(0.0, 1.0),
        ),
        max_size=14,
    ).map(lambda found: tuple(msgspec.structs.replace(r, id=f"r{n}") for n, r in enumerate(found))),
    queued_prefill_tokens=st.floats(0.0, 1e7),
    arriving_prefill_tokens_per_s=st.floats(0.0, 1e6),
    drain_tokens_per_s=st.none() | st.floats(1.0, 1e5),
    ttft_p95_s=st.none() | st.floats(0.0, 100.0),
    held_requests=st.integers(0, 5),
)


@given(
    st.lists(st.tuples(anything, st.floats(0.0, 400.0)), max_size=20), st.integers(0, 3), st.integers(3, 8)
)
@settings(deadline=None)
def test_bounds_hold_whatever_the_signals(steps: list[tuple[Signals, float]], low: int, high: int) -> None:
    scaler = Autoscaler(AutoscalerConfig(min_replicas=low, max_replicas=high))
    state, now = AutoscalerState(), 0.0
    last_up_s = None
    for signals, elapsed_s in steps:
        now += elapsed_s
        actions, state = scaler.decide(signals, state, now)
        phase_of = {replica.id: replica.phase for replica in signals.replicas}
        serving = sum(phase is not Phase.DRAINING for phase in phase_of.values())
        change = 0
        for action in actions:
            if isinstance(action, Start):
                change += action.count
            elif isinstance(action, Resume):
                change += len(action.replica_ids)
                assert all(phase_of[name] is Phase.DRAINING for name in action.replica_ids)
            elif isinstance(action, Drain):
                change -= len(action.replica_ids)
                assert all(phase_of[name] is not Phase.DRAINING for name in action.replica_ids)
            else:
                idle = {r.id for r in signals.replicas if r.phase is Phase.DRAINING and not r.num_requests}
                assert set(action.replica_ids) <= idle
        if change:
            assert low <= serving + change <= high
        if change > 0 and low <= serving <= high and serving:
            assert last_up_s is None or now - last_up_s >= scaler.config.up_cooldown_s
        if change > 0:
            last_up_s = now
        assert msgspec.json.decode(msgspec.json.encode(state), type=AutoscalerState) == state


@dataclass
class Plant:
    """A service whose waiting times grow without bound as the load nears what it can do."""

    load: float  # tokens/s
    kv_each: float  # KV that the whole load needs, in replicas
    size: int
    starting: list[float] = field(default_factory=list)

    def signals(self, now: float) -> Signals:
        self.size += sum(ready_s <= now for ready_s in self.starting)
        self.starting = [ready_s for ready_s in self.starting if ready_s > now]
        busy = self.load / (self.size * DRAIN_RATE)
        queue_s = 30.0 if busy >= 0.97 else 0.02 / (1.0 - busy)
        starting = tuple(ReplicaSignal(f"s{n}", Phase.STARTING) for n in range(len(self.starting)))
        return Signals(
            replicas=ready(self.size, kv_utilisation=min(1.0, self.kv_each / self.size), num_requests=4)
            + starting,
            queued_prefill_tokens=queue_s * self.size * DRAIN_RATE * 0.5,
            arriving_prefill_tokens_per_s=self.load,
            drain_tokens_per_s=DRAIN_RATE,
            ttft_p95_s=queue_s + 0.1,
        )

    def act(self, actions: tuple[Action, ...], now: float) -> int:
        changes = 0
        for action in actions:
            if isinstance(action, Start):
                self.starting += [now + 30.0] * action.count
                changes += action.count
            elif isinstance(action, Drain):
                self.size -= len(action.replica_ids)
                changes += len(action.replica_ids)
        return changes


@given(st.floats(0.05, 8.0), st.floats(0.0, 6.0), st.integers(1, 10))
@settings(max_examples=40, deadline=None)
def test_a_constant_load_comes_to_rest(load: float, kv_each: float, size: int) -> None:
    plant = Plant(load * DRAIN_RATE, kv_each, size)
    scaler, state = Autoscaler(CONFIG), AutoscalerState()
    late_changes = 0
    for tick in range(600):
        now = tick * 10.0
        actions, state = scaler.decide(plant.signals(now), state, now)
        changes = plant.act(actions, now)
        if tick >= 300:
            late_changes += changes
    assert late_changes == 0
    assert ceil(load) <= plant.size <= CONFIG.max_replicas
