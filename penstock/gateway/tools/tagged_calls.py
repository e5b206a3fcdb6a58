"""Reads calls between tags: a head with the function's name, and arguments as JSON or as tagged parameters.

Nothing is passed on before the name of a known tool has been read. A piece that is no call is passed on as text, with
its tags. The joined output does not depend on the pieces in which the text arrives.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from penstock.gateway.tools.json_calls import ValueSpan
from penstock.gateway.tools.parser import AnswerSink, SectionParser, first_marker, held_length


def bare_to_json(text: str, quote: str) -> str | None:
    """Return JSON for `{city:<|"|>Rome<|"|>,days:3}`, which may be JSON in part. None for text that is neither."""
    made, position, pattern = [], 0, _pattern(quote)
    while position < len(text):
        found = pattern.match(text, position)
        if found is None:
            return None
        if found["text"] is not None:
            made.append(json.dumps(found["text"], ensure_ascii=False))
        else:
            made.append(json.dumps(found["key"], ensure_ascii=False) if found["key"] else found[0])
        position = found.end()
    written = "".join(made).strip()
    try:
        json.loads(written)
    except (ValueError, RecursionError):
        return None
    return written


@lru_cache(maxsize=8)
def _pattern(quote: str) -> re.Pattern[str]:
    mark = re.escape(quote)
    plain = r'"(?:[^"\\]|\\.)*"|[{}\[\],:\s]|-?\d[\w.+-]*|true|false|null'
    return re.compile(rf'{mark}(?P<text>.*?){mark}|(?P<key>[^\s{{}}\[\],:"<]+)(?=\s*:)|{plain}', re.DOTALL)


_LONGEST_LITERAL = 1 << 16
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
        if value is text and types & {"array", "object"}:
            value = _python_value(text)
    fits = "string" not in types or _type_name(value) in types
    fits = fits or ("number" in types and isinstance(value, int) and not isinstance(value, bool))
    return value if fits and not isinstance(value, str) else text


def _python_value(text: str) -> Any:
    """Return the list or the object that a text writes as Python does; else the text. Some templates write the
    values of earlier calls so, and models follow them."""
    stripped = text.strip()
    if len(stripped) > _LONGEST_LITERAL or not stripped.startswith(("[", "{")):
        return text
    try:
        value = ast.literal_eval(stripped)
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


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


MAX_HEAD_CHARS = 512  # no name of a tool, with its tags, is longer
_WHITE_SPACE = " \t\r\n"


class ParameterTags(msgspec.Struct, frozen=True):
    """The format of one parameter: `start`, the name, `middle`, the value, `end`."""

    start: str
    middle: str
    end: str
    name_end: str = ""  # behind the name, before `middle`, perhaps with white space between
    call_end: str = ""  # behind the last parameter; empty: the end of the section
    trims_lines: bool = False  # a line break after `middle` and one before `end` do not belong to the value
    text_mark: str = ""  # behind the names of texts, whatever their schema says ...
    value_mark: str = ""  # ... and behind the names of other values
    literal: tuple[str, str] | None = None  # around texts that may hold `end`

    def name_and_schema(self, head: str, schema: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the name of a parameter in its head, and what is known of its values."""
        name = head.strip().removesuffix(self.name_end).strip()
        if self.text_mark and name.endswith(self.text_mark):
            return name.removesuffix(self.text_mark), {"type": "string"}
        if self.value_mark and name.endswith(self.value_mark):
            return name.removesuffix(self.value_mark), {}
        return name, schema.get(name)


class TaggedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The tags of calls of a model family. A section begins with one of `opening` and holds calls: `head`, a pattern
    with the group `name`, up to one of `head_ends`, then the arguments."""

    opening: tuple[str, ...]
    closing: str
    head: str
    head_ends: tuple[str, ...] = ("{",)
    keeps_head_end: bool = True  # it belongs to what follows
    call_start: str = ""  # a tag in front of each head
    ignored: tuple[str, ...] = ()  # tags between the calls of a section
    parameters: ParameterTags | None = None  # None: the arguments are one JSON object
    hides_markers: bool = True  # they are control tokens, which do not belong into a text
    # In front of each tag of arguments that are a tree of tags; empty: arguments are no such tree.
    tree_mark: str = ""
    quote: str = ""  # around texts in arguments whose keys are bare; empty: arguments are plain JSON
    tokens: tuple[str, ...] = ()  # within tags, of which some may be control tokens

    @property
    def head_start(self) -> str:
        """Return what each head begins with, if that is always the same, where heads have no tag in front."""
        start = None if self.call_start else re.match(r"[^\\(\[{*+?.|^$]+", self.head)
        return "" if start is None else start[0]

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of which some may be control tokens."""
        tags = re.findall(r"<[^<>\s]+>", self.head.replace("\\", ""))
        return (
            *self.opening,
            self.closing,
            self.call_start,
            *self.ignored,
            *self.head_ends,
            self.quote,
            self.tree_mark,
            *self.tokens,
            *tags,
        )


class TaggedCallParser(SectionParser):
    def __init__(self, sink: AnswerSink, tags: TaggedCalls, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        steps = {
            "section": self._step_section,
            "head": self._step_head,
            "json": self._step_json,
            "bare": self._step_bare,
            "tree": self._step_tree,
            "parameters": self._step_parameters,
            "value": self._step_value,
        }
        super().__init__(sink, tags.opening, steps, hides_markers=tags.hides_markers)
        self._tags = tags
        self._schemas = schemas
        self._head = _compiled(tags.head)
        self._span = ValueSpan()
        self._schema: Mapping[str, Any] = {}
        self._num_parameters = 0
        self._value: _ParameterValue | None = None

    def finish(self) -> None:
        if self._state == "text":
            self._end_text()
        elif self._state in ("section", "head") and not self._had_call:
            self._add_text("".join(self._raw) + self._buffer)
        elif self._state == "parameters":
            self._sink.add_arguments("}")
        elif self._state == "tree":
            self._sink.add_arguments(tree_to_json(self._buffer, self._tags.tree_mark, self._schema))
        elif self._state == "bare":
            self._sink.add_arguments(self._from_bare(self._buffer))
        self._buffer = ""
        self._raw = []

    def _step_section(self) -> bool:
        """Between the calls of a section."""
        tags, body = self._tags, self._buffer
        marks = (*tags.opening, *tags.ignored) if self._had_call else tags.ignored
        if body[0] in _WHITE_SPACE:
            self._skip(1)
        elif (mark := next((mark for mark in marks if body.startswith(mark)), None)) is not None:
            self._skip(len(mark), is_mark=True)
        elif body.startswith(tags.closing):
            self._skip(len(tags.closing), is_mark=True)
            self._leave_section()
        elif tags.call_start and body.startswith(tags.call_start):
            self._skip(len(tags.call_start), is_mark=True)
            self._state = "head"
        elif any(mark.startswith(body) for mark in (*marks, tags.closing, tags.call_start)) or (
            self._had_call and tags.head_start.startswith(body)
        ):
            return False
        elif self._had_call and not (tags.head_start and body.startswith(tags.head_start)):
            self._leave_section()
        else:
            self._state = "head"
        return True

    def _step_head(self) -> bool:
        found = first_marker(self._buffer, self._tags.head_ends)
        if found is None and len(self._buffer) <= MAX_HEAD_CHARS:
            return False
        position = 0 if found is None else found[0]
        if found is not None and not self._tags.keeps_head_end:
            position += len(found[1])
        head = self._head.fullmatch(self._buffer[:position])
        if position > MAX_HEAD_CHARS or head is None or head["name"] not in self._schemas:
            self._leave_section()
            return True
        self._take(position)
        self._raw = []
        self._note_call()
        self._sink.begin_call(head["name"])
        if self._tags.tree_mark:
            self._schema = self._schemas[head["name"]]
            self._state = "tree"
        elif self._tags.quote:
            self._schema = self._properties(head["name"])
            self._state = "bare"
        elif self._tags.parameters is None:
            self._span = ValueSpan()
            self._state = "json"
        else:
            self._schema = self._properties(head["name"])
            self._num_parameters = 0
            self._sink.add_arguments("{")
            self._state = "parameters"
        return True

    def _properties(self, name: str) -> Mapping[str, Any]:
        properties = self._schemas[name].get("properties")
        return properties if isinstance(properties, dict) else {}

    def _step_json(self) -> bool:
        span = self._span
        if not span.has_begun:
            self._take(len(self._buffer) - len(self._buffer.lstrip(_WHITE_SPACE)))
        end = span.consume(self._buffer, 0)
        self._sink.add_arguments(self._take(end))
        if span.is_complete:
            self._state = "section"
        elif span.is_broken:
            self._leave_section()
        return bool(self._buffer)

    def _step_bare(self) -> bool:
        """Take an object with bare keys, up to the closing tag that stands in no text."""
        quote, position = self._tags.quote, self._buffer.find(self._tags.closing)
        while position >= 0 and self._buffer.count(quote, 0, position) % 2:
            position = self._buffer.find(self._tags.closing, position + 1)
        if position < 0:
            return False
        written = self._take(position)
        self._sink.add_arguments(self._from_bare(written))
        self._state = "section"
        return True

    def _from_bare(self, written: str) -> str:
        """Return an object with bare keys as JSON, in which texts for numbers become numbers: some templates quote
        all values. Any other text stays as it is."""
        found = bare_to_json(written, self._tags.quote)
        if found is None:
            return written
        types = {name: types_of(schema) for name, schema in self._schema.items() if isinstance(schema, dict)}
        values = json.loads(found)
        texts = [
            name
            for name, value in values.items()
            if isinstance(value, str) and types.get(name) and "string" not in types[name]
        ]
        if not texts:
            return found
        typed = {name: json.loads(json_of(values[name], self._schema[name])) for name in texts}
        return json.dumps({**values, **typed}, ensure_ascii=False, separators=(",", ":"))

    def _step_tree(self) -> bool:
        """Take a tree of tags, up to the tag that closes the call."""
        end = f"{self._tags.tree_mark}</invoke>"
        position = self._buffer.find(end)
        if position < 0:
            return False
        self._sink.add_arguments(tree_to_json(self._take(position), self._tags.tree_mark, self._schema))
        self._take(len(end))
        self._state = "section"
        return True

    def _step_parameters(self) -> bool:
        tags = self._tags.parameters
        assert tags is not None
        rest = self._buffer.lstrip()
        if not rest:
            return False
        self._take(len(self._buffer) - len(rest))
        end = tags.call_end or self._tags.closing
        if rest.startswith(tags.start):
            position = rest.find(tags.middle, len(tags.start))
            if position < 0:
                if len(rest) <= MAX_HEAD_CHARS:
                    return False
                self._end_call()
                return True
            name, schema = tags.name_and_schema(rest[len(tags.start) : position], self._schema)
            self._take(position + len(tags.middle))
            self._sink.add_arguments((", " if self._num_parameters else "") + json.dumps(name) + ": ")
            self._num_parameters += 1
            self._value = _ParameterValue(tags, schema)
            self._state = "value"
        elif rest.startswith(end):
            self._take(len(end))
            self._end_call(closes=not tags.call_end)
        elif tags.start.startswith(rest) or end.startswith(rest):
            return False
        else:
            self._end_call()
        return True

    def _step_value(self) -> bool:
        value = self._value
        assert value is not None
        num_taken, piece = value.push(self._buffer)
        self._take(num_taken)
        if piece:
            self._sink.add_arguments(piece)
        if value.is_complete:
            self._state = "parameters"
        return value.is_complete

    def _end_call(self, *, closes: bool = False) -> None:
        self._sink.add_arguments("}")
        self._state = "section"
        if closes:
            self._leave_section()

    def _skip(self, length: int, *, is_mark: bool = False) -> None:
        taken = self._take(length)
        is_hidden = is_mark and self._tags.hides_markers and taken.startswith("<")
        if not self._had_call and not is_hidden:
            self._raw.append(taken)


@lru_cache(maxsize=64)
def _compiled(head: str) -> re.Pattern[str]:
    return re.compile(head)


class _ParameterValue:
    """One value, translated from tagged text to JSON piece by piece. A value that is certainly a string is passed on
    as it arrives."""

    __slots__ = ("_has_begun", "_held", "_schema", "_tags", "_types", "is_complete")

    def __init__(self, tags: ParameterTags, schema: Any) -> None:
        self._tags = tags
        self._schema = schema
        self._types = types_of(schema)
        self._held = ""
        self._has_begun = False
        self.is_complete = False

    def push(self, text: str) -> tuple[int, str]:
        """Return how much of `text` was taken, and the JSON that it adds."""
        end, literal = self._tags.end, self._tags.literal
        if literal is not None and not self._has_begun and text[: len(literal[0])] == literal[0][: len(text)]:
            return self._push_literal(text, *literal)
        position = text.find(end)
        if self._types == {"string"}:
            return self._push_string(text, position)
        if position < 0:
            return 0, ""
        self.is_complete = True
        return position + len(end), json_of(self._trimmed(text[:position]), self._schema)

    def _push_literal(self, text: str, start: str, stop: str) -> tuple[int, str]:
        """Take a text that stands between marks of its own, once it is whole."""
        position = text.find(stop + self._tags.end, len(start))
        if position < 0:
            return 0, ""
        self.is_complete = True
        length = position + len(stop + self._tags.end)
        return length, json.dumps(text[len(start) : position], ensure_ascii=False)

    def _push_string(self, text: str, position: int) -> tuple[int, str]:
        end = self._tags.end
        closers = (end, "\n" + end) if self._tags.trims_lines else (end,)
        safe = position if position >= 0 else len(text) - held_length(text, closers)
        if self._tags.trims_lines and position < 0 and not self._has_begun and text in ("", "\n"):
            return 0, ""
        piece = text[:safe]
        if position >= 0 and self._tags.trims_lines:
            piece = piece.removesuffix("\n")
        opening = ""
        if not self._has_begun and (piece or position >= 0):
            if self._tags.trims_lines:
                piece = piece.removeprefix("\n")
            opening, self._has_begun = '"', True
        written = opening + json.dumps(piece, ensure_ascii=False)[1:-1]
        if position < 0:
            return safe, written
        self.is_complete = True
        return position + len(end), written + '"'

    def _trimmed(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n") if self._tags.trims_lines else text
