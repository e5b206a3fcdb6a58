"""Chooses the replica from which a request's KV should come. Moves nothing: engines do.

Prefill replicas have a router of their own, which knows their caches and load. A request counts at its prefill
replica until its first token. Replicas of the same revision are paired, since the KV of other weights is useless. If
a revision has no prefill replica, prefill replicas of another revision compute for it, as long as the two differ only
in settings such as the number of ranks.

Three ways to a first token are compared in predicted seconds: the serving replica computes the missing part; it
fetches the part that another replica has cached and computes the rest; or a prefill replica computes the prompt and
sends its KV meanwhile. A decode replica leaves long prompts to others even if that is no quicker, since a prefill
would delay every answer that the replica streams.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineStats
from penstock.dispatch.replicas import ReplicaRecord, ReplicaTable
from penstock.router import Decision, RandomSource, Router, RoutingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    min_prefill_tokens: int = 256  # uncached; below, a prompt is computed where it is served
    min_saved_s: float = 0.005  # that a fetch must save
    min_saved_share: float = 0.2  # of the time of computing
    latency_s: float = 0.005  # of a question and its answer
    # Until a transfer has been measured. Too fast a guess costs one fetch; too slow a guess would never be corrected.
    first_bytes_per_s: float = 1e10
    speed_half_life_s: float = 60.0  # of a measurement, without newer ones
    # The largest factor by which a prefill replica may delay a first token; a busier pool is not used.
    max_slowdown: float = 2.0
    allowed_delay_s: float = 0.25


_KEPT_SHARE = 0.7  # of earlier bytes and seconds, when a new transfer is measured


class SourceKind(enum.StrEnum):
    """The source of a prompt's KV."""

    HERE = "here"
    FETCH = "fetch"  # another replica sends its cached blocks; the rest is computed here
    PREFILL = "prefill"  # a prefill replica computes the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The known facts about one request and the replica that will serve it."""

    num_tokens: int  # prompt, and answer so far
    cached_here: int  # tokens
    queue_here_s: float
    token_here_s: float  # for each token that is computed
    kv_bytes_per_token: int
    bytes_per_s: float  # of transfers to the serving replica
    cached_elsewhere: int = 0  # the most tokens that one other replica has
    # Predicted, until a prefill replica has computed it; None without such replicas.
    prefill_s: float | None = None
    is_for_decode: bool = False  # the serving replica should not compute prompts


def cheapest_source(options: Options, config: TransferConfig) -> SourceKind:
    missing = options.num_tokens - options.cached_here
    here_s = missing * options.token_here_s
    if options.is_for_decode and options.prefill_s is not None and missing >= config.min_prefill_tokens:
        limit_s = config.max_slowdown * (options.queue_here_s + here_s) + config.allowed_delay_s
        if options.prefill_s + config.latency_s <= limit_s:
            return SourceKind.PREFILL
    fetched = options.cached_elsewhere - options.cached_here
    if fetched <= 0:
        return SourceKind.HERE
    transfer_s = config.latency_s + fetched * options.kv_bytes_per_token / options.bytes_per_s
    saved_s = fetched * options.token_here_s - transfer_s
    if saved_s >= config.min_saved_s and saved_s >= config.min_saved_share * here_s:
        return SourceKind.FETCH
    return SourceKind.HERE


@dataclass(slots=True)
class _Measured:
    num_bytes: float  # read recently; earlier reads decay
    seconds: float
    at_s: float


class TransferSpeeds:
    """The speeds at which replicas read KV of others, as their heartbeats report."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._totals: dict[str, tuple[int, float]] = {}  # bytes and seconds of the last heartbeat
        self._measured: dict[str, _Measured] = {}

    def heard(self, replica_id: str, stats: EngineStats, now: float) -> None:
        num_bytes, seconds = self._totals.get(replica_id, (0, 0.0))
        if stats.kv_read_bytes == num_bytes:
            return
        self._totals[replica_id] = stats.kv_read_bytes, stats.kv_read_s
        new_bytes, new_s = stats.kv_read_bytes - num_bytes, stats.kv_read_s - seconds
        if new_bytes <= 0 or new_s <= 0.0:  # the replica has restarted
            return
        before = self._measured.get(replica_id)
        kept = 0.0 if before is None else _KEPT_SHARE
        self._measured[replica_id] = _Measured(
            new_bytes + (kept * before.num_bytes if before else 0.0),
            new_s + (kept * before.seconds if before else 0.0),
            now,
        )

    def keep(self, replica_ids: Container[str]) -> None:
        """Forget all other replicas."""
        self._totals = {name: total for name, total in self._totals.items() if name in replica_ids}
        self._measured = {name: found for name, found in self._measured.items() if name in replica_ids}

    def bytes_per_s(self, replica_id: str, now: float) -> float:
        """Return the measured speed. Without newer measurements it returns to the initial guess, so that a link that
        was slow once is tried again."""
        first = self._config.first_bytes_per_s
        found = self._measured.get(replica_id)
        if found is None:
            return first
        weight = 0.5 ** max(0.0, (now - found.at_s) / self._config.speed_half_life_s)
        return float((found.num_bytes / found.seconds) ** weight * first ** (1.0 - weight))


class KVSources:
    def __init__(self, table: ReplicaTable, rng: RandomSource) -> None:
        self.chosen: Counter[str] = Counter()  # by kind of source
        self._table = table
        self._rng = rng
        self._config = TransferConfig()
        self._prefilling: set[str] = set()  # requests that count at a prefill replica
        self.speeds = TransferSpeeds(self._config)

    def choose(
        self, request: RoutingRequest, decision: Decision, record: ReplicaRecord, now: float
    ) -> KVSource | None:
        """Return the source of KV for a request that goes to the replica of `record`; None: the replica computes all
        KV."""
        status = record.status
        if not status.kv_endpoint:
            return None
        request = replace(request, revision=record.revision, excluded=frozenset())
        lender, cached_there = self._best_lender(request, record)
        prefill = self._choose_prefill(request, status.kv_kind, now) if status.role == "decode" else None
        load = self._table.router.load(record.id)
        options = Options(
            num_tokens=request.num_prompt_tokens,
            cached_here=decision.matched_tokens,
            queue_here_s=0.0 if load is None else load.queue_s,
            token_here_s=0.0 if load is None else load.token_s,
            kv_bytes_per_token=status.kv_bytes_per_token,
            bytes_per_s=self.speeds.bytes_per_s(record.id, now),
            cached_elsewhere=cached_there,
            prefill_s=None if prefill is None else prefill.predicted_ttft_s,
            is_for_decode=status.role == "decode",
        )
        kind = cheapest_source(options, self._config)
        if kind is not SourceKind.PREFILL:
            self.ended(request.id, now)
        self.chosen[kind] += 1
        if kind is SourceKind.PREFILL and prefill is not None:
            return KVSource(self._endpoint(prefill.replica_id), computes=True)
        if kind is SourceKind.FETCH and lender is not None:
            return KVSource(self._endpoint(lender), computes=False)
        return None

    def choose_to_serve(self, request: RoutingRequest, now: float) -> Decision | None:
        """Choose a prefill replica that answers a request by itself, because no other replica can; None without one.
        Engines do not know their roles. The request counts at the replica until its first token."""
        try:
            decision = self._table.prefill_router.choose(request, self._table.prefilling, now, self._rng)
        except PenstockError:
            return None
        self._prefilling.add(request.id)
        return decision

    def ended(self, request_id: str, now: float) -> None:
        """Stop counting a request that has its first token, or has left its replica."""
        if request_id in self._prefilling:
            self._prefilling.discard(request_id)
            self._table.prefill_router.ended(request_id, now)

    def _best_lender(self, request: RoutingRequest, record: ReplicaRecord) -> tuple[str | None, int]:
        """Return the replica that has most of the prompt cached, and the number of tokens that it has."""
        best, most = None, 0
        for router in (self._table.router, self._table.prefill_router):
            for replica_id, num_tokens in _matches(router, request).items():
                if num_tokens <= most or replica_id == record.id or not self._endpoint(replica_id):
                    continue
                if not self._has_other_kind(replica_id, record.status.kv_kind):
                    best, most = replica_id, num_tokens
        return best, most

    def _choose_prefill(self, request: RoutingRequest, kv_kind: str, now: float) -> Decision | None:
        """Choose a prefill replica, and count the request there."""
        replicas = self._table.prefilling
        excluded = frozenset(
            replica.id
            for replica in replicas
            if not self._endpoint(replica.id) or self._has_other_kind(replica.id, kv_kind)
        )
        if not any(replica.revision == request.revision for replica in replicas):
            request = replace(request, revision=None)
            excluded |= {replica.id for replica in replicas if not self._has_kind(replica.id, kv_kind)}
        try:
            decision = self._table.prefill_router.choose(
                replace(request, excluded=excluded, expected_output_tokens=1), replicas, now, self._rng
            )
        except PenstockError:  # there is no prefill replica, or none can take the request
            return None
        self._prefilling.add(request.id)
        return decision

    def _has_kind(self, replica_id: str, kv_kind: str) -> bool:
        record = self._table.records.get(replica_id)
        return record is not None and bool(kv_kind) and record.status.kv_kind == kv_kind

    def _has_other_kind(self, replica_id: str, kv_kind: str) -> bool:
        """Return whether KV of a replica is known to be of no use, though the revisions may be the same: a host may
        have other weights at the same path."""
        record = self._table.records.get(replica_id)
        other = "" if record is None else record.status.kv_kind
        return bool(kv_kind and other) and other != kv_kind

    def _endpoint(self, replica_id: str) -> str:
        record = self._table.records.get(replica_id)
        return "" if record is None else record.status.kv_endpoint


def _matches(router: Router, request: RoutingRequest) -> dict[str, int]:
    try:
        return router.matches(request)
    except PenstockError:  # no replica there serves the model
        return {}
