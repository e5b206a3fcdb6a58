"""Knows which external servers are up, and chooses the server of a request. A request whose server fails before its
answer begins is sent to another server.

Servers report nothing about their caches, so the router assumes that each server keeps the prefixes of the prompts
that were sent to it. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from penstock.cluster.external.circuits import ServerCircuits
from penstock.cluster.external.members import Member, Run, ServerView
from penstock.cluster.external.relay import Relay
from penstock.cluster.external.server import ExternalServer, OnChunks, ServerDown
from penstock.cluster.external.waiting import WaitingCalls
from penstock.cluster.external.wire import ExternalCall, RequestRefused, server_name
from penstock.core.clock import Clock, SystemClock
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.messages import EngineStats
from penstock.dispatch.health import BreakerConfig, CircuitBreaker
from penstock.dispatch.requests import Failure, RetryBudget, RetryConfig, RetryDecision, RetryPolicy
from penstock.router import PrefixAware, Replica, ReplicaState, Router, RoutingRequest, hash_text

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 2.0
MAX_MISSED_PROBES = 3
BLOCK_TOKENS = 16
# A prefix is copied to another server when its own server's queue is longer by this many times the prefix. More than
# for our own engines. Queues are estimated here, because servers do not report when the prompt of a whole answer is
# computed. A copy may evict another prefix from a cache whose contents are unknown.
RECOMPUTE_WEIGHT = 4.0
# Twice of what one workspace may use up in a burst.
RETRIES = RetryConfig(max_budget=200.0)
MAX_BUDGETS = 1024
_NONE: frozenset[str] = frozenset()


class ExternalPool:
    """Sends requests to external servers. `run` must run in the background. Call `close` after the last request."""

    def __init__(
        self,
        servers: Sequence[ExternalServer],
        *,
        router: Router | None = None,
        clock: Clock | None = None,
        retries: RetryConfig | None = None,
        breaker: BreakerConfig | None = None,
        num_processes: int = 1,
    ) -> None:
        self._breaker = CircuitBreaker(breaker or BreakerConfig())
        self._members = {server.name: self._member(server) for server in servers}
        self._urls = tuple(
            dict.fromkeys(server.config.url for server in servers)
        )  # that the servers were found by
        self._listed: dict[
            str, Mapping[str, int | None]
        ] = {}  # by URL: the models that its servers listed last
        self._router = router or Router(PrefixAware(RECOMPUTE_WEIGHT))
        self._clock = clock or SystemClock()
        retries = retries or RETRIES
        self._retries = RetryPolicy(retries)
        self._budget = self._retries.first_budget(self._clock.now())
        self._own_retries = RetryPolicy(msgspec.structs.replace(retries, max_budget=retries.max_budget / 2.0))
        self._own_budgets: dict[str, RetryBudget] = {}  # of workspaces that have used some of theirs
        self._chance = random.Random()
        self._replicas: tuple[Replica, ...] = ()
        self._models: Mapping[str, int | None] = {}
        self._describe()
        self._waiting = WaitingCalls()
        self._num_processes = num_processes  # that share what servers take at a time
        self.num_retries = 0
        self.num_continued = 0  # answers that another server continued with
        # Called with a server and the hashes of a prompt that was sent there, if some of them are new there.
        self.on_placed: Callable[[str, Sequence[bytes]], None] | None = None

    def _member(self, server: ExternalServer) -> Member:
        return Member(server, ServerCircuits(self._breaker))

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a server to have room."""
        return len(self._waiting)

    @property
    def models(self) -> Mapping[str, int | None]:
        """Return the names that requests may use, with the context length if a server reports it. A model stays while
        its servers are away, and while the name that they were found by leads to no server."""
        return self._models

    @property
    def is_ready(self) -> bool:
        return any(member.state is ReplicaState.READY for member in self._members.values())

    def views(self) -> list[ServerView]:
        return [member.view() for member in self._members.values()]

    async def run(self) -> None:
        """Probe all servers again and again, until cancelled."""
        while True:
            try:
                await self.probe()
            except Exception:  # one server must not keep the others from being asked
                logger.exception("the external servers could not be asked; they are asked again")
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def probe(self) -> None:
        await asyncio.gather(*map(self._probe, self._members.values()))
        self._describe()
        self._grant()

    async def replace(
        self, configs: Sequence[ExternalServerConfig], found_by: Sequence[ExternalServerConfig] | None = None
    ) -> None:
        """Have these servers from now on. Those that are here already stay as they are; those that left finish what
        they run. `found_by` are the tables that stand for these servers, if not the servers themselves. Raises
        ConfigError, and nothing changes."""
        before = self._members
        urls = tuple(dict.fromkeys(config.url for config in (configs if found_by is None else found_by)))
        members: dict[str, Member] = {}
        new = []
        for config in configs:
            member = before.get(server_name(config))
            if member is None or member.server.config != config:
                member = self._member(ExternalServer(config))
                new.append(member)
            members[member.server.name] = member
        left = [member for member in before.values() if members.get(member.server.name) is not member]
        if not new and not left and urls == self._urls:
            return
        await asyncio.gather(*map(self._probe, new))
        self._members, self._urls = members, urls
        for member in left:
            logger.info("the external server %s is no longer used", member.server.name)
            member.has_left = True
            await self._close_if_over(member)
        self._describe()
        self._grant()

    async def _close_if_over(self, member: Member) -> None:
        if member.has_left and not member.num_running:
            await member.server.close()

    async def close(self) -> None:
        await asyncio.gather(*(member.server.close() for member in self._members.values()))

    async def send(self, call: ExternalCall, on_chunks: OnChunks) -> None:
        """Send a request to a server, and pass on the chunks of the answer until its end; those that came together
        are passed on together. Raises a PenstockError. Cancel this to cancel the request."""
        now = self._clock.now()
        deadline_s = None if call.timeout_s is None else now + call.timeout_s
        self._budget = self._retries.attempted(self._budget, now)
        if (own := self._own_budgets.get(call.tenant)) is not None:
            self._own_budgets[call.tenant] = self._own_retries.attempted(own, now)
        failed: set[str] = set()
        attempts = 0
        relay = Relay(call, on_chunks, self.note_first_token)
        while True:
            member = self._only_member(call, failed)
            if member is None:
                member = await self._place(call, failed, continues=relay.has_begun)
            attempts += 1
            try:
                await self._attempt(member, call, relay)
                return
            except RequestRefused as refused:
                failed.add(member.server.name)
                failure = Failure(
                    attempts=attempts,
                    num_emitted_tokens=int(relay.has_begun),
                    is_retryable=refused.elsewhere,
                    can_continue=relay.can_continue and not relay.has_ended,
                    deadline_s=deadline_s,
                )
                decision = self._decide(failure, call.tenant)
                has_others = self._usable(call, failed, continues=relay.has_begun)
                if not decision.is_retry or not has_others:
                    raise refused.error from refused
                logger.info("request %s is sent to another server: %s", call.id, refused)
                if relay.has_begun:
                    call = relay.continued()
                    self.num_continued += 1
            self.num_retries += 1
            await asyncio.sleep(decision.pause_s)

    def _decide(self, failure: Failure, tenant: str) -> RetryDecision:
        """Decide whether a request is sent again. Each workspace has a budget beside that of all, so that the
        failures of one leave the others their retries."""
        now = self._clock.now()
        own = self._own_budgets.pop(tenant, None) or self._own_retries.first_budget(now)
        decision, own = self._own_retries.decide(failure, own, now)
        if len(self._own_budgets) >= MAX_BUDGETS:  # the one that was used longest ago has filled up most
            del self._own_budgets[next(iter(self._own_budgets))]
        self._own_budgets[tenant] = own
        if decision.is_retry:
            decision, self._budget = self._retries.decide(failure, self._budget, now)
        return decision

    def note_first_token(self, call: ExternalCall) -> None:
        self._router.first_token(call.id, self._clock.now())

    async def _place(self, call: ExternalCall, failed: set[str], *, continues: bool) -> Member:
        """Return the server of the next attempt, which has room for it. Waits for room where no server has any."""
        was_granted = False
        while True:
            usable = self._usable(call, failed, continues=continues)
            free = [name for name in usable if self._has_room(self._members[name], was_granted=was_granted)]
            if was_granted:
                self._waiting.taken()
            if not usable and continues:
                raise EngineUnavailable("The server of this model broke off its answer.", hint="Try again.")
            if not usable and call.model in self._models and not self._has_server_of(call.model):
                raise EngineUnavailable(
                    f"No server of {call.model!r} is there at the moment.", retry_after_s=PROBE_INTERVAL_S
                )
            if free and len(self._members) == 1:  # there is no choice, now or later
                return self._members[free[0]]
            if free or not usable:  # without any, the router says why
                return self._choose(call, self._excluded(call, failed, self._cheapest(free)))
            await self._waiting.wait(call.model, call.tier, call.tenant)
            was_granted = True

    def _only_member(self, call: ExternalCall, failed: set[str]) -> Member | None:
        """Return the only server there is, if it has room for the first attempt."""
        if len(self._members) != 1 or failed:
            return None
        (member,) = self._members.values()
        is_free = self._is_usable(member, call, self._clock.now()) and self._has_room(member)
        return member if is_free else None

    def _has_server_of(self, model: str) -> bool:
        return any(model in member.server.models for member in self._members.values())

    def _excluded(
        self, call: ExternalCall, failed: Collection[str], allowed: Collection[str]
    ) -> frozenset[str]:
        """Return all servers but the allowed ones; where none is allowed, those that failed or are left alone."""
        if len(allowed) == len(self._members):
            return _NONE
        if allowed:
            return frozenset(name for name in self._members if name not in allowed)
        now = self._clock.now()
        asleep = [
            name for name, member in self._members.items() if not member.circuits.allows(call.tenant, now)
        ]
        return frozenset((*failed, *asleep))

    def _choose(self, call: ExternalCall, excluded: frozenset[str]) -> Member:
        """Return the router's choice of the servers that are not excluded."""
        hashes = hash_text(call.tenant, call.text)
        now = self._clock.now()
        request = RoutingRequest(
            id=call.id,
            model=call.model,
            num_prompt_tokens=max(call.estimated_tokens, len(hashes) * BLOCK_TOKENS + 1),
            block_hashes=hashes,
            region=call.region or None,
            spill_over_s=call.spill_over_s,
            affinity_key=call.affinity_key or None,
            excluded=excluded,
        )
        decision = self._router.choose(request, self._replicas, now, self._chance)
        if self.on_placed is not None and decision.matched_tokens < len(hashes) * BLOCK_TOKENS:
            self.on_placed(decision.replica_id, hashes)
        return self._members[decision.replica_id]

    def learn(self, server: str, hashes: Sequence[bytes]) -> None:
        """Note that another process of this gateway sent a prompt with these hashes to a server."""
        self._router.sent_elsewhere(server, hashes, self._clock.now())

    def _usable(self, call: ExternalCall, failed: Collection[str], *, continues: bool) -> list[str]:
        """Return the servers that could answer. With `continues`, those that can continue a chat of another
        server."""
        now = self._clock.now()
        needs_prefill = continues and call.api == "chat/completions"
        return [
            name
            for name, member in self._members.items()
            if name not in failed
            and self._is_usable(member, call, now)
            and (not needs_prefill or member.server.continues)
        ]

    def _is_usable(self, member: Member, call: ExternalCall, now: float) -> bool:
        """Return whether a server could answer a call from its beginning."""
        server = member.server
        if call.model not in server.models or member.state is not ReplicaState.READY:
            return False
        is_bound = call.spill_over_s == math.inf and bool(call.region)
        if is_bound and server.region != call.region:
            return False
        return member.circuits.allows(call.tenant, now)

    def _has_room(self, member: Member, *, was_granted: bool = False) -> bool:
        """Return whether a server takes another request. Places that were granted to others count as taken."""
        most = member.server.max_concurrent
        if most is None:
            return True
        num_taken = member.num_running + self._waiting.num_granted - was_granted
        return num_taken < max(1, most // self._num_processes)

    def _cheapest(self, names: Sequence[str]) -> list[str]:
        """Return the cheapest servers of each region: whether to leave a region is the router's business."""
        if len(names) < 2:
            return list(names)
        servers = [self._members[name].server for name in names]
        least: dict[str, float] = {}
        for server in servers:
            least[server.region] = min(server.cost, least.get(server.region, math.inf))
        return [server.name for server in servers if server.cost == least[server.region]]

    def _grant(self) -> None:
        """Let those that wait begin, as far as servers have room."""
        if self._waiting.is_empty:
            return
        self._waiting.grant(
            lambda model: any(
                model in member.server.models
                and member.state is ReplicaState.READY
                and self._has_room(member)
                for member in self._members.values()
            )
        )

    async def _attempt(self, member: Member, call: ExternalCall, relay: Relay) -> None:
        circuits, tenant, sent_s = member.circuits, call.tenant, self._clock.now()
        circuits.sent(tenant, sent_s)
        run = Run(call, relay, asyncio.current_task())
        member.runs.add(run)
        self._grant()  # what was granted to this call counts for it alone from now on
        outcome = "abandoned"
        try:
            await member.server.send(call, relay)
            if not relay.has_ended:
                raise _broken_off(member.server.name, has_begun=relay.has_begun)
            outcome = "served"
            circuits.succeeded(tenant)
        except asyncio.CancelledError:
            if not run.was_given_up():
                raise  # the client has gone, perhaps at the same moment
            outcome = "failed"
            circuits.unreachable(tenant, self._clock.now())
            raise _given_up(member.server.name) from None
        except RequestRefused as refused:
            outcome = "failed" if refused.elsewhere else "refused"
            if not refused.is_reached:
                circuits.unreachable(tenant, self._clock.now())
            elif refused.elsewhere:
                circuits.failed(tenant, sent_s, self._clock.now())
            else:  # a server that refuses a request is up
                circuits.succeeded(tenant)
            raise
        finally:
            if outcome == "abandoned":
                circuits.abandoned(tenant)
            member.outcomes[outcome] += 1
            member.runs.discard(run)
            if member.has_left:
                await self._close_if_over(member)
            self._grant()
            self._router.ended(call.id, self._clock.now())

    async def _probe(self, member: Member) -> None:
        try:
            await member.server.probe()
        except ServerDown as error:
            member.missed_probes += 1
            if error.is_silent:
                for run in member.silent_runs(MAX_MISSED_PROBES):
                    if self._usable(run.call, (member.server.name,), continues=run.relay.has_begun):
                        run.give_up()
            if member.state is ReplicaState.STARTING or (
                member.state is ReplicaState.READY and member.missed_probes >= MAX_MISSED_PROBES
            ):
                member.state = ReplicaState.UNHEALTHY
                logger.warning("the external server %s is not there: %s", member.server.name, error)
            return
        if member.state is not ReplicaState.READY:
            logger.info(
                "the external server %s serves %s",
                member.server.name,
                ", ".join(member.server.models) or "nothing",
            )
        member.missed_probes = 0
        member.state = ReplicaState.READY
        member.circuits.reached()

    def _describe(self) -> None:
        """Tell the router which servers there are, and note their models."""
        listed: dict[str, dict[str, int | None]] = {}
        for member in self._members.values():
            found = listed.setdefault(member.server.config.url, {})
            for model in member.server.models:
                found[model] = found.get(model) or member.server.max_model_lens.get(model)
        self._listed = {url: listed.get(url) or self._listed.get(url, {}) for url in self._urls}
        models: dict[str, int | None] = {}
        for each in self._listed.values():
            models |= {model: models.get(model) or length for model, length in each.items()}
        self._models = models
        replicas = tuple(
            Replica(
                id=name,
                models=frozenset(member.server.models),
                state=member.state,
                region=member.server.region,
                block_size=BLOCK_TOKENS,
                sends_kv_events=False,
            )
            for name, member in self._members.items()
        )
        if replicas != self._replicas:
            self._replicas = replicas
            self._router.update(replicas)
        for name, member in self._members.items():
            if (load := member.server.load) is not None:
                self._router.heartbeat(
                    name, EngineStats(num_running=load.num_running, num_waiting=load.num_waiting)
                )


def _given_up(name: str) -> RequestRefused:
    error = EngineUnavailable(f"The external server {name!r} does not answer any more.", hint="Try again.")
    return RequestRefused(error, elsewhere=True, is_reached=False)


def _broken_off(name: str, *, has_begun: bool) -> RequestRefused:
    error: PenstockError = EngineUnavailable(f"The external server {name!r} ended an answer before it began.")
    if has_begun:
        error = EngineUnavailable("The server of this model broke off its answer.", hint="Try again.")
    return RequestRefused(error, elsewhere=True)
