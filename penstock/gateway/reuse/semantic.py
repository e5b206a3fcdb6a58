"""Answers to questions that were asked before in other words. Off unless the operator turns it on.

Two requests are similar if everything but the text of the last turn is the same, down to the model and the sampling,
and the vectors of the two texts point in nearly the same direction. Similar is not the same: an answer may be wrong
for a question that differs in one number. Entries are private to a workspace, in memory, and bounded in bytes and in
time. Knows no embedding model: a function makes the vectors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.gateway.prompts import ChatPrompt, GenerationRequest, TextPart

_ENTRY_BYTES = 512  # what Python needs for an entry besides its vector and its answer
_MAX_PER_CONTEXT = 512  # entries that one lookup compares; older ones are dropped
_MAX_QUESTION_CHARS = 8_000  # longer texts are not compared: one vector says too little about them

# Makes the vector of a text for a request, with the named model. Returns it as little-endian float32 of length 1,
# with the identity of the model.
Embed: TypeAlias = Callable[[str, GenerationRequest, str], Awaitable[tuple[bytes, bytes]]]


class SemanticCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[semantic_cache]`."""

    enabled: bool = False
    model: str | None = None  # a served model that makes embeddings
    # The least cosine between two texts that count as one.
    threshold: Annotated[float, Meta(gt=0, le=1)] = 0.97
    ttl_s: Annotated[float, Meta(gt=0)] = 3600.0  # at most; a caller may ask for less
    max_bytes: Annotated[int, Meta(ge=0)] = 64 << 20

    def check(self) -> None:
        if self.enabled and not self.model:
            raise ConfigError(
                "semantic_cache needs a model that makes embeddings.",
                hint='Set model, such as model = "all-minilm-l6-v2".',
                param="semantic_cache.model",
            )


@dataclass(frozen=True, slots=True)
class Question:
    """The text of the last turn, and the request with an empty one in its place."""

    text: str
    rest: GenerationRequest


def question_of(request: GenerationRequest) -> Question | None:
    """None for a request that cannot be similar to another one: no chat, several prompts, images, a long text."""
    if len(request.prompts) != 1 or not isinstance(request.prompts[0], ChatPrompt):
        return None
    prompt = request.prompts[0]
    if not prompt.messages or prompt.messages[-1].role != "user" or prompt.continues_last:
        return None
    last = prompt.messages[-1]
    parts = last.content
    if not isinstance(parts, str) and any(type(part) is not TextPart for part in parts):
        return None
    text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
    if not text.strip() or len(text) > _MAX_QUESTION_CHARS:
        return None
    emptied = msgspec.structs.replace(last, content="")
    rest = msgspec.structs.replace(prompt, messages=(*prompt.messages[:-1], emptied))
    return Question(text, msgspec.structs.replace(request, prompts=(rest,)))


@dataclass(frozen=True, slots=True)
class Probe:
    """The key of a look-up. `context` is a fingerprint of all that must be the same, the vector's model included."""

    workspace_id: str
    context: bytes
    vector: bytes

    @property
    def place(self) -> tuple[str, bytes]:
        return self.workspace_id, self.context


@dataclass(frozen=True, slots=True)
class _Entry:
    place: tuple[str, bytes]
    vector: Any  # of numpy
    answer: bytes
    stored_at: float
    expires_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + int(self.vector.nbytes) + _ENTRY_BYTES


class SemanticCache:
    """Used from the event loop. Least recently used entries are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._places: dict[tuple[str, bytes], list[int]] = {}  # oldest first
        self._next = 0

    def find(self, probe: Probe, threshold: float, now: float, max_age_s: float) -> bytes | None:
        """Return the answer to the most similar text, if it is similar and young enough."""
        import numpy as np

        for number in [
            number for number in self._places.get(probe.place, ()) if self._has_ended(number, now)
        ]:
            self._remove(number)
        numbers = [
            number
            for number in self._places.get(probe.place, ())
            if now - self._entries[number].stored_at <= max_age_s
        ]
        if not numbers:
            return None
        vector = np.frombuffer(probe.vector, dtype="<f4")
        cosines = np.stack([self._entries[number].vector for number in numbers]) @ vector
        best = int(cosines.argmax())
        if not cosines[best] >= threshold:  # also if the numbers are none
            return None
        self._entries.move_to_end(numbers[best])
        return self._entries[numbers[best]].answer

    def put(self, probe: Probe, answer: bytes, now: float, ttl_s: float) -> None:
        import numpy as np

        entry = _Entry(probe.place, np.frombuffer(probe.vector, dtype="<f4"), answer, now, now + ttl_s)
        if entry.num_bytes > self.max_bytes:
            return
        there = self._places.get(probe.place, [])
        if len(there) >= _MAX_PER_CONTEXT:
            self._remove(there[0])
        self._next += 1
        self._entries[self._next] = entry
        self._places.setdefault(probe.place, []).append(self._next)
        self.num_bytes += entry.num_bytes
        self.shrink_to(self.max_bytes)

    def shrink_to(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        while self.num_bytes > max_bytes:
            self._remove(next(iter(self._entries)))

    def _has_ended(self, number: int, now: float) -> bool:
        return now >= self._entries[number].expires_at

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number)
        self.num_bytes -= entry.num_bytes
        numbers = self._places[entry.place]
        numbers.remove(number)
        if not numbers:
            del self._places[entry.place]
