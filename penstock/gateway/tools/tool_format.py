"""Defines how a family of models writes a tool call, and how tools are shown to the model. `formats` lists the
families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.grammar_text import ParameterText
from penstock.gateway.prompts import Tool, ToolCall
from penstock.gateway.tools.call_parser import (
    CHANNEL,
    CONTROL_TOKENS,
    START,
    CallMarkers,
    CallParser,
    HarmonyParser,
)
from penstock.gateway.tools.parser import AnswerSink, OutputParser
from penstock.gateway.tools.tagged_calls import TaggedCallParser, TaggedCalls

AUTO = "auto"
NO_PARSER = "none"

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

NAME = "NAME"


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a call of a model family: `head` with the function's name for `NAME`, the arguments, `call_tail`.
    Several are separated by `separator` and surrounded by `list_start` and `list_end`."""

    name: str
    markers: CallMarkers | TaggedCalls | None  # None: harmony, which has a parser of its own
    head: str
    call_tail: str = ""
    separator: str = "\n"
    list_start: str = ""
    list_end: str = ""
    short_call_ids: bool = False  # its templates insist on ids of nine letters and digits
    calls_once: bool = False  # a turn has one call
    parameters: ParameterText | None = None  # None: the arguments are one JSON object

    def call_head(self, name: str) -> str:
        """Return a call up to its arguments."""
        return self.head.replace(NAME, json.dumps(name)[1:-1])

    @property
    def trigger(self) -> str | None:
        """Return the text with which a call, and nothing else, begins."""
        return next((marker for marker in self.opening if self.head.startswith(marker)), None)

    @property
    def opening(self) -> tuple[str, ...]:
        """Return the texts that calls, and nothing else, begin with."""
        return (CHANNEL, START) if self.markers is None else self.markers.opening

    @property
    def triggers(self) -> tuple[str, ...]:
        """Return the texts that tell calls from words behind other calls."""
        start = self.head.partition(NAME)[0]
        has_own_start = self.parameters is not None and not start.startswith(self.opening)
        return (*self.opening, "{", *((start,) if has_own_start else ()))

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Texts that a parser must see even where they are control tokens."""
        return CONTROL_TOKENS if self.markers is None else self.markers.texts

    def parser(self, sink: AnswerSink, schemas: Mapping[str, Mapping[str, Any]]) -> OutputParser:
        """Return a parser of answers that may call the functions in `schemas`, which has their parameters."""
        if self.markers is None:
            return HarmonyParser(sink, frozenset(schemas))
        if isinstance(self.markers, TaggedCalls):
            return TaggedCallParser(sink, self.markers, schemas)
        return CallParser(sink, self.markers, frozenset(schemas))

    def written(self, calls: tuple[ToolCall, ...]) -> str:
        """Calls as the model would have written them."""
        written = (
            self.call_head(call.name) + self._arguments(call.arguments) + self.call_tail for call in calls
        )
        return self.list_start + self.separator.join(written) + self.list_end

    def _arguments(self, arguments: str) -> str:
        if self.parameters is None:
            return arguments or "{}"
        try:
            given = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return ""
        return "".join(self.parameters.written(name, value) for name, value in given.items())

    def instructions(self, tools: tuple[Tool, ...]) -> str:
        """Return the instructions about tools for a model whose template does not support them."""
        signatures = "\n".join(json.dumps(tool_schema(tool), ensure_ascii=False) for tool in tools)
        arguments = "<arguments as a JSON object>"
        if self.parameters is not None:
            arguments = self.parameters.written("<name of an argument>", "<its value>")
        example = f"{self.call_head('<function name>')}{arguments}{self.call_tail}"
        return (
            "# Tools\n\nYou may call one or more functions to help with the user's request. Their signatures:\n"
            f"<tools>\n{signatures}\n</tools>\n\n"
            f"To call a function, answer with nothing but its name and arguments, like this:\n"
            f"{self.list_start}{example}{self.list_end}\n"
            "Repeat this for every call. The results come back in <tool_response></tool_response>."
        )


def tool_schema(tool: Tool) -> dict[str, object]:
    """Return a tool as chat templates expect it."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or NO_PARAMETERS
    return {"type": "function", "function": function}
