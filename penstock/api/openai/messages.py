"""Chat messages and tools as OpenAI's clients write them, and their translation into the gateway's types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.api.http.parsing import check_num_parts
from penstock.core.errors import InvalidRequest, quoted
from penstock.gateway.documents import attached_text
from penstock.gateway.prompts import ChatMessage, ImagePart, TextPart, Tool, ToolCall, ToolChoice

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_ROLES_WITH_IMAGES = frozenset({"user", "tool", "function"})
# The last two are of the Responses API.
_TEXT_PARTS = frozenset({"text", "refusal", "input_text", "output_text"})
# The field that a part of each type must have.
_FIELDS = {
    **dict.fromkeys(_TEXT_PARTS, "text"),
    "refusal": "refusal",
    "image_url": "image_url",
    "file": "file",
}
# Templates know one name for each of these roles.
_NEWEST_ROLES = {"developer": "system", "function": "tool"}


class ImageURL(msgspec.Struct):
    url: str
    detail: str | None = None  # accepted; the model's own processor decides


class AttachedFile(msgspec.Struct, omit_defaults=True):
    file_id: str | None = None
    file_data: str | None = None  # base64, or a data URL
    filename: str | None = None


class MessagePart(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageURL | str | None = None
    file: AttachedFile | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class CalledCustom(msgspec.Struct):
    name: str
    input: str = ""


class MessageToolCall(msgspec.Struct, omit_defaults=True):
    id: str
    function: CalledFunction | None = None
    type: str = "function"
    custom: CalledCustom | None = None

    def to_tool_call(self, param: str) -> ToolCall:
        if self.custom is not None:
            return ToolCall(self.id, self.custom.name, custom_arguments_of(self.custom.input))
        if self.function is None:
            raise InvalidRequest(f"{param}.function is missing.", param=f"{param}.function")
        return ToolCall(self.id, self.function.name, self.function.arguments)


class _CustomArguments(msgspec.Struct):
    input: str


_decode_arguments = msgspec.json.Decoder(_CustomArguments).decode


def custom_arguments_of(text: str) -> str:
    """Return the arguments of the function that a custom tool is to the model."""
    return msgspec.json.encode(_CustomArguments(text)).decode()


def custom_input_of(arguments: str) -> str:
    """Return the text that the model passed to a custom tool. A call that was cut off gives what was written of
    it."""
    try:
        return _decode_arguments(arguments).input
    except msgspec.DecodeError:
        return arguments


class Message(msgspec.Struct):
    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # the older form of one tool call
    reasoning_content: str | None = None  # as we answer it
    reasoning: str | None = None  # the same, as other servers name it
    refusal: str | None = None

    def to_chat_message(self, position: int) -> ChatMessage:
        param = f"messages[{position}]"
        if self.role not in ROLES:
            raise InvalidRequest(
                f"{param}.role is {quoted(self.role)}, which is none of {', '.join(sorted(ROLES))}.",
                param=f"{param}.role",
            )
        if (self.tool_calls or self.function_call) and self.role != "assistant":
            raise InvalidRequest("Only an assistant calls tools.", param=f"{param}.tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequest(f"{param}.tool_call_id is missing.", param=f"{param}.tool_call_id")
        if self.role == "function" and self.name is None:
            raise InvalidRequest(f"{param}.name is missing.", param=f"{param}.name")
        return ChatMessage(
            _NEWEST_ROLES.get(self.role, self.role),
            self._content(param),
            self.name,
            self._calls(param),
            f"call_{self.name}" if self.role == "function" else self.tool_call_id,
            self.reasoning if self.reasoning_content is None else self.reasoning_content,
        )

    def _calls(self, param: str) -> tuple[ToolCall, ...]:
        calls = [
            call.to_tool_call(f"{param}.tool_calls[{position}]")
            for position, call in enumerate(self.tool_calls or ())
        ]
        if self.function_call is not None:  # has no id: results name the function
            name = self.function_call.name
            calls.append(ToolCall(f"call_{name}", name, self.function_call.arguments))
        return tuple(calls)

    def _content(self, param: str) -> str | tuple[TextPart, ...]:
        if isinstance(self.content, list):
            return tuple(self._part(part, param) for part in self.content)
        if self.content is not None:
            return self.content
        if self.role in ("assistant", "tool", "function"):  # an answer, or a result, without text
            return self.refusal or ""
        raise InvalidRequest(f"{param}.content is missing.", param=f"{param}.content")

    def _part(self, part: MessagePart, param: str) -> TextPart:
        is_file = part.type == "file" and part.file is not None
        if not is_file and (part.type != "image_url" or part.image_url is None):
            return TextPart(_text_of(part, param))
        if self.role not in _ROLES_WITH_IMAGES:
            kind = "a file" if is_file else "an image"
            raise InvalidRequest(
                f"{param}.content has {kind}; only messages of users and tools may have images and files.",
                param=f"{param}.content",
            )
        if part.type == "file" and part.file is not None:
            file = part.file
            return attached_text(file.file_id, file.file_data, file.filename, f"{param}.content")
        assert part.image_url is not None
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        return ImagePart(url=url, param=f"{param}.content")


def chat_messages(messages: list[Message]) -> tuple[ChatMessage, ...]:
    if not messages:
        raise InvalidRequest("There must be at least one message.", param="messages")
    check_num_parts(messages, "messages")
    return tuple(message.to_chat_message(position) for position, message in enumerate(messages))


def _text_of(part: MessagePart, param: str) -> str:
    field = _FIELDS.get(part.type)
    if field is not None and getattr(part, field) is None:
        raise InvalidRequest(
            f"{param}.content has a part of type {quoted(part.type)} without {field}.",
            param=f"{param}.content",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXT_PARTS or text is None:
        raise InvalidRequest(
            f"{param}.content has a part of type {quoted(part.type)}; text, image_url and file parts are supported.",
            param=f"{param}.content",
        )
    return text


class Prediction(msgspec.Struct):
    """The answer that a client expects. It changes the speed of the answer only."""

    type: Literal["content"]
    content: str | list[MessagePart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(_text_of(part, "prediction") for part in self.content)


ToolMode = Literal["auto", "none", "required"]


class FunctionDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters or {}, bool(self.strict))


class FunctionName(msgspec.Struct):
    name: str


class AllowedTool(msgspec.Struct):
    type: str
    function: FunctionName | None = None
    name: str | None = None  # the flat form of the Responses API
    custom: FunctionName | None = None

    @property
    def tool_name(self) -> str | None:
        named = self.function or self.custom
        return self.name if named is None else named.name


class AllowedTools(msgspec.Struct):
    tools: list[AllowedTool]
    mode: Literal["auto", "required"] = "auto"


def named_choice(name: str, tools: tuple[Tool, ...], *, parallel: bool) -> ToolChoice:
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(
            f"tool_choice names {quoted(name)}, which is not among the tools.", param="tool_choice"
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
