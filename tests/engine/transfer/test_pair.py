"""KV that comes from another engine changes no token, and whatever goes wrong with it costs no request."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import ConfigError, Overloaded
from penstock.core.kv_transfer import KVSource
from penstock.core.request import Request
from penstock.engine.drafters.length import DraftLength
from penstock.simulator.replay import replay
from tests.models.heads import eagle_tensors, write_folder

from ..drafting import speculate
from ..tiny import VOCAB_SIZE, request, run, tiny_engine, tokens, write_tiny_model
from .pair import Pair, pair, side

pytest.importorskip("nixl_cu12", reason="needs the extra disaggregation")


def prompt(length: int, step: int = 7) -> list[int]:
    return [3 + (step * n * n + n) % 290 for n in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The sender computes 40 tokens a step, which is no multiple of a block."""
    folder = tmp_path_factory.mktemp("sockets")
    with pair(model, folder, {"max_num_batched_tokens": 40}, {}) as engines:
        yield engines


def alone(model: Path, asked: Request) -> list[int]:
    return tokens(run(tiny_engine(model), [asked])[asked.id])


@pytest.mark.parametrize("length", [1, 16, 17, 33, 160, 161, 300])
def test_the_same_tokens_as_alone(two: Pair, model: Path, length: int) -> None:
    asked = request(f"of {length}", prompt(length, step=length))
    answer = two.fetch(asked)
    assert answer.tokens(asked.id) == alone(model, asked)
    assert answer.events[asked.id][0].num_cached_tokens == 0, "what was computed elsewhere is not cached"
    num_fetched = (length - 1) // 16 * 16
    assert answer.engine.loop.stats().tokens_computed >= length - num_fetched
    two.settle()


@pytest.mark.parametrize("kind", ["draft", "heads", "lookup"])
def test_a_receiver_that_drafts_answers_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The drafter's own KV and hidden states of the prompt stay at the sender."""
    monkeypatch.setattr(DraftLength, "begin", lambda *_: 4)
    folder = write_folder(tmp_path / "head", eagle_tensors(VOCAB_SIZE, third=False), VOCAB_SIZE)
    named = {"draft": f"draft={model}", "heads": f"heads={folder}"}.get(kind, kind)
    asked = [
        request(f"{kind}-{n}", prompt(100, step=n), 30, temperature=0.8 * n, seed=n, logprobs=1)
        for n in (0, 1)
    ]
    with pair(model, tmp_path, {"speculate": named}, {"speculate": named}) as two:
        drafting = two.receiver.engine
        assert drafting.loop.drafter is not None
        speculate(drafting, drafting.loop.drafter)
        for each in asked:
            answer = two.fetch(each)
            (expected,) = run(tiny_engine(model), [each]).values()
            assert answer.tokens(each.id) == tokens(expected)
            assert drafting.loop.stats().kv_fetched_tokens > 0
        two.settle()
        assert sum(sum(stats.drafted) for stats in drafting.loop.stats().drafters) > 10


def test_only_what_is_missing_is_fetched(two: Pair, model: Path) -> None:
    first = request("first", prompt(100, step=11))
    second = request("second", [*prompt(100, step=11)[:64], *prompt(90, step=12)])
    two.fetch(first)
    before = two.receiver.engine.loop.stats().kv_fetched_tokens
    answer = two.fetch(second)
    assert answer.tokens("second") == alone(model, second)
    assert answer.engine.loop.stats().kv_fetched_tokens - before == (154 - 1) // 16 * 16 - 64
    assert answer.events["second"][0].num_cached_tokens == 64
    two.settle()


def test_what_the_sender_had_cached_counts_as_cached(two: Pair) -> None:
    asked = request("cached there", prompt(120, step=13))
    two.sender.engine.loop.add(asked)
    two.until(lambda: two.sender.has_ended(asked.id))
    assert two.fetch(asked).events[asked.id][0].num_cached_tokens == 112
    two.settle()


def test_a_cached_prefix_is_fetched_without_computing(two: Pair, model: Path) -> None:
    known, more = prompt(96, step=14), prompt(60, step=15)
    two.sender.engine.loop.add(request("known", known))
    two.until(lambda: two.sender.has_ended("known"))
    computed = two.sender.engine.loop.stats().tokens_computed
    asked = request("known and more", [*known, *more])
    assert two.fetch(asked, computes=False).tokens(asked.id) == alone(model, asked)
    assert two.sender.engine.loop.stats().tokens_computed == computed
    assert two.receiver.events[asked.id][0].num_cached_tokens == 96
    nothing = request("nothing of it", prompt(80, step=16))
    assert two.fetch(nothing, computes=False).tokens(nothing.id) == alone(model, nothing)
    two.settle()


def test_an_answer_that_was_begun_elsewhere(two: Pair, model: Path) -> None:
    whole = request("begun", prompt(90, step=17), 30)
    answer = alone(model, whole)
    begun = msgspec.structs.replace(whole, output_token_ids=tuple(answer[:20]))
    assert two.fetch(begun).tokens("begun") == answer[20:]
    two.settle()


def test_many_at_once(two: Pair, model: Path) -> None:
    asked = [request(f"r{n}", [*prompt(48, step=18), *prompt(20 + 13 * n, step=19 + n)], 6) for n in range(8)]
    for each in asked:
        two.receiver.engine.loop.add(each, kv_source=KVSource(two.sender.endpoint))
    two.until(lambda: all(two.receiver.has_ended(each.id) for each in asked))
    for each in asked:
        assert two.receiver.tokens(each.id) == alone(model, each)
    two.settle()


def test_an_abort_reaches_the_sender_and_frees_both_sides(two: Pair) -> None:
    asked = request("aborted", prompt(400, step=31))
    two.receiver.engine.loop.add(asked, kv_source=KVSource(two.sender.endpoint))
    two.until(lambda: two.sender.num_blocks_used > 0)
    assert two.receiver.num_blocks_used > 0
    two.receiver.engine.loop.abort(asked.id)
    assert not two.receiver.engine.loop.has_work
    two.settle()
    assert two.sender.engine.loop.stats().num_running == 0
    assert "aborted" not in two.receiver.events
    assert not two.sender.events.keys() - {"known", "cached there"}, "a sender tells nobody of its exports"


def test_a_deadline_passes_while_the_sender_is_busy(two: Pair) -> None:
    asked = request("late", prompt(200, step=32))
    two.receiver.engine.loop.add(asked, 0.0, KVSource(two.sender.endpoint))
    two.until(lambda: bool(two.receiver.rejections), sender_steps=False)
    assert two.receiver.rejections.pop().code == "deadline_exceeded"
    two.settle()


def test_a_sender_that_refuses(two: Pair, model: Path) -> None:
    """Its cache is far too small for the prompt."""
    asked = request("too long for it", prompt(300, step=33))
    with side(model, two.sender.endpoint + "-small", num_kv_blocks=8) as small:
        engines = Pair(small, two.receiver)
        failed = two.receiver.engine.loop.stats().kv_fetches_failed
        assert engines.fetch(asked).tokens(asked.id) == alone(model, asked)
        assert two.receiver.engine.loop.stats().kv_fetches_failed == failed + 1
        engines.settle()


def test_a_sender_of_other_weights_is_not_believed(two: Pair, model: Path) -> None:
    asked = request("other", prompt(100, step=34))
    with side(model, two.sender.endpoint + "-bfloat16", dtype="bfloat16") as other:
        engines = Pair(other, two.receiver)
        assert engines.fetch(asked).tokens(asked.id) == alone(model, asked)
        engines.settle()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "its KV is stored as int8, and ours as float32"),
        ({"block_size": 32}, "its blocks have 32 tokens, and ours 16"),
    ],
)
def test_blocks_of_another_kind_are_not_read(
    two: Pair, model: Path, settings: dict[str, object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(f"other {words}", prompt(100, step=len(words)))
    failed = two.receiver.engine.loop.stats().kv_fetches_failed
    with side(model, f"{two.sender.endpoint}-{len(words)}", **settings) as other:
        engines = Pair(other, two.receiver)
        with caplog.at_level(logging.WARNING):
            assert engines.fetch(asked).tokens(asked.id) == alone(model, asked)
        engines.settle()
    assert two.receiver.engine.loop.stats().kv_fetches_failed == failed + 1
    assert f"did not all come from another engine: {words}" in caplog.text


def test_a_sender_that_has_gone(two: Pair, model: Path) -> None:
    asked = request("nobody there", prompt(100, step=35))
    with side(model, two.sender.endpoint + "-gone") as gone:
        pass
    two.receiver.engine.loop.add(asked, kv_source=KVSource(gone.endpoint))
    two.until(lambda: two.receiver.has_ended(asked.id))
    assert two.receiver.tokens(asked.id) == alone(model, asked)
    two.settle()


def test_a_receiver_whose_cache_is_full_waits_or_computes(two: Pair, model: Path) -> None:
    with side(model, two.sender.endpoint + "-crowded", num_kv_blocks=24, max_num_seqs=4) as crowded:
        engines = Pair(two.sender, crowded)
        asked = [request(f"crowd {n}", prompt(200, step=40 + n), 20) for n in range(4)]
        for each in asked:
            crowded.engine.loop.add(each, kv_source=KVSource(two.sender.endpoint))
        engines.until(lambda: all(crowded.has_ended(each.id) for each in asked))
        for each in asked:
            assert crowded.tokens(each.id) == alone(model, each)
        engines.settle()


@pytest.mark.parametrize("seed", range(3))
def test_random_aborts_and_tiny_caches_lose_and_repeat_nothing(
    model: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    prefixes = [prompt(150, step=70 + n) for n in range(3)]
    asked = [
        request(
            f"r{n}",
            [*rng.choice(prefixes)[: rng.randrange(150)], *prompt(rng.randrange(1, 60), step=80 + n)],
            rng.randrange(1, 25),
        )
        for n in range(24)
    ]
    expected = run(tiny_engine(model), asked)
    aborted: set[str] = set()
    settings = {"num_kv_blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": 50}
    with pair(model, tmp_path, settings, {**settings, "max_num_batched_tokens": 33}) as engines:
        loop, answers = engines.receiver.engine.loop, engines.receiver

        def all_are_over() -> bool:
            if asked and rng.random() < 0.2:
                each = asked.pop()
                source = KVSource(engines.sender.endpoint, computes=rng.random() < 0.7)
                loop.add(each, kv_source=source if rng.random() < 0.8 else None)
                started.append(each.id)
            if started and rng.random() < 0.03:
                victim = rng.choice(started)
                if not answers.has_ended(victim):
                    loop.abort(victim)
                    aborted.add(victim)
            return not asked and all(answers.has_ended(each) or each in aborted for each in started)

        started: list[str] = []
        engines.until(all_are_over)
        engines.settle()
    for each in started:
        whole = tokens(expected[each])
        answer = answers.tokens(each) if each in answers.events else []
        assert answer == (whole[: len(answer)] if each in aborted else whole)


def test_the_plan_logs_of_both_replay(model: Path, tmp_path: Path) -> None:
    logs = [tmp_path / "sender.log", tmp_path / "receiver.log"]
    settings = [{"record_plans": str(log), "max_num_batched_tokens": 48} for log in logs]
    with pair(model, tmp_path, *settings) as engines:
        for n in range(3):
            engines.fetch(request(f"r{n}", [*prompt(64), *prompt(40 + n, step=50 + n)]))
        engines.fetch(request("cached", prompt(64)), computes=False)
        engines.settle()
    for log in logs:
        with log.open("rb") as lines:
            outcome = replay(lines)
        assert outcome.mismatch is None
        assert outcome.num_plans >= 3  # requests that arrive together share steps


def test_no_more_wait_than_the_queue_may_hold(two: Pair, model: Path) -> None:
    limits = {"max_num_seqs": 2, "max_queue_requests": 1}
    with side(model, two.sender.endpoint + "-bounded", **limits) as bounded:
        asked = [request(f"bounded {n}", prompt(100, step=60 + n)) for n in range(4)]
        source = KVSource(two.sender.endpoint)
        for each in asked[:3]:
            bounded.engine.loop.add(each, kv_source=source)
        assert bounded.engine.loop.stats().num_waiting == 3
        with pytest.raises(Overloaded):
            bounded.engine.loop.add(asked[3], kv_source=source)
        engines = Pair(two.sender, bounded)
        engines.until(lambda: all(bounded.has_ended(each.id) for each in asked[:3]))
        engines.settle()


def test_it_needs_prefix_caching(model: Path) -> None:
    with pytest.raises(ConfigError, match="prefix caching"):
        tiny_engine(model, kv_transfer=True, enable_prefix_caching=False)
