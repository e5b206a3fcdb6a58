"""Tools and the choice among them as OpenAI's clients write them, and the gateway's nouns for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.prompts import Tool, ToolChoice

ToolMode = Literal["auto", "none", "required"]


class FunctionDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters or {}, bool(self.strict))


class ChatTool(msgspec.Struct):
    type: str
    function: FunctionDefinition | None = None


class FunctionName(msgspec.Struct):
    name: str


class AllowedTool(msgspec.Struct):
    type: str
    function: FunctionName | None = None
    name: str | None = None  # the flat form of the Responses API

    @property
    def tool_name(self) -> str | None:
        return self.name if self.function is None else self.function.name


class AllowedTools(msgspec.Struct):
    tools: list[AllowedTool]
    mode: Literal["auto", "required"] = "auto"


class ChosenTool(msgspec.Struct):
    """One function, or those that are allowed."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


def tools_of(wire: Sequence[ChatTool] | None) -> tuple[Tool, ...]:
    tools = []
    for position, tool in enumerate(wire or ()):
        if tool.type != "function" or tool.function is None:
            raise InvalidRequest(
                f"tools[{position}] is of type {tool.type!r}; only functions are supported.", param="tools"
            )
        tools.append(tool.function.to_tool())
    return tuple(tools)


def tool_choice_of(
    wire: ToolMode | ChosenTool | None, tools: tuple[Tool, ...], *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that remain, and the choice among them."""
    if isinstance(wire, ChosenTool):
        if wire.type == "function" and wire.function is not None:
            return tools, named_choice(wire.function.name, tools, parallel=parallel)
        if wire.type == "allowed_tools" and wire.allowed_tools is not None:
            return allowed_choice(wire.allowed_tools, tools, parallel=parallel)
        raise InvalidRequest(f"tool_choice of type {wire.type!r} is not supported.", param="tool_choice")
    if wire == "required" and not tools:
        raise InvalidRequest("tool_choice is 'required', but there are no tools.", param="tool_choice")
    return tools, ToolChoice(wire or "auto", parallel=parallel)


def named_choice(name: str, tools: tuple[Tool, ...], *, parallel: bool) -> ToolChoice:
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(
            f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice"
        )
    return ToolChoice("named", name, parallel)


def allowed_choice(
    allowed: AllowedTools, tools: tuple[Tool, ...], *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    names = {tool.tool_name for tool in allowed.tools}
    remaining = tuple(tool for tool in tools if tool.name in names)
    if len(remaining) < len(names):
        raise InvalidRequest("tool_choice allows a tool that is not among the tools.", param="tool_choice")
    return remaining, ToolChoice(allowed.mode, parallel=parallel)
