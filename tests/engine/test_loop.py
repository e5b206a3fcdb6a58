"""Aborts, deadlines, endings and the plan log, on the real loop with a tiny model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.clock import VirtualClock
from penstock.core.errors import InvalidRequest, Overloaded
from penstock.core.messages import EngineStats
from penstock.core.request import CacheBreakpoint, FinishReason
from penstock.engine.build import Engine
from penstock.engine.collaborator import MemoryWatch
from penstock.kernels.native import NativeOps
from penstock.simulator.replay import replay

from .tiny import VOCAB_SIZE, request, run, teach_short_answers, tiny_engine, tokens, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Engine:
    """Plenty of memory and nothing reused: what an answer should be."""
    return tiny_engine(model, enable_prefix_caching=False)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(1, 3))
def test_random_aborts_and_a_tiny_cache_lose_and_repeat_nothing(
    model: Path, oracle: Engine, seed: int, depth: int
) -> None:
    rng = random.Random(seed)
    engine = tiny_engine(
        model, num_kv_blocks=12, steps_in_flight=depth, max_num_batched_tokens=32, max_num_seqs=6
    )
    teach_short_answers(engine)
    wanted = {}
    for n in range(12):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        wanted[str(n)] = request(str(n), prompt, rng.randint(1, 30))
    waiting, live, got = list(wanted.values()), set(), {}
    while waiting or engine.loop.has_work:
        if waiting and rng.random() < 0.5:
            engine.loop.add(waiting[-1])
            live.add(waiting.pop().id)
        if live and rng.random() < 0.05:
            gone = rng.choice(sorted(live))
            live.discard(gone)
            del wanted[gone]
            engine.loop.abort(gone)
        for event in engine.loop.step():
            assert event.request_id in live, "news of a request that has gone"
            got.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                live.discard(event.request_id)
        engine.loop.scheduler.check_integrity()
    assert not live
    expected = run(oracle, list(wanted.values()))
    for request_id in wanted:
        assert got[request_id] == tokens(expected[request_id])
    assert engine.loop.stats().num_kv_blocks_used == 0


def test_the_plan_log_of_a_live_run_replays_to_the_same_plans(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "plans.jsonl"
    rng = random.Random(3)
    engine = tiny_engine(
        model,
        num_kv_blocks=14,
        max_num_batched_tokens=48,
        itl_target_ms=2.0,
        record_plans=str(log),
        steps_in_flight=2,
    )
    teach_short_answers(engine)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(32)]
    for n in range(20):
        engine.loop.add(request(str(n), shared + [rng.randrange(3, VOCAB_SIZE) for _ in range(1 + n)], 60))
        engine.loop.step()
        if n % 7 == 6:
            engine.loop.abort(str(n - 1))
    run(engine, [])
    assert engine.loop.stats().num_preemptions > 0
    engine.close()
    with log.open("rb") as lines:
        report = replay(lines)
    assert report.num_plans > 50
    assert report.mismatch is None


def test_a_deadline_ends_a_running_request(model: Path) -> None:
    engine = tiny_engine(model)
    engine.loop.add(request("late", [5, 6], 400), timeout_s=1e-9)
    events = [event for _ in range(3) for event in engine.loop.step()]
    assert events[-1].finish_reason is FinishReason.DEADLINE
    assert not engine.loop.has_work


def test_endings(model: Path) -> None:
    engine = tiny_engine(model)
    answer = tokens(run(engine, [request("a", [5, 6, 7], 20)])["a"])
    stop = answer[4]
    stopped = run(engine, [request("b", [5, 6, 7], 20, stop_token_ids=(stop,))])["b"]
    assert tokens(stopped) == answer[: answer.index(stop) + 1]
    assert stopped[-1].finish_reason is FinishReason.STOP
    delayed = run(engine, [request("c", [5, 6, 7], 20, stop_token_ids=(stop,), min_tokens=12)])["c"]
    assert len(tokens(delayed)) >= 12
    assert stop not in tokens(delayed)[:12]


def test_logit_bias_and_logprobs(model: Path) -> None:
    engine = tiny_engine(model)
    events = run(engine, [request("a", [5, 6, 7], 5, logit_bias={9: 1000.0}, logprobs=3)])["a"]
    assert tokens(events) == [9] * 5
    for event in events:
        (at,) = event.logprobs
        assert len(at.top_token_ids) == 3
        assert at.logprob < at.top_logprobs[0] <= 0.0, (
            "log-probabilities are the model's own, before the bias"
        )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "seed": 3},
        {"logprobs": 1},
        {"logit_bias": {9: 1.0}},
        {"repetition_penalty": 1.3},
        {"min_tokens": 4, "stop_token_ids": (9,)},
    ],
    ids=str,
)
def test_logits_are_made_only_where_somebody_looks_at_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    made = []
    logits = NativeOps.logits
    monkeypatch.setattr(NativeOps, "logits", lambda self, x, head: made.append(1) or logits(self, x, head))
    engine = tiny_engine(model)
    alone = run(engine, [request("alone", [5, 6, 7], 8)])["alone"]
    assert not made
    beside = run(engine, [request("a", [5, 6, 7], 8), request("b", [8, 9], 4, **options)])
    assert len(made) == len(beside["b"])
    assert tokens(beside["a"]) == tokens(alone)
    sampled = [request("a", [8, 9], 4, temperature=0.9, seed=3) for _ in range(2)]
    first, again = (tokens(run(engine, [each])["a"]) for each in sampled)
    assert first == again, "greedy draws count as draws"


def test_settings_beyond_what_the_sampler_counts_with(model: Path) -> None:
    """A temperature that float32 cannot divide by is greedy, and a top_k beyond int32 is the whole vocabulary."""
    greedy = request("a", [5, 6, 7], 8)
    (expected,) = run(tiny_engine(model), [greedy]).values()
    for options in ({"temperature": 1e-40}, {"temperature": 0.0, "top_k": 2**40}):
        (answer,) = run(tiny_engine(model), [request("a", [5, 6, 7], 8, **options)]).values()
        assert tokens(answer) == tokens(expected)


def test_bad_requests_leave_no_trace(model: Path) -> None:
    engine = tiny_engine(model, max_queue_requests=1, max_num_seqs=1)
    for prompt in ([], [5] * 600):
        with pytest.raises(InvalidRequest):
            engine.loop.add(request("bad", prompt))
    assert not engine.loop.has_work
    engine.loop.add(request("first", [5] * 20))
    engine.loop.step()
    engine.loop.add(request("second", [5] * 20))
    with pytest.raises(Overloaded) as caught:
        engine.loop.add(request("third", [5] * 20))
    assert caught.value.retry_after_s is not None
    assert msgspec.structs.asdict(engine.loop.stats())["num_waiting"] == 1


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, 10**9, -1])
@pytest.mark.parametrize("place", ["prompt", "output", "logit_bias", "stop_token_ids"])
def test_a_token_outside_the_vocabulary_is_refused_and_the_engine_goes_on(
    model: Path, wrong: int, place: str
) -> None:
    engine = tiny_engine(model)
    bad = request("bad", [3, 4], min_tokens=2)
    changes: dict[str, Any] = {
        "prompt": {"prompt_token_ids": (3, wrong)},
        "output": {"output_token_ids": (wrong,)},
        "logit_bias": {"sampling": msgspec.structs.replace(bad.sampling, logit_bias={wrong: 1.0})},
        "stop_token_ids": {"sampling": msgspec.structs.replace(bad.sampling, stop_token_ids=(wrong,))},
    }[place]
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.loop.add(msgspec.structs.replace(bad, **changes))
    assert not engine.loop.has_work
    assert len(tokens(run(engine, [request("good", [3, 4])])["good"])) == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_clients_that_leave_a_tiny_cache_with_host_memory_do_not_end_the_engine(
    model: Path, oracle: Engine, depth: int
) -> None:
    rng = random.Random(depth)
    engine = tiny_engine(
        model, num_kv_blocks=20, kv_host_memory="1MiB", steps_in_flight=depth, max_num_seqs=16
    )
    engine.loop.scheduler._swapping._block_copy_s = 0.0  # every preempted request is worth swapping
    teach_short_answers(engine)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(60)]
    wanted: dict[str, Any] = {}
    answers: dict[str, list[int]] = {}
    for n in range(120):
        prompt = shared[: rng.choice([0, 20, 60])] + [rng.randrange(3, VOCAB_SIZE) for _ in range(9)]
        breakpoints = (CacheBreakpoint(len(prompt), 5.0, ()),) if rng.random() < 0.2 else ()
        wanted[str(n)] = request(str(n), prompt, rng.choice([4, 30, 60]), breakpoints)
        engine.loop.add(wanted[str(n)])
        for _ in range(rng.randrange(4)):
            for event in engine.loop.step():
                answers.setdefault(event.request_id, []).extend(event.token_ids)
        if rng.random() < 0.6:  # someone leaves: in the queue, in a prompt or in an answer
            gone = rng.choice(sorted(wanted))
            engine.loop.abort(gone)
            del wanted[gone]
    while engine.loop.has_work:
        for event in engine.loop.step():
            answers.setdefault(event.request_id, []).extend(event.token_ids)
    engine.loop.scheduler.check_integrity()
    stats = engine.loop.stats()
    assert min(stats.num_preemptions, stats.num_blocks_to_host, stats.num_blocks_from_host) > 0
    for request_id in rng.sample(sorted(wanted), 5):
        assert answers[request_id] == tokens(run(oracle, [wanted[request_id]])[request_id])


def test_the_memory_of_the_device_is_read_once_a_second() -> None:
    clock, reads = VirtualClock(), iter([(40, 100), (10, 100)])
    watch = MemoryWatch(lambda: next(reads), clock)

    def used() -> tuple[int, int]:
        stats = watch.add_stats(EngineStats(num_running=1))
        assert stats.num_running == 1
        return stats.gpu_memory_used_bytes, stats.gpu_memory_bytes

    assert used() == (60, 100)
    clock.advance(0.5)
    assert used() == (60, 100)
    clock.advance(0.5)
    assert used() == (90, 100)
