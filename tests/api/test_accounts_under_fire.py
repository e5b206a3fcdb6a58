"""Whatever happens to requests, each that was admitted is settled once: limits, ledger, engine and gateway agree."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from penstock.api.app import create_app
from penstock.core.clock import VirtualClock
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.identity import Principal, RateLimits
from penstock.gateway.accounts import Accounts, Claim, Lease, Outcome
from penstock.gateway.gateway import Gateway
from penstock.gateway.ledger.journal import Journal
from penstock.gateway.ledger.ledger import JOURNAL_FOLDER, UsageLedger
from penstock.gateway.ledger.prices import ModelPrice, PriceSettings, PriceTable
from penstock.gateway.ledger.spend import LedgerSpendTracker
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.settings import LimitSettings
from penstock.gateway.responses.store import ResponseStore
from penstock.gateway.reuse.idempotency import IdempotentAnswers
from penstock.gateway.reuse.replay import IdempotencySettings, ResponseCacheSettings
from penstock.gateway.reuse.reuse import AnswerReuse
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import usage
from penstock.gateway.tenants.authenticator import Tenants
from penstock.gateway.tenants.directory import Actor
from penstock.gateway.tenants.records import NewKey
from tests.api.fire import FickleClient, UnreliableEngine
from tests.gateway.fake_engine import until
from tests.gateway.guards.read_settings import guard_settings
from tests.gateway.store.ready_made import ready_made_database

NUM_REQUESTS = 150
LIMITS = msgspec.convert(
    {
        "key": {"requests_per_minute": 10**6, "concurrent_requests": 12, "dollars_per_day": 1000.0},
        "workspace": {"input_tokens_per_minute": 10**7, "output_tokens_per_minute": 10**7},
        "model": {"output_tokens_per_minute": 10**7, "requests_per_minute": 10**6},
    },
    LimitSettings,
)
PRICES = PriceTable(PriceSettings(models={"bytes": ModelPrice(input=1, output=2)}))  # type: ignore[arg-type]
PATIENCE = {"timeout_s": 0.02, "max_tokens": 16}
GUARDS = {
    "policies": {
        "strict": {
            "on_failure": "open",
            "rules": [
                {"guard": "blocklist", "terms": ["forbidden"]},
                {"guard": "blocklist", "name": "abc", "patterns": ["abc"], "stage": "output"},
                {"guard": "judge", "constitution": "Be good.", "stage": "input", **PATIENCE},
                {
                    "guard": "judge",
                    "name": "later",
                    "constitution": "Be good.",
                    "action": "flag",
                    **PATIENCE,
                },
            ],
        }
    },
}


class CountingLimiter:
    """Counts what it lends and what comes back."""

    def __init__(self, limiter: LocalLimiter) -> None:
        self._limiter = limiter
        self.settled: Counter[str] = Counter()
        self.num_asking = 0
        self.num_lent = 0
        self.admitted: Counter[str] = Counter()  # by key
        self.reserved: set[str] = set()  # the requests that got both halves

    async def admit(self, claim: Claim) -> Lease:
        self.num_asking += 1
        try:
            await asyncio.sleep(0)  # as a shared limiter would; the asking task may be cancelled meanwhile
            lease = await self._limiter.admit(claim)
        finally:
            self.num_asking -= 1
        self.num_lent += 1
        self.admitted[claim.principal.key_id] += 1
        return _CountedLease(lease, claim, self)

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        return await self._limiter.peek(principal, model)


class _CountedLease:
    def __init__(self, lease: Lease, claim: Claim, counting: CountingLimiter) -> None:
        self._lease = lease
        self._claim = claim
        self._counting = counting
        self._settled = counting.settled
        self.rate_limits = lease.rate_limits

    async def reserve(self, claim: Claim) -> Lease:
        await asyncio.sleep(0)
        self._lease = await self._lease.reserve(claim)
        self._counting.reserved.add(claim.request_id)
        return self

    def undo(self) -> None:
        self._settled[self._claim.request_id] += 1
        self._lease.undo()

    def give_back_cached(self, num_tokens: int) -> None:
        self._lease.give_back_cached(num_tokens)

    def settle(self, outcome: Outcome) -> None:
        self._settled[self._claim.request_id] += 1
        self._lease.settle(outcome)


@dataclass
class Battlefield:
    dice: random.Random
    engine: UnreliableEngine
    gateway: Gateway
    limiter: LocalLimiter
    counting: CountingLimiter
    ledger: UsageLedger
    database: Database
    idempotency: IdempotentAnswers
    clients: list[FickleClient]

    async def anything(self) -> None:
        """One client does one thing that clients do."""
        dice, client = self.dice, self.dice.choice(self.clients)
        if dice.random() < 0.2:
            await self._ask_again(client)
            return
        headers = {}
        if dice.random() < 0.1:
            headers["x-request-timeout-ms"] = str(dice.randrange(1, 30))
        prompt = dice.choice(("hello", "tell me more", "forbidden words", "x" * 300))
        sampling = {"max_tokens": dice.randrange(1, 9), "stream": dice.random() < 0.5}
        openai = {"n": dice.choice((1, 1, 3)), "stop": dice.choice((None, "b", "ca"))}
        messages = [{"role": "user", "content": prompt}]
        match dice.choice(("chat", "completion", "messages", "response", "embeddings", "socket")):
            case "chat":
                body = {"model": "bytes", "messages": messages, **sampling, **openai}
                await client.post("/v1/chat/completions", body, headers)
            case "completion":
                await client.post("/v1/completions", {"prompt": prompt, **sampling, **openai}, headers)
            case "messages":
                await client.post(
                    "/v1/messages", {"model": "bytes", "messages": messages, **sampling}, headers
                )
            case "response":
                await self._respond(client, prompt, headers)
            case "embeddings":
                texts = [f"{prompt} {dice.randrange(5)}" for _ in range(dice.randrange(1, 5))]
                await client.post("/v1/embeddings", {"model": "bytes", "input": texts}, headers)
            case "socket":
                asks = [{"id": number, "prompt": prompt, "max_tokens": 8} for number in range(3)]
                await client.talk([*asks, {"cancel": dice.randrange(3)}, {"ping": 1}, {"cancel": 9}])

    async def _ask_again(self, client: FickleClient) -> None:
        """What was asked before, or is being asked."""
        headers = {"x-penstock-cache": "60"}
        if self.dice.random() < 0.6:
            headers = {"idempotency-key": f"key-{self.dice.randrange(2)}"}
        body = {"prompt": "again", "max_tokens": 8, "stream": self.dice.random() < 0.5}
        await client.post("/v1/completions", body, headers)

    async def _respond(self, client: FickleClient, prompt: str, headers: dict[str, str]) -> None:
        body = {"model": "bytes", "input": prompt, "max_output_tokens": 8}
        if self.dice.random() < 0.5:
            await client.post("/v1/responses", {**body, "stream": self.dice.random() < 0.5}, headers)
            return
        _, seen = await client.post("/v1/responses", {**body, "background": True}, headers)
        if seen and "id" in (answer := json.loads(seen)) and self.dice.random() < 0.7:
            await client.post(f"/v1/responses/{answer['id']}/cancel", {})

    async def calm(self) -> None:
        """Until nothing happens any more. What the engine never answers is cut off by the drain."""
        await self.gateway.drain(0.05)
        await until(
            lambda: not (self.engine.streams or self.gateway.guards._background or self.idempotency._running)
        )

    async def settled(self) -> None:
        """Until every admitted request is in the ledger. Replays need no engine, and may end after the
        calm."""
        counting = self.counting
        await until(lambda: not counting.num_asking and counting.settled.total() == counting.num_lent)
        await self.ledger.flush()


@asynccontextmanager
async def battlefield(folder: Path, seed: int) -> AsyncIterator[Battlefield]:
    dice = random.Random(seed)
    database = ready_made_database(folder)
    spending = LedgerSpendTracker(PRICES)
    ledger = UsageLedger(Journal(folder / JOURNAL_FOLDER), database, spending)
    await ledger.start()
    limiter = LocalLimiter(LIMITS, VirtualClock(), spending=spending)
    counting = CountingLimiter(limiter)
    idempotency = IdempotentAnswers(IdempotencySettings(abandoned_after_s=0.01), database)
    engine = UnreliableEngine(dice)
    gateway = Gateway(
        engine,
        GatewayConfig(),
        accounts=Accounts(counting, ledger),
        reuse=AnswerReuse(ResponseCacheSettings(enabled=True), idempotency),
    )
    tenants = Tenants(database)
    app = create_app(gateway, ServerConfig(), tenants=tenants, responses=ResponseStore(database))
    directory, actor = tenants.directory, Actor("test")
    guarded = await directory.create_workspace(actor, "guarded")
    gateway.guards.apply(guard_settings({**GUARDS, "workspaces": {guarded.id: "strict"}}))
    keys = [
        await directory.create_key(actor, NewKey(name="k", **place))
        for place in ({}, {}, {"workspace_id": guarded.id})
    ]
    clients = [FickleClient(app, key.secret, dice) for key in keys]
    yield Battlefield(dice, engine, gateway, limiter, counting, ledger, database, idempotency, clients)
    await tenants.close()
    await ledger.close()
    database.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_admitted_request_is_settled_once(tmp_path: Path, seed: int) -> None:
    async with battlefield(tmp_path, seed) as field:
        at_once = asyncio.Semaphore(40)

        async def one() -> None:
            async with at_once:
                await field.anything()

        tasks = [asyncio.create_task(one()) for _ in range(NUM_REQUESTS)]
        await asyncio.sleep(0.05)
        field.limiter.apply(LIMITS)  # settings are read again in the middle of it
        # Most must end by themselves, on a slow machine too; a few wait for the engine until the drain.
        await until(lambda: sum(task.done() for task in tasks) >= NUM_REQUESTS * 0.8)
        await field.calm()
        await asyncio.gather(*tasks)
        await field.settled()
        check_that_nothing_is_left(field)
        check_that_ledger_and_buckets_agree(field)


def check_that_nothing_is_left(field: Battlefield) -> None:
    assert field.gateway.num_live == 0
    assert field.engine.streams == {}
    assert field.counting.num_lent > NUM_REQUESTS / 3
    assert field.counting.settled.total() == field.counting.num_lent
    assert set(field.counting.settled.values()) == {1}
    for meter in field.limiter._meters._meters.values():
        assert (meter.num_running, meter.reserved_microdollars) == (0, 0.0), meter.subject


def check_that_ledger_and_buckets_agree(field: Battlefield) -> None:
    rows = field.database.run_now(lambda connection: connection.execute(sa.select(usage)).all())
    # Judges are in the ledger, and not limited.
    limited = [row for row in rows if row.endpoint != "guard"]
    assert {row.request_id for row in limited} == field.counting.reserved
    assert field.counting.reserved <= set(field.counting.settled)
    assert {row.status for row in rows} == {"completed", "cancelled", "failed"}
    assert {"guard", "chat", "completions", "messages", "responses", "embeddings"} == {
        row.endpoint for row in rows
    }
    assert any(row.is_cached for row in rows)
    admitted, written = field.counting.admitted, Counter[str]()
    for row in limited:
        written[row.workspace_id] += row.completion_tokens
    for meter in field.limiter._meters._meters.values():
        name = meter.subject.name
        if meter.requests is not None and meter.subject.scope == "key":
            assert meter.requests.limit - meter.requests.level == admitted[name]
        if meter.output_tokens is not None and meter.subject.scope == "workspace":
            assert meter.output_tokens.limit - meter.output_tokens.level == written[name]
        if meter.input_tokens is not None:
            assert meter.input_tokens.level <= meter.input_tokens.limit
        if meter.subject.scope == "model":
            assert meter.requests is not None
            assert meter.output_tokens is not None
            assert meter.requests.limit - meter.requests.level == field.counting.num_lent
            assert meter.output_tokens.limit - meter.output_tokens.level == written.total()
