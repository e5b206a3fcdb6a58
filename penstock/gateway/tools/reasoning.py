"""Splits what a model thinks from what it says: `<think>…</think>` at the beginning of an answer."""

from __future__ import annotations

from typing import Literal

from penstock.gateway.tools.parser import AnswerSink, OutputParser, held_length

THINK_START = "<think>"
THINK_END = "</think>"


class ReasoningSplitter:
    """Hands everything after the reasoning to `then`. White space around the reasoning belongs to neither part.

    `is_open` says that the prompt ended inside the reasoning, as some templates do.
    """

    def __init__(self, sink: AnswerSink, then: OutputParser, *, is_open: bool) -> None:
        self._sink = sink
        self._then = then
        self._state: Literal["start", "inside", "behind", "outside"] = "inside" if is_open else "start"
        self._held = ""
        self._has_reasoned = False

    @property
    def is_reasoning(self) -> bool:
        return self._state == "inside"

    def push(self, text: str) -> None:
        if self._state == "outside":
            self._then.push(text)
            return
        text = self._held + text
        self._held = ""
        if self._state == "start":
            text = self._push_start(text)
        if self._state == "inside":
            text = self._push_inside(text)
        if self._state == "behind":
            text = text.lstrip()
            if text:
                self._state = "outside"
        if self._state == "outside" and text:
            self._then.push(text)

    def finish(self) -> None:
        if self._state == "start":
            self._then.push(self._held)
        elif self._state == "inside":
            self._reason(self._held.rstrip())
        self._held = ""
        self._then.finish()

    def _push_start(self, text: str) -> str:
        begun = text.lstrip()
        if begun.startswith(THINK_START):
            self._state = "inside"
            return begun[len(THINK_START) :]
        if THINK_START.startswith(begun):
            self._held = text
            return ""
        self._state = "outside"
        return text

    def _push_inside(self, text: str) -> str:
        position = text.find(THINK_END)
        if position >= 0:
            self._reason(text[:position].rstrip())
            self._state = "behind"
            return text[position + len(THINK_END) :]
        safe = text[: len(text) - held_length(text, (THINK_END,))].rstrip()
        self._reason(safe)
        self._held = text[len(safe) :]
        return ""

    def _reason(self, text: str) -> None:
        if not self._has_reasoned:
            text = text.lstrip()
        if text:
            self._has_reasoned = True
            self._sink.add_reasoning(text)
