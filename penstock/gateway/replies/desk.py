"""Decides, before an engine works, whether a request has been answered already.

An idempotency key is asked first, then, for callers that opted in, the response cache. A request with neither passes
at the cost of a few comparisons. Opting in is enough: a sampled answer is cached like a greedy one, because only the
client knows whether another sample would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.clock import Clock, SystemClock
from penstock.gateway.prompts import GenerationRequest
from penstock.gateway.replies.cache import AnswerCache
from penstock.gateway.replies.fingerprint import request_fingerprint
from penstock.gateway.replies.idempotency import IdempotentAnswers
from penstock.gateway.replies.recording import decode_answer
from penstock.gateway.replies.replay import RecordingAnswer, ReplayedAnswer
from penstock.gateway.replies.settings import IdempotencySettings, ResponseCacheSettings
from penstock.gateway.replies.source import AnswerSource
from penstock.gateway.stream import AnswerStream


class ReplyDesk(Collector):
    """Also a collector of metrics: hits, misses, and what is kept."""

    def __init__(
        self,
        cache: ResponseCacheSettings | None = None,
        idempotency: IdempotentAnswers | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._settings = cache or ResponseCacheSettings()
        self._cache = AnswerCache(self._settings.max_bytes)
        self.idempotency = idempotency or IdempotentAnswers(IdempotencySettings())
        self._clock = clock or SystemClock()
        self.num_hits = 0
        self.num_misses = 0

    def apply(self, cache: ResponseCacheSettings, idempotency: IdempotencySettings) -> None:
        """New settings, from now on. What no longer fits is dropped."""
        self._settings = cache
        self._cache.shrink_to(cache.max_bytes if cache.enabled else 0)
        self.idempotency.apply(idempotency)

    def may_know(self, wish: GenerationRequest) -> bool:
        """Whether `answer` could do anything but have the request generated."""
        return self._is_idempotent(wish) or self._ttl_s(wish) > 0

    async def answer(self, wish: GenerationRequest, source: AnswerSource) -> AnswerStream:
        ttl_s = self._ttl_s(wish)
        fingerprint = request_fingerprint(wish, source.model_fingerprint)
        if ttl_s > 0:
            source = replace(source, generate=partial(self._cached, wish, fingerprint, ttl_s, source))
        if self._is_idempotent(wish):
            return await self.idempotency.answer(wish, fingerprint, source)
        return await source.generate()

    async def _cached(
        self, wish: GenerationRequest, fingerprint: bytes, ttl_s: float, source: AnswerSource
    ) -> AnswerStream:
        workspace_id = wish.principal.workspace_id
        data = self._cache.get(workspace_id, fingerprint, self._clock.now(), ttl_s)
        if data is not None:
            self.num_hits += 1
            return ReplayedAnswer(decode_answer(data), await source.open_account())
        self.num_misses += 1

        def keep(answer: bytes) -> None:
            if self._settings.enabled and len(answer) <= self._settings.max_entry_bytes:
                self._cache.put(workspace_id, fingerprint, answer, self._clock.now(), ttl_s)

        return RecordingAnswer(await source.generate(), self._settings.max_entry_bytes, keep)

    def _is_idempotent(self, wish: GenerationRequest) -> bool:
        return wish.idempotency_key is not None and self.idempotency.settings.enabled

    def _ttl_s(self, wish: GenerationRequest) -> float:
        """0 where the cache is not to be used. What the request says goes before what its key says."""
        if not self._settings.enabled:
            return 0.0
        if wish.cache_response_s is not None:
            return min(wish.cache_response_s, self._settings.max_ttl_s)
        return self._settings.ttl_s if wish.principal.caches_responses else 0.0

    def collect(self) -> Iterator[Metric]:
        for name, help_text, value in (
            ("response_cache_hits", "Requests answered from the response cache.", self.num_hits),
            ("response_cache_misses", "Requests that the response cache could not answer.", self.num_misses),
            (
                "idempotent_replays",
                "Requests that got an earlier one's answer.",
                self.idempotency.num_replayed,
            ),
            (
                "idempotency_conflicts",
                "Idempotency keys that came with another request.",
                self.idempotency.num_conflicts,
            ),
        ):
            yield CounterMetricFamily(f"penstock_{name}", help_text, value=value)
        yield GaugeMetricFamily(
            "penstock_response_cache_bytes",
            "Bytes of answers in the response cache.",
            value=self._cache.num_bytes,
        )
