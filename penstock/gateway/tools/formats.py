"""The formats in which families of models write tool calls and reasoning, and which format a model uses.

A model's chat template tells the family of the model, because the template repeats the model's own calls. A new
family is an entry in `FORMATS`, and in `_SIGNS` if its template has a sign of its own.

`described_in_words` rewrites a chat for templates that know nothing of tools: the tools are described at the end of
the system prompt, earlier calls stand in the model's turns as the model would write them, and results come back as a
user's turn. `with_single_calls` gives each call a turn of its own, for templates that take one call in a turn.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.messages import ModelCard
from penstock.gateway.prompts import ChatMessage, ImagePart, TextPart, Tool, ToolCall
from penstock.gateway.tools.call_parser import CallMarkers
from penstock.gateway.tools.parser import THINK_START

AUTO = "auto"
NO_PARSER = "none"

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_NAME = "NAME"


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes a call: `head` with the function's name for `NAME`, the arguments, `call_tail`. Several are
    separated by `separator` and surrounded by `list_start` and `list_end`."""

    name: str
    markers: CallMarkers
    head: str
    call_tail: str = ""
    separator: str = "\n"
    list_start: str = ""
    list_end: str = ""
    short_call_ids: bool = False  # its templates insist on ids of nine letters and digits

    def call_head(self, name: str) -> str:
        """A call up to its arguments."""
        return self.head.replace(_NAME, json.dumps(name)[1:-1])

    @property
    def trigger(self) -> str | None:
        """What a call, and nothing else, begins with."""
        return next((marker for marker in self.markers.opening if self.head.startswith(marker)), None)

    def written(self, calls: tuple[ToolCall, ...]) -> str:
        """Calls as the model would have written them."""
        written = (self.call_head(call.name) + (call.arguments or "{}") + self.call_tail for call in calls)
        return self.list_start + self.separator.join(written) + self.list_end

    def instructions(self, tools: tuple[Tool, ...]) -> str:
        """What a model reads about tools whose template knows nothing of them."""
        signatures = "\n".join(json.dumps(tool_schema(tool), ensure_ascii=False) for tool in tools)
        example = f"{self.call_head('<function name>')}<arguments as a JSON object>{self.call_tail}"
        return (
            "# Tools\n\nYou may call one or more functions to help with the user's request. Their signatures:\n"
            f"<tools>\n{signatures}\n</tools>\n\n"
            f"To call a function, answer with nothing but its name and arguments, like this:\n"
            f"{self.list_start}{example}{self.list_end}\n"
            "Repeat this for every call. The results come back in <tool_response></tool_response>."
        )


HERMES = ToolFormat(
    name="hermes",
    markers=CallMarkers(opening=("<tool_call>",), closing="</tool_call>"),
    head=f'<tool_call>\n{{"name": "{_NAME}", "arguments": ',
    call_tail="}\n</tool_call>",
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    markers=CallMarkers(opening=("<|python_tag|>",), bare="{", hides_markers=True),
    head=f'{{"name": "{_NAME}", "parameters": ',
    call_tail="}",
    separator="; ",
)
_MISTRAL_MARKERS = CallMarkers(opening=("[TOOL_CALLS]",), name_end="[ARGS]", hides_markers=True)
MISTRAL = ToolFormat(
    name="mistral",
    markers=_MISTRAL_MARKERS,
    head=f'{{"name": "{_NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="[TOOL_CALLS][",
    list_end="]",
    short_call_ids=True,
)
MISTRAL_ARGS = ToolFormat(  # Mistral's newer models
    name="mistral_args",
    markers=_MISTRAL_MARKERS,
    head=f"[TOOL_CALLS]{_NAME}[ARGS]",
    separator="",
    short_call_ids=True,
)
GEMMA = ToolFormat(
    name="gemma",
    markers=CallMarkers(
        opening=("```tool_code", "```tool_call", "```json"), closing="```", bare="{[", writes_python=True
    ),
    head=f'```tool_code\n{{"name": "{_NAME}", "parameters": ',
    call_tail="}\n```",
)
FORMATS = {
    tool_format.name: tool_format for tool_format in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, GEMMA)
}

# What only one family's template contains, looked for in this order.
_SIGNS = (
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3_JSON),
    ("ipython", LLAMA3_JSON),  # the role of its tools
)


def tool_schema(tool: Tool) -> dict[str, object]:
    """A tool as chat templates expect it."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or NO_PARAMETERS
    return {"type": "function", "function": function}


def tool_format_of(card: ModelCard, setting: str = AUTO) -> ToolFormat | None:
    """The format that a model writes calls in: as configured, else as its template or architecture shows. None when
    calls are not to be parsed at all."""
    if setting == NO_PARSER:
        return None
    if setting != AUTO:
        return FORMATS[setting]
    for sign, tool_format in _SIGNS:
        if sign in (card.chat_template or ""):
            return tool_format
    return GEMMA if card.architecture.lower().startswith("gemma") else HERMES


def reasons(card: ModelCard, setting: str = AUTO) -> bool:
    """Whether answers of a model may begin with reasoning: as configured, else as its template shows."""
    if setting == AUTO:
        return THINK_START in (card.chat_template or "")
    return setting != NO_PARSER


def described_in_words(
    messages: Sequence[ChatMessage], tools: tuple[Tool, ...], tool_format: ToolFormat
) -> tuple[ChatMessage, ...]:
    told: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            _add_result(told, message)
        elif message.tool_calls:
            told.append(_with_written_calls(message, tool_format))
        else:
            told.append(message)
    if tools:
        _instruct(told, tool_format.instructions(tools))
    return tuple(told)


def with_single_calls(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Calls that were made in parallel, as if each had waited for the result of the one before."""
    told: list[ChatMessage] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        if len(message.tool_calls) < 2:
            told.append(message)
            continue
        results = []
        while rest and rest[0].role == "tool":
            results.append(rest.popleft())
        content = message.content
        for call in message.tool_calls:
            told.append(msgspec.structs.replace(message, content=content, tool_calls=(call,)))
            told += [result for result in results if result.tool_call_id == call.id]
            content = ""
        ids = {call.id for call in message.tool_calls}
        told += [result for result in results if result.tool_call_id not in ids]
    return tuple(told)


def _instruct(told: list[ChatMessage], instructions: str) -> None:
    if told and told[0].role == "system":
        system = told[0]
        told[0] = msgspec.structs.replace(
            system, content=(*_parts(system), TextPart("\n" + instructions)), cache=None
        )
    else:
        told.insert(0, ChatMessage("system", instructions))


def _with_written_calls(message: ChatMessage, tool_format: ToolFormat) -> ChatMessage:
    written = TextPart(tool_format.written(message.tool_calls))
    parts = (*_parts(message), written)
    return msgspec.structs.replace(message, content=parts, tool_calls=())


def _add_result(told: list[ChatMessage], message: ChatMessage) -> None:
    """Results of parallel calls share a turn, because many templates want turns to alternate."""
    body = "\n".join(part.text for part in _parts(message))
    images = tuple(part for part in _parts(message) if isinstance(part, ImagePart))
    result = TextPart(f"<tool_response>\n{body}\n</tool_response>", message.cache)
    last = told[-1] if told else None
    if last is not None and last.role == "user" and last.tool_call_id is not None:
        told[-1] = msgspec.structs.replace(last, content=(*_parts(last), result, *images))
    else:
        told.append(ChatMessage("user", (result, *images), tool_call_id=message.tool_call_id or ""))


def _parts(message: ChatMessage) -> tuple[TextPart, ...]:
    if isinstance(message.content, str):
        return (TextPart(message.content),) if message.content else ()
    return message.content
