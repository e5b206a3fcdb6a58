"""The tools of chat completions and of the Responses API: the functions that the model sees, and what a call of
each becomes.

Chat completions have functions, custom tools that take free text, and the older `functions`; `CallStyle` writes a
call as the client that sent the tools expects it.

In the Responses API, functions and custom tools are the client's. A tool inside a namespace has one flat name for the
model. `apply_patch`, `local_shell` and `shell` in a local environment are also run by the client, and are functions
to the model. Every other type is a hosted tool, which a provider's server would run: this server runs none, skips the
tool and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.api.openai.messages import (
    AllowedTool,
    AllowedTools,
    FunctionDefinition,
    FunctionName,
    ToolMode,
    allowed_choice,
    custom_input_of,
    named_choice,
)
from penstock.core.errors import InvalidRequest, quoted
from penstock.gateway.answers.choice import ToolCallDelta
from penstock.gateway.checks import check_num_tools
from penstock.gateway.prompts import RequestWarning, Tool, ToolChoice

_MAX_SHOWN_CHARS = 64


class ToolFormat(msgspec.Struct, omit_defaults=True):
    """The input format of a custom tool."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None  # of a custom tool
    tools: list[ResponseTool] | None = None  # of a namespace
    environment: Any = None  # of a shell


class ResponseToolChoice(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


def _object(required: Sequence[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_NUMBER = {"type": "integer"}
_PATCH_TYPES = ["create_file", "update_file", "delete_file"]
# Tools that the client runs and that have a type of their own, as the functions that they are to the model.
CLIENT_TOOLS = {
    "apply_patch": Tool(
        "apply_patch",
        "Creates, updates or deletes one file. The diff is in the V4A format, and empty for delete_file.",
        _object(
            ["type", "path", "diff"],
            {"type": {"type": "string", "enum": _PATCH_TYPES}, "path": _TEXT, "diff": _TEXT},
        ),
        strict=True,
    ),
    "shell": Tool(
        "shell",
        "Runs shell commands on the user's machine and returns their output.",
        _object(["commands"], {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}),
        strict=True,
    ),
    "local_shell": Tool(
        "local_shell",
        "Runs one command on the user's machine and returns its output.",
        _object(["command"], {"command": _TEXTS, "timeout_ms": _NUMBER, "working_directory": _TEXT}),
        strict=True,
    ),
}

CallKind: TypeAlias = Literal["function", "custom", "apply_patch", "shell", "local_shell"]


class CalledTool(msgspec.Struct, frozen=True):
    """A called tool under the client's name. The model may see another name."""

    kind: CallKind
    name: str
    namespace: str | None = None


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name that the model sees of a tool in a namespace."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


class Toolbox:
    """The tools of one request. `called` says what a call is to the client, by the name that the model uses."""

    def __init__(self, wire: Sequence[ResponseTool] | None) -> None:
        self.tools: list[Tool] = []
        self.called: dict[str, CalledTool] = {}
        self._flat_names: dict[str, dict[str, None]] = {}  # of the model, by those of the client
        self.warnings: list[RequestWarning] = []
        self._skipped: set[str] = set()
        check_num_tools(sum([1 + len(tool.tools or ()) for tool in wire or ()]))
        for position, tool in enumerate(wire or ()):
            self._add(tool, f"tools[{position}]")

    def choice(
        self, wire: ToolMode | ResponseToolChoice | None, *, parallel: bool
    ) -> tuple[tuple[Tool, ...], ToolChoice]:
        """Return the tools that remain, and the choice among them."""
        tools = tuple(self.tools)
        if isinstance(wire, ResponseToolChoice):
            if wire.type in ("function", "custom") and wire.name is not None:
                return tools, named_choice(self._flat(wire.name), tools, parallel=parallel)
            if wire.type in CLIENT_TOOLS:
                return tools, named_choice(wire.type, tools, parallel=parallel)
            if wire.type == "allowed_tools" and wire.tools is not None:
                return self._allowed(wire.tools, wire.mode or "auto", tools, parallel=parallel)
            raise InvalidRequest(
                f"tool_choice of type {quoted(wire.type)} is not supported.", param="tool_choice"
            )
        if wire == "required" and not tools:
            raise InvalidRequest(
                "tool_choice is 'required', but there are no tools that the model could call.",
                param="tool_choice",
            )
        return tools, ToolChoice(wire or "auto", parallel=parallel)

    def _allowed(
        self,
        allowed: Sequence[AllowedTool],
        mode: Literal["auto", "required"],
        tools: tuple[Tool, ...],
        *,
        parallel: bool,
    ) -> tuple[tuple[Tool, ...], ToolChoice]:
        check_num_tools(len(allowed), "tool_choice")
        remaining = [
            msgspec.structs.replace(tool, name=self._flat(tool.tool_name or tool.type), function=None)
            for tool in allowed
            if tool.type not in self._skipped
        ]
        if mode == "required" and not remaining:
            raise InvalidRequest("tool_choice allows only tools that were skipped.", param="tool_choice")
        return allowed_choice(AllowedTools(remaining, mode), tools, parallel=parallel)

    def _flat(self, name: str) -> str:
        """Return the flat name for a name that the client uses. A name that several namespaces have stays as it
        is."""
        found = list(self._flat_names.get(name, ()))
        return found[0] if name not in self.called and len(found) == 1 else name

    def _add(self, tool: ResponseTool, param: str, namespace: ResponseTool | None = None) -> None:
        if tool.type in ("function", "custom"):
            self._add_named(tool, param, namespace)
        elif tool.type == "namespace" and namespace is None:
            if not tool.name or tool.tools is None:
                raise InvalidRequest(f"{param} is a namespace without a name or tools.", param="tools")
            for position, inner in enumerate(tool.tools):
                self._add(inner, f"{param}.tools[{position}]", tool)
        elif tool.type in CLIENT_TOOLS and namespace is None and _runs_locally(tool):
            self._put(CLIENT_TOOLS[tool.type], CalledTool(tool.type, tool.type), param)  # type: ignore[arg-type]
        else:
            self._skipped.add(tool.type)
            shown = tool.type[:_MAX_SHOWN_CHARS]
            message = f"The tool {quoted(shown)} was skipped, because this server runs no hosted tools."
            self.warnings.append(RequestWarning("tool_skipped", message, "tools"))

    def _add_named(self, tool: ResponseTool, param: str, namespace: ResponseTool | None) -> None:
        if not tool.name:
            raise InvalidRequest(f"{param} has no name.", param="tools")
        space = None if namespace is None else namespace.name
        called = CalledTool(tool.type, tool.name, space)  # type: ignore[arg-type]
        description = tool.description
        if namespace is not None and namespace.tools and namespace.tools[0] is tool:
            description = "\n".join(filter(None, (namespace.description, description)))
        shown = Tool(
            flat_name(space, tool.name), description or None, tool.parameters or {}, bool(tool.strict)
        )
        if tool.type == "custom":
            shown = self._custom(shown, tool.format or ToolFormat("text"), param)
        self._put(shown, called, param)

    def _put(self, tool: Tool, called: CalledTool, param: str) -> None:
        other = self.called.get(tool.name)
        if other is not None and other != called:
            raise InvalidRequest(f"{param} has the name {quoted(tool.name)} of another tool.", param="tools")
        self.called[tool.name] = called
        self._flat_names.setdefault(called.name, {})[tool.name] = None
        self.tools.append(tool)

    def _custom(self, tool: Tool, form: ToolFormat, param: str) -> Tool:
        """Return a custom tool as a function with one text. A regular expression binds the text; a Lark grammar is
        only shown to the model, because the text is written inside JSON."""
        text: dict[str, Any] = {"type": "string"}
        description = tool.description
        if form.type == "grammar" and form.definition is not None and form.syntax in ("lark", "regex"):
            description = "\n\n".join(
                filter(
                    None, (description, f"The input follows this {form.syntax} grammar:\n{form.definition}")
                )
            )
            if form.syntax == "regex":
                text["pattern"] = f"^(?:{form.definition})$"
            else:
                name = tool.name[:_MAX_SHOWN_CHARS]
                message = f"The grammar of the tool {quoted(name)} is shown to the model and not enforced."
                self.warnings.append(RequestWarning("grammar_not_enforced", message, "tools"))
        elif form.type != "text":
            raise InvalidRequest(
                f"{param}.format is neither text nor a lark or regex grammar.", param="tools"
            )
        return Tool(tool.name, description, _object(["input"], {"input": text}), strict=True)


def _runs_locally(tool: ResponseTool) -> bool:
    if tool.type != "shell":
        return True
    return isinstance(tool.environment, dict) and tool.environment.get("type") == "local"


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
    check_num_tools(max(len(tools or ()), len(functions or ())))
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
