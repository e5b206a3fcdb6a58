"""Turns texts that models write as values into JSON, by the schemas of tools: single texts, and trees of tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_DEEPEST = 64  # tags within each other


def json_of(text: str, schema: Any) -> str:
    """Return JSON: a text where the schema allows texts and not the type that is written, or where no JSON is
    written. Other values that the schema does not allow stay as they are, for the client to judge."""
    return json.dumps(_typed(text, types_of(schema)), ensure_ascii=False)


def tree_to_json(text: str, mark: str, schema: Any) -> str:
    """Return JSON for `<city>Rome</city><days><item>1</item></days>`, where `mark` stands in front of each tag. JSON
    stays as it is, and so does what is not a tree; tags that are open at the end are closed."""
    if text.lstrip().startswith("{"):
        return text.strip()
    root = _Node("")
    path = [root]
    for piece in text.split(mark)[1:]:
        tag, closed, behind = piece.partition(">")
        if not closed or not tag.startswith("<") or len(path) > _DEEPEST:
            break
        if tag.startswith("</"):
            if len(path) == 1 or path[-1].name != tag[2:]:
                break
            path.pop()
        else:
            path[-1].children.append(_Node(tag[1:], behind))
            path.append(path[-1].children[-1])
    return json.dumps(_value(root, schema, is_object=True), ensure_ascii=False)


@dataclass
class _Node:
    name: str
    text: str = ""
    children: list[_Node] = field(default_factory=list)


def _value(node: _Node, schema: Any, *, is_object: bool = False) -> Any:
    known = schema if isinstance(schema, dict) else {}
    types = types_of(known)
    if is_object or (node.children and any(child.name != "item" for child in node.children)):
        properties = known.get("properties")
        inner: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        return {child.name: _value(child, inner.get(child.name)) for child in node.children}
    if node.children:
        return [_value(child, known.get("items")) for child in node.children]
    if not node.text and types & {"array", "object"}:
        return [] if "array" in types else {}
    return _typed(node.text, types)


def _typed(text: str, types: set[str]) -> Any:
    try:
        value = json.loads(text.strip(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    fits = "string" not in types or _type_name(value) in types
    fits = fits or ("number" in types and isinstance(value, int) and not isinstance(value, bool))
    return value if fits and not isinstance(value, str) else text


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _type_name(value: Any) -> str:
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def types_of(schema: Any) -> set[str]:
    """Return the types that a schema allows; empty where it does not say."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {each for each in given if isinstance(each, str)}
    if isinstance(values := schema.get("enum"), list) and values:
        return {_type_name(value) for value in values}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(keyword), list):
            types = [types_of(branch) for branch in branches]
            return set().union(*types) if all(types) else set()
    return set()
