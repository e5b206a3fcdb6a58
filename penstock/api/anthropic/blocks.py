"""The content blocks that clients send to /v1/messages, and how turns made of them become chat messages.

The rules about which block may stand where are Anthropic's. Knows nothing of sampling or of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, Union

import msgspec

from penstock.core.errors import InvalidRequest, quoted
from penstock.gateway.documents import described
from penstock.gateway.prompts import CacheMark, ChatMessage, FilePart, ImagePart, TextPart, ToolCall

_TTL_S = {"5m": 300.0, "1h": 3600.0}
_TEXT_ONLY = (
    "Only text, images, plain-text documents, search results, tool_use, tool_result and thinking are "
    "supported."
)


class CacheControl(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    def mark(self) -> CacheMark:
        return CacheMark(_TTL_S[self.ttl or "5m"])


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted thinking of another server: accepted, and not shown to the model."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ImageSource(msgspec.Struct):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    file_id: str = ""


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    source: ImageSource
    cache_control: CacheControl | None = None


class DocumentSource(msgspec.Struct):
    """Plain text in `data`, text blocks in `content`, an uploaded file of text, or a document that is no text."""

    type: str
    data: str | None = None
    content: str | list[TextBlock] | None = None
    media_type: str | None = None
    file_id: str | None = None


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None

    def text(self) -> str | None:
        """Return the text for the model; None for documents without text."""
        source = self.source
        body = source.data if source.type == "text" else None
        if source.type == "content":
            body = _joined_text(source.content)
        return None if body is None else described("document", body, title=self.title, context=self.context)


class SearchResultBlock(msgspec.Struct, tag_field="type", tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]
    cache_control: CacheControl | None = None

    def text(self) -> str | None:
        return described("search_result", _joined_text(self.content), title=self.title, source=self.source)


def _joined_text(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class HostedBlock(msgspec.Struct, tag_field="type"):
    """A call of a tool that a provider's server ran, or the result. It is not shown to the model: the provider's
    model has written the same as text."""


# One class for each type, as msgspec asks.
_HOSTED_BLOCKS = tuple(
    msgspec.defstruct(kind.title().replace("_", ""), [], bases=(HostedBlock,), tag_field="type", tag=kind)
    for kind in (
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    )
)
OwnBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)
if TYPE_CHECKING:
    Block: TypeAlias = OwnBlock | HostedBlock
else:
    Block = Union[(OwnBlock, *_HOSTED_BLOCKS)]


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def blocks(self) -> Sequence[Block]:
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content


def mark_of(control: CacheControl | None) -> CacheMark | None:
    return None if control is None else control.mark()


def chat_messages(turns: Sequence[Turn]) -> tuple[ChatMessage, ...]:
    """Consecutive turns of one role count as one, as templates that insist on alternation need it."""
    if not turns:
        raise InvalidRequest("messages: at least one message is required.", param="messages")
    if turns[0].role == "assistant":
        raise InvalidRequest("messages: the first message must be the user's.", param="messages")
    _check_tool_pairing(turns)
    messages: list[list[ChatMessage]] = []  # those that are joined into one stand together
    previous_role: str | None = None
    for position, turn in enumerate(turns):
        reader = _TurnReader(position, is_last=position == len(turns) - 1)
        if turn.role == "assistant":
            converted = [reader.assistant(turn.blocks())]
        else:
            converted = reader.user(turn.role, turn.blocks())
        if turn.role == previous_role and converted and _can_join(messages[-1][-1], converted[0]):
            messages[-1].append(converted.pop(0))
        messages += [[message] for message in converted]
        previous_role = turn.role
    return tuple(map(_joined, messages))


def system_message(system: str | Sequence[TextBlock] | None) -> tuple[ChatMessage, ...]:
    """Return the system prompt as a turn of its own; an empty one counts as none."""
    if not system:
        return ()
    blocks = [TextBlock(system)] if isinstance(system, str) else system
    parts = [_text_part(block, f"system.{index}") for index, block in enumerate(blocks)]
    return (ChatMessage("system", _content(parts)),)


class _TurnReader:
    """Converts the blocks of one turn; knows their position in the request, for its errors."""

    def __init__(self, position: int, *, is_last: bool) -> None:
        self._place = f"messages.{position}"
        self._is_last = is_last

    def user(self, role: str, blocks: Sequence[Block]) -> list[ChatMessage]:
        """Tool results become turns of their own, in the order in which they stand."""
        if not blocks:
            self._refuse("content", "must not be empty.")
        messages: list[ChatMessage] = []
        parts: list[TextPart] = []
        for index, block in enumerate(blocks):
            place = f"content.{index}"
            if isinstance(block, TextBlock):
                parts.append(_text_part(block, f"{self._place}.{place}"))
            elif isinstance(block, DocumentBlock | SearchResultBlock):
                parts.append(self._document(block, place))
            elif isinstance(block, ImageBlock) and role == "user":
                parts.append(self._image(block, place))
            elif isinstance(block, ToolResultBlock) and role == "user":
                if parts:
                    self._refuse(place, "tool_result blocks must come before text in a message.")
                messages.append(self._tool_result(block, place))
            elif isinstance(
                block, ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | HostedBlock
            ):
                kind = block.__struct_config__.tag
                self._refuse(place, f"{kind} blocks cannot be in a message of the role {quoted(role)}.")
            else:
                self._refuse_media(block, place)
        if parts:
            messages.append(ChatMessage(role, _content(parts)))
        return messages

    def assistant(self, blocks: Sequence[Block]) -> ChatMessage:
        parts: list[TextPart] = []
        calls: list[ToolCall] = []
        thoughts: list[str] = []
        for index, block in enumerate(blocks):
            place = f"content.{index}"
            if isinstance(block, TextBlock):
                parts.append(_text_part(block, f"{self._place}.{place}"))
            elif isinstance(block, ToolUseBlock):
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(ToolCall(block.id, block.name, arguments, mark_of(block.cache_control)))
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolResultBlock):
                self._refuse(place, "tool_result blocks belong into a user's message.")
            elif not isinstance(block, RedactedThinkingBlock | HostedBlock):
                self._refuse_media(block, place)
        if not blocks and not self._is_last:
            self._refuse("content", "must not be empty.")
        return ChatMessage(
            "assistant", _content(parts), tool_calls=tuple(calls), reasoning="".join(thoughts) or None
        )

    def _tool_result(self, block: ToolResultBlock, place: str) -> ChatMessage:
        texts: list[str] = []
        more: list[TextPart] = []  # images, and files of text
        if isinstance(block.content, str):
            texts.append(block.content)
        for index, part in enumerate(block.content if isinstance(block.content, list) else ()):
            if isinstance(part, ImageBlock):
                more.append(self._image(part, f"{place}.content.{index}"))
            elif isinstance(part, DocumentBlock) and part.source.file_id:
                more.append(self._document(part, f"{place}.content.{index}"))
            else:
                texts.append(self._text_of(part, f"{place}.content.{index}"))
        text = "\n".join(texts)
        if block.is_error:  # templates have no other way to tell the model
            text = f"Error: {text}" if text else "Error"
        content = (*([TextPart(text)] if text else ()), *more) if more else text
        return ChatMessage(
            "tool", content, tool_call_id=block.tool_use_id, cache=mark_of(block.cache_control)
        )

    def _document(self, block: DocumentBlock | SearchResultBlock, place: str) -> TextPart:
        mark = mark_of(block.cache_control)
        if isinstance(block, DocumentBlock) and block.source.type == "file" and block.source.file_id:
            return FilePart(
                file_id=block.source.file_id,
                title=block.title,
                context=block.context,
                param=f"{self._place}.{place}",
                cache=mark,
            )
        return TextPart(self._text_of(block, place), mark)

    def _image(self, block: ImageBlock, place: str) -> ImagePart:
        source, mark = block.source, mark_of(block.cache_control)
        param = f"{self._place}.{place}"
        if source.type == "base64" and source.data:
            return ImagePart(url=f"data:{source.media_type};base64,{source.data}", param=param, cache=mark)
        if source.type == "url" and source.url:
            return ImagePart(url=source.url, param=param, cache=mark)
        if source.type != "file" or not source.file_id:
            self._refuse(f"{place}.source", "must be of the type base64, url or file, and hold the image.")
        return ImagePart(file_id=source.file_id, param=param, cache=mark)

    def _text_of(self, block: TextBlock | DocumentBlock | SearchResultBlock, place: str) -> str:
        if isinstance(block, TextBlock):
            return block.text
        text = block.text()
        if text is None:
            self._refuse_media(block, place)
        return text

    def _refuse_media(self, block: msgspec.Struct, place: str) -> NoReturn:
        kind = block.__struct_config__.tag
        self._refuse(place, f"this model takes no {kind} blocks. {_TEXT_ONLY}")

    def _refuse(self, place: str, reason: str) -> NoReturn:
        raise InvalidRequest(f"{self._place}.{place}: {reason}", param="messages")


def _check_tool_pairing(turns: Sequence[Turn]) -> None:
    """Every tool_use is answered in the next turn, and nothing else is answered there."""
    open_ids: set[str] = set()
    for position, turn in enumerate(turns):
        results = [block.tool_use_id for block in turn.blocks() if isinstance(block, ToolResultBlock)]
        for tool_use_id in results:
            if tool_use_id not in open_ids:
                raise InvalidRequest(
                    f"messages.{position}: the tool_result for {quoted(tool_use_id)} answers no tool_use block "
                    "of the message before it.",
                    param="messages",
                )
            open_ids.discard(tool_use_id)
        if open_ids:
            raise InvalidRequest(
                f"messages.{position}: a tool_result for {quoted(min(open_ids))} is missing; each tool_use block "
                "must be answered in the next message.",
                param="messages",
            )
        open_ids = {block.id for block in turn.blocks() if isinstance(block, ToolUseBlock)}
    if open_ids:
        raise InvalidRequest(
            f"messages: the last message has a tool_use block, {quoted(min(open_ids))}, that nothing answers.",
            param="messages",
        )


def _text_part(block: TextBlock, place: str) -> TextPart:
    if not block.text:
        raise InvalidRequest(f"{place}: text content blocks must not be empty.", param=place.split(".")[0])
    return TextPart(block.text, mark_of(block.cache_control))


def _content(parts: Sequence[TextPart]) -> str | tuple[TextPart, ...]:
    if not parts:
        return ""
    is_plain = len(parts) == 1 and parts[0].cache is None and not isinstance(parts[0], ImagePart | FilePart)
    return parts[0].text if is_plain else tuple(parts)


def _can_join(earlier: ChatMessage, later: ChatMessage) -> bool:
    return earlier.role == later.role != "tool" and not earlier.tool_calls


def _joined(messages: Sequence[ChatMessage]) -> ChatMessage:
    if len(messages) == 1:
        return messages[0]
    parts = [part for message in messages for part in message.parts]
    reasoning = "".join([message.reasoning or "" for message in messages])
    return msgspec.structs.replace(messages[-1], content=_content(parts), reasoning=reasoning or None)
