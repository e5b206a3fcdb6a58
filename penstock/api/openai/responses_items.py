"""The items of the Responses API, and the chat that they stand for.

A conversation is a flat list of items: messages, reasoning, calls and their outputs. A chat has turns: what the model
thought, said and called between two turns of others is one turn of its own.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from penstock.api.http.parsing import check_num_parts
from penstock.api.openai.answers import ChatLogprob
from penstock.api.openai.messages import custom_arguments_of
from penstock.api.openai.tools import CLIENT_TOOLS, CallKind, flat_name
from penstock.core.errors import InvalidRequest, quoted
from penstock.gateway.documents import attached_text
from penstock.gateway.prompts import ChatMessage, FilePart, ImagePart, RequestWarning, TextPart, ToolCall

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "apply_patch_call": "apc",
    "shell_call": "sh",
    "local_shell_call": "lsh",
}
_RESPONSE_OF_ITEM = re.compile(r"[a-z]+_(\w+)-i?\d+")
_CALL_OUTPUTS = frozenset(
    {"function_call_output", "custom_tool_call_output", *(f"{kind}_call_output" for kind in CLIENT_TOOLS)}
)
# Items of hosted tools, in conversations that began at another server.
_HOSTED_ITEMS = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_call",
        "tool_search_call",
        "tool_search_output",
    }
)
_COMPACTED = "penstock-1."  # begins the content of compaction items, with the version of their form
_SUMMARY_START = "This is a summary of the conversation so far:"
_NO_IMAGE = "[An image, which this model cannot see.]"


class ContentPart(msgspec.Struct, omit_defaults=True):
    type: str = ""  # absent in the output of a shell
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    stdout: str | None = None
    stderr: str | None = None
    outcome: dict[str, Any] | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None  # accepted; the model's own processor decides
    file_data: str | None = None  # base64, or a data URL
    file_url: str | None = None
    filename: str | None = None


class InputItem(msgspec.Struct, omit_defaults=True):
    """Any item that a client sends, or that a stored response holds."""

    type: str | None = None  # absent for a message
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of the tool that is called
    arguments: str | None = None
    input: str | None = None  # of a custom tool's call
    operation: dict[str, Any] | None = None  # of a call of apply_patch
    action: dict[str, Any] | None = None  # of a call of a shell
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


class OutputText(msgspec.Struct):
    text: str
    logprobs: list[ChatLogprob] = []
    annotations: list[Any] = []
    type: str = "output_text"


class _OutputItem(msgspec.Struct, tag_field="type"):
    id: str
    status: ItemStatus


class _OutputCall(_OutputItem):
    call_id: str


class OutputMessage(_OutputItem, tag="message"):
    content: list[OutputText]
    role: str = "assistant"


class ReasoningText(msgspec.Struct):
    text: str
    type: str = "reasoning_text"


class OutputReasoning(_OutputItem, tag="reasoning"):
    content: list[ReasoningText]
    summary: list[Any] = []


class OutputCall(_OutputCall, tag="function_call"):
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class OutputCustomCall(_OutputCall, tag="custom_tool_call"):
    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class OutputPatchCall(_OutputCall, tag="apply_patch_call"):
    operation: dict[str, Any]


class OutputShellCall(_OutputCall, tag="shell_call"):
    action: dict[str, Any]
    environment: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "local"})


class OutputLocalShellCall(_OutputCall, tag="local_shell_call"):
    action: dict[str, Any]


ClientCall = OutputPatchCall | OutputShellCall | OutputLocalShellCall
OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | ClientCall


def client_call(kind: CallKind, item: OutputCall) -> ClientCall | None:
    """Return the call of a function that stands for a tool with a type of its own. None when the call was cut off."""
    try:
        given = msgspec.json.decode(item.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    if kind == "apply_patch":
        if given.get("type") == "delete_file":
            given.pop("diff", None)
        return OutputPatchCall(item.id, item.status, item.call_id, given)
    if kind == "shell":
        action = {"timeout_ms": None, "max_output_length": None, **given}
        return OutputShellCall(item.id, item.status, item.call_id, action)
    return OutputLocalShellCall(item.id, item.status, item.call_id, {"type": "exec", "env": {}, **given})


def compaction_item(item_id: str, summary: str) -> InputItem:
    """Return an item that stands for all that it summarizes. Its content is opaque to clients."""
    content = _COMPACTED + base64.urlsafe_b64encode(summary.encode()).decode()
    return InputItem(type="compaction", id=item_id, encrypted_content=content)


def _summary_of(item: InputItem, param: str) -> str:
    content = item.encrypted_content or ""
    try:
        if content.startswith(_COMPACTED):
            return base64.b64decode(content.removeprefix(_COMPACTED), b"-_", validate=True).decode()
    except ValueError:
        pass
    raise InvalidRequest("The compaction item was not made by this server.", param=param)


def new_id(kind: str) -> str:
    return f"{_ID_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to. Items to which a client gave an id have no such ids."""
    found = _RESPONSE_OF_ITEM.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


def input_items(wire: str | list[InputItem], owner: str, param: str = "input") -> list[InputItem]:
    """Return the client's input in full form, with types, ids and parts, so that it can be listed later. `owner` is
    the id of the request, and becomes part of the ids."""
    items = [InputItem(role="user", content=wire)] if isinstance(wire, str) else wire
    check_num_parts(items, param)
    return [_full(item, f"{owner}-i{position}") for position, item in enumerate(items)]


def _full(item: InputItem, name: str) -> InputItem:
    kind = item.type or "message"
    item_id = item.id or f"{_ID_PREFIXES.get(kind, 'item')}_{name}"
    full = msgspec.structs.replace(item, type=kind, id=item_id)
    if kind.endswith(("message", "_call", "_output")):  # other items have no status, or may be without one
        full.status = item.status or "completed"
    if kind == "message" and isinstance(item.content, str):
        part_type = "output_text" if item.role == "assistant" else "input_text"
        annotations: list[Any] | None = [] if item.role == "assistant" else None
        full.content = [ContentPart(part_type, item.content, annotations=annotations)]
    return full


def messages_of(
    items: Iterable[InputItem], instructions: str | None, warnings: list[RequestWarning], param: str = "input"
) -> tuple[ChatMessage, ...]:
    """Return the chat that the items stand for. Each part that cannot be shown to the model is added to
    `warnings`."""
    chat = _Chat()
    if instructions:
        chat.messages.append(ChatMessage("system", instructions))
    items = tuple(items)
    check_num_parts(items, param)
    for position, item in enumerate(items):
        chat.add(item, f"{param}[{position}]")
    chat.end_turn()
    warnings += [
        RequestWarning("item_skipped", f"Input items of the type {quoted(kind)} were skipped.", param)
        for kind in sorted(chat.skipped)
    ]
    return tuple(chat.messages)


class _Chat:
    """Gathers items into turns."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.skipped: set[str] = set()  # types
        self._reasoning: list[str] = []
        self._said: list[TextPart] = []
        self._calls: list[ToolCall] = []

    def add(self, item: InputItem, param: str) -> None:
        match item.type or "message":
            case "message":
                self._add_message(item, param)
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else item.summary
                self._reasoning += [part.text or "" for part in parts or ()]
            case "function_call":
                self._calls.append(_call(item, item.arguments or "{}", param))
            case "custom_tool_call":
                self._calls.append(_call(item, custom_arguments_of(item.input or ""), param))
            case "apply_patch_call" | "shell_call" | "local_shell_call" as kind:
                arguments = msgspec.json.encode(item.operation or item.action or {}).decode()
                named = msgspec.structs.replace(item, name=kind.removesuffix("_call"))
                self._calls.append(_call(named, arguments, param))
            case kind if kind in _CALL_OUTPUTS:
                self.end_turn()
                call_id = item.call_id or (item.id if kind == "local_shell_call_output" else None)
                if call_id is None:
                    raise InvalidRequest(f"{param}.call_id is missing.", param=f"{param}.call_id")
                output = (
                    item.status or "" if item.output is None and kind.startswith("apply") else item.output
                )
                result = _parts(output, f"{param}.output", is_output=True)
                self.messages.append(ChatMessage("tool", result, tool_call_id=call_id))
            case "compaction" | "compaction_summary":
                self.end_turn()
                summary = _summary_of(item, f"{param}.encrypted_content")
                self.messages.append(ChatMessage("user", f"{_SUMMARY_START}\n{summary}"))
            case kind if kind in _HOSTED_ITEMS:
                self.skipped.add(kind)
            case kind:
                raise InvalidRequest(
                    f"{param} is of type {quoted(kind)}, which is not supported.", param=param
                )

    def end_turn(self) -> None:
        """Close the turn of the model, if one is open."""
        if self._said or self._calls:
            reasoning = "\n".join(self._reasoning) or None
            self.messages.append(
                ChatMessage(
                    "assistant", tuple(self._said), tool_calls=tuple(self._calls), reasoning=reasoning
                )
            )
        self._reasoning, self._said, self._calls = [], [], []

    def _add_message(self, item: InputItem, param: str) -> None:
        if item.role not in _ROLES:
            raise InvalidRequest(
                f"{param}.role is {quoted(item.role)}, which is none of {', '.join(sorted(_ROLES))}.",
                param=f"{param}.role",
            )
        parts = _parts(item.content, f"{param}.content")
        if item.role != "user" and any(isinstance(part, ImagePart | FilePart) for part in parts):
            raise InvalidRequest("Only users' messages may have images and files.", param=f"{param}.content")
        if item.role == "assistant":
            if self._calls:
                self.end_turn()
            self._said += parts
            return
        self.end_turn()
        role = "system" if item.role == "developer" else item.role
        self.messages.append(ChatMessage(role, parts))


def _call(item: InputItem, arguments: str, param: str) -> ToolCall:
    if item.call_id is None or item.name is None:
        raise InvalidRequest(f"{param} must have a call_id and a name.", param=param)
    return ToolCall(item.call_id, flat_name(item.namespace, item.name), arguments)


def _parts(
    content: str | list[ContentPart] | None, param: str, *, is_output: bool = False
) -> tuple[TextPart, ...]:
    """`is_output`: the content is the output of a tool, whose images a model of texts may do without."""
    if content is None:
        raise InvalidRequest(f"{param} is missing.", param=param)
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(_part(part, param, is_output=is_output) for part in content)


def _part(part: ContentPart, param: str, *, is_output: bool) -> TextPart:
    if part.type == "input_image":
        if not part.image_url and not part.file_id:
            raise InvalidRequest(f"{param} has an image with neither image_url nor file_id.", param=param)
        return ImagePart(
            url=part.image_url or "",
            file_id="" if part.image_url else part.file_id or "",
            param=param,
            stand_in=_NO_IMAGE if is_output else "",
        )
    if part.type == "input_file":
        if part.file_url:
            raise InvalidRequest(
                "Files are not fetched by URL.", param=param, hint="Upload the file, or send its data."
            )
        return attached_text(part.file_id, part.file_data, part.filename, param)
    if is_output and part.stdout is not None:
        return TextPart(msgspec.json.encode(part).decode())
    text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
    if text is None:
        raise InvalidRequest(
            f"{param} has a part of type {quoted(part.type)}; text, input_image and input_file parts are supported.",
            param=param,
        )
    return TextPart(text)
