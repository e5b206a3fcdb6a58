"""Idempotency keys: the same key with the same request gives the same answer, which is made once.

A repeat of a running request reads along; a repeat of a finished one gets its answer again, for a day. A request that
fails frees its key. Keys belong to a workspace. With a database, all of this holds across restarts and gateways;
while the database is away, it holds within this process.

The process that starts a request claims the row of its key with a lease, and renews the lease while the request runs.
The claim of a process that died therefore expires. The functions of the table are plain functions of a database
connection. Times are Unix seconds; times of rows are on the clock of the database: clocks of gateways may differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from penstock.core.errors import Conflict, InvalidRequest, StoreUnavailable
from penstock.gateway.accounts import Account
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.prepared import PreparedRequest
from penstock.gateway.reuse.replay import (
    AnswerCache,
    IdempotencySettings,
    ReplayedAnswer,
    SharedAnswer,
    decode_answer,
)
from penstock.gateway.store.database import Database, database_time, insert_once
from penstock.gateway.store.retention import Retention
from penstock.gateway.store.tables import idempotent_answers

_columns = idempotent_answers.c


class KeyClaim(msgspec.Struct, frozen=True, kw_only=True):
    workspace_id: str
    idempotency_key: str
    fingerprint: bytes
    owner: str  # unique to this attempt


class Claimed(msgspec.Struct, frozen=True):
    """The claimant is to run the request."""


class RunsElsewhere(msgspec.Struct, frozen=True):
    fingerprint: bytes


class Answered(msgspec.Struct, frozen=True):
    fingerprint: bytes
    answer: bytes


ClaimResult: TypeAlias = Claimed | RunsElsewhere | Answered


def claim_key(
    connection: Connection, claim: KeyClaim, now: float, lease_until: float, expires_at: float
) -> ClaimResult:
    values = msgspec.structs.asdict(claim) | {"lease_until": lease_until, "expires_at": expires_at}
    if insert_once(connection, idempotent_answers, values):
        return Claimed()
    # The row is too old, or the process that ran the request has died. The condition makes taking it over atomic.
    has_lapsed = sa.or_(
        _columns.expires_at <= now, sa.and_(_columns.answer.is_(None), _columns.lease_until <= now)
    )
    taken = connection.execute(
        sa.update(idempotent_answers).where(_same_key(claim), has_lapsed).values(**values, answer=None)
    )
    if taken.rowcount:
        return Claimed()
    found = sa.select(_columns.fingerprint, _columns.answer, _columns.lease_until).where(_same_key(claim))
    row = connection.execute(found).first()
    if row is None:  # released meanwhile; the caller asks again
        return RunsElsewhere(claim.fingerprint)
    if row.answer is None and row.lease_until > lease_until:
        # The clock was set back since. Its owner renews the lease, unless the owner has died.
        is_unchanged = _columns.answer.is_(None), _columns.lease_until == row.lease_until
        shorter = sa.update(idempotent_answers).where(_same_key(claim), *is_unchanged)
        connection.execute(shorter.values(lease_until=lease_until))
    return RunsElsewhere(row.fingerprint) if row.answer is None else Answered(row.fingerprint, row.answer)


def keep_answer(connection: Connection, claim: KeyClaim, answer: bytes, expires_at: float) -> None:
    connection.execute(
        sa.update(idempotent_answers).where(_own(claim)).values(answer=answer, expires_at=expires_at)
    )


def retention_of(database: Database, max_workspace_bytes: int) -> Retention:
    return Retention(
        database,
        idempotent_answers,
        _columns.idempotency_key,
        sa.func.length(_columns.answer),
        _columns.expires_at,
        max_workspace_bytes,
        may_go=_columns.answer.is_not(None),
    )


def release_key(connection: Connection, claim: KeyClaim) -> None:
    """Free the key of a request that failed, so that the next request with the key may run."""
    connection.execute(sa.delete(idempotent_answers).where(_own(claim), _columns.answer.is_(None)))


def renew_leases(connection: Connection, claims: Sequence[KeyClaim], lease_until: float) -> None:
    owners = [claim.owner for claim in claims]
    connection.execute(
        sa.update(idempotent_answers)
        .where(_columns.owner.in_(owners), _columns.answer.is_(None))
        .values(lease_until=lease_until)
    )


def _same_key(claim: KeyClaim) -> sa.ColumnElement[bool]:
    return sa.and_(
        _columns.workspace_id == claim.workspace_id, _columns.idempotency_key == claim.idempotency_key
    )


def _own(claim: KeyClaim) -> sa.ColumnElement[bool]:
    return sa.and_(_same_key(claim), _columns.owner == claim.owner)


logger = logging.getLogger(__name__)

MAX_KEY_CHARS = 255
LEASE_S = 30.0
RENEWAL_S = 10.0
POLL_S = 0.25  # how often a repeat looks for an answer that another gateway is making
MAX_WAIT_S = 600.0
CLOSE_TIMEOUT_S = 5.0
_FINGERPRINT_BYTES = 32

Generate: TypeAlias = Callable[[PreparedRequest], Awaitable[AnswerStream]]
_Key: TypeAlias = tuple[str, str]  # workspace and idempotency key


async def open_replay(work: PreparedRequest) -> Account:
    """Open the account of a request that gets an earlier answer. No tokens are reserved, because nothing was
    prepared."""
    assert work.admission is not None
    return await work.admission.open(work.claim())


class IdempotentAnswers:
    """Used from the event loop only. With a database, `run` must run in the background."""

    def __init__(
        self,
        settings: IdempotencySettings,
        database: Database | None = None,
        wall_clock: Callable[[], float] = time.time,
        lease_clock: Callable[[Connection], float] = database_time,
    ) -> None:
        self.settings = settings
        self.num_replayed = 0
        self.num_conflicts = 0
        self._database = database
        self._wall_clock = wall_clock
        self._lease_clock = lease_clock
        self._is_alone = False  # the database is away, which was logged
        self._running: dict[_Key, SharedAnswer] = {}
        self._unrecorded: set[SharedAnswer] = set()  # running, or being written to the database
        self._retention = retention_of(database, settings.max_workspace_bytes) if database else None
        self._claims: dict[_Key, KeyClaim] = {}  # of running requests, where a database holds them
        self._fingerprints: dict[_Key, bytes] = {}  # of running requests
        self._finished = AnswerCache(settings.max_bytes)  # fingerprint and answer
        self._releasing: set[asyncio.Task[None]] = set()  # claims of requests that were cancelled
        self._turns: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()

    def apply(self, settings: IdempotencySettings) -> None:
        self.settings = settings
        if self._retention is not None:
            self._retention.max_workspace_size = settings.max_workspace_bytes
        self._finished.shrink_to(settings.max_bytes)

    async def answer(self, work: PreparedRequest, fingerprint: bytes, generate: Generate) -> AnswerStream:
        request = work.request
        if not request.idempotency_key or len(request.idempotency_key) > MAX_KEY_CHARS:
            raise InvalidRequest(f"An idempotency key has 1 to {MAX_KEY_CHARS} characters.")
        key = request.principal.workspace_id, request.idempotency_key
        # Requests with the same key take turns until one of them runs. A waiting request keeps the lock alive.
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            if (shared := self._running.get(key)) is not None:
                self._check_same(self._fingerprints[key], fingerprint)
                self.num_replayed += 1
                return shared.reader(await open_replay(work))
            data = self._finished.find(key[0], key[1].encode(), self._wall_clock(), self.settings.ttl_s)
            if data is not None:
                return await self._replay(
                    data[:_FINGERPRINT_BYTES], data[_FINGERPRINT_BYTES:], fingerprint, work
                )
            claim = KeyClaim(
                workspace_id=key[0],
                idempotency_key=key[1],
                fingerprint=fingerprint,
                owner=secrets.token_hex(16),
            )
            if (found := await self._claim(claim)) is not None:
                return await self._replay(found.fingerprint, found.answer, fingerprint, work)
            return await self._start(key, claim, generate(work))

    async def run(self) -> None:
        """Renews leases and deletes what is too old, until cancelled."""
        if self._database is not None and self._retention is not None:
            await asyncio.gather(
                self._renew_leases(self._database), self._sweep(self._database, self._retention)
            )

    async def _renew_leases(self, database: Database) -> None:
        while True:
            if self._claims:
                with contextlib.suppress(StoreUnavailable):
                    await database.run(partial(self._renew, list(self._claims.values())))
            await asyncio.sleep(RENEWAL_S)

    async def _sweep(self, database: Database, retention: Retention) -> None:
        while True:
            if database.exists:
                with contextlib.suppress(StoreUnavailable):
                    await retention.sweep(await database.run(self._lease_clock, reads_only=True))
            await asyncio.sleep(RENEWAL_S)

    def _renew(self, claims: Sequence[KeyClaim], connection: Connection) -> None:
        renew_leases(connection, claims, lease_until=self._lease_clock(connection) + LEASE_S)

    async def close(self) -> None:
        """Let the records of answers that have ended be written. Call it when the gateway has drained."""
        endings = [asyncio.ensure_future(shared.over()) for shared in self._unrecorded]
        endings += self._releasing
        if endings:
            await asyncio.wait(endings, timeout=CLOSE_TIMEOUT_S)

    async def _start(self, key: _Key, claim: KeyClaim, starting: Awaitable[AnswerStream]) -> AnswerStream:
        if self._database is not None:
            self._claims[key] = claim
        try:
            answer = await starting
        except BaseException:
            self._claims.pop(key, None)
            await asyncio.shield(self._release(claim))
            raise
        settings = self.settings
        on_over = partial(self._on_over, key, claim)
        shared = SharedAnswer(answer, settings.abandoned_after_s, settings.max_entry_bytes, on_over)
        self._running[key] = shared
        self._unrecorded.add(shared)
        self._fingerprints[key] = claim.fingerprint
        return shared.reader(None)

    async def _on_over(self, key: _Key, claim: KeyClaim, answer: bytes | None) -> None:
        shared = self._running.pop(key)
        del self._fingerprints[key]
        now = self._wall_clock()
        try:
            if answer is not None and len(answer) <= self.settings.max_entry_bytes:
                data = claim.fingerprint + answer
                self._finished.keep(key[0], key[1].encode(), data, now, self.settings.ttl_s)
                await self._keep(claim, answer)
            else:
                await self._release(claim)
        finally:
            self._unrecorded.discard(shared)
        if self._claims.get(key) is claim:  # a failed request's key may have a new owner by now
            del self._claims[key]

    async def _replay(
        self, known: bytes, answer: bytes, fingerprint: bytes, work: PreparedRequest
    ) -> AnswerStream:
        self._check_same(known, fingerprint)
        self.num_replayed += 1
        recorded = decode_answer(answer)
        return ReplayedAnswer(recorded, await open_replay(work), answer_id=recorded.id)

    def _check_same(self, known: bytes, fingerprint: bytes) -> None:
        if known != fingerprint:
            self.num_conflicts += 1
            raise Conflict(
                "This idempotency key was used before, for another request.",
                hint="Use a new key for each different request.",
            )

    async def _claim(self, claim: KeyClaim) -> Answered | None:
        """Return the answer that another gateway made; None when this gateway is to run the request."""
        if self._database is None:
            return None
        now = asyncio.get_running_loop().time  # a clock that is never set back, unlike the wall clock
        deadline = now() + MAX_WAIT_S
        while now() < deadline:
            attempting = asyncio.ensure_future(self._database.run(partial(self._attempt, claim)))
            try:
                result = await asyncio.shield(attempting)
            except asyncio.CancelledError:  # the database may still grant a claim whose caller has gone
                releasing = asyncio.create_task(self._release_after(attempting, claim))
                self._releasing.add(releasing)
                releasing.add_done_callback(self._releasing.discard)
                raise
            except StoreUnavailable as error:
                if not self._is_alone:
                    logger.warning("idempotency keys hold within this process only: %s", error)
                self._is_alone = True
                return None
            self._is_alone = False
            if isinstance(result, Claimed):
                return None
            self._check_same(result.fingerprint, claim.fingerprint)
            if isinstance(result, Answered):
                return result
            await asyncio.sleep(POLL_S)
        raise Conflict("Another request with this idempotency key is still running.", retry_after_s=5.0)

    def _attempt(self, claim: KeyClaim, connection: Connection) -> ClaimResult:
        now = self._lease_clock(connection)
        return claim_key(connection, claim, now, now + LEASE_S, now + self.settings.ttl_s)

    async def _keep(self, claim: KeyClaim, answer: bytes) -> None:
        def keep(connection: Connection) -> None:
            keep_answer(connection, claim, answer, self._lease_clock(connection) + self.settings.ttl_s)

        if self._database is not None and self._retention is not None:
            with contextlib.suppress(StoreUnavailable):  # it is in memory, and the lease lapses
                await self._database.run(keep)
                await self._retention.note_added(claim.workspace_id, len(answer))

    async def _release_after(self, attempting: Awaitable[ClaimResult], claim: KeyClaim) -> None:
        with contextlib.suppress(StoreUnavailable):
            await attempting
        await self._release(claim)

    async def _release(self, claim: KeyClaim) -> None:
        if self._database is not None:
            with contextlib.suppress(StoreUnavailable):  # the lease lapses by itself
                await self._database.run(partial(release_key, claim=claim))
