"""Which other replica a request's KV should come from, as one gateway knows it. Moves nothing: engines do.

Prefill replicas have a router of their own: what they have cached and how busy they are is known as it is of others,
and a request counts there until its first token is there. Only replicas of the same revision are paired, since the KV
of other weights is of no use.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from penstock.cluster.link import Link
from penstock.cluster.roster import Roster
from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.router import (
    Decision,
    Options,
    Router,
    RoutingRequest,
    TransferConfig,
    Way,
    cheapest_way,
)


class KVSources:
    def __init__(
        self, roster: Roster, router: Router, rng: Random, config: TransferConfig | None = None
    ) -> None:
        self.ways: Counter[str] = Counter()  # that requests were sent
        self._roster = roster
        self._router = router  # of those that serve
        self._rng = rng
        self._config = config or TransferConfig()
        self._prefilling: set[str] = set()  # requests that count at a prefill replica

    def choose(self, request: RoutingRequest, decision: Decision, link: Link, now: float) -> KVSource | None:
        """For a request that goes to the replica of `link`. None: it computes everything itself."""
        ready = link.client.ready
        if ready is None or not ready.kv_endpoint:
            return None
        wish = replace(request, revision=link.member.replica.revision, excluded=frozenset())
        options = self._options(wish, decision, link, ready.kv_bytes_per_token)
        lender, cached_there = self._best_lender(wish, link)
        options = replace(options, cached_elsewhere=cached_there)
        prefill = self._choose_prefill(wish, now) if options.is_for_decode else None
        if prefill is not None:
            options = replace(options, prefill_s=prefill.predicted_ttft_s)
        way = cheapest_way(options, self._config)
        if way is not Way.PREFILL:
            self.ended(request.id, now)
        self.ways[way] += 1
        if way is Way.PREFILL and prefill is not None:
            return self._source(prefill.replica_id, computes=True)
        if way is Way.FETCH and lender is not None:
            return self._source(lender, computes=False)
        return None

    def ended(self, request_id: str, now: float) -> None:
        """A request has its first token, or has left its replica."""
        if request_id in self._prefilling:
            self._prefilling.discard(request_id)
            self._roster.prefill_router.ended(request_id, now)

    def _options(
        self, wish: RoutingRequest, decision: Decision, link: Link, kv_bytes_per_token: int
    ) -> Options:
        ledger = self._router.ledger(link.id)
        return Options(
            num_tokens=wish.num_prompt_tokens,
            cached_here=decision.matched_tokens,
            queue_here_s=0.0 if ledger is None else ledger.queue_s,
            token_here_s=0.0 if ledger is None else ledger.token_s,
            kv_bytes_per_token=kv_bytes_per_token,
            is_for_decode=link.member.role == "decode",
        )

    def _best_lender(self, wish: RoutingRequest, link: Link) -> tuple[str | None, int]:
        """Who has most of the prompt, of all that could lend it, and how many tokens."""
        best, most = None, 0
        for router in (self._router, self._roster.prefill_router):
            for replica_id, num_tokens in _matches(router, wish).items():
                if num_tokens > most and replica_id != link.id and self._can_lend(replica_id):
                    best, most = replica_id, num_tokens
        return best, most

    def _choose_prefill(self, wish: RoutingRequest, now: float) -> Decision | None:
        """Counts the request there."""
        replicas = self._roster.prefill_replicas
        excluded = frozenset(replica.id for replica in replicas if not self._can_lend(replica.id))
        try:
            decision = self._roster.prefill_router.choose(
                replace(wish, excluded=excluded, expected_output_tokens=1), replicas, now, self._rng
            )
        except PenstockError:  # there is none, or none that can take it
            return None
        self._prefilling.add(wish.id)
        return decision

    def _can_lend(self, replica_id: str) -> bool:
        link = self._roster.links.get(replica_id)
        return link is not None and link.client.ready is not None and bool(link.client.ready.kv_endpoint)

    def _source(self, replica_id: str, *, computes: bool) -> KVSource | None:
        ready = self._roster.links[replica_id].client.ready
        return None if ready is None else KVSource(ready.kv_endpoint, computes)


def _matches(router: Router, wish: RoutingRequest) -> dict[str, int]:
    try:
        return router.matches(wish)
    except PenstockError:  # nobody there serves the model
        return {}
