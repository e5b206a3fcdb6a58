"""Reads calls between tags: a head with the function's name, and arguments as JSON or as tagged parameters.

Nothing is passed on before the name of a known tool has been read. What turns out to be no call goes back to the
text, tags included. The joined output does not depend on the pieces in which the text arrives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from penstock.gateway.tools.bare_objects import bare_to_json
from penstock.gateway.tools.json_calls import ValueSpan
from penstock.gateway.tools.parser import AnswerSink, SectionParser, first_marker, held_length
from penstock.gateway.tools.typed_texts import json_of, tree_to_json, types_of

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
    tree_mark: str = (
        ""  # in front of each tag of arguments that are a tree of tags; empty: arguments are no such tree
    )
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
        all values. What is no such object stays as it is."""
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
