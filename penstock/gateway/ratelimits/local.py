"""Limits kept in this process, or in a table that all processes of a server share. A decision is made without
awaiting anything, so within one process it needs no lock.

Each half of a reservation (first the request and its place, later its tokens and money) is granted by every limit
that applies, or by none.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Self

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import RateLimited
from penstock.core.identity import Principal, RateLimits
from penstock.gateway.accounts import UNLIMITED, Claim, Lease, Limiter, Outcome
from penstock.gateway.ratelimits.decisions import CompiledDecisions, TableStruct, load_decisions
from penstock.gateway.ratelimits.meters import SECONDS_PER_LIMIT, CallerMeters, Meter, Meters
from penstock.gateway.ratelimits.settings import (
    CallerLimits,
    Figure,
    LimiterMetrics,
    LimitSettings,
    Refusal,
    SlotTimes,
    Subject,
    error_for,
)
from penstock.gateway.ratelimits.spend import (
    NOTHING,
    Demand,
    Spend,
    SpendTracker,
    budgets_of,
    demand_of,
    used_by,
)

NUM_SLOTS = 16_384
LOCK_TIMEOUT_S = 0.02
_LOCK_PAUSE_S = 0.0001
_BROKEN_S = 1.0  # in which no process waits for a lock that was not released in time
_WINDOW = 32  # slots that a subject may have, from the first that its name leads to
_KEY_CELLS = 2
_BUCKET_CELLS = 3  # level, time of the last refill, and the limit that both belong to; 0 for no limit yet
_SLOT_CELLS = _KEY_CELLS + 3 * _BUCKET_CELLS + 1  # the last one counts what was stored without the lock
_UNLOCKED = 3 * _BUCKET_CELLS  # its place behind the key
_CELL_BYTES = 8


class MeterTable:
    """One process's view of the limits' state that all gateway processes of a server share: the levels of every
    subject's buckets, and the number of requests that each process runs. The table is a file that all processes
    map.

    Levels are changed under a lock on the file, which the kernel releases when a process dies. Running requests and
    the money that they reserve are written by their own process only, into its own column; a process that starts
    clears the column of its predecessor. Load and store only with the lock held.

    A process that is stopped while it holds the lock does not block the others. After `LOCK_TIMEOUT_S` they continue
    without the lock, and decisions made at the same moment may then overlook each other. Levels that others changed
    meanwhile stay when the stopped process continues: only its one decision is not in them.

    When no slot is free for a subject, which needs thousands of subjects that were active within the last minute,
    each process counts that subject for itself.
    """

    def __init__(
        self, path: Path | None, num_processes: int, number: int, num_slots: int = NUM_SLOTS
    ) -> None:
        """Without a path, the table is in the memory of the only process."""
        self._num_slots = num_slots
        self._columns = num_slots * _SLOT_CELLS
        self._all_columns = range(self._columns, self._columns + 2 * num_slots * num_processes, 2 * num_slots)
        self._own = self._all_columns[number]
        self._others = tuple(start for start in self._all_columns if start != self._own)
        size = (self._columns + 2 * num_slots * num_processes) * _CELL_BYTES
        self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(self._file, size)  # zeros, where there was nothing
        memory = memoryview(mmap.mmap(self._file, size))
        self._cells = memory.cast("d")
        self._keys = memory.cast("Q")
        self._is_broken_until_s = 0.0
        self._holds_lock = False
        first_byte = self._own * _CELL_BYTES
        memory[first_byte : first_byte + 2 * num_slots * _CELL_BYTES] = bytes(2 * num_slots * _CELL_BYTES)
        self.described = TableStruct.of(memory, num_slots, self._columns, num_processes, number, self._file)

    @classmethod
    def made(cls, folder: Path | None, num_processes: int, number: int) -> Self | None:
        """Return the table of the processes that share a folder. A process without others has a table where compiled
        code decides, and otherwise none: plain Python is faster without."""
        if folder is not None:
            return cls(folder / "limits", num_processes, number)
        return cls(None, 1, 0) if load_decisions() is not None else None

    def lock(self) -> None:
        if self._file < 0:
            self._holds_lock = True
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._holds_lock = True
        except BlockingIOError:
            self._wait_for_lock()

    def unlock(self) -> None:
        if self._holds_lock:
            self._holds_lock = False
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the lock. The mapping goes with the object."""
        if self._file >= 0:
            os.close(self._file)

    def load(self, meter: Meter, now: float) -> None:
        """Bring a meter up to date with all processes."""
        slot = meter.slot
        if slot is None or not self._is_of(slot, meter):
            slot = meter.slot = self._find(meter, now)
            if slot is None:
                return
        place = slot * _SLOT_CELLS + _KEY_CELLS
        cells = self._cells
        meter.unlocked_stores = cells[place + _UNLOCKED]
        for bucket in (meter.requests, meter.input_tokens, meter.output_tokens):
            if bucket is not None:
                limit = cells[place + 2]
                if limit == bucket.limit:
                    bucket.level, bucket.updated_s = cells[place], cells[place + 1]
                elif (
                    limit
                ):  # settings change in one process after the other: what is half full stays half full
                    bucket.level, bucket.updated_s = cells[place] * bucket.limit / limit, cells[place + 1]
                else:
                    bucket.level, bucket.updated_s = float(bucket.limit), now
            place += _BUCKET_CELLS
        num_running, reserved, reserved_offset = 0.0, 0.0, slot + self._num_slots
        for column in self._others:
            num_running += cells[column + slot]
            reserved += cells[column + reserved_offset]
        meter.running_elsewhere = int(num_running)
        meter.reserved_elsewhere = reserved

    def store(self, meter: Meter) -> None:
        """Tell all processes of a meter that was loaded and changed."""
        slot = meter.slot
        if slot is None:
            return
        place = slot * _SLOT_CELLS + _KEY_CELLS
        cells = self._cells
        if not self._holds_lock:
            cells[place + _UNLOCKED] += 1.0
        elif cells[place + _UNLOCKED] != meter.unlocked_stores:
            self._store_own(meter, slot)
            return
        for bucket in (meter.requests, meter.input_tokens, meter.output_tokens):
            if bucket is not None:
                cells[place] = bucket.level
                cells[place + 1] = bucket.updated_s
                cells[place + 2] = bucket.limit
            place += _BUCKET_CELLS
        self._store_own(meter, slot)

    def _store_own(self, meter: Meter, slot: int) -> None:
        """Tell what this process runs."""
        cells = self._cells
        cells[self._own + slot] = meter.num_running
        cells[self._own + self._num_slots + slot] = meter.reserved_microdollars

    def _wait_for_lock(self) -> None:
        """Wait for the lock for a bounded time: the event loop waits too."""
        now = time.monotonic()
        deadline_s = now if now < self._is_broken_until_s else now + LOCK_TIMEOUT_S
        while (now := time.monotonic()) < deadline_s:
            time.sleep(_LOCK_PAUSE_S)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            self._holds_lock = True
            return
        self._is_broken_until_s = max(self._is_broken_until_s, now + _BROKEN_S)

    def _is_of(self, slot: int, meter: Meter) -> bool:
        """Return whether a slot still belongs to a meter's subject: another process may have given the slot away."""
        first, second = meter.key
        place = slot * _SLOT_CELLS
        return self._keys[place] == first and self._keys[place + 1] == second

    def _find(self, meter: Meter, now: float) -> int | None:
        """Return the slot of a subject: its own, an empty one, or that of a subject which a new slot would describe
        as well; None where no slot is free."""
        first, second = meter.key = key_of(meter.subject.scope, meter.subject.name)
        free: int | None = None
        for step in range(min(_WINDOW, self._num_slots)):
            slot = (first + step) % self._num_slots
            place = slot * _SLOT_CELLS
            key = self._keys[place], self._keys[place + 1]
            if key == (first, second):
                return slot
            if free is None and (key == (0, 0) or self._is_idle(slot, now)):
                free = slot
            if key == (0, 0):
                break
        if free is not None:
            place = free * _SLOT_CELLS
            self._keys[place], self._keys[place + 1] = first, second
            for cell in range(place + _KEY_CELLS, place + _SLOT_CELLS):
                self._cells[cell] = 0.0
        return free

    def _is_idle(self, slot: int, now: float) -> bool:
        if any(self._cells[column + slot] for column in self._all_columns):
            return False
        first = slot * _SLOT_CELLS + _KEY_CELLS
        for place in range(first, first + 3 * _BUCKET_CELLS, _BUCKET_CELLS):
            level, updated_s, limit = (self._cells[place + cell] for cell in range(_BUCKET_CELLS))
            if limit and level + (now - updated_s) * limit / SECONDS_PER_LIMIT < limit:
                return False
        return True


class SharedCallerMeters(CallerMeters):
    """The meters of one caller, with the lock held and up to date within a `with` statement.

    Most requests are opened and closed by compiled code, in the table itself. Compiled code leaves to Python what is
    rare: subjects without a slot, limits that changed, budgets, and a lock that another process holds."""

    __slots__ = ("_clock", "_compiled", "_table")

    def __init__(
        self, limits: CallerLimits, meters: tuple[Meter, ...], table: MeterTable, clock: Clock
    ) -> None:
        super().__init__(limits, meters)
        self._table = table
        self._clock = clock
        self._compiled: CompiledDecisions | None = None
        if not limits.has_budget and (library := load_decisions()) is not None:
            self._compiled = CompiledDecisions(library, table.described, meters)

    def __enter__(self) -> None:
        table = self._table
        table.lock()
        now = self._clock.now()
        for meter in self.meters:
            table.load(meter, now)
        if self._compiled is not None:
            self._compiled.note_slots()

    def begin(self, num_requests: int, demand: Demand, now: float) -> RateLimits | None:
        compiled = self._compiled
        if compiled is None or not compiled.take(num_requests, demand, now):
            return super().begin(num_requests, demand, now)
        if num_requests:
            for meter in self.meters:
                meter.num_running += 1
        return compiled.left()

    def end(self, reserved: Demand, used: Demand, now: float) -> None:
        compiled = self._compiled
        input_tokens = reserved.input_tokens - used.input_tokens
        output_tokens = reserved.output_tokens - used.output_tokens
        if compiled is None or not compiled.give_back(1, input_tokens, output_tokens, now):
            super().end(reserved, used, now)
            return
        for meter in self.meters:
            meter.num_running -= 1
            if not meter.num_running:
                meter.reserved_microdollars = 0.0

    def give_back_input(self, num_tokens: int, now: float) -> None:
        if self._compiled is None or not self._compiled.give_back(0, num_tokens, 0, now):
            super().give_back_input(num_tokens, now)

    def __exit__(self, *_: object) -> None:
        table = self._table
        for meter in self.meters:
            table.store(meter)
        table.unlock()


def key_of(scope: str, name: str) -> tuple[int, int]:
    """Return the name of a subject in the table; never (0, 0), which is no subject."""
    digest = blake2b(f"{scope}\0{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8]) | 1, int.from_bytes(digest[8:])


class LocalLease(Lease):
    __slots__ = ("_claim", "_limiter", "_meters", "_reserved", "rate_limits")

    def __init__(
        self, limiter: LocalLimiter, claim: Claim, meters: CallerMeters, reserved: Demand, left: RateLimits
    ) -> None:
        self._limiter = limiter
        self._claim = claim
        self._meters = meters
        self._reserved = reserved
        self.rate_limits = left  # as of the half that was taken last

    async def reserve(self, claim: Claim) -> Lease:
        self._claim = claim
        self._reserved, self.rate_limits = await self._limiter.reserve(claim, self._meters)
        return self

    def give_back_cached(self, num_tokens: int) -> None:
        given, self._reserved = self._reserved.without_input(num_tokens)
        self._meters.give_back_input(given, self._limiter.now())

    def settle(self, outcome: Outcome) -> None:
        limiter = self._limiter
        used = used_by(self._claim, outcome, self._meters.limits, limiter.spending)
        self._meters.end(self._reserved, used, limiter.now())
        limiter.slot_times.observe(outcome.duration_s)

    def undo(self) -> None:
        with self._meters:
            self._meters.settle(NOTHING, NOTHING, self._limiter.now())
            self._meters.give_back_request(self._limiter.now())


class RunningLimiter(Limiter):
    """A limiter whose settings may change, perhaps with work in the background."""

    metrics: LimiterMetrics

    async def start(self) -> None:
        """Begin the work in the background. Call it before the first request."""

    async def close(self) -> None:
        """End the work in the background. Call it after the last request."""

    def apply(self, settings: LimitSettings) -> None:
        """Take over new limits. Counts of what callers have used, run and owe stay."""
        raise NotImplementedError


class LocalLimiter(RunningLimiter):
    """A limiter of one process, or of one of several that share a `table`. The spend tracker knows what all processes
    spent."""

    def __init__(
        self,
        settings: LimitSettings,
        clock: Clock | None = None,
        *,
        spending: SpendTracker | None = None,
        table: MeterTable | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        clock = clock or SystemClock()
        self.now = clock.now
        self.spending = spending or SpendTracker()
        self.metrics = LimiterMetrics()
        self.slot_times = SlotTimes()
        self._wall_clock = wall_clock
        self._meters = (
            Meters(settings)
            if table is None
            else Meters(settings, partial(SharedCallerMeters, table=table, clock=clock))
        )
        self.metrics.subjects = self._meters

    def apply(self, settings: LimitSettings) -> None:
        self._meters.apply(settings, self.now())

    async def admit(self, claim: Claim) -> Lease:
        now = self.now()
        meters = self._meters.of_caller(claim.principal, claim.model, now)
        if not meters.meters:
            self.metrics.admitted += 1
            return UNLIMITED
        over_budget: list[Refusal] = []
        spends: dict[Subject, Spend] = {}
        if not meters.limits.has_budget:
            left = meters.begin(1, NOTHING, now)
            if left is not None:
                return self._lease(claim, meters, NOTHING, left)
        else:
            spends = await self._spends(meters.limits)
            # Time has passed: the meters may have been swept, and the limits changed.
            now = self.now()
            meters = self._meters.of_caller(claim.principal, claim.model, now)
        with meters:
            if spends:
                over_budget = self._over_budget(meters, spends, NOTHING)
            if over_budget or not meters.admits(now):
                raise self._refuse(
                    over_budget + meters.refusals(1, NOTHING, now) + self._full(meters), meters
                )
            meters.admit()
            left = meters.rate_limits()
        return self._lease(claim, meters, NOTHING, left)

    def open_now(self, claim: Claim) -> Lease | None:
        now = self.now()
        meters = self._meters.of_caller(claim.principal, claim.model, now)
        if not meters.meters:
            self.metrics.admitted += 1
            return UNLIMITED
        if not meters.limits.has_budget:
            demand = demand_of(claim, meters.limits, self.spending)
            left = meters.begin(1, demand, now)
            if left is not None:
                return self._lease(claim, meters, demand, left)
        return None

    async def open(self, claim: Claim) -> Lease:
        return self.open_now(claim) or await super().open(claim)

    def _lease(self, claim: Claim, meters: CallerMeters, reserved: Demand, left: RateLimits) -> LocalLease:
        self.metrics.admitted += 1
        return LocalLease(self, claim, meters, reserved, left)

    async def reserve(self, claim: Claim, meters: CallerMeters) -> tuple[Demand, RateLimits]:
        """Take the second half of a lease. Returns it, and what is left. `meters` hold the first half, so that they
        are not swept meanwhile."""
        demand = demand_of(claim, meters.limits, self.spending)
        over_budget: list[Refusal] = []
        spends: dict[Subject, Spend] = {}
        if meters.limits.has_budget:
            spends = await self._spends(meters.limits)
        now = self.now()
        if not spends:
            left = meters.begin(0, demand, now)
            if left is not None:
                return demand, left
        with meters:
            if spends:
                over_budget = self._over_budget(meters, spends, demand)
            if over_budget or not meters.fits(demand, now):
                raise self._refuse(over_budget + meters.refusals(0, demand, now), meters)
            meters.take(demand)
            return demand, meters.rate_limits()

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        now = self.now()
        meters = self._meters.of_caller(principal, model, now)
        with meters:
            meters.refill(now)
            return meters.rate_limits()

    async def _spends(self, limits: CallerLimits) -> dict[Subject, Spend]:
        budgeted = [subject for subject, resolved in limits.applying if resolved.has_budget]
        return {subject: await self.spending.spent(subject) for subject in budgeted}

    def _over_budget(
        self, meters: CallerMeters, spends: dict[Subject, Spend], demand: Demand
    ) -> list[Refusal]:
        wall_s = self._wall_clock()
        found = []
        for meter in meters.meters:
            spend = spends.get(meter.subject)
            if spend is None:
                continue
            running = meter.reserved_microdollars + meter.reserved_elsewhere + demand.microdollars
            for budget in budgets_of(meter.limits, spend, wall_s):
                if budget.spent_microdollars + running > budget.limit_microdollars:
                    found.append(
                        Refusal(budget.reset_s, budget.figure, meter.subject, budget.limit_dollars, 0.0)
                    )
        return found

    def _full(self, meters: CallerMeters) -> list[Refusal]:
        return [
            Refusal(
                self.slot_times.wait_s(meter.num_running + meter.running_elsewhere),
                Figure.CONCURRENCY,
                meter.subject,
                meter.max_running,
                1,
            )
            for meter in meters.meters
            if meter.is_full and meter.max_running is not None
        ]

    def _refuse(self, found: list[Refusal], meters: CallerMeters) -> RateLimited:
        refusal = max(found)
        self.metrics.count_refusal(refusal)
        return error_for(refusal, meters.rate_limits())
