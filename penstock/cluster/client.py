"""How a gateway talks to one engine, whatever carries the messages.

Callbacks run on the caller's event loop and must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.core.messages import EngineReady, EngineStats
from penstock.core.plan import TokenEvent
from penstock.core.request import Request


class EngineClient(Protocol):
    @property
    def ready(self) -> EngineReady | None:
        """What the engine serves; None while it starts and after it has gone."""
        ...

    @property
    def models(self) -> Mapping[str, EngineReady]:
        """Every model that could be asked for, by name."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest that engines reported, added up. The same object until there is something new."""
        ...

    def stats_of(self, model: str) -> EngineStats:
        """Of the engines that serve one model."""
        ...

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None],
        on_error: Callable[[PenstockError], None],
    ) -> None:
        """Send a request. `on_event` is called for every TokenEvent up to the one with a finish_reason; or
        `on_error` is called once, and nothing follows."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request: no callback of it runs any more, and the engine frees its blocks within a step."""
        ...
