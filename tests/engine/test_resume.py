"""An answer that another engine began goes on as if nothing had happened, wherever it was cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.core.plan import TokenEvent, TokenLogprobs
from penstock.core.request import Dry, FinishReason, Grammar, Request
from penstock.engine.build import Engine
from penstock.simulator.replay import replay

from .byte_model import constrained, write_byte_model
from .tiny import request, run, tiny_engine, tokens, write_tiny_model

PROMPT = [17 + 3 * n % 280 for n in range(37)]
LENGTH = 24
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}

SETTINGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "a seed drawn from the id": {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    "greedy with penalties": PENALTIES,
    "seeded with penalties": {"temperature": 0.8, "seed": 9, **PENALTIES},
    "log-probabilities": {"temperature": 1.0, "seed": 6, "logprobs": 3},
    "an early end forbidden": {"temperature": 1.0, "seed": 7, "min_tokens": 20, "ignore_eos": False},
    "bad words": {
        "temperature": 1.0,
        "seed": 3,
        "allowed_token_ids": (5, 6),
        "bad_words": ((5, 6, 5), (6, 6)),
    },
    "top tokens excluded": {"temperature": 1.0, "seed": 4, "xtc_probability": 0.5, "typical_p": 0.9},
    "no repetitions": {
        "temperature": 1.0,
        "seed": 5,
        "allowed_token_ids": (5, 6, 7, 8),
        "dry": Dry(1.5, allowed_length=1, last_n=20, breakers=bytes([1 << 6])),
        "repeat_last_n": 7,
        "repetition_penalty": 1.4,
        "top_n_sigma": 2.0,
    },
    "stop strings": {"temperature": 1.0, "seed": 8, "stop": ("nothing like this",)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return tiny_engine(model)


@pytest.fixture(scope="module")
def other_engine(model: Path) -> Engine:
    return tiny_engine(model, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def byte_engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    model = write_byte_model(tmp_path_factory.mktemp("bytes"))
    return tiny_engine(model), tiny_engine(model, enable_prefix_caching=False)


def resumed(original: Request, output: list[int]) -> Request:
    return msgspec.structs.replace(original, output_token_ids=tuple(output))


def logprobs(events: list[TokenEvent]) -> list[TokenLogprobs]:
    return [logprob for event in events for logprob in event.logprobs]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_cut_at_any_token(engine: Engine, other_engine: Engine, settings: dict[str, object]) -> None:
    original = request("one", PROMPT, LENGTH, **settings)
    whole = run(engine, [original])["one"]
    answer = tokens(whole)
    for cut in range(1, len(answer)):
        rest = run(other_engine, [resumed(original, answer[:cut])])["one"]
        assert tokens(rest) == answer[cut:], f"cut after {cut}"
        assert rest[-1].finish_reason == whole[-1].finish_reason
        for theirs, ours in zip(logprobs(whole)[cut:], logprobs(rest), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert ours.top_token_ids == theirs.top_token_ids


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", r"[0-9]{3}-[0-9]{4}/x+y"),
        Grammar(
            "json_schema", '{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}'
        ),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_grammar_goes_on_where_it_stood(byte_engines: tuple[Engine, Engine], grammar: Grammar) -> None:
    first, second = byte_engines
    original = constrained("one", grammar, max_tokens=40)
    answer = tokens(run(first, [original])["one"])
    for cut in range(1, len(answer)):
        assert tokens(run(second, [resumed(original, answer[:cut])])["one"]) == answer[cut:], (
            f"cut after {cut}"
        )


def test_many_at_once_between_others(engine: Engine, model: Path) -> None:
    """Preempted, cut into chunks and batched with others: it makes no difference."""
    originals = [
        request(f"r{n}", [3 + n, *PROMPT[n:]], LENGTH, temperature=0.7, seed=n, **PENALTIES) for n in range(6)
    ]
    answers = {name: tokens(events) for name, events in run(engine, originals).items()}
    small = tiny_engine(model, num_kv_blocks=12, max_num_batched_tokens=19)
    mixed = [
        resumed(original, answers[original.id][: 4 * n]) if n % 2 else original
        for n, original in enumerate(originals)
    ]
    for each, events in run(small, mixed).items():
        begun = len(next(one for one in mixed if one.id == each).output_token_ids)
        assert tokens(events) == answers[each][begun:]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: resumed(one, [5] * one.sampling.max_tokens), FinishReason.LENGTH),
        (lambda one: resumed(one, [5, 2]), FinishReason.STOP),
    ],
    ids=["the last token it may have", "an end token"],
)
def test_an_answer_that_was_complete_ends_at_once(
    engine: Engine, change: Callable[[Request], Request], reason: FinishReason
) -> None:
    complete = change(request("one", PROMPT, 4, ignore_eos=False))
    assert run(engine, [complete])["one"] == [TokenEvent("one", finish_reason=reason)]
    assert not engine.loop.has_work


def test_prompt_tokens_count_as_cached_and_the_answer_does_not(engine: Engine) -> None:
    original = request("cached", PROMPT, LENGTH)
    answer = tokens(run(engine, [original])["cached"])
    events = run(engine, [resumed(original, answer[:20])])["cached"]
    assert events[0].num_cached_tokens == len(PROMPT)  # 48 of 57 tokens were found, 37 of them of the prompt


def test_the_plan_log_replays_it(model: Path, tmp_path: Path) -> None:
    engine = tiny_engine(model, record_plans=str(tmp_path / "plans"))
    run(engine, [resumed(request("one", PROMPT, LENGTH), [9, 8, 7]), request("two", PROMPT, 3)])
    engine.close()
    with (tmp_path / "plans").open("rb") as lines:
        outcome = replay(lines)
    assert outcome.mismatch is None
    assert outcome.num_plans > LENGTH - 4
