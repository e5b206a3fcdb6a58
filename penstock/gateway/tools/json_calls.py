"""Reads one call that a model writes as a JSON object, while it is being written.

Nothing is passed on before the name of a known tool has been read; until then the text may still turn out to be no
call at all. From then on the arguments are passed on as they come, unchanged, so that even broken ones reach the
client, who alone can tell what to do with them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.gateway.tools.parser import AnswerSink

ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args"})
NAME_KEYS = ("name", "tool_name")
FUNCTION_KEY = "function"  # holds the name, or the whole call once more

_CLOSER = {"{": "}", "[": "]"}
_WHITE_SPACE = " \t\r\n"
_SCALAR_ENDS = frozenset(",}]" + _WHITE_SPACE)


class ValueSpan:
    """Finds where one JSON value ends. Looks at brackets and quotes only: whether it is valid shows later."""

    __slots__ = ("_closers", "_escapes", "_in_string", "_kind", "is_broken", "is_complete")

    def __init__(self) -> None:
        self._kind: Literal["", "string", "scalar", "nested"] = ""
        self._closers: list[str] = []
        self._in_string = False
        self._escapes = False
        self.is_complete = False
        self.is_broken = False

    def consume(self, text: str, start: int) -> int:
        """Return the position behind that part of `text` which belongs to the value, or at which it breaks."""
        for position in range(start, len(text)):
            character = text[position]
            if self._in_string:
                self._step_in_string(character)
            elif not self._kind:
                self._begin(character)
            elif self._kind == "scalar":
                if character in _SCALAR_ENDS:
                    self.is_complete = True
                    return position
            else:
                self._step_nested(character)
            if self.is_broken:
                return position
            if self.is_complete:
                return position + 1
        return len(text)

    @property
    def has_begun(self) -> bool:
        return bool(self._kind)

    def _begin(self, character: str) -> None:
        if character == '"':
            self._kind, self._in_string = "string", True
        elif character in _CLOSER:
            self._kind = "nested"
            self._closers.append(_CLOSER[character])
        elif character.isalnum() or character == "-":
            self._kind = "scalar"
        else:
            self.is_broken = True

    def _step_in_string(self, character: str) -> None:
        if self._escapes:
            self._escapes = False
        elif character == "\\":
            self._escapes = True
        elif character == '"':
            self._in_string = False
            self.is_complete = self._kind == "string"

    def _step_nested(self, character: str) -> None:
        if character == '"':
            self._in_string = True
        elif character in _CLOSER:
            self._closers.append(_CLOSER[character])
        elif character in "}]":
            if character != self._closers.pop():
                self.is_broken = True
            elif not self._closers:
                self.is_complete = True


class CallReader:
    """Reads `{"name": …, "arguments": {…}}` with its keys in any order, and others among them."""

    # fmt: off
    __slots__ = (
        "_expects", "_held", "_key", "_known_names", "_sink", "_span", "_streams", "_value", "has_begun",
        "is_broken", "is_complete",
    )
    # fmt: on

    def __init__(self, sink: AnswerSink, known_names: frozenset[str]) -> None:
        self._sink = sink
        self._known_names = known_names
        self._expects: Literal["{", "key", "colon", "value", "comma"] = "{"
        self._span: ValueSpan | None = None
        self._key = ""
        self._value: list[str] = []
        self._streams = False  # whether the value being read is passed on as it comes
        self._held: dict[str, Any] = {}
        self.has_begun = False
        self.is_complete = False
        self.is_broken = False

    def consume(self, text: str, start: int) -> int:
        """Return the position up to which `text` was read: behind the call, where it breaks, or the end."""
        position = start
        while position < len(text) and not self.is_complete and not self.is_broken:
            if self._span is not None:
                position = self._read_value(text, position)
            elif text[position] in _WHITE_SPACE:
                position += 1
            else:
                position = self._read_mark(text, position)
        return position

    def _read_mark(self, text: str, position: int) -> int:
        character = text[position]
        if self._expects == "{" and character == "{":
            self._expects = "key"
        elif self._expects == "key" and character == '"':
            self._begin_value(is_key=True)
            return position
        elif self._expects == "colon" and character == ":":
            self._expects = "value"
        elif self._expects == "value":
            self._begin_value(is_key=False)
            self._streams = self.has_begun and self._key in ARGUMENT_KEYS and character == "{"
            return position
        elif self._expects == "comma" and character == ",":
            self._expects = "key"
        elif character == "}" and self._expects in ("key", "comma"):
            self._end()
        else:
            self.is_broken = True
            return position
        return position + 1

    def _begin_value(self, *, is_key: bool) -> None:
        self._span = ValueSpan()
        self._value = []
        self._streams = False
        self._expects = "key" if is_key else "value"

    def _read_value(self, text: str, start: int) -> int:
        span = self._span
        assert span is not None
        end = span.consume(text, start)
        piece = text[start:end]
        if self._streams:
            self._sink.add_arguments(piece)
        else:
            self._value.append(piece)
        if span.is_broken:
            self.is_broken = True
        elif span.is_complete:
            self._span = None
            self._end_value()
        return end

    def _end_value(self) -> None:
        if self._streams:
            self._held["arguments"] = None  # they have gone out
            self._expects = "comma"
            return
        try:
            value = msgspec.json.decode("".join(self._value))
        except (msgspec.DecodeError, RecursionError):
            self.is_broken = True
            return
        if self._expects == "key":
            self._key = str(value)
            self._expects = "colon"
            return
        self._expects = "comma"
        if self._key in NAME_KEYS or (self._key == FUNCTION_KEY and isinstance(value, str)):
            self._begin(value)
        elif self._key in ARGUMENT_KEYS:
            self._hold_arguments("".join(self._value), value)
        elif self._key == FUNCTION_KEY and isinstance(value, dict):
            self._unwrap(value)

    def _begin(self, name: object) -> None:
        if self.has_begun or not isinstance(name, str) or name not in self._known_names:
            self.is_broken = True
            return
        self.has_begun = True
        self._sink.begin_call(name)
        if "arguments" in self._held:
            self._sink.add_arguments(self._held["arguments"])

    def _hold_arguments(self, raw: str, value: object) -> None:
        """Arguments that came before the name, or that are no object: a string holds them as JSON once more."""
        arguments = value if isinstance(value, str) else "{}" if value is None else raw
        self._held["arguments"] = arguments
        if self.has_begun:
            self._sink.add_arguments(arguments)

    def _unwrap(self, call: dict[str, Any]) -> None:
        for key in ARGUMENT_KEYS & call.keys():
            self._hold_arguments(msgspec.json.encode(call[key]).decode(), call[key])
        self._begin(next((call[key] for key in NAME_KEYS if key in call), None))

    def _end(self) -> None:
        if not self.has_begun:
            self.is_broken = True
            return
        if "arguments" not in self._held:
            self._sink.add_arguments("{}")
        self.is_complete = True
