"""The tools of chat completions: functions, custom tools that take free text, and the older `functions`.

The model sees each as a function. `CallStyle` writes a call as the client that sent the tools expects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from penstock.api.openai.messages import (
    AllowedTools,
    FunctionDefinition,
    FunctionName,
    ToolMode,
    custom_input_of,
)
from penstock.api.openai.responses_tools import ResponseTool, ResponseToolChoice, Toolbox, ToolFormat
from penstock.core.errors import InvalidRequest
from penstock.gateway.answers.choice import ToolCallDelta


class TextGrammar(msgspec.Struct):
    definition: str
    syntax: str


class CustomFormat(msgspec.Struct):
    type: str
    grammar: TextGrammar | None = None


class CustomDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class ChatTool(msgspec.Struct):
    type: str = "function"
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    def flat(self, param: str) -> ResponseTool:
        """Return the tool as the Responses API writes tools."""
        if self.type == "custom" and self.custom is not None:
            form = self.custom.format or CustomFormat("text")
            grammar = form.grammar or TextGrammar("", "")
            shape = ToolFormat(form.type, grammar.syntax or None, grammar.definition or None)
            return ResponseTool("custom", self.custom.name, self.custom.description, format=shape)
        if self.type == "function" and self.function is not None:
            return flat_function(self.function)
        if self.type in ("function", "custom"):
            raise InvalidRequest(f"{param}.{self.type} is missing.", param="tools")
        return ResponseTool(self.type)


class ChosenTool(msgspec.Struct):
    """One tool, or those that are allowed."""

    type: str
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def flat(self) -> ResponseToolChoice:
        named = self.custom if self.type == "custom" else self.function
        allowed = self.allowed_tools
        if allowed is None:
            return ResponseToolChoice(self.type, None if named is None else named.name)
        return ResponseToolChoice(self.type, mode=allowed.mode, tools=allowed.tools)


def flat_function(function: FunctionDefinition) -> ResponseTool:
    return ResponseTool("function", function.name, function.description, function.parameters, function.strict)


def toolbox_of(tools: Sequence[ChatTool] | None, functions: Sequence[FunctionDefinition] | None) -> Toolbox:
    if functions and tools:
        raise InvalidRequest("Give either tools or the older functions, not both.", param="functions")
    flat = [tool.flat(f"tools[{position}]") for position, tool in enumerate(tools or ())]
    return Toolbox([*flat, *map(flat_function, functions or ())])


def flat_choice(
    choice: ToolMode | Literal["any"] | ChosenTool | None,
    older: Literal["auto", "none"] | FunctionName | None,
    toolbox: Toolbox,
) -> ToolMode | ResponseToolChoice | None:
    """`tool_choice`, or the older `function_call`, as the Responses API writes the choice. Mistral's clients say
    "any" for "required"."""
    if choice == "any":
        choice = "required"
    if choice is None:
        choice = older if not isinstance(older, FunctionName) else ChosenTool("function", older)
    if older is not None and not toolbox.tools:
        raise InvalidRequest("function_call may only be given together with functions.", param="functions")
    return choice.flat() if isinstance(choice, ChosenTool) else choice


class CallStyle(msgspec.Struct, frozen=True):
    """The format of calls: `custom` names the tools that take free text; `is_older` means `function_call`."""

    custom: frozenset[str] = frozenset()
    is_older: bool = False

    @classmethod
    def of(cls, tools: Sequence[ChatTool] | None, *, is_older: bool) -> CallStyle:
        custom = (tool.custom.name for tool in tools or () if tool.type == "custom" and tool.custom)
        return cls(frozenset(custom), is_older)

    def fields(self, calls: Sequence[ToolCallDelta], *, is_whole: bool) -> dict[str, Any]:
        """Return the fields of a message or of a delta that tell `calls`."""
        if self.is_older:
            function = _present(name=calls[0].name, arguments=calls[0].arguments)
            return {"function_call": function}
        return {"tool_calls": [self._call(call, is_whole=is_whole) for call in calls]}

    def _call(self, call: ToolCallDelta, *, is_whole: bool) -> dict[str, Any]:
        if call.name in self.custom:
            kind, called = "custom", {"name": call.name, "input": custom_input_of(call.arguments)}
        else:
            kind, called = "function", _present(name=call.name, arguments=call.arguments)
        place = {} if is_whole else {"index": call.index}
        begun = {} if call.id is None else {"id": call.id, "type": kind}
        return {**place, **begun, kind: called}


PLAIN_CALLS = CallStyle()


def _present(**fields: str | None) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value is not None}


class StreamedCalls:
    """Calls of one streamed answer. A call of a custom tool is held back until the call is whole, because the model
    writes the text inside JSON."""

    def __init__(self, style: CallStyle) -> None:
        self._style = style
        self._held: ToolCallDelta | None = None

    def ready(self, calls: Iterable[ToolCallDelta], *, is_end: bool) -> list[ToolCallDelta]:
        """Return the parts of calls that can be written now."""
        ready: list[ToolCallDelta] = []
        for call in calls:
            held = self._held
            if held is not None and held.index == call.index:
                self._held = msgspec.structs.replace(held, arguments=held.arguments + call.arguments)
                continue
            ready += self._release()
            if call.name in self._style.custom:
                self._held = call
            elif not self._style.is_older or call.index == 0:
                ready.append(call)
        return ready + (self._release() if is_end else [])

    def _release(self) -> list[ToolCallDelta]:
        held, self._held = self._held, None
        return [] if held is None else [held]
