"""The places of connections. A connection on which no known caller's request is answered rests, and makes room for a
new connection; the others are in use by workspaces, each of which leaves places to others.
"""

from __future__ import annotations

import asyncio

from starlette.types import Scope

from penstock.core.errors import RateLimited
from penstock.core.identity import OPEN_PRINCIPAL, Principal
from penstock.core.shares import Shares

TAKE_PLACE = "penstock.take_place"  # the ASGI extension by which the caller of a request takes the place
RETRY_AFTER_S = 5.0
MAX_LOOKS = 16  # for a connection that has nothing to send


class Places:
    def __init__(self, max_connections: int) -> None:
        self.shares = Shares(max_connections)
        self.resting: dict[Place, None] = {}  # the one that rests the longest first

    def make_room(self) -> bool:
        """End the connection that has rested the longest, and return whether there was one. Connections that have
        nothing to send go first."""
        first = next(iter(self.resting), None)
        if first is None:
            return False
        looked_at = (place for place, _ in zip(self.resting, range(MAX_LOOKS), strict=False))
        place = next((each for each in looked_at if each.is_silent), first)
        del self.resting[place]
        place.abort()
        return True


class Place:
    """The place of one connection. It rests until a known caller's request is answered."""

    __slots__ = ("_holder", "_places", "_transport")

    def __init__(self, places: Places, transport: asyncio.Transport) -> None:
        self._places = places
        self._transport = transport
        self._holder: str | None = None  # the workspace that uses it

    @property
    def holder(self) -> str:
        """Return the workspace that uses the connection; empty where none does."""
        return self._holder or ""

    @property
    def is_silent(self) -> bool:
        return not self._transport.get_write_buffer_size()

    def abort(self) -> None:
        self._transport.abort()

    def take(self, principal: Principal) -> None:
        """Rest no longer: the request of a known caller is answered. Raises RateLimited for a workspace that has its
        share of the places. The owner of a server without keys shares with nobody."""
        holder, shares = principal.workspace_id, self._places.shares
        if principal is not OPEN_PRINCIPAL and holder != self._holder:
            if shares.is_full_for(holder):
                raise RateLimited(
                    f"This workspace uses {shares.of(holder)} connections, and the rest is kept for others.",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._let_go()
            self._holder = holder
            shares.add(holder)
        self._places.resting.pop(self, None)

    def rest(self) -> None:
        """Rest from now on: the connection is new, has a new request, or a request was answered."""
        if self._holder is not None:
            self._let_go()
        resting = self._places.resting
        resting.pop(self, None)
        resting[self] = None

    def leave(self) -> None:
        """The connection has ended."""
        self._let_go()
        self._places.resting.pop(self, None)

    def _let_go(self) -> None:
        if self._holder is not None:
            self._places.shares.add(self._holder, -1)
            self._holder = None


def take_place(scope: Scope, principal: Principal) -> None:
    """Let the caller of a request take the place of its connection. Raises RateLimited where the caller has too many.
    Calls from inside of the server have no connection."""
    found = (scope.get("extensions") or {}).get(TAKE_PLACE)
    if found is not None:
        found["take"](principal)
