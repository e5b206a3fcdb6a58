"""A sink that keeps what a parser found, and runs of a parser over text cut in any way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.tools.parser import OutputParser
from penstock.gateway.tools.tool_format import ToolFormat

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "get_time": {},
}
TOOLS = frozenset(SCHEMAS)


@dataclass
class Recorder:
    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add_reasoning(self, text: str) -> None:
        assert text
        self.reasoning += text

    def add_text(self, text: str) -> None:
        assert text
        self.text += text

    def begin_call(self, name: str) -> None:
        self.calls.append((name, ""))

    def add_arguments(self, text: str) -> None:
        name, arguments = self.calls[-1]
        self.calls[-1] = (name, arguments + text)


def feed(parser: OutputParser, pieces: Iterable[str]) -> None:
    for piece in pieces:
        parser.push(piece)
    parser.finish()


def parse_calls(tool_format: ToolFormat, *pieces: str) -> Recorder:
    recorder = Recorder()
    feed(tool_format.parser(recorder, SCHEMAS), pieces)
    return recorder
