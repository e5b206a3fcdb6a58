"""Reads answers in the harmony format of gpt-oss: messages on channels, of which some are addressed to functions.

The channel `analysis` holds reasoning, `commentary` text before calls, and `final` the answer. A message to
`functions.NAME` is a call. An answer without channels is text.
"""

from __future__ import annotations

import re
from typing import Literal

from penstock.gateway.tools.json_calls import ValueSpan
from penstock.gateway.tools.parser import AnswerSink, SteppedParser, first_marker, held_length

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
CONTROL_TOKENS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)
MAX_HEADER_CHARS = 512

_ENDS = (END, CALL, RETURN, START)
_HEADER_STARTS = (CHANNEL, " to=")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(SteppedParser):
    """`known_names` are the functions that may be called. What is addressed to others is text."""

    def __init__(self, sink: AnswerSink, known_names: frozenset[str]) -> None:
        steps = {
            "start": self._step_start,
            "header": self._step_header,
            "content": self._step_content,
            "between": self._step_between,
        }
        super().__init__("start", steps)
        self._sink = sink
        self._known_names = known_names
        self._kind: Literal["reasoning", "text", "call"] = "text"
        self._span = ValueSpan()  # of a call's arguments
        self._has_text_behind = False  # the arguments

    @property
    def is_reasoning(self) -> bool:
        return self._state == "content" and self._kind == "reasoning"

    def finish(self) -> None:
        if self._state == "content" or (self._state == "start" and self._buffer):
            self._add(self._buffer)
        self._buffer = ""

    def _step_start(self) -> bool:
        """The prompt ends where the header of a message continues; a plain text has none."""
        if self._buffer.startswith(_HEADER_STARTS):
            self._state = "header"
        elif any(start.startswith(self._buffer) for start in _HEADER_STARTS):
            return False
        else:
            self._state = "content"
        return True

    def _step_header(self) -> bool:
        position = self._buffer.find(MESSAGE)
        if position < 0:
            if len(self._buffer) <= MAX_HEADER_CHARS:
                return False
            self._kind, self._state = "text", "content"
            return True
        header = self._take(position)
        self._take(len(MESSAGE))
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        if recipient is not None and recipient[1] in self._known_names:
            self._kind, self._span, self._has_text_behind = "call", ValueSpan(), False
            self._sink.begin_call(recipient[1])
        self._state = "content"
        return True

    def _step_content(self) -> bool:
        found = first_marker(self._buffer, _ENDS)
        if found is None:
            self._add(self._take(len(self._buffer) - held_length(self._buffer, _ENDS)))
            return False
        position, marker = found
        self._add(self._take(position))
        if marker != START:
            self._take(len(marker))
        self._state = "between"
        return True

    def _step_between(self) -> bool:
        """Between messages, where the next header begins. Anything else is text."""
        if self._buffer.startswith(START):
            self._take(len(START))
            self._state = "header"
        elif START.startswith(self._buffer):
            return False
        else:
            self._kind, self._state = "text", "content"
        return True

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._kind == "reasoning":
            self._sink.add_reasoning(text)
        elif self._kind == "call":
            self._add_arguments(text)
        else:
            self._sink.add_text(text)

    def _add_arguments(self, text: str) -> None:
        """Arguments end with their last bracket. What follows is text, unless the arguments are broken."""
        span = self._span
        if not span.is_complete and not span.is_broken:
            end = span.consume(text, 0)
            if end:
                self._sink.add_arguments(text[:end])
            text = text[end:]
        if text and span.is_broken:
            self._sink.add_arguments(text)
        elif text := text if self._has_text_behind else text.lstrip():
            self._has_text_behind = True
            self._sink.add_text(text)
