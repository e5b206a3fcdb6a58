"""Limits shared by several gateways through Redis: the decisions of `local.py`, made by one atomic script each.

Redis keeps the time, the levels and the leases. The lease of a gateway that died stops counting when the lease
expires. While Redis is away, local buckets decide (policy "open") or requests are refused (policy "closed"), without
waiting. Requests that end during that time are settled when Redis is back. A Redis that lost its data gets the leases
of running requests again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec
from redis.asyncio import Redis

from penstock.core.errors import ConfigError, LimitsUnavailable, RateLimited
from penstock.core.gateway_config import RedisPolicy
from penstock.core.identity import LimitState, Principal, RateLimits
from penstock.gateway.accounts import UNLIMITED, Claim, Lease, Outcome
from penstock.gateway.ratelimits.local import LocalLimiter, RunningLimiter
from penstock.gateway.ratelimits.meters import SECONDS_PER_LIMIT, TOLERANCE
from penstock.gateway.ratelimits.script_pipe import PROBE_INTERVAL_S, RedisGone, ScriptPipe, read_scripts
from penstock.gateway.ratelimits.settings import (
    CallerLimits,
    Figure,
    LimitResolver,
    LimitSettings,
    Refusal,
    ResolvedLimits,
    error_for,
)
from penstock.gateway.ratelimits.spend import (
    NOTHING,
    NOTHING_SPENT,
    Demand,
    Spend,
    budgets_of,
    day_of,
    demand_of,
    used_by,
)

REDIS_TIMEOUT_S = 1.0
LEASE_TTL_S = 30.0
CLOSE_TIMEOUT_S = 2.0
# In braces, so that a Redis cluster keeps all keys in one place, where a script can reach them.
KEY_PREFIX = "{penstock:limits}"
LEASE_KEY_PREFIX = f"{KEY_PREFIX}:leases"  # no scope of limits has this name
PROBE_KEY = f"{KEY_PREFIX}:probe"

_MAX_CACHED_CALLERS = 65_536
_RENEWED_AT_ONCE = 256


class _Spent(msgspec.Struct):
    day: float
    month: float


class _SubjectAsk(ResolvedLimits, frozen=True, kw_only=True, omit_defaults=True):
    """A subject's limits, as the scripts read them."""

    spent: _Spent | None = None


class _Ask(msgspec.Struct):
    requests: int
    input_tokens: int
    output_tokens: int
    microdollars: float
    day: int
    month: int
    subjects: tuple[_SubjectAsk, ...] = ()


class _Renewal(msgspec.Struct):
    """The leases of one subject that live: name, input tokens and output tokens of each."""

    limits: _SubjectAsk
    leases: list[tuple[str, int, int]]


class _Levels(msgspec.Struct):
    requests: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None


class _Decision(msgspec.Struct):
    levels: list[_Levels]
    refusals: list[tuple[int, Figure, float]] = []  # subject, figure, seconds to wait or number running


class _Caller:
    """The data that all requests of one caller of one model share."""

    __slots__ = ("asks", "keys", "limits")

    def __init__(self, limits: CallerLimits) -> None:
        self.limits = limits
        self.keys = tuple(
            key
            for subject, _ in limits.applying
            # The name of a subject may come from a token and end in anything, so no key is another one's beginning.
            for key in (
                f"{KEY_PREFIX}:{subject.scope}:{subject.name}",
                f"{LEASE_KEY_PREFIX}:{subject.scope}:{subject.name}",
            )
        )
        self.asks = tuple(_SubjectAsk(**msgspec.structs.asdict(resolved)) for _, resolved in limits.applying)


class RedisLease(Lease):
    __slots__ = ("_claim", "_limiter", "_reserved", "_stem", "caller", "rate_limits")

    def __init__(self, limiter: RedisLimiter, claim: Claim, caller: _Caller) -> None:
        self._limiter = limiter
        self._claim = claim
        self.caller = caller
        self._reserved = NOTHING
        self._stem = uuid.uuid4().hex
        self.rate_limits = RateLimits()

    @property
    def name(self) -> str:
        """Return the name of the lease in Redis, which ends with the money that the lease reserves; scripts read it
        there."""
        return self.name_with(self._reserved)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.caller.keys

    @property
    def reserved(self) -> Demand:
        return self._reserved

    def name_with(self, reserved: Demand) -> str:
        return f"{self._stem}:{reserved.microdollars!r}"

    async def reserve(self, claim: Claim) -> Lease:
        return await self._limiter.reserve(self, claim)

    def holds(self, claim: Claim, reserved: Demand) -> None:
        self._claim, self._reserved = claim, reserved

    def give_back_cached(self, num_tokens: int) -> None:
        given, self._reserved = self._reserved.without_input(num_tokens)
        self._limiter.give_back_input(self, given)

    def settle(self, outcome: Outcome) -> None:
        limiter = self._limiter
        used = used_by(self._claim, outcome, self.caller.limits, limiter.local.spending)
        limiter.release(self, self._reserved, used)
        limiter.local.slot_times.observe(outcome.duration_s)

    def undo(self) -> None:
        self._limiter.release(self, self._reserved, NOTHING, requests=-1)


class RedisLimiter(RunningLimiter):
    """`local` decides while Redis is gone, and its spend tracker, metrics and settings are used always."""

    def __init__(
        self,
        client: Redis,
        settings: LimitSettings,
        local: LocalLimiter,
        *,
        policy: RedisPolicy = "open",
        lease_ttl_s: float = LEASE_TTL_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.local = local
        self.metrics = local.metrics
        self._policy = policy
        self._lease_ttl_s = lease_ttl_s
        self._wall_clock = wall_clock
        self._resolver = LimitResolver(settings)
        self._callers: dict[tuple[str, str, str | None], _Caller] = {}
        self._live: dict[str, RedisLease] = {}
        self._pipe = ScriptPipe(client, read_scripts(), REDIS_TIMEOUT_S, local.metrics, PROBE_KEY)
        self._renewing: asyncio.Task[None] | None = None
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(_Decision).decode

    @classmethod
    def at(
        cls, url: str, settings: LimitSettings, local: LocalLimiter, *, policy: RedisPolicy = "open"
    ) -> RedisLimiter:
        try:
            client = Redis.from_url(
                url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
            )
        except ValueError:  # not shown: it may quote a password
            raise ConfigError(
                "The Redis URL cannot be read.", hint="It looks like redis://HOST:6379/0."
            ) from None
        return cls(client, settings, local, policy=policy)

    async def start(self) -> None:
        await self._pipe.start()
        self._renewing = asyncio.create_task(self._renew_forever(), name="limits-lease-renewal")

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewing
        await self._pipe.close(CLOSE_TIMEOUT_S)

    def apply(self, settings: LimitSettings) -> None:
        self._resolver = LimitResolver(settings)
        self._callers.clear()
        self.local.apply(settings)

    async def admit(self, claim: Claim) -> Lease:
        caller = self._caller(claim.principal, claim.model)
        if not caller.limits.applying:
            self.metrics.admitted += 1
            return UNLIMITED
        lease = RedisLease(self, claim, caller)
        try:
            decision = await self._decide(lease, NOTHING, num_requests=1)
        except RedisGone as gone:
            if gone.may_have_run:
                self.release(lease, NOTHING, NOTHING, requests=-1)
            return await self._admit_without_redis(claim)
        except asyncio.CancelledError:
            self.release(lease, NOTHING, NOTHING, requests=-1)
            raise
        lease.rate_limits = _rate_limits(caller, decision)
        if decision.refusals:
            raise self._refuse(caller, NOTHING, decision, lease.rate_limits)
        self._live[lease.name] = lease
        self.metrics.admitted += 1
        return lease

    async def reserve(self, lease: RedisLease, claim: Claim) -> Lease:
        """Take the second half of `lease`, whose name in Redis changes with the money that it reserves."""
        caller = lease.caller
        if not caller.limits.reserves:
            lease.holds(claim, NOTHING)
            return lease
        demand = demand_of(claim, caller.limits, self.local.spending)
        # While its name changes, it is not renewed: the lease of the old name must not be made again.
        self._live.pop(lease.name, None)
        try:
            decision = await self._decide(lease, demand, num_requests=0)
        except RedisGone as gone:
            self._end_unknown(lease, demand, has_run=gone.may_have_run)
            admitted = await self._admit_without_redis(claim)
            try:
                return await admitted.reserve(claim)
            except BaseException:
                admitted.undo()
                raise
        except asyncio.CancelledError:
            self._end_unknown(lease, demand, has_run=True)
            raise
        rate_limits = _rate_limits(caller, decision)
        if decision.refusals:
            self._live[lease.name] = lease
            raise self._refuse(caller, demand, decision, rate_limits)
        lease.rate_limits = rate_limits
        lease.holds(claim, demand)
        self._live[lease.name] = lease
        return lease

    def _end_unknown(self, lease: RedisLease, demand: Demand, *, has_run: bool) -> None:
        """End a lease in Redis that may stand under either of its names."""
        self.release(lease, NOTHING, NOTHING)
        if has_run:
            self.release(lease, demand, NOTHING)

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        caller = self._caller(principal, model)
        if not caller.limits.applying:
            return RateLimits()
        try:
            answer = await self._pipe.call("peek", caller.keys, (self._encode(caller.asks),))
        except RedisGone:
            return await self.local.peek(principal, model) if self._policy == "open" else RateLimits()
        return _rate_limits(caller, self._decode(answer))

    def give_back_input(self, lease: RedisLease, num_tokens: int) -> None:
        """Give back input tokens, at most once. If the message is lost, the refill makes up for the tokens within a
        minute."""
        self._pipe.try_post("give_back", lease.keys, (lease.name, num_tokens))

    def release(self, lease: RedisLease, reserved: Demand, used: Demand, *, requests: int = 0) -> None:
        """Settle in Redis, as soon as it can be reached. `requests` is -1 for a request that is not to count."""
        name = lease.name_with(reserved)
        self._live.pop(name, None)
        num_input = used.input_tokens - reserved.input_tokens
        num_output = used.output_tokens - reserved.output_tokens
        correction = self._ask(requests, Demand(num_input, num_output, used.microdollars))
        self._pipe.post("settle", lease.keys, (name, self._encode(correction)))

    def _caller(self, principal: Principal, model: str | None) -> _Caller:
        name = (principal.key_id, principal.workspace_id, model)
        caller = self._callers.get(name)
        if caller is None:
            if len(self._callers) >= _MAX_CACHED_CALLERS:
                self._callers.clear()
            limits = self._resolver.limits_of_caller(principal, model)
            caller = self._callers[name] = _Caller(limits)
        return caller

    async def _spends(self, limits: CallerLimits) -> list[Spend]:
        """Return the spend of each subject that applies, in order."""
        return [
            await self.local.spending.spent(subject) if resolved.has_budget else NOTHING_SPENT
            for subject, resolved in limits.applying
        ]

    async def _decide(self, lease: RedisLease, demand: Demand, *, num_requests: int) -> _Decision:
        """Ask Redis for one half of a lease: the first half for one request, which makes the lease, and the second
        for none."""
        limits, asks = lease.caller.limits, lease.caller.asks
        if limits.has_budget:
            spends = await self._spends(limits)
            asks = tuple(
                msgspec.structs.replace(ask, spent=_Spent(spend.today_microdollars, spend.month_microdollars))
                for ask, spend in zip(asks, spends, strict=True)
            )
        ask = self._ask(num_requests, demand, asks)
        before = lease.name if num_requests == 0 else ""
        arguments = (lease.name_with(demand), self._lease_ttl_s, self._encode(ask), before)
        return self._decode(await self._pipe.call("reserve", lease.keys, arguments))

    def _ask(self, requests: int, demand: Demand, subjects: tuple[_SubjectAsk, ...] = ()) -> _Ask:
        day = day_of(self._wall_clock())
        tokens = demand.input_tokens, demand.output_tokens
        return _Ask(requests, *tokens, demand.microdollars, day, day // 100, subjects)

    async def _admit_without_redis(self, claim: Claim) -> Lease:
        if self._policy == "closed":
            self.metrics.closed_refusals += 1
            raise LimitsUnavailable("Limits cannot be checked at the moment.", retry_after_s=PROBE_INTERVAL_S)
        self.metrics.local_decisions += 1
        return await self.local.admit(claim)

    def _refuse(
        self, caller: _Caller, demand: Demand, decision: _Decision, rate_limits: RateLimits
    ) -> RateLimited:
        found = []
        for index, figure, detail in decision.refusals:
            subject, limits = caller.limits.applying[index]
            limit = getattr(limits, figure)
            amount = _amount(figure, demand)
            wait_s = math.inf if amount > limit else self._wait_s(figure, detail, limits)
            found.append(Refusal(wait_s, figure, subject, limit, amount))
        refusal = max(found)
        self.metrics.count_refusal(refusal)
        return error_for(refusal, rate_limits)

    def _wait_s(self, figure: Figure, detail: float, limits: ResolvedLimits) -> float:
        if figure is Figure.CONCURRENCY:
            return self.local.slot_times.wait_s(int(detail))
        for budget in budgets_of(limits, NOTHING_SPENT, self._wall_clock()):
            if budget.figure is figure:
                return budget.reset_s
        return detail

    async def _renew_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_ttl_s / 3):
                    await self._pipe.came_back.wait()
            self._pipe.came_back.clear()
            with contextlib.suppress(RedisGone):
                await self.renew()

    async def renew(self) -> None:
        """Renew all leases, and make those again that Redis has lost. Raises RedisGone."""
        leases_of: defaultdict[tuple[str, str], list[RedisLease]] = defaultdict(list)
        asks: dict[tuple[str, str], _SubjectAsk] = {}
        for lease in self._live.values():
            caller = lease.caller
            for hash_key, leases_key, ask in zip(
                caller.keys[::2], caller.keys[1::2], caller.asks, strict=True
            ):
                leases_of[hash_key, leases_key].append(lease)
                asks[hash_key, leases_key] = ask
        subjects = list(leases_of)
        for start in range(0, len(subjects), _RENEWED_AT_ONCE):
            chunk = subjects[start : start + _RENEWED_AT_ONCE]
            renewals = [_Renewal(asks[subject], self._still_live(leases_of[subject])) for subject in chunk]
            keys = [key for subject in chunk for key in subject]
            await self._pipe.call("renew", keys, (self._lease_ttl_s, self._encode(renewals)))

    def _still_live(self, leases: Iterable[RedisLease]) -> list[tuple[str, int, int]]:
        """Leave out leases that were settled while Redis was asked about others."""
        return [
            (lease.name, lease.reserved.input_tokens, lease.reserved.output_tokens)
            for lease in leases
            if self._live.get(lease.name) is lease
        ]


def _amount(figure: Figure, demand: Demand) -> int:
    """Return the part of a limit that a request needs. A budget refuses no request for its size alone."""
    tokens = {Figure.INPUT_TOKENS: demand.input_tokens, Figure.OUTPUT_TOKENS: demand.output_tokens}
    return tokens.get(figure, 1 if figure in (Figure.REQUESTS, Figure.CONCURRENCY) else 0)


def _rate_limits(caller: _Caller, decision: _Decision) -> RateLimits:
    return RateLimits(
        *(
            _tightest(
                (getattr(levels, kind), getattr(resolved, f"{kind}_per_minute"))
                for levels, (_, resolved) in zip(decision.levels, caller.limits.applying, strict=True)
            )
            for kind in ("requests", "input_tokens", "output_tokens")
        )
    )


def _tightest(buckets: Iterable[tuple[float, int | None]]) -> LimitState | None:
    present = [(level, limit) for level, limit in buckets if limit is not None]
    if not present:
        return None
    level, limit = min(present)
    reset_s = (limit - level) * SECONDS_PER_LIMIT / limit
    return LimitState(limit, max(0, int(level + TOLERANCE)), reset_s)
