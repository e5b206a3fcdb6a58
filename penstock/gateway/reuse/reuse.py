"""Decides, before an engine works, whether a request has been answered already, here or at another gateway.

An idempotency key is asked first, then, for callers that opted in, the response cache. A request with neither passes
at the cost of a few comparisons. Opting in is enough: a sampled answer is cached like a greedy one, because only the
client knows whether another sample would do. Last, if the operator wants that, comes the cache of similar requests.

`SemanticCache` holds answers to questions that were asked before in other words. It is off unless the operator turns
it on.

Two requests are similar if they differ only in the text of the last turn, and if the vectors of the two texts point
in nearly the same direction. Model and sampling must be the same. Similar is not the same: an answer may be wrong for
a question that differs in one number. Entries are private to a workspace, in memory, and bounded in bytes and in
time. Knows no embedding model: a function makes the vectors.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.figures import CountOrZero, Positive, Share
from penstock.core.lru import LruCache
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.metrics.table import Figures
from penstock.gateway.prepared import PreparedRequest
from penstock.gateway.prompts import ChatPrompt, GenerationRequest, TextPart
from penstock.gateway.reuse.idempotency import Generate, IdempotentAnswers, open_replay
from penstock.gateway.reuse.replay import (
    AnswerCache,
    IdempotencySettings,
    RecordedAnswer,
    RecordingAnswer,
    ReplayedAnswer,
    ResponseCacheSettings,
    decode_answer,
)
from penstock.gateway.reuse.shared_cache import SharedCaches, bytes_of, entry_name

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
    threshold: Share = 0.97
    ttl_s: Positive = 3600.0  # at most; a caller may ask for less
    max_bytes: CountOrZero = 64 << 20

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


class SemanticCache(LruCache[int, _Entry]):
    """Answers by numbers, bounded in bytes. Used from the event loop."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, lambda _, entry: entry.num_bytes)
        self._places: dict[tuple[str, bytes], list[int]] = {}  # oldest first
        self._next = 0

    def find(self, probe: Probe, threshold: float, now: float, max_age_s: float) -> bytes | None:
        """Return the answer to the most similar text, if it is similar and young enough."""
        import numpy as np

        for number in list(self._places.get(probe.place, ())):
            if now >= self._entries[number].expires_at:
                self.pop(number)
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
        found = self.get(numbers[best])
        return None if found is None else found.answer

    def keep(self, probe: Probe, answer: bytes, now: float, ttl_s: float) -> None:
        import numpy as np

        entry = _Entry(probe.place, np.frombuffer(probe.vector, dtype="<f4"), answer, now, now + ttl_s)
        if entry.num_bytes > self.capacity:
            return
        there = self._places.get(probe.place, [])
        if len(there) >= _MAX_PER_CONTEXT:
            self.pop(there[0])
        self._next += 1
        self._places.setdefault(probe.place, []).append(self._next)
        self.put(self._next, entry)

    def pop(self, key: int) -> _Entry | None:
        entry = super().pop(key)
        if entry is not None:
            numbers = self._places[entry.place]
            numbers.remove(key)
            if not numbers:
                del self._places[entry.place]
        return entry


logger = logging.getLogger(__name__)

_EMBED_TIMEOUT_S = 2.0
_EMBED_PAUSE_S = 10.0  # after a failure
_SHARED_KIND = "responses"


class AnswerReuse:
    """Answers requests from earlier answers where the caller wants that."""

    def __init__(
        self,
        cache: ResponseCacheSettings | None = None,
        idempotency: IdempotentAnswers | None = None,
        clock: Clock | None = None,
        shared: SharedCaches | None = None,
    ) -> None:
        self._settings = cache or ResponseCacheSettings()
        self._cache = AnswerCache(self._settings.max_bytes)
        self.idempotency = idempotency or IdempotentAnswers(IdempotencySettings())
        self._clock = clock or SystemClock()
        self._shared = shared
        self._similar = SemanticCacheSettings()
        self._semantic = SemanticCache(0)
        self.embed: Embed | None = None  # set where embeddings can be made
        self._embed_after = 0.0
        self.num_similar = 0
        self.num_hits = 0
        self.num_misses = 0

    def apply(
        self,
        cache: ResponseCacheSettings,
        idempotency: IdempotencySettings,
        similar: SemanticCacheSettings | None = None,
    ) -> None:
        """Use new settings from now on. Cached answers that no longer fit are dropped."""
        self._settings = cache
        self._cache.shrink_to(cache.max_bytes if cache.enabled else 0)
        self._similar = similar or SemanticCacheSettings()
        self._semantic.shrink_to(self._similar.max_bytes if self._similar.enabled and cache.enabled else 0)
        self.idempotency.apply(idempotency)

    async def answer(self, work: PreparedRequest, generate: Generate) -> AnswerStream:
        """Return an earlier answer to callers that want one, and otherwise the answer that `generate` starts. Only a
        generated answer uses tokens; every request counts as one request."""
        ttl_s = self._ttl_s(work.request)
        is_idempotent = self._is_idempotent(work.request)
        if not ttl_s and not is_idempotent:
            return await generate(work)
        fingerprint = request_fingerprint(work.request, work.model.fingerprint)
        if ttl_s:
            generate = partial(self._cached, fingerprint, ttl_s, generate)
        if is_idempotent:
            return await self.idempotency.answer(work, fingerprint, generate)
        return await generate(work)

    async def _cached(
        self, fingerprint: bytes, ttl_s: float, generate: Generate, work: PreparedRequest
    ) -> AnswerStream:
        workspace_id = work.request.principal.workspace_id
        data = self._cache.find(workspace_id, fingerprint, self._clock.now(), ttl_s)
        recorded = decode_answer(data) if data is not None else None
        if recorded is None:
            recorded = await self._find_shared(workspace_id, fingerprint, ttl_s)
        if recorded is not None:
            self.num_hits += 1
            return ReplayedAnswer(recorded, await open_replay(work))
        probe = await self._probe(work)
        similar_ttl_s = min(ttl_s, self._similar.ttl_s)
        if probe is not None:
            now, threshold = self._clock.now(), self._similar.threshold
            data = self._semantic.find(probe, threshold, now, similar_ttl_s)
            if data is not None:
                self.num_similar += 1
                account = await open_replay(work)
                return ReplayedAnswer(decode_answer(data), account, cache_status="similar")
        self.num_misses += 1

        def keep(answer: bytes) -> None:
            settings = self._settings
            if not settings.enabled or len(answer) > settings.max_entry_bytes:
                return
            self._cache.keep(workspace_id, fingerprint, answer, self._clock.now(), ttl_s)
            if probe is not None and self._similar.enabled:
                self._semantic.keep(probe, answer, self._clock.now(), similar_ttl_s)
            if self._shared is not None and settings.shared:
                name = entry_name(workspace_id, fingerprint)
                self._shared.put(_SHARED_KIND, name, answer, ttl_s, settings.shared_max_bytes)

        return RecordingAnswer(await generate(work), self._settings.max_entry_bytes, keep)

    async def _probe(self, work: PreparedRequest) -> Probe | None:
        """Return where to look for similar requests; None if semantic reuse is off for the request, or there is no
        vector now."""
        settings = self._similar
        if not settings.enabled or settings.model is None or self.embed is None:
            return None
        if self._clock.now() < self._embed_after:
            return None
        question = question_of(work.request)
        if question is None:
            return None
        try:
            async with asyncio.timeout(_EMBED_TIMEOUT_S):
                vector, model = await self.embed(question.text, work.request, settings.model)
        except (PenstockError, TimeoutError) as error:
            self._embed_after = self._clock.now() + _EMBED_PAUSE_S
            cause = error.message if isinstance(error, PenstockError) else "The vector took too long."
            logger.warning("no similar answers are looked for, for %.0f s: %s", _EMBED_PAUSE_S, cause)
            return None
        context = request_fingerprint(question.rest, work.model.fingerprint + model)
        return Probe(work.request.principal.workspace_id, context, vector)

    async def _find_shared(
        self, workspace_id: str, fingerprint: bytes, ttl_s: float
    ) -> RecordedAnswer | None:
        """Return an answer that another gateway, or an earlier life of this one, has kept."""
        if self._shared is None or not self._settings.shared:
            return None
        entry = await self._shared.get(_SHARED_KIND, entry_name(workspace_id, fingerprint))
        if entry is None or entry.age_s > ttl_s:
            return None
        try:
            recorded = decode_answer(entry.value)
        except msgspec.DecodeError:
            return None  # damaged, or written by another program
        stored_at = self._clock.now() - entry.age_s
        self._cache.keep(workspace_id, fingerprint, entry.value, stored_at, ttl_s)
        return recorded

    def _is_idempotent(self, request: GenerationRequest) -> bool:
        return request.idempotency_key is not None and self.idempotency.settings.enabled

    def concerns(self, request: GenerationRequest) -> bool:
        """Return whether an earlier answer may do for the request, or its answer for a later request."""
        if request.idempotency_key is not None or request.cache_response_s is not None:
            return True
        return self._settings.enabled and request.principal.caches_responses

    def _ttl_s(self, request: GenerationRequest) -> float:
        """Return how old a cached answer may be; 0 if the cache is not used. A header of the request overrides the
        setting of the key."""
        if not self._settings.enabled:
            return 0.0
        if request.cache_response_s is not None:
            return min(request.cache_response_s, self._settings.max_ttl_s)
        return self._settings.ttl_s if request.principal.caches_responses else 0.0

    def figures(self) -> Figures:
        return {
            "response_cache_hits": self.num_hits,
            "response_cache_similar": self.num_similar,
            "response_cache_misses": self.num_misses,
            "idempotent_replays": self.idempotency.num_replayed,
            "idempotency_conflicts": self.idempotency.num_conflicts,
            "response_cache_bytes": self._cache.used,
            "semantic_cache_bytes": self._semantic.used,
        }


def request_fingerprint(request: GenerationRequest, model_fingerprint: bytes) -> bytes:
    """Return the fingerprint of a request: 32 bytes over the prompts, the sampling, the number of answers and the
    model.

    The caller, the tier and the request id do not matter; the caches keep workspaces apart. Order matters everywhere,
    also of the keys of a tool's schema, because a model sees it."""
    content = (
        [(type(prompt).__name__, prompt) for prompt in request.prompts],
        request.sampling,
        request.n,
        request.default_max_tokens,
        request.drops_oldest_turns,
        request.truncates_to,
        request.text,
        request.beams,
    )
    return hashlib.blake2b(model_fingerprint + bytes_of(content), digest_size=32).digest()
