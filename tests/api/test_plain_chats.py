"""Plain chats are what the full shape would make of them, or are left to it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.api.extensions import EXTENSION_FIELDS, refuse_foreign
from penstock.api.http.parsing import BodyDecoder
from penstock.api.openai.endpoints import plain_chat
from penstock.api.openai.requests import ChatCompletionRequest

USER = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
FULL = BodyDecoder(ChatCompletionRequest, EXTENSION_FIELDS, refuse_foreign)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 5, "temperature": 1, "top_p": 0.5, "seed": 7, "user": "u"},
        {"max_completion_tokens": 5, "max_tokens": 9, "stop": ["a", "b"]},
        {"max_tokens": None, "stop": None, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [{"role": "system", "content": ""}, USER, {"role": "assistant", "content": "ä"}]},
        {"temperature": 99.0, "max_tokens": -1},  # refused by later steps, whatever the shape
    ],
)
def test_a_plain_chat_is_what_the_full_shape_makes_of_it(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode(CHAT | fields)
    plain, full = plain_chat(body), FULL.decode(body)
    assert plain is not None
    whole = msgspec.structs.replace(full.to_generation(), is_plain=True, is_read_whole=not full.stream)
    assert plain.to_generation() == whole
    assert plain.includes_usage == full.includes_usage
    assert plain.stream == full.stream


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"n": 2},
        CHAT | {"tools": []},
        CHAT | {"temprature": 1},
        CHAT | {"store": True},
        CHAT | {"model": ""},
        CHAT | {"messages": []},
        CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        CHAT | {"messages": [{"role": "developer", "content": "a"}]},
        CHAT | {"messages": [USER | {"name": "x"}]},
        CHAT | {"stream_options": {"include_usage": True}},
        {"messages": [USER]},
        [],
    ],
)
def test_everything_else_is_left_to_the_full_shape(body: Any) -> None:
    assert plain_chat(msgspec.json.encode(body)) is None


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "\xff"}', b"[" * 100_000])
def test_what_is_no_json_is_left_to_the_full_shape(body: bytes) -> None:
    assert plain_chat(body) is None
