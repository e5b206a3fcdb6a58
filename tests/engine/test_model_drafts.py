"""Drafts of a smaller model and of heads change no answer, and a drafter that agrees with the model is accepted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.core.plan import ON_DEVICE
from penstock.core.request import Grammar, Request
from penstock.engine import cache_memory, decoder
from penstock.engine.build import Engine
from penstock.engine.drafters import length
from penstock.engine.drafters.hidden_states import HiddenStates
from penstock.engine.drafters.length import DraftLength
from penstock.engine.drafters.loading import LoadedDrafter, load_drafter
from tests.models.heads import SIZE, eagle_tensors, write_folder

from .byte_model import constrained, write_byte_model
from .drafting import Answer, answers, speculate
from .test_drafts import all_requests
from .tiny import (
    VOCAB_SIZE,
    request,
    run,
    teach_short_answers,
    tiny_engine,
    write_tiny_adapter,
    write_tiny_model,
)

source = random.Random(4)
SHARED = [source.randrange(3, VOCAB_SIZE) for _ in range(50)]


def some_requests(count: int = 6, max_tokens: int = 40) -> list[Request]:
    rng = random.Random(9)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"presence_penalty": 0.5}]
    return [
        request(
            f"r{n}",
            [*(SHARED if n % 2 else []), *(rng.randrange(3, VOCAB_SIZE) for _ in range(1 + 7 * n))],
            max_tokens + n,
            **kinds[n % len(kinds)],
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafters draft four tokens, whether that pays or not."""
    monkeypatch.setattr(DraftLength, "begin", lambda self, *_: 4)
    monkeypatch.setattr(DraftLength, "end", lambda *_: None)


def drafting(model: Path, named: str, *, follows: bool = False, **settings: Any) -> Engine:
    """Build an engine that takes all drafts. With `follows` the drafter works behind steps, as on a GPU."""
    engine = tiny_engine(model, speculate=named, **settings)
    if follows:
        drafter = drafter_of(engine)
        drafter.follows_steps = True
        engine.loop.executor._follower = drafter  # type: ignore[attr-defined]
        drafter.num_followed = 0
        take = drafter._take_followed

        def count(wanted: Any) -> Any:
            found = take(wanted)
            drafter.num_followed += len(found)
            return found

        drafter._take_followed = count
    return speculate(engine, engine.loop.drafter, most=4)  # type: ignore[arg-type]


def drafter_of(engine: Engine) -> Any:
    return engine.loop.drafter._drafters[-1]  # type: ignore[union-attr]


def acceptance(engine: Engine) -> list[float]:
    (stats,) = engine.loop.stats().drafters
    return [a / d for a, d in zip(stats.accepted, stats.drafted, strict=True)]


def heads(folder: Path, kind: str) -> Path:
    if kind == "medusa":
        tensors = {
            f"{head}.{name}": torch.randn(shape) * 0.05
            for head in range(3)
            for name, shape in (("0.linear.weight", (SIZE, SIZE)), ("1.weight", (VOCAB_SIZE, SIZE)))
        }
        return write_folder(folder, tensors, VOCAB_SIZE)
    draft_vocab = 100 if kind in ("eagle-short", "eagle3") else None
    tensors = eagle_tensors(VOCAB_SIZE, third=kind == "eagle3", draft_vocab=draft_vocab)
    return write_folder(folder, tensors, VOCAB_SIZE, eagle_aux_hidden_state_layer_ids=[0, 1, 2])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("follows", [False, True], ids=["asked", "behind-steps"])
@pytest.mark.parametrize("cache", [{}, {"kv_cache_dtype": "int8"}, {"max_num_batched_tokens": 16}], ids=str)
def test_the_model_itself_is_accepted_nearly_always(
    model: Path, cache: dict[str, Any], follows: bool
) -> None:
    plain = answers(tiny_engine(model, speculate="off", **cache), some_requests())
    engine = drafting(model, f"draft={model}", follows=follows, **cache)
    assert answers(engine, some_requests()) == plain
    greedy = drafting(model, f"draft={model}", follows=follows, **cache)
    run(
        greedy,
        [
            each
            for each in some_requests()
            if not each.sampling.temperature and not each.sampling.presence_penalty
        ],
    )
    assert min(acceptance(greedy)) > 0.95
    assert greedy.loop.stats().num_steps < 25


@dataclass(frozen=True)
class Everything:
    """Requests with every feature that a drafter meets, and their answers without drafts."""

    model: Path
    requests: list[Request]
    answers: dict[str, Answer]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    folder = tmp_path_factory.mktemp("everything")
    model = write_byte_model(folder / "bytes", VOCAB_SIZE)
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 4, "logprobs": 1}
    asked = all_requests()
    asked += [constrained(f"grammar-{name}", *given) for name, given in CONSTRAINED.items()]
    for seed in (1, 2):
        adapter = write_tiny_adapter(folder / f"adapter-{seed}", seed)
        asked += [
            replace(request(f"{seed}-{len(settings)}", [*SHARED, seed], 24, **settings), adapter=adapter)
            for settings in ({}, drawn)
        ]
    found = answers(tiny_engine(model), asked)
    for name in ("seeded", "penalised", "grammar-schema"):  # begun by another engine
        whole = next(each for each in asked if each.id == name)
        asked.append(replace(whole, id=f"{name}-rest", output_token_ids=tuple(found[name][0][:5])))
        token_ids, logprobs, *reason = found[name]
        found[f"{name}-rest"] = (token_ids[5:], logprobs[5:], *reason)  # type: ignore[assignment]
    return Everything(model, asked, found)


CONSTRAINED: dict[str, tuple[Grammar, int]] = {
    "schema": (
        Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
        30,
    ),
    "choice": (Grammar("choice", '["yes, certainly", "yes, perhaps", "no"]'), 30),
    "regex": (Grammar("regex", "[a-f]{3,9}(-[0-9]{2}){1,4}"), 30),
}  # fmt: skip


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["same", "other", "eagle", "eagle-short", "eagle3", "medusa"])
@pytest.mark.parametrize("follows", [False, True], ids=["asked", "behind-steps"])
def test_no_drafter_changes_an_answer(
    everything: Everything, tmp_path: Path, kind: str, follows: bool
) -> None:
    if kind == "same":
        named = f"draft={everything.model}"
    elif kind == "other":
        other = write_tiny_model(
            tmp_path / "other", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
        )
        (other / "tokenizer.json").write_bytes((everything.model / "tokenizer.json").read_bytes())
        named = f"draft={other}"
    else:
        named = f"heads={heads(tmp_path / 'heads', kind)}"
    # A small cache holds a few of the requests at a time.
    cache = {"steps_in_flight": 2} if follows else {"num_kv_blocks": 24}
    engine = drafting(everything.model, named, follows=follows, max_num_batched_tokens=40, **cache)
    assert answers(engine, everything.requests) == everything.answers
    used = {stats.drafter: sum(stats.drafted) for stats in engine.loop.stats().drafters}
    assert used["heads" if named.startswith("heads") else "draft"] > 300
    if follows:
        assert drafter_of(engine).num_followed > 100


@pytest.mark.usefixtures("always")
def test_a_shared_beginning_is_computed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = drafting(model, f"draft={model}")
    drafter = drafter_of(engine)
    run(engine, [request("first", [*SHARED, 7], 8)])
    counts = []
    forward = drafter._guesser.forward

    def count(token_ids: torch.Tensor, *rest: Any) -> Any:
        counts.append(len(token_ids))
        return forward(token_ids, *rest)

    monkeypatch.setattr(drafter._guesser, "forward", count)
    run(engine, [request("second", [*SHARED, 9], 8)])
    assert max(counts) < len(SHARED) // 2
    assert min(acceptance(engine)) > 0.95


@pytest.mark.usefixtures("always")
def test_a_long_prompt_is_computed_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.drafters.model.CATCH_UP_TOKENS", 30)
    prompt = [source.randrange(3, VOCAB_SIZE) for _ in range(200)]
    requests = [request("long", prompt, 30), request("short", [5, 6], 30)]
    plain = answers(tiny_engine(model, speculate="off"), requests)
    engine = drafting(model, f"draft={model}")
    assert answers(engine, requests) == plain
    assert min(acceptance(engine)) > 0.95


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("follows", [False, True], ids=["asked", "behind-steps"])
@pytest.mark.parametrize(("kind", "swaps"), [("same", False), ("same", True), ("eagle", False)])
def test_preempted_requests_are_drafted_for_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, swaps: bool, follows: bool
) -> None:
    requests = [request(f"p{n}", [3 + n, *SHARED[:20]], 60) for n in range(8)]
    plain = answers(tiny_engine(model, speculate="off"), requests)
    named = f"draft={model}" if kind == "same" else f"heads={heads(tmp_path / 'heads', 'eagle')}"
    monkeypatch.setattr(cache_memory, "block_copy_s", lambda *_: 0.0)
    host = {} if swaps else {"kv_host_memory": "0"}
    engine = drafting(model, named, follows=follows, num_kv_blocks=20, **host)
    teach_short_answers(engine)
    assert answers(engine, requests) == plain
    stats = engine.loop.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped > 0) == (stats.num_blocks_from_host > 0) == swaps
    if kind == "same":
        assert min(acceptance(engine)) > 0.9


def test_drafters_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", vocab_size=VOCAB_SIZE + 8)
    with pytest.raises(ConfigError, match="another vocabulary"):
        tiny_engine(model, speculate=f"draft={other}")
    with pytest.raises(ConfigError, match="no draft model"):
        tiny_engine(model, speculate=f"draft={tmp_path / 'nothing'}")
    wide = write_tiny_model(tmp_path / "wide", hidden_size=128)
    with pytest.raises(ConfigError, match="hidden states of 64 numbers; the model has 128"):
        tiny_engine(wide, speculate=f"heads={heads(tmp_path / 'heads', 'eagle')}")
    with pytest.raises(ModelLoadError, match="no heads"):
        tiny_engine(model, speculate=f"heads={tmp_path / 'nothing'}")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("follows", [False, True], ids=["asked", "behind-steps"])
def test_a_drafter_that_fails_is_switched_off(
    model: Path, caplog: pytest.LogCaptureFixture, follows: bool
) -> None:
    plain = answers(tiny_engine(model, speculate="off"), some_requests())
    engine = drafting(model, f"draft={model}", follows=follows)
    drafter = drafter_of(engine)
    calls = []

    def fail(*_: Any) -> torch.Tensor:
        calls.append(1)
        raise torch.OutOfMemoryError("no memory")

    (drafter._steps if follows else drafter)._guesser = SimpleNamespace(lag=0, forward=fail)
    assert answers(engine, some_requests()) == plain
    assert len(calls) == 1
    assert "drafts no more" in caplog.text


def test_hidden_states_of_rejected_drafts_are_replaced() -> None:
    states = HiddenStates(1)

    def step(start: int, values: list[float]) -> None:
        class Step:
            chunk_starts = np.array([0, len(values)])
            query_starts = np.arange(len(values) + 1)  # drafts are sequences of their own on a GPU
            positions = np.arange(start, start + len(values))

        states.take_step(["r"], Step(), torch.tensor(values).unsqueeze(1))  # type: ignore[arg-type]

    step(0, [0, 1, 2])
    step(3, [3, 40, 50])
    step(4, [4, 5])
    begin, taken = states.take("r", 2, 6)
    assert taken is not None
    assert (begin, taken.flatten().tolist()) == (2, [2, 3, 4, 5])
    step(8, [8, 9])
    begin, taken = states.take("r", 6, 10)
    assert taken is not None
    assert (begin, taken.flatten().tolist()) == (8, [8, 9])
    assert states.take("r", 9, 10) == (10, None)


class Clock(SystemClock):
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def lengths(
    accepted: int,
    token_s: float,
    step_s: float,
    calls: int,
    *,
    first_s: float = 0.0,
    num_slow: int = 2,
    num_taken: int = 8,
) -> list[int]:
    """The lengths that are chosen in so many calls, of which the first `num_slow` take `first_s` longer. The
    scheduler takes `num_taken` tokens of each draft."""
    clock = Clock()
    chooser = DraftLength(clock, 8)
    chosen = []
    for call in range(calls):
        count = chooser.begin()
        chosen.append(count)
        clock.time += count * token_s + (first_s if call < num_slow else 0.0)
        if count:
            chooser.end(count, 1, 1)
            taken = min(num_taken, count)
            known = min(count, min(accepted, taken) + 1)
            chooser.observe(count, taken, known, min(accepted, known))
        clock.time += step_s
    return chosen


def test_lengths_follow_acceptance_and_cost() -> None:
    assert lengths(8, 0.1, 1.0, 60)[-1] == 8
    assert lengths(2, 0.1, 1.0, 60)[-1] in (2, 3)
    never = lengths(0, 0.1, 1.0, 300)
    assert never[-20:].count(0) >= 19
    assert 0 < sum(never[100:]) <= length._TRIAL_TOKENS * 4
    assert lengths(8, 5.0, 1.0, 60)[-1] == 0


def test_a_stall_in_the_first_measurement_is_forgotten_with_the_next_trial() -> None:
    chosen = lengths(8, 0.1, 1.0, 100, first_s=60.0, num_slow=4)
    assert chosen[4:60].count(0) == 56, "the stall counts as the cost of a token"
    assert chosen[75:].count(8) > 20


def test_tokens_that_the_scheduler_does_not_take_are_drafted_rarely() -> None:
    few = lengths(8, 0.1, 1.0, 600, num_taken=2)[-100:]
    assert few.count(2) > 80
    assert max(few) == 3, "after a while a further token is worth a try again"
    assert lengths(8, 0.1, 1.0, 300, num_taken=0)[-100:].count(0) > 80


def test_a_drafter_that_is_rarely_asked_tries_again_as_soon() -> None:
    """While drafts do not pay, the scheduler asks for them once in many steps."""
    clock = Clock()
    chooser = DraftLength(clock, 8)
    chosen = []
    for _ in range(40):
        chosen.append(chooser.begin(num_steps=32))
        clock.time += 5.0 * chosen[-1]
        if chosen[-1]:
            chooser.end(chosen[-1], 1, 1)
            chooser.observe(*[chosen[-1]] * 4)
        clock.time += 32 * 1.0
    assert chosen[-20:].count(length._TRIAL_TOKENS) == 10


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("num_taken", [0, 1])
def test_drafts_that_the_scheduler_did_not_take_do_not_count_as_wrong(model: Path, num_taken: int) -> None:
    engine = drafting(model, f"draft={model}")
    engine.loop.scheduler._speculation._best_lengths = (  # type: ignore[method-assign]
        lambda offers, *_: [min(num_taken, offer.room) for offer in offers]
    )
    run(engine, [request(f"r{n}", [3 + n, *SHARED], 30) for n in range(3)])
    chooser = drafter_of(engine)._choice.chains
    for position in range(num_taken + 1):
        assert chooser._tried[position] > 20
        assert chooser._accepted[position] > 0.9 * chooser._tried[position]


def test_the_time_to_compile_does_not_count() -> None:
    assert lengths(8, 0.1, 1.0, 40, first_s=100.0)[-1] == 8


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", ["other", "eagle", "eagle3", "medusa"])
def test_drafts_behind_steps_are_those_of_a_new_request(model: Path, tmp_path: Path, kind: str) -> None:
    if kind == "other":
        named = f"draft={write_tiny_model(tmp_path / 'other', num_hidden_layers=1)}"
    else:
        named = f"heads={heads(tmp_path / 'heads', kind)}"

    def proposals(engine: Engine) -> list[tuple[list[int], tuple[int, ...]]]:
        drafter, found = engine.loop.drafter, []
        assert drafter is not None
        propose = drafter.propose

        def record(wanted: Any) -> Any:
            drafts = propose(wanted)
            rows = engine.loop.executor._rows  # type: ignore[attr-defined]
            for each, draft in drafts.items():
                ids = draft.token_ids
                if ON_DEVICE in ids:
                    ids = drafter_of(engine).in_use.of(each)
                found.append((rows.tokens(each).tolist(), ids))
            return drafts

        drafter.propose = record  # type: ignore[method-assign]
        return found

    engine = drafting(model, named, follows=True)
    seen = proposals(engine)
    run(engine, [request("a", SHARED[:20], 40), request("b", SHARED[5:12], 40)])  # they share blocks
    fresh = drafting(model, named, enable_prefix_caching=False)
    expected = proposals(fresh)
    checked = [each for each in seen[2:] if len(each[1]) > 1][::7]
    assert len(checked) > 2
    for number, (tokens, draft) in enumerate(checked):
        expected.clear()
        run(fresh, [request(f"n{number}", tokens[:-1], 4)])
        assert expected[0][0] == tokens
        assert expected[0][1] == draft[: len(expected[0][1])]


@pytest.mark.usefixtures("always")
def test_the_host_learns_drafts_late_unless_it_needs_them(model: Path) -> None:
    """Penalties depend on the drafts in front of a sample, so the host waits for those drafts."""
    engine = drafting(model, f"draft={model}", follows=True)
    submit, seen = engine.loop.executor.submit, dict[str, set[bool]]()

    def watch(plan: Any) -> Any:
        for chunk in plan.chunks:
            if chunk.drafts:
                seen.setdefault(chunk.request_id, set()).add(ON_DEVICE in chunk.drafts)
        return submit(plan)

    engine.loop.executor.submit = watch  # type: ignore[method-assign]
    run(engine, [request("plain", SHARED[:9], 30), request("edited", SHARED[:9], 30, presence_penalty=0.5)])
    assert True in seen["plain"]
    assert seen["edited"] == {False}


@pytest.mark.parametrize("kind", ["draft", "eagle", "eagle3", "medusa"])
def test_a_warm_up_launches_drafters_with_few_and_many_rows(
    model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the first launch of a kernel compiles it: no answer shall wait for that."""
    loaded: list[LoadedDrafter] = []

    def load(*arguments: Any) -> LoadedDrafter | None:
        found = load_drafter(*arguments)
        loaded.extend([found] if found is not None else [])
        return found

    monkeypatch.setattr(decoder, "load_drafter", load)
    named = f"draft={model}" if kind == "draft" else f"heads={heads(tmp_path / 'heads', kind)}"
    tiny_engine(model, speculate=named)
    (drafter,) = loaded
    guesser, rows = drafter.guesser if drafter.guesser is not None else drafter.heads, []
    assert guesser is not None
    real = guesser.draft if drafter.guesser is None else guesser.argmax  # type: ignore[union-attr]

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return real(hidden)

    monkeypatch.setattr(type(guesser), "with_distinct_layers", lambda self: self, raising=False)
    monkeypatch.setattr(guesser, "draft" if drafter.guesser is None else "argmax", counted)
    drafter.launch_all(16, verifies_trees=True)
    assert {1, 2, 8, 32, 64, 128} <= set(rows)
    assert (1024 in rows) == drafter.grows_trees
