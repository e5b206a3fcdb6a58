"""Objects whose properties are listed take no others, unless their schema says so."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from penstock.core.closed_schema import closed
from penstock.core.errors import InvalidRequest
from penstock.core.grammar_text import grammar_text, lenient
from penstock.core.request import Grammar
from tests.gateway.fake_engine import byte_tokenizer

TEXT: dict[str, Any] = {"type": "string"}
A: dict[str, Any] = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": TEXT}, "required": ["b"]}


def accepts(schema: Any, *texts: str) -> list[bool]:
    grammar = grammar_text(Grammar("json_schema", json.dumps(schema)), {})
    tokenizer = llguidance.LLTokenizer(byte_tokenizer().to_str(), eos_token=256)
    accepted = []
    for text in texts:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        accepted.append(all(map(matcher.consume_token, text.encode())) and bool(matcher.is_accepting()))
    return accepted


@pytest.mark.parametrize("mark", [lambda schema: schema, lenient])
def test_listed_properties_are_all_there_are(mark: Any) -> None:
    assert accepts(mark(A), '{"a":"x"}', '{"a":"x","more":1}') == [True, False]
    nothing = {"type": "object", "properties": {}}
    assert accepts(mark(nothing), "{}", '{"a":1}') == [True, False]
    assert accepts(mark({"properties": {"a": TEXT}}), '{"a":"x"}', '{"b":"x"}') == [True, False]


def test_what_says_otherwise_stays_open() -> None:
    more = '{"a":"x","more":1}'
    assert accepts({**A, "additionalProperties": True}, more) == [True]
    typed = {**A, "additionalProperties": {"type": "integer"}}
    assert accepts(typed, more, '{"a":"x","more":"y"}') == [True, False]
    assert accepts({"type": "object"}, "{}", '{"any":[1]}') == [True, True]
    assert accepts({"type": "object", "additionalProperties": TEXT}, '{"any":"x"}') == [True]
    assert accepts({}, '{"any":1}', "3") == [True, True]
    pattern = {**A, "patternProperties": {"^x_": {"type": "integer"}}}
    assert accepts(pattern, '{"a":"x","x_1":2}', '{"a":"x","y_1":2}') == [True, False]


@pytest.mark.parametrize(
    ("wrapped", "good", "bad"),
    [
        ({"properties": {"in": A}}, '{"in":{"a":"x"}}', '{"in":{"a":"x","c":1}}'),
        ({"type": "array", "items": A}, '[{"a":"x"}]', '[{"a":"x","c":1}]'),
        ({"prefixItems": [A]}, '[{"a":"x"}]', '[{"a":"x","c":1}]'),
        ({"type": "object", "additionalProperties": A}, '{"k":{"a":"x"}}', '{"k":{"a":"x","c":1}}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, '{"a":"x"}', '{"a":"x","c":1}'),
        ({"properties": {"in": {"allOf": [A]}}}, '{"in":{"a":"x"}}', '{"in":{"a":"x","c":1}}'),
        ({"anyOf": [A, {"type": "null"}]}, "null", '{"a":"x","c":1}'),
    ],
)
def test_closing_reaches_every_level(wrapped: dict[str, Any], good: str, bad: str) -> None:
    assert accepts(wrapped, good, bad) == [True, False]


def test_names_of_properties_are_not_taken_for_keywords() -> None:
    schema = {"properties": {"properties": {"type": "integer"}, "required": TEXT}, "required": ["properties"]}
    assert accepts(schema, '{"properties":1}', '{"properties":1,"c":2}') == [True, False]
    data = {"const": {"properties": {"a": 1}}}
    assert closed(data) == data


def test_the_parts_of_one_object_are_closed_together() -> None:
    both, extra = '{"a":"x","b":"y"}', '{"a":"x","b":"y","c":1}'
    assert accepts({"allOf": [A, B]}, both, extra) == [True, False]
    beside = {"allOf": [A], "properties": B["properties"], "required": ["b"]}
    assert accepts(beside, both, extra) == [True, False]
    reference = {"$ref": "#/$defs/A"}
    inherited = {"$defs": {"A": A}, "allOf": [reference, B]}
    assert accepts(inherited, both, extra) == [True, False]
    referring = {"$defs": {"A": A}, **reference, "properties": B["properties"], "required": ["b"]}
    assert accepts(referring, both, extra) == [True, False]
    in_two_places = {"$defs": {"A": A}, "properties": {"one": reference, "two": {"allOf": [reference, B]}}}
    good, bad = f'{{"one":{{"a":"x"}},"two":{both}}}', f'{{"one":{both}}}'
    assert accepts(in_two_places, good, bad) == [True, False]
    assert accepts({"allOf": [{**A, "additionalProperties": True}, B]}, extra) == [True]


def test_alternatives_are_closed_one_by_one() -> None:
    either = {"properties": {"kind": TEXT}, "required": ["kind"], "anyOf": [A, B]}
    good = ['{"kind":"k","a":"x"}', '{"kind":"k","b":"x"}']
    bad = ['{"kind":"k","a":"x","b":"y"}', '{"kind":"k","a":"x","c":1}']
    assert accepts(either, *good, *bad) == [True, True, False, False]
    union = {"$defs": {"A": A, "B": B}, "anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    assert accepts(union, '{"a":"x"}', '{"b":"x"}', '{"a":"x","c":1}') == [True, True, False]
    needs = {
        "properties": {"a": TEXT, "b": TEXT},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    assert accepts(needs, '{"a":"x"}', '{"b":"x"}', '{"a":"x","c":1}', "{}") == [True, True, False, False]


def test_a_required_property_that_is_not_listed_can_still_be_written() -> None:
    schema = {"properties": {"a": TEXT}, "required": ["b"]}
    assert accepts(schema, '{"b":[1]}', '{"b":1,"c":2}') == [True, False]
    shared = {"anyOf": [A, B], "required": ["id"]}
    assert accepts(shared, '{"a":"x","id":1}', '{"b":"x","id":1}') == [True, True]


def test_an_object_that_holds_itself() -> None:
    tree = {
        "$defs": {
            "Node": {
                "properties": {"name": TEXT, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
                "required": ["name"],
            }
        },
        "$ref": "#/$defs/Node",
    }
    good, bad = '{"name":"x","next":{"name":"y","next":null}}', '{"name":"x","next":{"name":"y","c":1}}'
    assert accepts(tree, good, bad) == [True, False]
    itself = {"$ref": "#", "properties": {"a": TEXT}}
    assert closed(itself)["additionalProperties"] is False


def test_properties_of_conditions_may_be_written() -> None:
    schema = lenient({"properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": B})
    assert accepts(schema, '{"a":"x","b":"y"}', '{"a":"x","b":"y","c":"y"}') == [True, False]


def test_what_leads_nowhere_is_left_to_the_matcher() -> None:
    for schema in (
        {"properties": {"a": TEXT}, "$ref": "https://example.org/schema"},
        {"properties": {"a": TEXT}, "$ref": "#/$defs/nowhere"},
        {"properties": 3, "allOf": 4, "anyOf": "x", "required": 5, "$ref": 6},
        True,
        [1],
    ):
        assert closed(schema) == schema


def test_many_references_stay_small() -> None:
    """Each definition has the next one twice as a part."""
    definitions: dict[str, Any] = {
        f"D{index}": {"allOf": [{"$ref": f"#/$defs/D{index + 1}"}, {"$ref": f"#/$defs/D{index + 1}"}]}
        for index in range(60)
    }
    definitions["D60"] = A
    schema = closed({"$defs": definitions, "$ref": "#/$defs/D0"})
    assert len(json.dumps(schema)) < 60_000


def test_nesting_beyond_reason_is_refused() -> None:
    schema: dict[str, Any] = A
    for _ in range(2000):
        schema = {"properties": {"in": schema}}
    with pytest.raises(InvalidRequest, match="deeply"):
        closed(schema)
