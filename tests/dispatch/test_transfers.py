"""When fetching KV from another replica is worth the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.messages import EngineStats
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.dispatch import Action, DispatchConfig, Dispatcher, FleetStatus, ReplicaStatus, Send
from penstock.dispatch.kv_sources import Options, SourceKind, TransferConfig, TransferSpeeds, cheapest_source
from penstock.router import Replica, ReplicaState

CONFIG = TransferConfig()
# A prompt that takes 2 s to compute here, and 46 MB to move.
OPTIONS = Options(
    num_tokens=2000,
    cached_here=0,
    queue_here_s=0.01,
    token_here_s=0.001,
    kv_bytes_per_token=23_040,
    bytes_per_s=1e9,
)
DECODE = replace(OPTIONS, is_for_decode=True, prefill_s=2.0)


def test_a_long_prompt_is_computed_by_a_prefill_replica() -> None:
    assert cheapest_source(DECODE, CONFIG) is SourceKind.PREFILL


def test_short_and_mostly_cached_prompts_stay() -> None:
    assert cheapest_source(replace(DECODE, num_tokens=200), CONFIG) is SourceKind.HERE
    assert cheapest_source(replace(DECODE, cached_here=1900), CONFIG) is SourceKind.HERE


def test_a_prefill_pool_that_is_too_busy_is_not_waited_for() -> None:
    assert cheapest_source(replace(DECODE, prefill_s=20.0), CONFIG) is SourceKind.HERE


def test_a_replica_that_does_both_computes_what_nobody_has() -> None:
    assert cheapest_source(replace(OPTIONS, prefill_s=0.1), CONFIG) is SourceKind.HERE


def test_what_another_replica_has_is_fetched_when_that_is_cheaper() -> None:
    there = replace(OPTIONS, cached_elsewhere=1600)
    assert cheapest_source(there, CONFIG) is SourceKind.FETCH
    assert cheapest_source(replace(there, cached_here=1590), CONFIG) is SourceKind.HERE, (
        "ten tokens save nothing"
    )
    fast = replace(there, token_here_s=10e-6)
    assert cheapest_source(fast, CONFIG) is SourceKind.HERE, "computing is quicker than moving"
    assert (
        cheapest_source(replace(fast, bytes_per_s=50e9), replace(CONFIG, latency_s=0.001)) is SourceKind.FETCH
    )


@given(
    num_tokens=st.integers(1, 100_000),
    cached_here=st.integers(0, 100_000),
    cached_elsewhere=st.integers(0, 100_000),
    token_s=st.floats(1e-7, 1e-2),
    bytes_per_token=st.integers(1, 1 << 20),
    prefill_s=st.one_of(st.none(), st.floats(0, 100)),
    is_for_decode=st.booleans(),
)
def test_no_way_is_taken_that_cannot_gain(
    num_tokens: int,
    cached_here: int,
    cached_elsewhere: int,
    token_s: float,
    bytes_per_token: int,
    prefill_s: float | None,
    is_for_decode: bool,
) -> None:
    options = Options(
        num_tokens=num_tokens,
        cached_here=min(cached_here, num_tokens - 1),
        cached_elsewhere=min(cached_elsewhere, num_tokens - 1),
        queue_here_s=0.0,
        token_here_s=token_s,
        kv_bytes_per_token=bytes_per_token,
        bytes_per_s=1e9,
        prefill_s=prefill_s,
        is_for_decode=is_for_decode,
    )
    way = cheapest_source(options, CONFIG)
    if way is SourceKind.PREFILL:
        assert is_for_decode
        assert prefill_s is not None
        assert options.num_tokens - options.cached_here >= CONFIG.min_prefill_tokens
    elif way is SourceKind.FETCH:
        num_fetched = options.cached_elsewhere - options.cached_here
        assert num_fetched * bytes_per_token / options.bytes_per_s < num_fetched * token_s


def reads(num_bytes: int, seconds: float) -> EngineStats:
    return EngineStats(kv_read_bytes=num_bytes, kv_read_s=seconds)


def test_the_speed_of_transfers_is_measured_for_each_receiver() -> None:
    speeds = TransferSpeeds(CONFIG)
    assert speeds.bytes_per_s("a", 0.0) == CONFIG.first_bytes_per_s
    speeds.heard("a", reads(0, 0.0), 0.0)
    speeds.heard("a", reads(40_000_000, 0.1), 1.0)
    assert speeds.bytes_per_s("a", 1.0) == pytest.approx(4e8)
    assert speeds.bytes_per_s("b", 1.0) == CONFIG.first_bytes_per_s
    for n in range(2, 30):  # the network has become twenty times faster
        speeds.heard("a", reads(40_000_000 * n, 0.1 + 0.005 * n), float(n))
    assert speeds.bytes_per_s("a", 30.0) == pytest.approx(8e9, rel=0.1)


def test_a_slow_way_is_tried_again_after_a_while() -> None:
    speeds = TransferSpeeds(CONFIG)
    speeds.heard("a", reads(1_000_000, 1.0), 0.0)
    there = replace(OPTIONS, cached_elsewhere=1600)
    ways = [
        cheapest_source(replace(there, bytes_per_s=speeds.bytes_per_s("a", now)), CONFIG)
        for now in (0.0, 600.0)
    ]
    assert ways == [SourceKind.HERE, SourceKind.FETCH]


def test_a_replica_that_began_anew_and_one_that_is_gone_leave_nothing_behind() -> None:
    speeds = TransferSpeeds(CONFIG)
    speeds.heard("a", reads(9_000, 0.001), 0.0)
    speeds.heard("a", reads(1_000, 0.001), 1.0)  # fewer than before: another process
    assert speeds.bytes_per_s("a", 1.0) == pytest.approx(9e6, rel=0.1)
    speeds.keep({"b"})
    assert speeds.bytes_per_s("a", 1.0) == CONFIG.first_bytes_per_s


def test_a_prefill_replica_answers_by_itself_while_no_decode_replica_can() -> None:
    def fleet(decode: ReplicaState) -> FleetStatus:
        replicas = [
            ReplicaStatus(
                replica=Replica(id=role, models=frozenset({"m"}), state=state), model="m", role=role
            )
            for role, state in (("prefill", ReplicaState.READY), ("decode", decode))
        ]
        return FleetStatus(replicas=tuple(replicas), models={"m": 16})

    def sent_to(actions: Sequence[Action]) -> list[str]:
        return [each.replica_id for each in actions if isinstance(each, Send)]

    def asked(name: str) -> Request:
        return Request(id=name, prompt_token_ids=(1,) * 9, sampling=SamplingParams(max_tokens=9), model="m")

    dispatcher = Dispatcher(DispatchConfig(), Random(0), 0.0)
    dispatcher.update(fleet(ReplicaState.READY), 0.0)
    assert sent_to(dispatcher.add(asked("a"), 0.0)) == ["decode"]
    dispatcher.news("decode", [TokenEvent("a", (7, 8))], 0.5)
    moved = dispatcher.update(fleet(ReplicaState.UNHEALTHY), 1.0)
    assert sent_to(moved) == ["prefill"]
    assert [each.request.output_token_ids for each in moved if isinstance(each, Send)] == [(7, 8)]
    assert sent_to(dispatcher.add(asked("b"), 1.0)) == ["prefill"]
    dispatcher.news("prefill", [TokenEvent("a", (9,), finish_reason=FinishReason.LENGTH)], 2.0)
    dispatcher.update(fleet(ReplicaState.READY), 3.0)
    assert sent_to(dispatcher.add(asked("c"), 3.0)) == ["decode"]
    dispatcher.abort("b", 3.0)
    load = dispatcher.table.prefill_router.load("prefill")
    assert load is not None
    assert load.own_requests == 0
