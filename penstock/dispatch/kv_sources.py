"""Which other replica a request's KV should come from. Moves nothing: engines do.

Prefill replicas have a router of their own: their caches and load are known as those of other replicas are, and a
request counts at its prefill replica until its first token. Only replicas of the same revision are paired, since the
KV of other weights is useless.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.dispatch.replicas import ReplicaRecord, ReplicaTable
from penstock.router import (
    Decision,
    Options,
    RandomSource,
    Router,
    RoutingRequest,
    TransferConfig,
    Way,
    cheapest_way,
)


class KVSources:
    def __init__(self, table: ReplicaTable, rng: RandomSource, config: TransferConfig | None = None) -> None:
        self.ways: Counter[str] = Counter()  # how the KV of requests was to come about
        self._table = table
        self._rng = rng
        self._config = config or TransferConfig()
        self._prefilling: set[str] = set()  # requests that count at a prefill replica

    def choose(
        self, request: RoutingRequest, decision: Decision, record: ReplicaRecord, now: float
    ) -> KVSource | None:
        """Where a request that goes to the replica of `record` gets its KV; None: the replica computes everything."""
        status = record.status
        if not status.kv_endpoint:
            return None
        request = replace(request, revision=record.revision, excluded=frozenset())
        lender, cached_there = self._best_lender(request, record)
        prefill = self._choose_prefill(request, now) if status.role == "decode" else None
        ledger = self._table.router.ledger(record.id)
        options = Options(
            num_tokens=request.num_prompt_tokens,
            cached_here=decision.matched_tokens,
            queue_here_s=0.0 if ledger is None else ledger.queue_s,
            token_here_s=0.0 if ledger is None else ledger.token_s,
            kv_bytes_per_token=status.kv_bytes_per_token,
            cached_elsewhere=cached_there,
            prefill_s=None if prefill is None else prefill.predicted_ttft_s,
            is_for_decode=status.role == "decode",
        )
        way = cheapest_way(options, self._config)
        if way is not Way.PREFILL:
            self.ended(request.id, now)
        self.ways[way] += 1
        if way is Way.PREFILL and prefill is not None:
            return KVSource(self._endpoint(prefill.replica_id), computes=True)
        if way is Way.FETCH and lender is not None:
            return KVSource(self._endpoint(lender), computes=False)
        return None

    def ended(self, request_id: str, now: float) -> None:
        """A request has its first token, or has left its replica."""
        if request_id in self._prefilling:
            self._prefilling.discard(request_id)
            self._table.prefill_router.ended(request_id, now)

    def _best_lender(self, request: RoutingRequest, record: ReplicaRecord) -> tuple[str | None, int]:
        """The replica that has most of the prompt, of all that could lend it, and how many tokens."""
        best, most = None, 0
        for router in (self._table.router, self._table.prefill_router):
            for replica_id, num_tokens in _matches(router, request).items():
                if num_tokens > most and replica_id != record.id and self._endpoint(replica_id):
                    best, most = replica_id, num_tokens
        return best, most

    def _choose_prefill(self, request: RoutingRequest, now: float) -> Decision | None:
        """Choose a prefill replica, and count the request there."""
        replicas = self._table.prefilling
        excluded = frozenset(replica.id for replica in replicas if not self._endpoint(replica.id))
        try:
            decision = self._table.prefill_router.choose(
                replace(request, excluded=excluded, expected_output_tokens=1), replicas, now, self._rng
            )
        except PenstockError:  # there is no prefill replica, or none can take the request
            return None
        self._prefilling.add(request.id)
        return decision

    def _endpoint(self, replica_id: str) -> str:
        record = self._table.records.get(replica_id)
        return "" if record is None else record.status.kv_endpoint


def _matches(router: Router, request: RoutingRequest) -> dict[str, int]:
    try:
        return router.matches(request)
    except PenstockError:  # no replica there serves the model
        return {}
