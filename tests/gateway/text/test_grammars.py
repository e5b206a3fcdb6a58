"""What clients may ask answers to look like, and every way to be refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import llguidance
import msgspec
import pytest

from penstock.core.errors import InvalidRequest, Overloaded
from penstock.core.gateway_config import GatewayConfig
from penstock.core.grammar_text import StructuralTags, TaggedText, grammar_text, lenient
from penstock.core.request import Grammar
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.text import grammars
from penstock.gateway.text.grammars import (
    CheckedGrammar,
    GrammarChecker,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from tests.gateway.fake_engine import FakeEngine, byte_tokenizer, script_text
from tests.loop_time import pass_time, settle

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAGS = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}


DEEP = '{"items":' * 5000 + "{}" + "}" * 5000


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_response_formats() -> None:
    assert ResponseFormat(type="text").to_grammar() is None
    assert ResponseFormat(type="json_object").to_grammar() == Grammar("json")
    strict = ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(name="x", schema=OBJECT, strict=True)
    )
    assert strict.to_grammar() == Grammar("json_schema", json.dumps(OBJECT))
    loose = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="x", schema=OBJECT))
    assert loose.to_grammar() == Grammar("json_schema", json.dumps(lenient(OBJECT)))
    tags = ResponseFormat(type="structural_tag", structures=TAGS["structures"], triggers=["<f"])
    assert tags.to_grammar() == Grammar("structural_tag", json.dumps(TAGS))


def test_a_schema_beside_the_type_of_a_response_format_is_never_ignored() -> None:
    expected = Grammar("json_schema", json.dumps(lenient(OBJECT)))
    for asked in (
        ResponseFormat(type="json_object", schema=OBJECT),
        ResponseFormat(type="json_schema", schema=OBJECT),
        ResponseFormat(type="json_object", value=OBJECT),
        ResponseFormat(type="json", value=json.dumps(OBJECT)),
    ):
        assert asked.to_grammar() == expected
    assert ResponseFormat(type="regex", value="a+").to_grammar() == Grammar("regex", "a+")


@pytest.mark.parametrize(
    "wrong",
    [
        ResponseFormat(type="xml"),
        ResponseFormat(type="json_schema"),
        ResponseFormat(type="regex"),
        ResponseFormat(type="regex", value={}),
        ResponseFormat(type="json", value="{"),
    ],
)
def test_a_wrong_response_format_names_its_field(wrong: ResponseFormat) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wrong.to_grammar()
    assert str(caught.value.param).startswith("response_format.")


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (StructuredOutputs(json=OBJECT), "json_schema"),
        (StructuredOutputs(json=json.dumps(OBJECT)), "json_schema"),
        (StructuredOutputs(json_object=True), "json"),
        (StructuredOutputs(regex="a+"), "regex"),
        (StructuredOutputs(choice=["a", "b"]), "choice"),
        (StructuredOutputs(grammar='start: "a"'), "ebnf"),
        (StructuredOutputs(structural_tag=TAGS), "structural_tag"),
        (StructuredOutputs(structural_tag=json.dumps(TAGS)), "structural_tag"),
    ],
)
async def test_structured_outputs_of_every_kind_pass_the_check(asked: StructuredOutputs, kind: str) -> None:
    grammar = asked.to_grammar("structured_outputs")
    assert grammar is not None
    assert grammar.kind == kind
    assert (await GrammarChecker().check(grammar, {})).grammar == grammar


@pytest.mark.parametrize(
    "asked",
    [
        StructuredOutputs(json=OBJECT, regex="a"),
        StructuredOutputs(json="{"),
        StructuredOutputs(json="[1]"),
        StructuredOutputs(json=nested(grammars.MAX_SCHEMA_DEPTH + 1)),
        StructuredOutputs(json={"enum": list(range(grammars.MAX_SCHEMA_VALUES))}),
        StructuredOutputs(json={"description": "x" * grammars.MAX_GRAMMAR_BYTES}),
        StructuredOutputs(regex="a" * (grammars.MAX_REGEX_CHARACTERS + 1)),
        StructuredOutputs(choice=[]),
        StructuredOutputs(choice=["a", ""]),
        StructuredOutputs(choice=[str(n) for n in range(grammars.MAX_CHOICES + 1)]),
        StructuredOutputs(grammar="x" * (grammars.MAX_EBNF_BYTES + 1)),
        StructuredOutputs(structural_tag={"structures": 3}),
        StructuredOutputs(structural_tag="nothing"),
        StructuredOutputs(json=DEEP),
        StructuredOutputs(structural_tag=DEEP),
    ],
)
def test_bounds_and_shapes_are_checked_at_once(asked: StructuredOutputs) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked.to_grammar("structured_outputs")
    assert str(caught.value.param).startswith("structured_outputs")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "thing"}'),
        Grammar("json_schema", json.dumps({"uniqueItems": True})),
        Grammar("regex", "(a"),
        Grammar("ebnf", 'root ::= "a'),
        Grammar("ebnf", "start: nowhere"),
        Grammar("json_schema", json.dumps({"$ref": "https://example.org/schema"})),
        Grammar("structural_tag", json.dumps(TAGS | {"triggers": ["<g"]})),
        Grammar("json", "x" * (grammars.MAX_GRAMMAR_BYTES + 1)),
        Grammar("json_schema", DEEP),
        Grammar(
            "structural_tag", f'{{"structures": [{{"begin": "a", "schema": {DEEP}}}], "triggers": ["a"]}}'
        ),
    ],
)
async def test_what_cannot_be_compiled_is_refused_in_one_line(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await GrammarChecker().check(grammar, {})
    params = {"json": "response_format", "json_schema": "response_format", "structural_tag": "tools"}
    assert caught.value.param == params.get(grammar.kind, "structured_outputs")
    assert "\n" not in caught.value.message


async def test_keywords_that_cannot_be_enforced_are_refused_only_where_strict() -> None:
    schema = {"type": "array", "uniqueItems": True}
    checker = GrammarChecker()
    (warning,) = (await checker.check(grammars.json_schema(schema, strict=False, param="x"), {})).warnings
    assert "uniqueItems" in warning.message
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        await checker.check(grammars.json_schema(schema, param="x"), {})


async def test_gbnf_is_translated() -> None:
    checker = GrammarChecker()
    asked = Grammar("ebnf", 'root ::= "a" root | "b"')
    sent = await checker.check(asked, {})
    assert "::=" not in sent.grammar.text
    assert "start:" in sent.grammar.text
    assert await checker.check(asked, {}) is sent, "remembered"


class SlowChecks:
    """Checks of the regular expression `slow…` take until `released` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.begun: list[str] = []
        monkeypatch.setattr(grammars, "_checked", self._check)
        monkeypatch.setattr(grammars, "CHECK_TIMEOUT_S", 600.0)

    def _check(self, grammar: Grammar, _: object) -> CheckedGrammar:
        self.begun.append(grammar.text)
        if grammar.text.startswith("slow"):
            self.released.wait(60)
        return CheckedGrammar(grammar)

    async def until_begun(self) -> None:
        while not self.begun:
            await asyncio.sleep(0.001)


async def test_the_slow_grammars_of_one_workspace_leave_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks, checker = SlowChecks(monkeypatch), GrammarChecker()
    slow = [
        asyncio.create_task(checker.check(Grammar("regex", f"slow{each % 3}"), {}, "a")) for each in range(9)
    ]
    await checks.until_begun()
    async with asyncio.timeout(50):
        await checker.check(Grammar("regex", "quick"), {}, "b")
    assert checks.begun == ["slow0", "quick"]
    checks.released.set()
    await asyncio.gather(*slow)
    assert checks.begun == ["slow0", "quick", "slow1", "slow2"], "each grammar is checked once"


async def test_a_grammar_that_is_given_up_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on. The workspace would otherwise have all threads, and its next grammars every new one."""
    checks, checker = SlowChecks(monkeypatch), GrammarChecker()
    given_up = asyncio.create_task(checker.check(Grammar("regex", "slow0"), {}, "a"))
    await checks.until_begun()
    await settle()
    pass_time(grammars.CHECK_TIMEOUT_S)
    with pytest.raises(InvalidRequest, match="to compile"):
        await given_up
    without_a_turn = asyncio.create_task(checker.check(Grammar("regex", "slow1"), {}, "a"))
    await settle()
    pass_time(grammars.CHECK_TIMEOUT_S)
    with pytest.raises(Overloaded):
        await without_a_turn
    async with asyncio.timeout(50):
        await checker.check(Grammar("regex", "quick"), {}, "b")
    assert checks.begun == ["slow0", "quick"]
    checks.released.set()
    await checker.check(Grammar("regex", "slow1"), {}, "a")


async def test_as_many_grammars_are_remembered_as_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MAX_REMEMBERED_BYTES", 200_000)
    checks, checker = SlowChecks(monkeypatch), GrammarChecker()
    large = [Grammar("regex", letter * 30_000) for letter in "abcd"]
    for each in (*large[:3], large[0], large[3], large[0], large[1]):
        await checker.check(each, {})
    assert [text[0] for text in checks.begun] == ["a", "b", "c", "d", "b"], (
        "the oldest use is forgotten first"
    )


async def test_no_workspace_can_time_the_grammars_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, checker = SlowChecks(monkeypatch), GrammarChecker()
    for workspace_id in ("a", "a", "b"):
        await checker.check(Grammar("regex", "secret"), {}, workspace_id)
        await checker.check(Grammar("json"), {}, workspace_id)
    assert checks.begun == ["secret", "", "secret"], "all share what says nothing about them"


async def test_a_grammar_that_waits_too_long_for_others_is_not_called_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks, checker = SlowChecks(monkeypatch), GrammarChecker()
    slow = asyncio.create_task(checker.check(Grammar("regex", "slow"), {}, "a"))
    await checks.until_begun()
    await settle()  # it has begun to wait, and has taken the patient timeout
    monkeypatch.setattr(grammars, "CHECK_TIMEOUT_S", 0.001)
    with pytest.raises(Overloaded):
        await checker.check(Grammar("regex", "quick"), {}, "a")
    checks.released.set()
    assert (await slow).grammar.text == "slow"
    monkeypatch.setattr(grammars, "CHECK_TIMEOUT_S", 600.0)
    await checker.check(Grammar("regex", "quick"), {}, "a")


async def test_a_request_with_a_bad_grammar_never_reaches_the_engine() -> None:
    engine = FakeEngine(script_text("{}"))
    gateway = Gateway(engine, GatewayConfig())

    def request_for(grammar: Grammar) -> GenerationRequest:
        sampling = SamplingOptions(max_tokens=8, grammar=grammar)
        return GenerationRequest(prompts=(TextPrompt("hello"),), sampling=sampling, n=2)

    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        await gateway.submit(request_for(Grammar("regex", "(a")))
    assert not engine.added
    await (await gateway.submit(request_for(Grammar("ebnf", 'root ::= "a"')))).collect()
    assert len(engine.added) == 2
    assert all(
        "start:" in request.sampling.grammar.text for request in engine.added if request.sampling.grammar
    )


PASSWORD = {"type": "string", "pattern": r"^(?=.*\d)(?=[^)]*[a-z])[a-z\d]{4,8}$"}
TWICE = {"type": "string", "pattern": r"^(a|b)\1$"}


async def test_of_patterns_that_cannot_be_enforced_the_rest_is() -> None:
    schema = {
        "properties": {"word": PASSWORD, "twice": TWICE, "plain": {"type": "string", "pattern": "^x+$"}},
        "patternProperties": {"^(?!secret)s_": {"type": "integer"}, r"^(.)\1": {"type": "null"}},
        "default": {"pattern": "(?=x)"},
    }
    loose = grammars.json_schema(schema, strict=False, param="x")
    found = await GrammarChecker().check(loose, {})
    checked = json.loads(found.grammar.text)
    assert checked["properties"] == {
        "word": {"type": "string", "pattern": r"^[a-z\d]{4,8}$"},
        "twice": {"type": "string"},
        "plain": {"type": "string", "pattern": "^x+$"},
    }
    assert list(checked["patternProperties"]) == ["^s_"]
    assert checked["default"] == schema["default"]
    notes = [each.message for each in found.warnings]
    assert [note for note in notes if repr(PASSWORD["pattern"]) in note and "without its assertions" in note]
    assert [note for note in notes if repr(TWICE["pattern"]) in note and "is not enforced" in note]
    assert len(notes) == 4
    tags = StructuralTags(
        structures=(TaggedText("<f>", lenient({"properties": {"a": TWICE}})),), triggers=("<f",)
    )
    of_tool = Grammar("structural_tag", msgspec.json.encode(tags).decode())
    checked_tags = msgspec.json.decode(
        (await GrammarChecker().check(of_tool, {})).grammar.text, type=StructuralTags
    )
    assert checked_tags.structures[0].schema["properties"] == {"a": {"type": "string"}}


@pytest.mark.parametrize("schema", [{"properties": {"word": PASSWORD}}, TWICE])
async def test_a_strict_schema_keeps_its_patterns(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        await GrammarChecker().check(grammars.json_schema(schema, param="x"), {})


async def test_only_so_many_patterns_are_softened() -> None:
    many = {"properties": {f"p{index}": PASSWORD for index in range(grammars.MAX_SOFTENED_PATTERNS + 1)}}
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        await GrammarChecker().check(grammars.json_schema(many, strict=False, param="x"), {})


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d+", "42", "\u0663"),
        (r"\w+", "a_1", "\u00e9"),
        (r"[\d.]+", "4.2", "\u0663"),
        (r"[^\d]", "\u0663", "3"),
        (r"\D\W", "x\u00e9", "xy"),
        (r"\\d", "\\d", "\\3"),
        (r"[a[]", "[", "b"),
        (r"[[:alpha:]]\d", "a1", "1a"),
    ],
)
def test_digits_and_letters_are_ascii(pattern: str, good: str, bad: str) -> None:
    tokenizer = llguidance.LLTokenizer(byte_tokenizer().to_str(), eos_token=256)
    for grammar in (Grammar("regex", pattern), Grammar("ebnf", f"start: /{pattern}/")):
        for text, is_good in ((good, True), (bad, False)):
            matcher = llguidance.LLMatcher(tokenizer, grammar_text(grammar, {}), log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            taken = all(map(matcher.consume_token, text.encode())) and bool(matcher.is_accepting())
            assert taken == is_good


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 1_000_003},
        {"type": "number", "multipleOf": 0.1000003},
        {"allOf": [{"type": "integer", "multipleOf": 4099}, {"multipleOf": 4093}]},
    ],
)
async def test_multiples_that_take_minutes_to_compile_are_refused_or_left_out(schema: dict[str, Any]) -> None:
    """An engine compiles grammars in few threads, and two such grammars kept all others waiting."""
    checker = GrammarChecker()
    strict = Grammar("json_schema", json.dumps(schema))
    with pytest.raises(InvalidRequest, match="multipleOf cannot be enforced"):
        await checker.check(strict, {})
    spelt = strict.text.replace("multipleOf", "multiple\\u004ff")
    with pytest.raises(InvalidRequest, match="multipleOf cannot be enforced"):
        await checker.check(Grammar("ebnf", f"start: %json {spelt}"), {})
    checked = await checker.check(Grammar("json_schema", json.dumps(lenient(schema))), {})
    assert "multipleOf" not in checked.grammar.text
    assert all("is not enforced" in warning.message for warning in checked.warnings)
    assert checked.warnings


@pytest.mark.parametrize("number", [1, 0.01, 0.5, 2.5, 60, 1000, 1024, 3_600_000, 1e6])
async def test_usual_multiples_are_enforced(number: float) -> None:
    text = json.dumps({"type": "number", "multipleOf": number})
    checked = await GrammarChecker().check(Grammar("json_schema", text), {})
    assert (checked.grammar.text, checked.warnings) == (text, ())


def test_a_schema_of_megabytes_is_refused_by_its_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("penstock.gateway.text.grammars.json.dumps")
    schema = {"type": "object", "description": "x" * 1_000_000}
    with pytest.raises(InvalidRequest, match="is larger than 131072 bytes"):
        ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="x", schema=schema)).to_grammar()


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        StructuredOutputs(json='{"const": "\\ud800"}').to_grammar("structured_outputs")
