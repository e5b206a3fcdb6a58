"""The chats that most requests are: messages of text, and the common options.

Their shape knows nothing else, so it is decoded and translated at a fraction of the cost of the full shape. Whatever
does not fit is left to the full shape, which also words the errors.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.api.http.parsing import MAX_MESSAGE_PARTS, UNCOUNTED_BYTES
from penstock.api.openai.requests import ChatCompletionRequest, StreamOptions
from penstock.gateway.prompts import ChatMessage, ChatPrompt, GenerationRequest, SamplingOptions


class PlainMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class PlainChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A chat that the full shape would translate into the same `GenerationRequest`."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: Annotated[list[PlainMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGE_PARTS)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_generation(self) -> GenerationRequest:
        is_old_name = self.max_completion_tokens is None
        return GenerationRequest(
            prompts=(
                ChatPrompt(
                    messages=tuple([ChatMessage(message.role, message.content) for message in self.messages])
                ),
            ),
            sampling=SamplingOptions(
                max_tokens=self.max_tokens if is_old_name else self.max_completion_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                seed=self.seed,
                stop=self.stop or (),
            ),
            model=self.model,
            max_tokens_param="max_tokens" if is_old_name else "max_completion_tokens",
            endpoint=ChatCompletionRequest.ENDPOINT,
            user=self.user,
        )


_decode = msgspec.json.Decoder(PlainChat).decode


def plain_chat(body: bytes) -> PlainChat | None:
    """None for a body that only the full shape can judge, and for one whose values must be counted first."""
    if len(body) > UNCOUNTED_BYTES:
        return None
    try:
        chat = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if chat.stream_options is not None and not chat.stream else chat
