"""Remembers the last requests of a gateway process, with the times of their parts: where each request waited, and for
what.

Holds no prompt unless the operator asked for that. Counts are bounded: the oldest requests are forgotten.

`RequestRecorder` writes down the requests of a fleet so that the simulator can repeat them: when each came, how long
it and its answer were, and which prefixes it shared. Never text, tokens or names.

A line is one request that was answered, in the format of Mooncake's traces (`timestamp` in milliseconds,
`input_length`, `output_length`, `hash_ids`) with three more keys: `block_tokens`, the size of the blocks that
`hash_ids` stand for; `tenant`; and `tier`. Hashes are keyed with a secret that ends with the process. They show which
requests of one file begin alike, and do not allow anyone to check a guess of a prompt or of a tenant.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import chain, starmap
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.hashing import chain_hashes
from penstock.core.lru import LruCache
from penstock.core.request import Request, Tier
from penstock.dispatch import Send
from penstock.dispatch.actions import Attempt
from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.prompts import GenerationRequest
from penstock.gateway.siblings import Siblings
from penstock.gateway.telemetry import MAX_LOGGED_PROMPT_CHARS, prompt_text

TOPIC = "requests"
MAX_ENDED = 500  # requests of each process
MAX_RUNNING = 5000  # records of requests that have begun; a record beyond that is dropped
MAX_ROUTES = 8  # attempts of one request that are shown
MAX_PROMPTS = 500
Status = Literal["running", "completed", "cancelled", "failed"]


class Route(msgspec.Struct, frozen=True):
    """One attempt: the replica that a request went to, and why."""

    replica_id: str
    reason: str
    matched_tokens: int  # of the prompt, expected in the replica's cache
    after_s: float  # since the request was admitted


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Its timeline: `before_engine_s` until the engine had it, `queue_s` in the engine's queue,
    `prefill_s` until the first token, then the rest of `duration_s`."""

    id: str
    at: float  # Unix seconds: admitted, with its prompts tokenized
    model: str
    tier: Tier
    endpoint: str
    workspace_id: str
    key_id: str
    status: Status
    max_output_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    duration_s: float | None = None  # None while it runs
    first_token_s: float | None = None
    before_engine_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    chunks: tuple[tuple[float, int], ...] = ()  # of the prefill: seconds after its begin, and tokens
    waited_for: str | None = None  # seats, tokens, blocks or prefix
    routes: tuple[Route, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    error_code: str | None = None
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    is_replayed: bool = False  # a stored answer was replayed
    prompt: str | None = None  # only where the operator asked for prompts to be shown
    object: Literal["request"] = "request"


class _Running:
    __slots__ = ("at", "claim", "routes")

    def __init__(self, claim: Claim, at: float) -> None:
        self.claim = claim
        self.at = at
        self.routes: list[Route] = []


_Ended: TypeAlias = tuple[_Running, Outcome, str | None]  # with the prompt, where prompts are shown
_decode = msgspec.json.Decoder(list[RequestView]).decode


class RecentRequests:
    """An `accounts.Observer`. Gateways report a request when its account opens and ends; the fleet reports every
    replica that the request goes to."""

    def __init__(
        self,
        siblings: Siblings | None = None,
        *,
        keeps_prompts: bool = False,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._wall_time = wall_time
        self.keeps_prompts = keeps_prompts
        self._running: dict[str, _Running] = {}
        self._ended: deque[_Ended] = deque(maxlen=MAX_ENDED)
        self._prompts = LruCache[str, str](MAX_PROMPTS)
        self._siblings = siblings or Siblings()
        self._siblings.answers[TOPIC] = self._encoded

    def begin(self, claim: Claim) -> Callable[[Outcome], None]:
        running = _Running(claim, self._wall_time())
        if len(self._running) < MAX_RUNNING:
            self._running[claim.request_id] = running

        def settled(outcome: Outcome) -> None:
            if self._running.get(claim.request_id) is running:
                del self._running[claim.request_id]
            prompt = self._prompts.peek(claim.request_id)
            self._ended.append((running, outcome, prompt))

        return settled

    def note_prompt(self, request: GenerationRequest) -> None:
        """Keep the beginning of a request's prompts. Called only where the operator asked for that."""
        if request.request_id:
            texts = [prompt_text(prompt)[:MAX_LOGGED_PROMPT_CHARS] for prompt in request.prompts[:4]]
            self._prompts.put(request.request_id, "\n\n".join(texts))

    def note_sent(self, send: Send) -> None:
        """Note the replica that a request goes to. An engine's id for a request ends with the number of the
        answer."""
        running = self._running.get(send.request.id.rpartition("-")[0])
        if running is not None and len(running.routes) < MAX_ROUTES:
            after_s = max(0.0, self._wall_time() - running.at)
            running.routes.append(Route(send.replica_id, send.reason, send.matched_tokens, after_s))

    async def latest(
        self, limit: int, *, status: str | None = None, model: str | None = None
    ) -> list[RequestView]:
        """Return the last requests of all processes, the newest first."""
        answers = await self._siblings.ask(TOPIC)
        found = chain.from_iterable(map(_decode, answers))
        wanted = [
            view
            for view in found
            if (status is None or view.status == status) and (model is None or view.model == model)
        ]
        wanted.sort(key=lambda view: view.at, reverse=True)
        return wanted[:limit]

    def _encoded(self, detail: str) -> bytes:
        running = (_begun(each, self._prompts.peek(name)) for name, each in self._running.items())
        views: Iterable[RequestView] = chain(starmap(_ended, self._ended), running)
        return msgspec.json.encode(list(views))


def _begun(running: _Running, prompt: str | None) -> RequestView:
    claim = running.claim
    return RequestView(
        id=claim.request_id,
        at=running.at,
        model=claim.model,
        tier=claim.tier,
        endpoint=claim.endpoint,
        workspace_id=claim.principal.workspace_id,
        key_id=claim.principal.key_id,
        status="running",
        max_output_tokens=claim.max_output_tokens,
        prompt_tokens=claim.input_tokens,
        routes=tuple(running.routes),
        prompt=prompt,
    )


def _ended(running: _Running, outcome: Outcome, prompt: str | None) -> RequestView:
    prefill = outcome.prefill
    before_engine_s = None
    if outcome.first_token_s is not None and outcome.queue_s is not None and prefill is not None:
        before_engine_s = max(0.0, outcome.first_token_s - outcome.queue_s - prefill.seconds)
    return msgspec.structs.replace(
        _begun(running, prompt),
        status=outcome.status,
        cached_tokens=outcome.usage.cached_tokens,
        completion_tokens=outcome.usage.completion_tokens,
        duration_s=outcome.duration_s,
        first_token_s=outcome.first_token_s,
        before_engine_s=before_engine_s,
        queue_s=outcome.queue_s,
        prefill_s=prefill.seconds if prefill else None,
        chunks=prefill.chunks if prefill else (),
        waited_for=prefill.waited_for if prefill else None,
        finish_reasons=tuple(str(reason) for reason in outcome.finish_reasons),
        error_code=outcome.error_code,
        draft_tokens=outcome.draft_tokens,
        accepted_draft_tokens=outcome.accepted_draft_tokens,
        is_replayed=outcome.is_cached,
    )


logger = logging.getLogger(__name__)

BLOCK_TOKENS = 64
MAX_BLOCKS = 4096  # of one prompt
MAX_RECORDED = 50_000  # requests that have not ended; beyond, the oldest are not recorded
_ID_BYTES = 6  # as a number, exact in every JSON reader


class _Recorded:
    __slots__ = ("at_s", "num_output_tokens")

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.num_output_tokens = 0  # of attempts that failed; their tokens are part of the answer


class RequestRecorder:
    """Implements `cluster.fleet.FleetObserver`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"Cannot record requests in {path}: {error.strerror}.") from error
        self._clock = clock
        self._began_s = clock()
        self._secret = secrets.token_bytes(16)
        self._running: dict[str, _Recorded] = {}
        self._is_broken = False

    def close(self) -> None:
        if not self._is_broken:
            self._is_broken = True
            os.close(self._file)

    def arrived(self, request: Request, uncached_tokens: int) -> None:
        if len(self._running) >= MAX_RECORDED:
            del self._running[next(iter(self._running))]
        self._running[request.id] = _Recorded(self._clock())

    def first_token(self, request: Request, replica_id: str, revision: str, ttft_s: float) -> None:
        pass

    def ended(self, attempt: Attempt) -> None:
        running = self._running.get(attempt.request.id)
        if running is None or self._is_broken:
            return
        running.num_output_tokens += len(attempt.output_token_ids)
        if attempt.finish_reason is None:
            return  # tried again elsewhere, or never answered
        del self._running[attempt.request.id]
        line = self._line(attempt.request, running)
        try:
            os.write(self._file, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            logger.warning("requests are no longer recorded: %s", error.strerror)
            self.close()

    def _line(self, request: Request, running: _Recorded) -> dict[str, object]:
        tokens = request.key_token_ids
        root = self._keyed(request.prefix_salt)
        hashes = chain_hashes(root, tokens[: BLOCK_TOKENS * MAX_BLOCKS], BLOCK_TOKENS)
        return {
            "timestamp": round((running.at_s - self._began_s) * 1e3, 3),
            "input_length": len(tokens),
            "output_length": running.num_output_tokens,
            "hash_ids": [int.from_bytes(each[:_ID_BYTES], "little") for each in hashes],
            "block_tokens": BLOCK_TOKENS,
            "tenant": self._keyed(request.tenant)[:_ID_BYTES].hex(),
            "tier": request.tier.value,
        }

    def _keyed(self, text: str) -> bytes:
        return blake2b(text.encode(), digest_size=16, key=self._secret).digest()
