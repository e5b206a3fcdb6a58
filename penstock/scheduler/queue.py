"""Keeps the waiting requests, in order and within bounds. Knows no blocks, budgets or executors.

Requests are ordered by tier (after aging), then by tenant: the tenant with the least service goes first. Within a
tenant, preempted requests go first, then the earlier arrival. A long predicted answer counts as a later arrival. That
shift is at most `aging_s`, so a long request can be overtaken by shorter ones for a bounded time only. A request that
aging has made more urgent leaves its turn to tenants of its own tier with less service. With shares of tiers, the
tier that has started the fewest tokens for its share goes first instead of the most urgent one.
"""

from __future__ import annotations

from collections.abc import Collection
from math import exp, inf

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import Overloaded
from penstock.core.request import Request
from penstock.core.shares import Shares
from penstock.scheduler.keyed_heap import KeyedHeap
from penstock.scheduler.sequence import BATCH_RANK, TIER_RANK, Sequence, State
from penstock.scheduler.tenants import NUM_LENGTH_BINS, TenantAccount, least_served, length_bin

_DRAIN_WINDOW_S = 30.0
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 120.0
_LATEST_NUMBER = 1e15  # of a request; preempted ones are ordered before all times of arrival


class WaitingQueue:
    """Holds the waiting requests. A request is in the tier queue of its rank, or is parked: counted, but never
    returned by `first`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._requests = Shares(config.max_queue_requests)  # members, by tenant
        self._tokens = Shares(config.max_queue_tokens)  # of their prompts
        self._aging_s = config.aging_s
        self._members: dict[int, Sequence] = {}
        self._parked: dict[int, Sequence] = {}
        self._tiers = [_TierQueue() for _ in range(BATCH_RANK + 1)]
        self._shares = None if config.tier_shares is None else _TierShares(config.tier_shares)
        # Members, by the time at which they become one tier more urgent.
        self._promotions: KeyedHeap[Sequence] = KeyedHeap()
        self._drain = _DrainRate()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> Collection[Sequence]:
        return self._members.values()

    @property
    def num_tokens(self) -> int:
        """Return the prompt tokens of members."""
        return self._tokens.used

    def check_room(self, request: Request, num_free_seats: int, now: float) -> None:
        """Raise Overloaded unless one more request may wait, in all and of its tenant. Requests for which there are
        free seats wait only for the next plan, and do not count: an idle engine always accepts work."""
        num_waiting, tenant = len(self._members), request.tenant
        room = self._requests.capacity + num_free_seats
        if num_waiting >= room:
            full = f"The queue is full, at {num_waiting} waiting requests."
        elif self.num_tokens and self.num_tokens + len(request.prompt_token_ids) > self._tokens.capacity:
            full = f"The queue is full, at {self.num_tokens} waiting prompt tokens."
        elif self._requests.is_full_for(tenant, more=num_free_seats) or self._tokens.is_full_for(tenant):
            num_own, num_own_tokens = self._requests.of(tenant), self._tokens.of(tenant)
            full = (
                "The rest of the queue is kept for other workspaces: this one has "
                f"{num_own} waiting requests with {num_own_tokens} prompt tokens."
            )
        else:
            return
        raise Overloaded(
            full,
            hint="Try again later, or raise --max-queue-requests or --max-queue-tokens.",
            retry_after_s=self._drain.seconds_to_serve(num_waiting, now),
        )

    def enter(self, sequence: Sequence, now: float, *, parked: bool = False) -> None:
        if not self._members:
            self._drain.start(now)
        self._members[sequence.number] = sequence
        self._count(sequence, +1)
        sequence.queued_s = now
        if sequence.rank > 0:
            self._promotions.push(sequence.number, self._promotion_s(sequence), sequence)
        if parked:
            self._parked[sequence.number] = sequence
        else:
            self._position(sequence)

    def leave(self, sequence: Sequence, now: float) -> None:
        """Remove a member, which runs or has ended."""
        number = sequence.number
        del self._members[number]
        self._count(sequence, -1)
        sequence.waited_s += now - sequence.queued_s
        self._promotions.discard(number)
        if self._parked.pop(number, None) is None:
            self._tiers[sequence.rank].discard(sequence)
        self._drain.count_one(now)

    def park(self, sequence: Sequence) -> None:
        self._tiers[sequence.rank].discard(sequence)
        self._parked[sequence.number] = sequence

    def unpark(self, sequence: Sequence) -> None:
        del self._parked[sequence.number]
        self._position(sequence)

    def first(self) -> Sequence | None:
        """Return the next request to be admitted, which stays in the queue. Call `promote` first."""
        if len(self._members) == len(self._parked):
            return None
        ranks = range(len(self._tiers)) if self._shares is None else self._shares.order()
        for rank in ranks:
            sequence = self._tiers[rank].first()
            if sequence is not None:
                return self._least_served(sequence)
        return None

    def _least_served(self, aged: Sequence) -> Sequence:
        """Return the request whose turn it is when `aged` is the first of its tier. Age puts a request before more
        urgent tiers' new requests, and not before tenants of its own tier with less service: a tenant with a long
        queue would keep all others waiting. With shares, every tier has its turn anyway."""
        found, own_rank = aged, TIER_RANK[aged.request.tier]
        if self._shares is None:
            for rank in range(aged.rank + 1, own_rank + 1):
                other = self._tiers[rank].first()
                if other is not None and other.account.service < found.account.service:
                    found = other
        return found

    def services(self) -> list[dict[str, int]]:
        """Return, for each tier, the service of the tenants that have requests to be admitted."""
        return [tier.services() for tier in self._tiers]

    def start(self, sequence: Sequence, now: float) -> None:
        """Remove a member, which runs from now on."""
        if self._shares is not None:
            self._shares.count(sequence.rank, sequence.predicted_length)
        self.leave(sequence, now)

    def promote(self, now: float) -> None:
        """Make each request that waited another `aging_s` one tier more urgent."""
        promotions = self._promotions
        while (due_s := promotions.first_key()) is not None and due_s <= now:
            sequence = promotions.first()
            assert sequence is not None
            parked = sequence.number in self._parked
            if not parked:
                self._tiers[sequence.rank].discard(sequence)
            sequence.rank -= 1
            if not parked:
                self._position(sequence)
            if sequence.rank > 0:
                promotions.push(sequence.number, self._promotion_s(sequence), sequence)
            else:
                promotions.discard(sequence.number)

    def check_integrity(self) -> None:
        assert self.num_tokens == sum(sequence.num_prompt for sequence in self._members.values())
        assert self._parked.keys() <= self._members.keys()
        positioned = [sequence for tier in self._tiers for sequence in tier.sequences()]
        assert len(positioned) + len(self._parked) == len(self._members)
        for rank, tier in enumerate(self._tiers):
            for sequence in tier.sequences():
                assert self._members.get(sequence.number) is sequence
                assert sequence.number not in self._parked
                assert sequence.rank == rank
        for number, sequence in self._members.items():
            assert (number in self._promotions) == (sequence.rank > 0)
            assert (number in self._parked) == (sequence.state in (State.HELD, State.SETTLING))

    def _count(self, sequence: Sequence, sign: int) -> None:
        tenant = sequence.request.tenant
        self._requests.add(tenant, sign)
        self._tokens.add(tenant, sign * sequence.num_prompt)

    def _position(self, sequence: Sequence) -> None:
        length = sequence.predicted_length - sequence.num_prompt
        shift_s = self._aging_s * length_bin(length) / NUM_LENGTH_BINS
        if self._shares is not None and self._tiers[sequence.rank].is_empty:
            self._shares.enter(sequence.rank, [not tier.is_empty for tier in self._tiers])
        self._tiers[sequence.rank].push(sequence, sequence.arrival_s + shift_s)

    def _promotion_s(self, sequence: Sequence) -> float:
        num_promotions = TIER_RANK[sequence.request.tier] - sequence.rank + 1
        return sequence.queued_s + self._aging_s * num_promotions - sequence.waited_s


class _TierQueue:
    """Orders the requests of one tier: tenants by service, each with its own line. Preempted requests are the first
    of their line, by age."""

    __slots__ = ("_lines", "_tenants")

    def __init__(self) -> None:
        self._lines: dict[int, KeyedHeap[Sequence]] = {}  # by account number; none is empty
        # Those with a line; a key may lag behind `service`.
        self._tenants: KeyedHeap[TenantAccount] = KeyedHeap()

    def push(self, sequence: Sequence, order_s: float) -> None:
        if sequence.has_started:
            order_s = sequence.number - _LATEST_NUMBER
        account = sequence.account
        line = self._lines.get(account.number)
        if line is None:
            line = self._lines[account.number] = KeyedHeap()
            self._tenants.push(account.number, account.service, account)
        line.push(sequence.number, order_s, sequence)

    def discard(self, sequence: Sequence) -> None:
        account_number = sequence.account.number
        line = self._lines[account_number]
        line.discard(sequence.number)
        if not line:
            del self._lines[account_number]
            self._tenants.discard(account_number)

    def first(self) -> Sequence | None:
        if not self._lines:
            return None
        account = least_served(self._tenants)
        return None if account is None else self._lines[account.number].first()

    @property
    def is_empty(self) -> bool:
        return not self._lines

    def services(self) -> dict[str, int]:
        return {account.tenant: account.service for account in self._tenants.items()}

    def sequences(self) -> list[Sequence]:
        return [item for line in self._lines.values() for item in line.items()]


class _TierShares:
    """Counts the started tokens of each tier, divided by the tier's share. A tier without a share goes last."""

    __slots__ = ("_served", "_shares")

    def __init__(self, shares: str) -> None:
        self._shares = [float(share) for share in shares.split(",")]
        self._served = [0.0 if share else inf for share in self._shares]  # tokens over the share

    def order(self) -> list[int]:
        """Return the ranks, the one that is furthest behind first."""
        return sorted(range(len(self._served)), key=lambda rank: (self._served[rank], rank))

    def count(self, rank: int, num_tokens: int) -> None:
        if self._shares[rank]:
            self._served[rank] += num_tokens / self._shares[rank]

    def enter(self, rank: int, waiting: list[bool]) -> None:
        """Record that a tier has waiting requests again. Its idle time gives no credit."""
        served = zip(self._served, waiting, strict=True)
        others = [tokens for tokens, is_waiting in served if is_waiting and tokens < inf]
        if others:
            self._served[rank] = max(self._served[rank], min(others))


class _DrainRate:
    """Measures how many requests leave the queue per second, over the recent time in which requests waited."""

    __slots__ = ("_count", "_last_s", "_window_s")

    def __init__(self) -> None:
        self._count = 0.0
        self._window_s = 0.0
        self._last_s = 0.0

    def start(self, now: float) -> None:
        """Begin to measure when a request waits again. Idle time before does not count."""
        self._last_s = now

    def count_one(self, now: float) -> None:
        self._count, self._window_s = self._as_of(now)
        self._count += 1.0
        self._last_s = max(self._last_s, now)

    def seconds_to_serve(self, num_requests: int, now: float) -> float:
        """Predict how long the requests that wait now will take, within sane bounds for a Retry-After. Changes
        nothing."""
        count, window_s = self._as_of(now)
        if count:
            expected_s = num_requests * window_s / count
        else:
            # No request has left yet: predict at least as long as they have waited so far.
            expected_s = now - self._last_s
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, expected_s))

    def _as_of(self, now: float) -> tuple[float, float]:
        """Return both sums, decayed by the time since their last change."""
        decay = exp(-max(0.0, now - self._last_s) / _DRAIN_WINDOW_S)
        return self._count * decay, self._window_s * decay + _DRAIN_WINDOW_S * (1.0 - decay)
