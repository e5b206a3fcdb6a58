"""Records how much service each tenant received, and how long its answers were. Knows no blocks, queues or tiers.

Each tenant has a virtual counter of the service it received. Within a tier, the tenant with the smallest counter
goes first. A tenant that becomes active starts at no less than the smallest counter of the active tenants, so that
idle time is not credit. A tenant that becomes idle keeps its counter, so that a pause does not wipe out a debt.

Lengths of answers fall into bins whose edges double, which is precise enough for a guess. Old answers decay, so that
a few hundred answers are enough to learn a tenant's new behaviour.
"""

from __future__ import annotations

from typing import TypeAlias

from penstock.core.engine_config import LengthBins
from penstock.core.request import Request
from penstock.scheduler.keyed_heap import KeyedHeap

# An output token costs about twice a prompt token: it is computed alone instead of in a batch with its neighbours.
PROMPT_TOKEN_WEIGHT = 1
OUTPUT_TOKEN_WEIGHT = 2
_MAX_IDLE_TENANTS = 4096


class TenantAccount:
    """The account of one tenant. `service` only ever grows. `num_active` counts the requests that wait or run."""

    __slots__ = ("num_active", "number", "service", "tenant")

    def __init__(self, tenant: str, number: int) -> None:
        self.tenant = tenant
        self.number = number
        self.service = 0
        self.num_active = 0


class TenantAccounts:
    def __init__(self) -> None:
        self._active: dict[str, TenantAccount] = {}
        self._idle: dict[
            str, TenantAccount
        ] = {}  # in the order they became idle; the oldest is forgotten first
        # Active ones; a key may lag behind `service`.
        self._by_service: KeyedHeap[TenantAccount] = KeyedHeap()
        self._num_tenants = 0

    @property
    def num_active(self) -> int:
        """Count the tenants that have requests."""
        return len(self._active)

    def enter(self, tenant: str) -> TenantAccount:
        """Count one more request of this tenant."""
        account = self._active.get(tenant)
        if account is None:
            account = self._idle.pop(tenant, None)
            if account is None:
                self._num_tenants += 1
                account = TenantAccount(tenant, self._num_tenants)
            least = least_served(self._by_service)
            if least is not None:
                account.service = max(account.service, least.service)
            self._active[tenant] = account
            self._by_service.push(account.number, account.service, account)
        account.num_active += 1
        return account

    def leave(self, account: TenantAccount) -> None:
        """Count one request less."""
        account.num_active -= 1
        if account.num_active:
            return
        del self._active[account.tenant]
        self._by_service.discard(account.number)
        self._idle[account.tenant] = account
        if len(self._idle) > _MAX_IDLE_TENANTS:
            del self._idle[next(iter(self._idle))]


def least_served(accounts: KeyedHeap[TenantAccount]) -> TenantAccount | None:
    """Return the account with the least service, from a heap whose keys may be too small because service grew
    since."""
    while (entry := accounts.first_entry()) is not None:
        account = entry[3]
        if entry[0] == account.service:
            return account
        accounts.push(account.number, account.service, account)
    return None


_FIRST_EDGE_TOKENS = 16
NUM_LENGTH_BINS = 14  # the last one begins past 65,536 tokens
_EDGES = tuple(_FIRST_EDGE_TOKENS << index for index in range(NUM_LENGTH_BINS))

_DECAY_PER_ANSWER = 0.99
_QUANTILE = 0.7  # above the median: a low guess costs a preemption, a high guess a little waiting
_MIN_ANSWERS = 3.5  # answers at least as long as this one that a histogram needs to be used
_UNKNOWN_LENGTH_TOKENS = 256
_LARGEST_COUNT = 1e12
_MAX_GROUPS = 8192


def length_bin(num_tokens: int) -> int:
    """Return the bin of a length: 0 for at most 16 tokens, 1 for at most 32, and so on."""
    return max(0, min((num_tokens - 1).bit_length() - 4, NUM_LENGTH_BINS - 1))


class _Histogram:
    """Holds fading counts of answers and of their tokens, by bin, so that each bin knows its mean. A new answer
    counts for more than the one before, which is the same as fading all others."""

    __slots__ = ("_counts", "_newest", "_tokens")

    def __init__(self) -> None:
        self._counts = [0.0] * NUM_LENGTH_BINS
        self._tokens = [0.0] * NUM_LENGTH_BINS
        self._newest = 1.0  # the weight of the newest answer

    def observe(self, num_tokens: int) -> None:
        self._newest /= _DECAY_PER_ANSWER
        index = length_bin(num_tokens)
        self._counts[index] += self._newest
        self._tokens[index] += num_tokens * self._newest
        if self._newest > _LARGEST_COUNT:
            self._counts = [count / self._newest for count in self._counts]
            self._tokens = [tokens / self._newest for tokens in self._tokens]
            self._newest = 1.0

    def predict(self, at_least: int) -> int | None:
        """Return a high quantile of the lengths from `at_least` on; None when too few answers were seen."""
        counts = self._counts
        first = length_bin(at_least)
        num_answers = sum(counts[first:])
        if num_answers < _MIN_ANSWERS * self._newest:
            return None
        index, below = first, counts[first]
        while below < _QUANTILE * num_answers and index + 1 < NUM_LENGTH_BINS:
            index += 1
            below += counts[index]
        length = round(self._tokens[index] / counts[index]) if counts[index] else 0
        return length if length >= at_least else max(at_least, _EDGES[index])


# The tenant, or None for all; the bin of the prompt's length and the kind of the request, or None for all.
_Group: TypeAlias = tuple[str | None, tuple[int, str] | None]


class OutputLengthEstimator:
    """Predicts the length of an answer as a high quantile of earlier answers: of the same tenant to prompts of
    similar length and kind; if these are too few, of the tenant; then of all tenants to such prompts; then of all."""

    def __init__(self, bins: LengthBins = "prompt") -> None:
        self._bins = bins
        self._histograms: dict[_Group, _Histogram] = {}  # least recently updated first

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Count an answer that ended by itself or at its limit. Aborted answers do not count."""
        for group in self._groups(request):
            histogram = self._histograms.pop(group, None)
            if histogram is None:
                histogram = _Histogram()
                if len(self._histograms) >= _MAX_GROUPS:
                    del self._histograms[next(iter(self._histograms))]
            self._histograms[group] = histogram
            histogram.observe(num_output_tokens)

    def predict(self, request: Request, num_output_tokens: int, limit: int) -> int:
        """Predict the final length of an answer that has `num_output_tokens` already: more than that, and within
        `limit`."""
        for group in self._groups(request):
            histogram = self._histograms.get(group)
            length = None if histogram is None else histogram.predict(num_output_tokens + 1)
            if length is not None:
                return min(limit, length)
        return min(limit, num_output_tokens + _UNKNOWN_LENGTH_TOKENS)

    def _groups(self, request: Request) -> tuple[_Group, ...]:
        """Return the groups that a request belongs to, the most specific first."""
        if self._bins == "off":
            return ()
        if self._bins == "tenant":
            return ((request.tenant, None), (None, None))
        task = length_bin(len(request.prompt_token_ids)), kind_of(request)
        return ((request.tenant, task), (request.tenant, None), (None, task), (None, None))


def kind_of(request: Request) -> str:
    """Return the kind of a request as a scheduler sees it: with a grammar, with images, with an adapter."""
    grammar = request.sampling.grammar
    adapter = "" if request.adapter is None else request.adapter.name
    return f"{'' if grammar is None else grammar.kind}/{'image' if request.images else ''}/{adapter}"
