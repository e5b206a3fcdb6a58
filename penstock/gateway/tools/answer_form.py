"""What the answers to one prompt consist of, decided once per prompt: how to parse them, and which grammar forces a
tool call."""

from __future__ import annotations

import msgspec

from penstock.core.request import Grammar
from penstock.gateway.prompts import ChatPrompt
from penstock.gateway.tools.call_parser import CallParser
from penstock.gateway.tools.formats import ToolFormat
from penstock.gateway.tools.parser import AnswerSink, OutputParser, PlainText
from penstock.gateway.tools.reasoning import ReasoningSplitter
from penstock.gateway.tools.tool_grammar import leaves_room_for_calls, tool_grammar


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that may hold reasoning (`reasons`), tool calls (`tool_names` is not empty), or both."""

    tool_format: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    parallel: bool = True
    reasons: bool = False
    reasoning_is_open: bool = False  # the prompt ends inside the reasoning
    grammar: Grammar | None = None  # replaces the request's own
    shown_token_ids: frozenset[int] = frozenset()  # control tokens that the parser must see

    def parser(self, sink: AnswerSink) -> OutputParser:
        parser: OutputParser = PlainText(sink)
        if self.tool_format is not None and self.tool_names:
            parser = CallParser(sink, self.tool_format.markers, self.tool_names)
        if self.reasons:
            parser = ReasoningSplitter(sink, parser, is_open=self.reasoning_is_open)
        return parser


def forces_calls(prompt: ChatPrompt) -> bool:
    return bool(prompt.tools) and prompt.tool_choice.mode in ("required", "named")


def offers_tools(prompt: ChatPrompt) -> bool:
    return bool(prompt.tools) and prompt.tool_choice.mode != "none"


def answer_form(
    prompt: ChatPrompt,
    tool_format: ToolFormat | None,
    *,
    reasons: bool,
    reasoning_is_open: bool,
    shown_token_ids: frozenset[int],
    grammar: Grammar | None,
) -> AnswerForm | None:
    """None for plain text, which then costs nothing. `grammar` is what the request demands of answers."""
    if tool_format is not None and _may_call(prompt, tool_format, grammar):
        return AnswerForm(
            tool_format=tool_format,
            tool_names=frozenset(tool.name for tool in prompt.tools),
            parallel=prompt.tool_choice.parallel,
            reasons=reasons,
            reasoning_is_open=reasoning_is_open,
            grammar=tool_grammar(prompt, tool_format, grammar),
            shown_token_ids=shown_token_ids,
        )
    return AnswerForm(reasons=True, reasoning_is_open=reasoning_is_open) if reasons else None


def _may_call(prompt: ChatPrompt, tool_format: ToolFormat, grammar: Grammar | None) -> bool:
    if not offers_tools(prompt):
        return False
    return grammar is None or forces_calls(prompt) or leaves_room_for_calls(grammar, tool_format)
