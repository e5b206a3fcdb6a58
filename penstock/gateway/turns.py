"""Fair work on the event loop: requests for many answers are prepared and sent in slices, so that a client with a
thousand prompts does not keep all others waiting. Knows no request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")

SLICE = 16  # prompts or answers of one request that are worked on at once


class Turns:
    """Lets large requests proceed one after the other: one slice of one of them in each iteration of the event
    loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, go_on: Callable[[], None], *, is_next: bool = False) -> None:
        """Call `go_on` when it is the caller's turn. With `is_next`, that is the turn after the present one."""
        if is_next:
            self._waiting.insert(1, go_on)
        else:
            self._waiting.append(go_on)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    async def next(self) -> None:
        """Return when it is the caller's turn."""
        turn = asyncio.get_running_loop().create_future()
        self.wait(partial(_begin, turn))
        await turn

    def pace(self) -> Pace:
        return Pace(self)

    def _next(self) -> None:
        go_on = self._waiting[0]  # stays until it is over, so that `wait` schedules no second call
        try:
            go_on()
        finally:  # after an error too: the others must not wait forever
            self._waiting.popleft()
            if self._waiting:
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
            workspace_id = next(iter(self._waiting))
            turns = self._waiting.pop(workspace_id)
            turn = turns.popleft()
            if turns:
                self._waiting[workspace_id] = turns  # behind the others
            if not turn.done():
                self._is_taken = True
                turn.set_result(None)


class Pace:
    """What one request may still do in its turn."""

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
