"""Moves KV between simulated replicas: a prefill replica computes a prompt, or another replica has it cached, and the
replica that answers gets its blocks before it gets the request.

The blocks that arrive are imported into the real block cache, as in the engine. The way takes the time of the bytes;
the connection of each pair of replicas is thought to be free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.dispatch import Send
from penstock.simulator.fleet import Member
from penstock.simulator.workload import Arrival


@dataclass(frozen=True, slots=True)
class KVLink:
    """The network between replicas for KV."""

    bytes_per_token: int
    bytes_per_s: float = 1e9
    latency_s: float = 0.005

    def seconds(self, num_tokens: int) -> float:
        return self.latency_s + num_tokens * self.bytes_per_token / self.bytes_per_s


@dataclass(slots=True, eq=False)
class _Move:
    """One request that waits for its KV."""

    request: Request
    source: Member
    target: Member
    deliver: Callable[[float], None]  # gives the request to the target


class Host(Protocol):
    """The driver's interface for transfers of KV."""

    def settle(self, member: Member, now: float) -> None: ...

    def touch(self, member: Member, now: float) -> None: ...

    def give(self, member: Member, arrival: Arrival, request: Request, now: float) -> None: ...

    def later(self, time_s: float, action: Callable[[float], None]) -> None: ...


class Transfers:
    def __init__(self, host: Host, link: KVLink) -> None:
        self._host = host
        self._link = link
        self._moves: dict[str, _Move] = {}  # by request
        self._prefills: dict[str, _Move] = {}  # by the id of the request at the prefill replica
        self._num_prefills = 0
        self.num_moved_tokens = 0

    def begin(
        self, send: Send, source: Member | None, target: Member, now: float, deliver: Callable[[float], None]
    ) -> bool:
        """Let the KV of a request come from `source`, and then call `deliver`. Returns False when the target has to
        compute everything itself."""
        assert send.kv_source is not None
        if source is None or not source.is_alive:
            return False
        move = _Move(send.request, source, target, deliver)
        if send.kv_source.computes:
            self._num_prefills += 1
            name = f"{send.request.id}/prefill-{self._num_prefills}"
            sampling = msgspec.structs.replace(send.request.sampling, max_tokens=1)
            prefill = msgspec.structs.replace(send.request, id=name, sampling=sampling, output_token_ids=())
            prefill = msgspec.structs.replace(
                prefill, prompt_token_ids=send.request.prompt_token_ids + send.request.output_token_ids
            )
            try:
                self._host.give(source, Arrival(now, prefill, 1), prefill, now)
            except PenstockError:  # the prefill replica is full
                return False
            self._prefills[name] = move
        else:
            self._travel(move, now)
        self._moves[send.request.id] = move
        return True

    def forget(self, request_id: str) -> None:
        """Stop waiting for the KV of a request that was cancelled."""
        self._moves.pop(request_id, None)

    def lost(self, source: Member, now: float) -> None:
        """Let requests continue without the KV of a replica that is gone."""
        for move in [move for move in self._prefills.values() if move.source is source]:
            if self._moves.get(move.request.id) is move:
                del self._moves[move.request.id]
                move.deliver(now)
        self._prefills = {name: move for name, move in self._prefills.items() if move.source is not source}

    def is_prefill(self, event: TokenEvent, now: float) -> bool:
        """Return whether an event is one of a prompt that was computed for another replica. Its KV then travels."""
        move = self._prefills.get(event.request_id)
        if move is None:
            return False
        if event.finish_reason is not None:
            del self._prefills[event.request_id]
            self._travel(move, now)
        return True

    def _travel(self, move: _Move, now: float) -> None:
        self._host.settle(move.target, now)
        missing = move.target.replica.scheduler.exchange.num_missing(move.request)
        num_tokens = missing * move.target.replica.cache.block_size
        self.num_moved_tokens += num_tokens
        self._host.later(now + self._link.seconds(num_tokens), partial(self._arrive, move))

    def _arrive(self, move: _Move, now: float) -> None:
        if self._moves.get(move.request.id) is not move:
            return  # cancelled, or sent to another replica
        del self._moves[move.request.id]
        if move.target.is_alive:
            self._host.touch(move.target, now)
            if move.source.is_alive:
                self._host.settle(move.source, now)
                self._import(move)
            move.deliver(now)

    def _import(self, move: _Move) -> None:
        """Take over the blocks that the source still has."""
        exchange = move.target.replica.scheduler.exchange
        begun = exchange.begin_import(move.request)
        if begun is None:
            return  # there is no room, or nothing is missing
        num_there = begun.num_found + len(begun.block_ids)
        num_there -= move.source.replica.scheduler.exchange.num_missing(move.request)
        exchange.finish_import(begun.number, max(0, min(num_there - begun.num_found, len(begun.block_ids))))
