"""Requests that wait for a replica which does not exist yet. Keeps them in order; decides nothing: `control/holding`
says who may wait and how long. Must be used from one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from penstock.control.holding import HoldingConfig, check_room, too_late
from penstock.core.errors import PenstockError
from penstock.core.request import Request


@dataclass(frozen=True, slots=True)
class _Held:
    request: Request
    send: Callable[[], None]
    on_error: Callable[[PenstockError], None]
    giving_up: asyncio.TimerHandle

    def is_for(self, model: str | None) -> bool:
        """A request that names no model is for the only one there is."""
        return model is None or self.request.model in (model, "")


class HeldRequests:
    def __init__(self, config: HoldingConfig | None = None) -> None:
        self.config = config or HoldingConfig()
        self.on_held: Callable[[], None] = lambda: None  # somebody may want to start a replica at once
        self._held: dict[str, _Held] = {}

    def hold(
        self,
        request: Request,
        *,
        wait_s: float,
        send: Callable[[], None],
        on_error: Callable[[PenstockError], None],
    ) -> None:
        """Keep a request until `release` calls `send`, or `on_error` after `wait_s`. Raises Overloaded when there is
        no room."""
        check_room(self.config, len(self._held), self.num_tokens(), len(request.prompt_token_ids))
        loop = asyncio.get_running_loop()
        giving_up = loop.call_later(wait_s, self._give_up, request.id)
        self._held[request.id] = _Held(request, send, on_error, giving_up)
        self.on_held()

    def release(self, model: str | None = None) -> None:
        """There is a replica now, of `model` or of anything: send what waits, first come first served. What finds no
        replica after all may be held again."""
        leaving = [held for held in self._held.values() if held.is_for(model)]
        for held in leaving:
            if self._held.get(held.request.id) is held:  # not aborted by one that was sent before it
                self._take(held.request.id)
                held.send()

    def abort(self, request_id: str) -> bool:
        """Whether it was held. No callback of it runs any more."""
        return self._take(request_id) is not None

    def num_requests(self, model: str | None = None) -> int:
        return sum(held.is_for(model) for held in self._held.values())

    def num_tokens(self, model: str | None = None) -> int:
        """Of their prompts."""
        return sum(len(held.request.prompt_token_ids) for held in self._held.values() if held.is_for(model))

    def _take(self, request_id: str) -> _Held | None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held.giving_up.cancel()
        return held

    def _give_up(self, request_id: str) -> None:
        held = self._held.pop(request_id)
        held.on_error(too_late(self.config))
