"""Chat messages as OpenAI's clients write them, tool calls and results included, and the gateway's nouns for them."""

from __future__ import annotations

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.prompts import ChatMessage, TextPart, ToolCall

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class MessagePart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class MessageToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # as we answer it
    reasoning: str | None = None  # the same, as other servers name it
    refusal: str | None = None

    def to_chat_message(self, position: int) -> ChatMessage:
        param = f"messages[{position}]"
        if self.role not in ROLES:
            raise InvalidRequest(
                f"{param}.role is {self.role!r}, which is none of {', '.join(sorted(ROLES))}.",
                param=f"{param}.role",
            )
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest("Only an assistant calls tools.", param=f"{param}.tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequest(f"{param}.tool_call_id is missing.", param=f"{param}.tool_call_id")
        return ChatMessage(
            # Templates know the older name of this role.
            "system" if self.role == "developer" else self.role,
            self._content(param),
            self.name,
            tuple(
                ToolCall(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls or ()
            ),
            self.tool_call_id,
            self.reasoning if self.reasoning_content is None else self.reasoning_content,
        )

    def _content(self, param: str) -> str | tuple[TextPart, ...]:
        if isinstance(self.content, list):
            return tuple(TextPart(_text_of(part, param)) for part in self.content)
        if self.content is not None:
            return self.content
        if self.role == "assistant" and (self.tool_calls or self.refusal is not None):
            return self.refusal or ""
        raise InvalidRequest(f"{param}.content is missing.", param=f"{param}.content")


def chat_messages(messages: list[Message]) -> tuple[ChatMessage, ...]:
    if not messages:
        raise InvalidRequest("There must be at least one message.", param="messages")
    return tuple(message.to_chat_message(position) for position, message in enumerate(messages))


def _text_of(part: MessagePart, param: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "refusal") or text is None:
        raise InvalidRequest(
            f"{param}.content has a part of type {part.type!r}; this model takes text parts only.",
            param=f"{param}.content",
        )
    return text
