"""A grammar that takes for ever to compile or to mask holds up nobody but its own request. Counted in steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.clock import VirtualClock
from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from penstock.core.messages import RequestRejected
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Grammar
from penstock.engine import grammar as grammar_module
from penstock.engine.build import Engine
from penstock.engine.grammar import GrammarCompiler, GrammarQueue
from penstock.engine.grammar_masks import CompiledGrammar, GrammarLimits, GrammarMasks, Mask

from .byte_model import constrained, text_of, until, write_byte_model
from .tiny import run, tiny_engine, tokens

SLOW = Grammar("regex", "slow[0-9]{4}")
QUICK = Grammar("regex", "quick[0-9]{4}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Whatever waits behind it is let go at the end, come what may."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> threading.Event:
    """Set when the compilation of the slow grammar has begun."""
    compile_now, has_begun = GrammarCompiler._compile, threading.Event()

    def compile_slowly(self: GrammarCompiler, grammar: Grammar) -> CompiledGrammar:
        if grammar == SLOW:
            has_begun.set()
            gate.wait()
        return compile_now(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_slowly)
    return has_begun


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> set[CompiledGrammar]:
    """Grammars in the set wait for the gate before each mask."""
    masks_now = CompiledGrammar.masks
    slow: set[CompiledGrammar] = set()

    def masks_slowly(self: CompiledGrammar, matchers: Sequence[Any]) -> list[Mask | str]:
        if self in slow:
            gate.wait()
        return masks_now(self, matchers)

    monkeypatch.setattr(CompiledGrammar, "masks", masks_slowly)
    return slow


def limit(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(grammar_module, "GrammarLimits", lambda: GrammarLimits(**changes))


def is_compiling(engine: Engine) -> bool:
    return engine.loop.has_work and not engine.loop.scheduler.has_work


@pytest.mark.usefixtures("slow_compiler")
def test_others_run_while_a_grammar_is_compiled(model: Path, gate: threading.Event) -> None:
    engine = tiny_engine(model)
    others = [constrained("free", None, 50, ignore_eos=True), constrained("quick", QUICK)]
    alone = run(tiny_engine(model), others)
    engine.loop.add(constrained("slow", SLOW))
    for each in others:
        engine.loop.add(each)
    events, steps_of_free = [], 0
    while not is_compiling(engine):
        events += engine.loop.step()
        if any(event.request_id == "free" and event.finish_reason for event in events) and not steps_of_free:
            steps_of_free = engine.loop.stats().num_steps
    by_id = {name: [event for event in events if event.request_id == name] for name in ("free", "quick")}
    assert {name: tokens(each) for name, each in by_id.items()} == {
        name: tokens(each) for name, each in alone.items()
    }
    assert steps_of_free == 50, "a token in every step"
    gate.set()
    assert text_of(until(engine, lambda: not engine.loop.has_work)).startswith("slow")


@pytest.mark.usefixtures("slow_compiler")
def test_a_request_can_be_cancelled_while_its_grammar_is_compiled(model: Path, gate: threading.Event) -> None:
    engine = tiny_engine(model)
    engine.loop.add(constrained("gone", SLOW))
    engine.loop.step()
    engine.loop.abort("gone")
    assert not engine.loop.has_work
    gate.set()
    assert text_of(run(engine, [constrained("next", SLOW)])["next"]).startswith("slow")


@pytest.mark.usefixtures("slow_compiler")
def test_a_deadline_passes_while_a_grammar_is_compiled(model: Path) -> None:
    engine = tiny_engine(model)
    engine.loop.add(constrained("late", SLOW), timeout_s=0.01)
    (rejected,) = rejections(engine)
    assert (rejected.request_id, rejected.code) == ("late", DeadlineExceeded.code)


def test_compilation_has_a_time_limit(
    model: Path, monkeypatch: pytest.MonkeyPatch, slow_compiler: threading.Event
) -> None:
    limit(monkeypatch, compile_timeout_s=0.01)
    engine = tiny_engine(model)
    engine.loop.add(constrained("endless", SLOW))
    assert slow_compiler.wait(60)
    (rejected,) = rejections(engine)
    assert rejected.code == InvalidRequest.code
    assert "0.01 s to compile" in rejected.message


def test_a_grammar_that_had_no_turn_is_not_called_slow(
    model: Path, monkeypatch: pytest.MonkeyPatch, slow_compiler: threading.Event
) -> None:
    limit(monkeypatch, compile_threads=1, compile_timeout_s=0.01)
    engine = tiny_engine(model)
    engine.loop.add(constrained("endless", SLOW))
    assert slow_compiler.wait(60)
    engine.loop.add(constrained("behind", QUICK))
    found: list[RequestRejected] = []
    while len(found) < 2:
        found += rejections(engine)
    assert {each.request_id: each.code for each in found} == {
        "endless": InvalidRequest.code,
        "behind": Overloaded.code,
    }


@pytest.mark.usefixtures("slow_compiler")
def test_waiting_for_grammars_is_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, max_compiling=1)
    engine = tiny_engine(model)
    engine.loop.add(constrained("first", SLOW))
    engine.loop.add(constrained("sibling", SLOW))
    with pytest.raises(Overloaded):
        engine.loop.add(constrained("other", QUICK))
    with pytest.raises(InvalidRequest, match="already being served"):
        engine.loop.add(constrained("first", SLOW))


@pytest.mark.parametrize("depth", [1, 2])
def test_others_run_while_a_mask_is_computed(
    model: Path, gate: threading.Event, slow_masks: set[CompiledGrammar], depth: int
) -> None:
    engine = tiny_engine(model, steps_in_flight=depth, max_num_seqs=4)
    alone = run(
        tiny_engine(model), [constrained("slow", SLOW), constrained("free", None, 50, ignore_eos=True)]
    )
    slow_masks.add(compiled(engine, SLOW))
    engine.loop.add(constrained("slow", SLOW))
    until(engine, lambda: engine.loop.stats().num_steps > 0)
    first_step = engine.loop.stats().num_steps
    engine.loop.add(constrained("free", None, 50, ignore_eos=True))
    free = []

    def is_over() -> bool:
        return any(event.finish_reason for event in free)

    while not is_over():
        events = engine.loop.step()
        free += [event for event in events if event.request_id == "free"]
        assert all(event.request_id == "free" for event in events), (
            "nothing can be known of the slow one's token"
        )
        engine.loop.scheduler.check_integrity()
    assert tokens(free) == tokens(alone["free"])
    assert engine.loop.stats().num_steps - first_step <= 50 + 2 * depth, (
        "every step brought the free row a token"
    )
    gate.set()
    rest = until(engine, lambda: not engine.loop.has_work)
    assert tokens(rest) == tokens(alone["slow"])[-len(tokens(rest)) :]
    assert rest[-1].finish_reason is FinishReason.STOP


def test_a_mask_has_a_time_limit(model: Path, slow_masks: set[CompiledGrammar]) -> None:
    engine = tiny_engine(model)
    clock = engine.loop.executor._masks._clock = VirtualClock()  # type: ignore[attr-defined]
    slow_masks.add(compiled(engine, SLOW))
    engine.loop.add(constrained("slow", SLOW))
    engine.loop.add(constrained("quick", QUICK))
    events: list[TokenEvent] = []
    while not any(event.request_id == "quick" and event.finish_reason for event in events):
        events += engine.loop.step()
    clock.advance(GrammarLimits().mask_timeout_s + 1)
    events += until(engine, lambda: not engine.loop.has_work)
    assert text_of([event for event in events if event.request_id == "quick"]).startswith("quick")
    assert (events[-1].request_id, events[-1].finish_reason) == ("slow", FinishReason.INVALID)
    assert "5 s" in str(events[-1].error)


def test_one_that_waits_for_its_mask_can_be_cancelled(model: Path, slow_masks: set[CompiledGrammar]) -> None:
    engine = tiny_engine(model)
    slow_masks.add(compiled(engine, SLOW))
    engine.loop.add(constrained("slow", SLOW))
    until(engine, lambda: engine.loop.stats().num_steps >= 3)
    engine.loop.abort("slow")
    assert not until(engine, lambda: not engine.loop.has_work)
    assert engine.loop.stats().num_kv_blocks_used == 0


def test_only_the_least_recently_used_grammars_are_forgotten(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, max_cached=2)
    engine = tiny_engine(model)
    first = compiled(engine, QUICK)
    compiled(engine, SLOW)
    assert compiled(engine, QUICK) is first
    compiled(engine, Grammar("regex", "third"))
    assert compiled(engine, QUICK) is first
    compiler = grammar_compiler(engine)
    assert [grammar for _, grammar in compiler._compiled] == [Grammar("regex", "third"), QUICK]


def test_tenants_share_no_compilation(model: Path) -> None:
    compiler = grammar_compiler(tiny_engine(model))
    assert compiler.compile(QUICK, "a") is compiler.compile(QUICK, "a")
    assert compiler.compile(QUICK, "a") is not compiler.compile(QUICK, "b")
    assert compiler.compile(Grammar("json"), "a") is compiler.compile(Grammar("json"), "b")


def test_a_grammar_that_explodes_ends_its_own_request_only(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, max_states=100)
    engine = tiny_engine(model)
    free = constrained("free", None, 60)
    wanted = tokens(run(engine, [free])["free"])
    events = run(engine, [constrained("bomb", Grammar("regex", r"((a|b)*a(a|b){200}){50}"), 400), free])
    assert tokens(events["free"]) == wanted
    assert events["bomb"][-1].finish_reason is FinishReason.INVALID
    assert "cannot follow its grammar" in str(events["bomb"][-1].error)


@pytest.mark.parametrize("text", ['"a"{1000000}', "/a{400000}/"])
def test_a_forced_text_beyond_the_matchers_limits_is_refused_before_the_first_token(
    model: Path, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"(?i)too complex: .*too many"):
        compiled(tiny_engine(model), Grammar("ebnf", f"start: {text}"))


def test_a_grammar_whose_first_token_is_its_whole_text_is_taken(model: Path) -> None:
    engine = tiny_engine(model)
    for text in ("", "a"):
        assert text_of(run(engine, [constrained(text, Grammar("ebnf", f'start: "{text}"'))])[text]) == text


def compiled(engine: Engine, grammar: Grammar) -> CompiledGrammar:
    return grammar_compiler(engine).compile(grammar).result()


def grammar_compiler(engine: Engine) -> GrammarCompiler:
    (queue,) = (each for each in engine.loop._collaborators if isinstance(each, GrammarQueue))
    return queue._compiler


def rejections(engine: Engine) -> list[RequestRejected]:
    found: list[RequestRejected] = []

    def is_rejected() -> bool:
        found.extend(engine.loop.take_rejections())
        return bool(found)

    until(engine, is_rejected)
    return found


def test_masks_are_waited_for_while_the_device_is_busy_and_no_longer() -> None:
    masks = GrammarMasks(GrammarLimits(), VirtualClock())
    pending: Future[None] = Future()
    masks._constraints["a"] = SimpleNamespace(pending=pending, is_busy=True)  # type: ignore[assignment]
    num_looks = 0

    def is_busy_for_two_looks() -> bool:
        nonlocal num_looks
        num_looks += 1
        return num_looks < 3

    masks.wait_while(is_busy_for_two_looks)
    assert num_looks == 3
    pending.set_result(None)
    masks.wait_while(lambda: True)  # comes back, because no mask is missing
