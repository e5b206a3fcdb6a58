"""Shares the event loop and the threads fairly. Requests for many answers are prepared and sent in slices, so that a
client with a thousand prompts does not delay all others. Workspaces take turns. Knows no request."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

SLICE = 16  # prompts or answers of one request that are worked on at once


# The workspace of the request that is being answered. Work that is shared out by workspaces is found deep inside of
# other work, which knows no callers.
working_for: ContextVar[str] = ContextVar("working_for", default="")


class Turns:
    """Lets large requests proceed one after the other: one slice of one of them in each iteration of the event loop,
    and workspaces in turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # the workspace whose turn is next first
        self._next_ones: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def wait(self, go_on: Callable[[], None], *, is_next: bool = False) -> None:
        """Call `go_on` when it is the caller's turn. With `is_next`, that is the turn after the present one."""
        waiting = self._next_ones if is_next else self._waiting.setdefault(working_for.get(), deque())
        waiting.append(go_on)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    async def next(self) -> None:
        """Return when it is the caller's turn."""
        turn = asyncio.get_running_loop().create_future()
        self.wait(partial(_begin, turn))
        await turn

    def pace(self) -> TurnBudget:
        return TurnBudget(self)

    def _next(self) -> None:
        go_on = self._next_ones.popleft() if self._next_ones else _first_of(self._waiting)
        try:
            go_on()
        finally:  # after an error too: the others must not wait forever
            self._is_scheduled = bool(self._next_ones or self._waiting)
            if self._is_scheduled:
                asyncio.get_running_loop().call_soon(self._next)


class WorkspaceTurns:
    """Lets workspaces take turns with long pieces of work, such as the decoding of large bodies. After each piece the
    event loop is free for as long as the piece took, however many wait."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the workspace whose turn is next first
        self._is_taken = False

    async def run(self, workspace_id: str, work: Callable[[], T]) -> T:
        """Do the work when it is the workspace's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(workspace_id, deque()).append(turn)
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise
        began_s = loop.time()
        try:
            return work()
        finally:
            loop.call_later(loop.time() - began_s, self._next)

    def _next(self) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            turn = _first_of(self._waiting)
            if not turn.done():
                self._is_taken = True
                turn.set_result(None)


class FairSlots:
    """Slots that workspaces share. A free slot goes to the waiting workspace that has the fewest, and within it to
    the caller that has waited the longest. No workspace has more than `most_each`."""

    def __init__(self, count: int, most_each: int | None = None) -> None:
        self._num_free = count
        self._most_each = count if most_each is None else most_each
        self._num_taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the workspace served longest ago first

    async def acquire(self, workspace_id: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(workspace_id, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(workspace_id)
            raise

    def release(self, workspace_id: str) -> None:
        self._num_free += 1
        self._num_taken[workspace_id] -= 1
        if not self._num_taken[workspace_id]:
            del self._num_taken[workspace_id]
        self._hand_out()

    @asynccontextmanager
    async def slot(self, workspace_id: str) -> AsyncIterator[None]:
        await self.acquire(workspace_id)
        try:
            yield
        finally:
            self.release(workspace_id)

    async def in_thread(self, threads: Executor | None, work: Callable[[], T]) -> T:
        """Do work in a thread, with a slot of the workspace that is worked for. A caller that is cancelled waits no
        longer, but the slot is taken for as long as the thread is."""
        workspace_id = working_for.get()
        await self.acquire(workspace_id)
        doing = asyncio.get_running_loop().run_in_executor(threads, copy_context().run, work)

        def release(done: asyncio.Future[T]) -> None:
            self.release(workspace_id)
            if not done.cancelled():
                done.exception()  # a caller that waits raises the error; asyncio logs an error that was not retrieved

        doing.add_done_callback(release)
        return await asyncio.shield(doing)

    def _hand_out(self) -> None:
        while self._num_free and self._waiting:
            workspace_id = min(self._waiting, key=self._num_taken.__getitem__)
            if self._num_taken[workspace_id] >= self._most_each:
                return
            turn = _first_of(self._waiting, workspace_id)
            if not turn.done():
                self._num_free -= 1
                self._num_taken[workspace_id] += 1
                turn.set_result(None)


_NUM_THREADS = min(30, (os.cpu_count() or 1) + 2)  # fewer than asyncio's own threads, which others use, too
_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, FairSlots] = WeakKeyDictionary()


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Do work on a client's data in a thread. Workspaces share the threads."""
    slots = _threads.setdefault(asyncio.get_running_loop(), FairSlots(_NUM_THREADS))
    return await slots.in_thread(None, partial(work, *arguments))


class TurnBudget:
    """Counts the work that one request may still do in its turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._left = SLICE

    async def spend(self, amount: int = 1) -> None:
        """Count work that comes next. Waits for another turn if this turn has no room for more."""
        if self._left <= 0:
            await self._turns.next()
            self._left = SLICE
        self._left -= amount


def _begin(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # a cancelled request waits no more
        turn.set_result(None)


def _first_of(waiting: dict[str, deque[T]], workspace_id: str | None = None) -> T:
    """Take the first thing that a workspace waits for, by default of the first one. A workspace that waits for more
    goes behind the others."""
    if workspace_id is None:
        workspace_id = next(iter(waiting))
    own = waiting.pop(workspace_id)
    found = own.popleft()
    if own:
        waiting[workspace_id] = own
    return found
