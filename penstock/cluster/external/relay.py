"""Passes on the chunks of an answer, and knows enough of them to let another server continue where one broke off.

A plain text can be continued: a completion by a longer prompt, a chat by an assistant's message that the server is
to complete (prefill). An answer with thoughts, calls of tools, log-probabilities or a grammar cannot: the next server
would begin such a thing anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.cluster.external.wire import ExternalCall, StreamChunk, WireChoice, WireUsage

_UNREPEATABLE = frozenset({"logprobs", "response_format", "structured_outputs", "suffix", "tool_choice"})


class Relay:
    """Passes on the chunks of all attempts of one call. `has_begun` says whether the client has seen anything, and
    `num_chunks` how much."""

    def __init__(
        self,
        call: ExternalCall,
        on_chunks: Callable[[list[StreamChunk]], None],
        on_first: Callable[[ExternalCall], None],
    ) -> None:
        self._call = call
        self._on_chunks = on_chunks
        self._on_first = on_first
        self._is_plain = not call.is_whole and _UNREPEATABLE.isdisjoint(call.body)
        self._text: list[str] = []
        self.num_chunks = 0
        self._num_before = 0  # chunks of servers that broke off
        self.has_begun = False
        self.has_ended = False  # with a finish_reason

    def __call__(self, chunks: list[StreamChunk]) -> None:
        for chunk in chunks:
            if chunk.choices:
                choice = chunk.choices[0]
                if choice.says_something:
                    self.num_chunks += 1
                    if choice.finish_reason is not None:
                        self.has_ended = True
                    if self._is_plain:
                        self._note(choice)
            elif chunk.data:
                self.has_begun = self.has_ended = True
        if not self.has_begun and self.num_chunks:
            self.has_begun = True
            if not self._call.is_whole:  # whose first token was not seen
                self._on_first(self._call)
        if self._num_before:
            chunks = [self._counted(chunk) for chunk in chunks]
        self._on_chunks(chunks)

    @property
    def can_continue(self) -> bool:
        return self._is_plain and self._continued_body() is not None

    def continued(self) -> ExternalCall:
        """Return the call for what is still to come. Only if `can_continue`."""
        body = self._continued_body()
        assert body is not None
        self._num_before = self.num_chunks
        return msgspec.structs.replace(self._call, body=body)

    def _note(self, choice: WireChoice) -> None:
        """Keep the text, with which another server could continue."""
        delta = choice.delta
        if delta is not None and (
            delta.tool_calls or delta.reasoning or delta.reasoning_content or delta.refusal
        ):
            self._is_plain = False
        if text := (delta.content if delta is not None else choice.text):
            self._text.append(text)

    def _continued_body(self) -> dict[str, Any] | None:
        body = {name: value for name, value in self._call.body.items() if name != "min_tokens"}
        text = "".join(self._text)
        if (max_tokens := self._call.max_tokens) is not None:
            body["max_tokens"] = max_tokens - self.num_chunks
            if body["max_tokens"] < 1:
                return None
        if "messages" not in body:
            if not isinstance(body.get("prompt"), str):
                return None
            return body | {"prompt": body["prompt"] + text}
        messages = list(body["messages"])
        if body.get("continue_final_message"):
            if not isinstance(messages[-1].get("content"), str):
                return None
            messages[-1] = messages[-1] | {"content": messages[-1]["content"] + text}
        else:
            messages.append({"role": "assistant", "content": text})
        return body | {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}

    def _counted(self, chunk: StreamChunk) -> StreamChunk:
        """Usage as if one server had answered. Each chunk of the server that broke off counts as a token."""
        if chunk.usage is None:
            return chunk
        told = chunk.usage
        usage = WireUsage(
            max(0, told.prompt_tokens - self._num_before),
            None if told.completion_tokens is None else told.completion_tokens + self._num_before,
            told.prompt_tokens_details,
            told.completion_tokens_details,
        )
        return msgspec.structs.replace(chunk, usage=usage)
