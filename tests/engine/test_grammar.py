"""Answers that a grammar holds: they match, whatever the batch, and nobody else's tokens change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.core.messages import RequestRejected
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Grammar, Request
from penstock.engine import grammar as grammar_module
from penstock.engine.build import Engine
from penstock.engine.grammar_masks import GrammarLimits
from penstock.simulator.replay import replay

from .byte_model import CALL_TOKENS, END, constrained, text_of, until, write_byte_model
from .tiny import run, teach_short_answers, tiny_engine, tokens, write_tiny_model

PHONE = Grammar("regex", r"[0-9]{3}-[0-9]{4}/x+")
CHOICE = Grammar("choice", json.dumps(["yes", "no", "mäybe 😀"]))
SUM = Grammar("ebnf", 'start: NUM | "(" start "+" start ")"\nNUM: /[0-9]{1,3}/')
SHORT_ARRAY = Grammar("json_schema", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    """Its grammars are bounded by their size alone: a busy machine may take long for any of them."""
    limits = GrammarLimits(compile_timeout_s=600.0, mask_timeout_s=600.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_module, "GrammarLimits", lambda: limits)
        return tiny_engine(model)


def test_thoughts_end_when_their_budget_is_spent(engine: Engine) -> None:
    start, end = CALL_TOKENS
    requests = []
    for index in range(6):
        budget = {"max_tokens": 7, "start": start, "end": end, "is_open": index % 2 == 0}
        tags = {"structures": [], "triggers": [], "thinking": budget}
        grammar = Grammar("structural_tag", json.dumps(tags))
        bias = {CALL_TOKENS[start]: 0.0 if index % 2 == 0 else 100.0, END: -100.0}
        requests.append(constrained(f"thinks {index}", grammar, 20, seed=index, logit_bias=bias))
    for name, events in run(engine, requests).items():
        token_ids = [token_id for event in events for token_id in event.token_ids]
        assert len(token_ids) == 20, name
        assert CALL_TOKENS[end] in token_ids[:9], name


# SmolLM2's tokenizer has no token for the first bytes of what lies above, nor for surrogates.
WRITABLE = st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs",))


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose every value is short, since a random model stops only where it must."""
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
            st.integers(-500, 500),
            st.integers(0, 300),
        ),
        st.builds(
            lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
            st.integers(0, 4),
            st.integers(0, 6),
        ),
        st.lists(
            st.one_of(st.integers(-9, 9), st.text(WRITABLE, max_size=6), st.none()), min_size=1, max_size=4
        ).map(lambda values: {"enum": values}),
        st.just({"type": "string", "pattern": "^[a-f]{2}[0-9]?$"}),
        st.just({"type": "string", "format": "date"}),
    )

    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.text(alphabet='abcé"\\ ', min_size=1, max_size=4)
        objects = st.dictionaries(names, inner, max_size=4).flatmap(
            lambda properties: st.sets(
                st.sampled_from(sorted(properties)) if properties else st.nothing()
            ).map(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": sorted(required),
                    "additionalProperties": False,
                }
            )
        )
        arrays = st.builds(
            lambda items, low, span: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + span,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        )
        unions = st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches})
        return st.one_of(objects, arrays, unions)

    return st.recursive(leaves, nested, max_leaves=6)


@settings(max_examples=40, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**31))
def test_every_answer_matches_its_schema(engine: Engine, schema: dict[str, Any], seed: int) -> None:
    request = constrained(
        "answer",
        Grammar("json_schema", json.dumps(schema)),
        450,
        seed=seed,
        logit_bias={32: -30.0, 10: -30.0},
    )
    events = run(engine, [request])
    if not events:
        (rejected,) = engine.loop.take_rejections()
        assert "nsatisfiable" in rejected.message, rejected.message
        return
    answer = events["answer"]
    if answer[-1].finish_reason is FinishReason.LENGTH:
        return
    assert answer[-1].finish_reason is FinishReason.STOP, answer[-1]
    jsonschema.Draft202012Validator(schema).validate(json.loads(text_of(answer)))


@pytest.mark.parametrize("seed", range(4))
def test_every_kind_of_grammar_holds_its_answer(engine: Engine, seed: int) -> None:
    tags = {
        "structures": [
            {
                "begin": "<call>f(",
                "schema": {"type": "integer", "maximum": 9, "minimum": 0},
                "end": ")</call>",
            }
        ],
        "triggers": ["<call>"],
        "at_least_one": True,
        "separator": ";",
        "prefix": "[",
        "suffix": "]",
    }
    requests = [
        constrained("regex", PHONE, 30, seed=seed, logit_bias={ord("x"): -8.0}),
        constrained("slash", Grammar("regex", "a/b\\/c\n[d]"), seed=seed),
        constrained("choice", CHOICE, seed=seed),
        constrained("ebnf", SUM, seed=seed, logit_bias={ord("("): -5.0}),
        constrained("json", Grammar("json"), 100, seed=seed, logit_bias={ord("}"): 8.0}),
        constrained(
            "tags", Grammar("structural_tag", json.dumps(tags)), seed=seed, logit_bias={ord(";"): -3.0}
        ),
    ]
    events = run(engine, requests)
    text = {name: text_of(each) for name, each in events.items()}
    ended = {name for name, each in events.items() if each[-1].finish_reason is FinishReason.STOP}
    assert {"slash", "choice"} <= ended
    assert text["slash"] == "a/b/c\nd"
    assert text["choice"] in json.loads(CHOICE.text)
    if "regex" in ended:
        assert re.fullmatch(PHONE.text, text["regex"])
    if "json" in ended:
        assert isinstance(json.loads(text["json"]), dict)
    if "tags" in ended:
        assert re.fullmatch(r"\[<call>f\(\s*\d\)</call>(;<call>f\(\s*\d\)</call>)*\]", text["tags"])
    if "ebnf" in ended:
        assert (
            re.fullmatch(r"\d{1,3}", re.sub(r"\(\d{1,3}\+\d{1,3}\)", "1", text["ebnf"]))
            or "((" in text["ebnf"]
        )


def test_free_text_goes_on_as_a_structure_after_a_trigger(engine: Engine) -> None:
    tags = {
        "structures": [{"begin": "<f>", "schema": {"enum": ["up", "down"]}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    grammar = Grammar("structural_tag", json.dumps(tags))
    towards = dict.fromkeys(b"<f", 40.0)
    (answer,) = run(engine, [constrained("t", grammar, 60, logit_bias=towards)]).values()
    for opened in text_of(answer).split("<f")[1:-1]:
        assert re.match(r'>"(up|down)"</f>', opened)
    assert "<f>" in text_of(answer)


@pytest.mark.parametrize("only_calls", [True, False])
@pytest.mark.parametrize("marker", CALL_TOKENS)
def test_special_tokens_stand_for_themselves(engine: Engine, marker: str, only_calls: bool) -> None:
    """Text that looks like one is not one: the token itself opens the structure."""
    call = CALL_TOKENS[marker]
    tags = {
        "structures": [{"begin": f"{marker}f", "schema": {"enum": ["up", "down"]}, "end": ";"}],
        "triggers": [marker],
        "at_least_one": only_calls,
        "stop_after_first": True,
    }
    grammar = Grammar("structural_tag", json.dumps(tags))
    (answer,) = run(engine, [constrained("t", grammar, 60, logit_bias={call: 60.0})]).values()
    written = tokens(answer)
    assert written[0] == call
    assert bytes(written[1:-1]).decode() in ('f"up";', 'f"down";')
    assert written[-1] == END


@pytest.mark.parametrize("marker", CALL_TOKENS)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", r"{}x[ab]"),
        ("choice", '["{}xa", "{}xb"]'),
        ("ebnf", 'start: "{}x" ("a" | "b") // not <tool_call>'),
        ("json_schema", '{{"enum": ["{}xa", "{}xb"]}}'),
    ],
)
def test_a_grammar_may_spell_a_special_tokens_name(engine: Engine, marker: str, kind: Any, text: str) -> None:
    """It is text then, and not the token."""
    spelt = re.escape(marker) if kind == "regex" else marker
    (answer,) = run(engine, [constrained("t", Grammar(kind, text.format(spelt, spelt)))]).values()
    assert answer[-1].finish_reason is FinishReason.STOP, answer[-1]
    assert text_of(answer).strip('"') in (f"{marker}xa", f"{marker}xb")
    assert not set(CALL_TOKENS.values()) & set(tokens(answer))


def test_a_clients_own_grammar_calls_tokens_by_their_names(engine: Engine) -> None:
    grammar = Grammar("ebnf", 'start: <tool_call> "<tool_call>" /<tool_call>/ // <tool_call>')
    (answer,) = run(engine, [constrained("t", grammar)]).values()
    assert tokens(answer) == [CALL_TOKENS["<tool_call>"], *b"<tool_call><tool_call>", END]


def test_with_two_steps_in_flight_constrained_requests_take_part_in_all(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a mask may be late, and the row then skips a step.
    monkeypatch.setattr(grammar_module, "GrammarLimits", lambda: GrammarLimits(mask_grace_s=30))
    engine = tiny_engine(model, steps_in_flight=2)
    digits = Grammar("regex", "[0-9]{30}")
    free = constrained("free", None, max_tokens=36, ignore_eos=True)
    run(engine, [constrained("compiled", digits)])  # or its request could wait for the compiler
    num_before = engine.loop.stats().num_steps
    events = run(engine, [constrained("bound", digits), free])
    assert len(tokens(events["bound"])) == 31
    assert engine.loop.stats().num_steps - num_before < 50  # every other step would make 62


MIX = [
    constrained(f"{kind}-{n}", grammar, 40, seed=n, frequency_penalty=0.2 * (n % 2), logprobs=n % 3 or None)
    for n in range(3)
    for kind, grammar in (
        ("free", None),
        ("phone", PHONE),
        ("choice", CHOICE),
        ("array", SHORT_ARRAY),
        ("json", Grammar("json")),
    )
]


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[int]]:
    return {each.id: tokens(run(tiny_engine(model), [each])[each.id]) for each in MIX}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps_in_flight": 2},
        {"num_kv_blocks": 7},
        {"steps_in_flight": 3, "num_kv_blocks": 7, "max_num_batched_tokens": 23},
    ],
    ids=str,
)
def test_constrained_and_free_rows_do_not_change_each_other(
    model: Path, alone: dict[str, list[int]], changes: dict[str, int], tmp_path: Path
) -> None:
    """However steps overlap and requests are preempted; and the plan log of it replays."""
    engine = tiny_engine(model, record_plans=str(tmp_path / "log"), **changes)
    if "num_kv_blocks" in changes:
        teach_short_answers(engine)
    events = run(engine, MIX)
    assert {name: tokens(each) for name, each in events.items()} == alone
    if "num_kv_blocks" in changes:
        assert engine.loop.stats().num_preemptions > 0, "the cache was meant to be too small"
    engine.close()
    with (tmp_path / "log").open("rb") as lines:
        assert replay(lines).mismatch is None


def test_a_cached_prefix_changes_nothing(engine: Engine) -> None:
    long = Request(
        id="x",
        prompt_token_ids=tuple(b"the same prompt, longer than a block of sixteen tokens"),
        sampling=constrained("x", PHONE).sampling,
    )
    first, second = run(engine, [long])["x"], run(engine, [long])["x"]
    assert second[0].num_cached_tokens == 48
    assert tokens(first) == tokens(second)


def test_the_end_comes_only_where_the_grammar_allows_it(engine: Engine) -> None:
    wants_to_end = {END: 100.0}
    (answer,) = run(engine, [constrained("a", PHONE, logit_bias=wants_to_end)]).values()
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}/x", text_of(answer))
    assert tokens(answer)[-1] == END


@pytest.mark.parametrize("options", [{"min_tokens": 200}, {"ignore_eos": True}])
def test_a_finished_grammar_ends_the_answer_whatever_else_was_asked(
    engine: Engine, options: dict[str, object]
) -> None:
    events = run(
        engine,
        [
            constrained("fixed", Grammar("regex", "abc"), 200, **options),
            constrained("open", Grammar("regex", "ab*"), 60, logit_bias={END: 100.0}, **options),
        ],
    )
    assert tokens(events["fixed"]) == [*b"abc", END]
    assert events["fixed"][-1].finish_reason is FinishReason.STOP
    assert tokens(events["open"]) == [*b"a", *b"b" * 59], "the end waits for as long as the grammar goes on"


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    (answer,) = run(engine, [constrained("a", CHOICE, logprobs=2)]).values()
    for event in answer:
        (at,) = event.logprobs
        assert at.logprob <= max(at.top_logprobs) < 0.0
        assert len(at.top_token_ids) == 2


def rejection(engine: Engine, grammar: Grammar) -> RequestRejected:
    engine.loop.add(constrained("bad", grammar))
    rejections: list[RequestRejected] = []

    def is_rejected() -> bool:
        rejections.extend(engine.loop.take_rejections())
        return bool(rejections)

    assert not until(engine, is_rejected)
    assert not engine.loop.has_work
    return rejections[0]


HUGE_SCHEMA = {
    "type": "object",
    "properties": {f"k{n}": {"enum": [f"value {m} of {n}" for m in range(40)]} for n in range(4000)},
}


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (Grammar("json_schema", '{"type": "thing"}'), "cannot be compiled"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", '{"not": {}}'), "Unimplemented"),
        (Grammar("json_schema", "false"), "nsatisfiable"),
        (Grammar("regex", "(a"), "cannot be compiled"),
        (Grammar("regex", "(?=a)b"), "cannot be compiled"),
        (Grammar("ebnf", "start: nothing_here"), "cannot be compiled"),
        (Grammar("choice", "[]"), "at least one"),
        (Grammar("choice", '{"a": 1}'), "at least one"),
        (Grammar("structural_tag", '{"structures": [], "triggers": []}'), "at least one"),
        (Grammar("structural_tag", '{"structures": [{"begin": "<a>"}], "triggers": ["<b"]}'), "No trigger"),
        (Grammar("json_schema", json.dumps(HUGE_SCHEMA)), "cannot be compiled"),
    ],
    ids=lambda value: value.text[:30] if isinstance(value, Grammar) else "",
)
def test_a_bad_grammar_is_refused_with_a_sentence(engine: Engine, grammar: Grammar, sentence: str) -> None:
    rejected = rejection(engine, grammar)
    assert rejected.code == InvalidRequest.code
    assert sentence in rejected.message
    assert "\n" not in rejected.message


def test_an_engine_without_text_refuses_grammars(tmp_path: Path) -> None:
    engine = tiny_engine(write_tiny_model(tmp_path / "numbers"))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        engine.loop.add(constrained("a", PHONE))
    assert not engine.loop.has_work


def test_siblings_share_one_compilation(engine: Engine) -> None:
    requests = [constrained(str(n), Grammar("regex", "[ab]{5}c"), seed=n) for n in range(6)]
    answers: dict[str, list[TokenEvent]] = run(engine, requests)
    assert len({text_of(each) for each in answers.values()}) > 1
    assert all(re.fullmatch("[ab]{5}c", text_of(each)) for each in answers.values())
