"""Drafts of constrained answers: the grammar masks every drafted position, and forced tokens are drafts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.core.plan import Draft, TokenEvent
from penstock.core.request import Grammar, Request
from penstock.engine import grammar_masks
from penstock.engine.build import Engine
from penstock.engine.drafters.combination import GrammarDrafter
from penstock.engine.grammar_masks import CompiledGrammar, GrammarMasks, Mask

from .byte_model import END, constrained, until, write_byte_model
from .drafting import Answer, KnowingDrafter, answer, answers, num_accepted, speculate
from .tiny import run, tiny_engine

SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 8}, "year_of_birth": {"type": "integer"}},
    "required": ["first_name", "year_of_birth"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, tuple[Grammar | None, dict[str, Any]]] = {
    "schema": (Grammar("json_schema", json.dumps(SCHEMA)), {"logprobs": 2}),
    "same schema": (Grammar("json_schema", json.dumps(SCHEMA)), {"seed": 5, "frequency_penalty": 0.5}),
    "greedy": (Grammar("json_schema", json.dumps(SCHEMA)), {"temperature": 0.0}),
    "choice": (Grammar("choice", '["yes, certainly", "yes, perhaps", "no"]'), {}),
    "regex": (Grammar("regex", "[a-f]{3,9}(-[0-9]{2}){1,4}"), {"min_tokens": 12}),
    "typical": (Grammar("regex", "(ab|cd|[0-9]){5,20}"), {"typical_p": 0.3, "xtc_probability": 0.4}),
    "no end": (Grammar("regex", "(ab|cd)+x?"), {"ignore_eos": True}),
    "free": (None, {"logprobs": 1}),
}


def all_requests() -> list[Request]:
    return [constrained(name, grammar, 40, **more) for name, (grammar, more) in GRAMMARS.items()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("draft-grammars") / "bytes")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Answer]:
    return answers(tiny_engine(model, speculate="off"), all_requests())


def known(expected: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: token_ids for name, (token_ids, *_) in expected.items()}


def masks_of(engine: Engine) -> GrammarMasks:
    masks: GrammarMasks = engine.loop.executor._masks  # type: ignore[attr-defined]
    return masks


@pytest.mark.parametrize("spoiled", [0.0, 0.4, 1.0])
def test_drafts_change_no_constrained_answer(
    model: Path, expected: dict[str, Answer], spoiled: float
) -> None:
    engine = tiny_engine(model, speculate="off")
    speculate(engine, KnowingDrafter(known(expected), spoiled, vocab_size=END + 8))
    assert answers(engine, all_requests()) == expected
    assert (num_accepted(engine) == 0) == (spoiled == 1.0)


def test_a_grammar_ends_in_the_middle_of_drafts(model: Path) -> None:
    """Also for a request that goes on behind end tokens elsewhere."""
    request = constrained("r", Grammar("choice", '["abcdef"]'), 40, ignore_eos=True)
    engine = tiny_engine(model, speculate="off")
    speculate(engine, KnowingDrafter({"r": [*b"abcdef", END, END, 7, 7]}, 0.0), 12)
    steps = 0
    events: list[TokenEvent] = []
    engine.loop.add(request)
    while engine.loop.has_work:
        new = engine.loop.step()
        steps += bool(new)
        events += new
    token_ids, _, reason, error = answer(events)
    assert (bytes(token_ids[:6]), token_ids[6:], error) == (b"abcdef", [END], None)
    assert reason is not None
    assert steps <= 3, "the drafts were taken in one step"


def test_forced_tokens_are_drafted(model: Path, expected: dict[str, Answer]) -> None:
    request = constrained("schema", GRAMMARS["schema"][0], 40, logprobs=2)
    engine = tiny_engine(model, speculate="off")
    speculate(engine, GrammarDrafter(masks_of(engine)), 16)
    assert answer(run(engine, [request])["schema"]) == expected["schema"]
    (stats,) = engine.loop.stats().drafters
    assert stats.drafter == "grammar"
    assert stats.accepted == stats.drafted, "bytes can be cut into tokens in one way only"
    assert sum(stats.accepted) >= len('"first_name"') - 2


def test_a_drafter_hardly_waits_for_forced_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    advance = CompiledGrammar.advance
    waits: list[float] = []

    def slow(self: CompiledGrammar, matcher: Any, token_ids: Any) -> None:
        gate.wait(60)
        advance(self, matcher, token_ids)

    def count(futures: Any, timeout: float, *how: Any) -> None:
        waits.append(timeout)

    monkeypatch.setattr(CompiledGrammar, "advance", slow)
    engine = tiny_engine(model, speculate="off")
    masks = masks_of(engine)
    drafter = GrammarDrafter(masks)
    engine.loop.add(constrained("r", Grammar("choice", '["abcdef"]')))
    until(engine, lambda: any(each.token_ids for each in masks._constraints.values()))
    monkeypatch.setattr(grammar_masks, "wait", count)
    # The task for the first token does not end, and what was forced from the beginning on is known all the same.
    for _ in range(50):
        assert drafter.propose({"r": 3, "stranger": 3}) == {"r": Draft(tuple(b"bcd"), "grammar")}
    assert len(waits) == 4
    assert max(waits) <= 0.0005
    gate.set()
    engine.loop.abort("r")
    assert drafter.propose({"r": 3}) == {}


def test_a_late_mask_postpones_drafts(
    model: Path, expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task is late at first, and the drafts change meanwhile."""
    gate = threading.Event()
    advance = CompiledGrammar.advance

    def slow(self: CompiledGrammar, matcher: Any, token_ids: Any) -> None:
        gate.wait(60)
        advance(self, matcher, token_ids)

    monkeypatch.setattr(CompiledGrammar, "advance", slow)
    engine = tiny_engine(model, speculate="off")
    speculate(engine, KnowingDrafter(known(expected), 0.3, vocab_size=END + 8))
    events: dict[str, Any] = {}
    for request in all_requests():
        engine.loop.add(request)
    count = 0
    while engine.loop.has_work:
        gate.clear()
        for event in engine.loop.step():
            events.setdefault(event.request_id, []).append(event)
        count += 1
        if count % 2:
            gate.set()
            for constraint in masks_of(engine)._constraints.values():
                if constraint.pending is not None:
                    constraint.pending.result(60)
    assert {name: answer(each) for name, each in events.items()} == expected


@pytest.mark.parametrize("fails", [False, True])
def test_drafts_wait_for_the_newest_token_in_no_thread(
    model: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The task for the drafts begins when the task for the token is done. A failure of the first ends the request."""
    gate = threading.Event()
    advance = CompiledGrammar.advance

    def slow(self: CompiledGrammar, matcher: Any, token_ids: Any) -> None:
        assert gate.wait(60)
        if fails:
            raise ValueError("no more")
        advance(self, matcher, token_ids)

    monkeypatch.setattr(CompiledGrammar, "advance", slow)
    engine = tiny_engine(model, speculate="off")
    masks = masks_of(engine)
    masks.finds_forced = True  # tokens are given to the threads at once
    speculate(engine, KnowingDrafter({"r": list(b"abcdef")}, 0.0), 3)
    engine.loop.add(constrained("r", Grammar("choice", '["abcdef"]')))
    until(engine, lambda: any(each.token_ids for each in masks._constraints.values()))
    engine.loop.step()
    constraint = masks._constraints["r"]
    assert b"bcdef".startswith(bytes(constraint.drafts or b"?")), "the drafts are with the threads, too"
    assert masks._pool._work_queue.qsize() == 0
    assert len(masks._pool._threads) == 1
    gate.set()
    events = until(engine, lambda: not engine.loop.has_work)
    assert (events[-1].error is not None) == fails
    assert fails or bytes(answer(events)[0][:-1]).endswith(b"bcdef")


def test_a_forbidden_draft_leaves_the_matcher_as_it_was(model: Path) -> None:
    engine = tiny_engine(model, speculate="off")
    engine.loop.add(constrained("r", Grammar("regex", "[ab]{4}")))
    masks = masks_of(engine)
    until(engine, lambda: bool(masks._constraints))
    grammar = masks._constraints["r"].grammar
    matcher, first = grammar.start(), grammar.first_mask
    behind = grammar.masks_behind([matcher] * 3, [first] * 3, [b"ab", b"axb", b"abab"])
    assert [len(each) for each in behind] == [2, 1, 4]
    assert all(isinstance(mask, Mask) and mask.allows(ord("a")) for each in behind[:2] for mask in each)
    assert behind[2][-1].must_end
    assert behind[2][-1].allows(END)
    assert not first.allows(10**6)
    (again,) = grammar.masks([matcher])
    assert isinstance(again, Mask)
    assert (again.words == first.words).all()
