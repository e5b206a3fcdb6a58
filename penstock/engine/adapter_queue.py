"""The queue of requests that wait for their LoRA adapter, before the scheduler. Knows no model and no tensor.

A thread reads an adapter from disk while steps go on; packing what was read is short work in the engine's loop. When
as many adapters as may be loaded are all in use, a request for another adapter waits until a slot is free. A request
that waits can be aborted and has its deadline, like any other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PenstockError
from penstock.core.request import Adapter
from penstock.engine.collaborator import Arrival, Collaborator

Weights = TypeVar("Weights")

RETRY_AFTER_S = 5.0
_ALL_IN_USE = "Too many requests wait for LoRA adapters that are not loaded."
_IDLE_WAIT_S = 0.002  # for an adapter, when the engine has nothing else to do
MAX_READ_AHEAD = 2  # adapters that are in memory twice, or wait there for a slot


class LoadedAdapters(Protocol[Weights]):
    """The loaded adapters, by digest. `engine.adapters.LoRAModel` implements it."""

    def __contains__(self, digest: str) -> bool: ...

    def read(self, adapter: Adapter) -> Weights:
        """Read an adapter's files, on any thread. Raises PenstockError if they cannot be used."""
        ...

    def make_room(self, in_use: frozenset[str]) -> bool: ...
    def load(self, digest: str, weights: Weights) -> None: ...
    def touch(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    arrival: Arrival
    adapter: Adapter
    gives_up_s: float


class AdapterQueue(Collaborator, Generic[Weights]):
    """The queue has the same bounds as the scheduler's: at most `max_waiting` requests, each for at most
    `queue_timeout_s`."""

    def __init__(
        self,
        adapters: LoadedAdapters[Weights],
        *,
        max_waiting: int = 1024,
        queue_timeout_s: float | None = None,
    ) -> None:
        self._adapters = adapters
        self._max_waiting = max_waiting
        self._queue_timeout_s = math.inf if queue_timeout_s is None else queue_timeout_s
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._waiting: dict[str, _Waiting] = {}
        self._reading: dict[str, Future[Weights]] = {}  # by digest, until loaded or refused
        self._digest_of: dict[str, str] = {}  # of requests that passed the queue
        self._in_use: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def must_wait(self, arrival: Arrival) -> bool:
        return arrival.request.adapter is not None

    def enter(self, arrival: Arrival, now: float) -> None:
        request = arrival.request
        assert request.adapter is not None
        if request.id in self._waiting or request.id in self._digest_of:
            raise InvalidRequest(f"A request with the id {request.id!r} is already being served.")
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(_ALL_IN_USE, retry_after_s=RETRY_AFTER_S)
        deadline_s = math.inf if request.deadline_s is None else request.deadline_s
        gives_up_s = min(deadline_s, now + self._queue_timeout_s)
        self._waiting[request.id] = _Waiting(arrival, request.adapter, gives_up_s)

    def forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        digest = self._digest_of.pop(request_id, None)
        if digest is not None:
            self._in_use[digest] -= 1
            if not self._in_use[digest]:
                del self._in_use[digest]

    def ready(self, now: float, *, is_idle: bool) -> Iterator[tuple[Arrival, PenstockError | None]]:
        """In order of arrival."""
        if is_idle and self._waiting:
            wait(self._reading.values(), _IDLE_WAIT_S, FIRST_COMPLETED)
        self._forget_unwanted()
        for request_id, waiting in tuple(self._waiting.items()):
            error: PenstockError | None = None
            try:
                if not self._is_loaded(waiting, now):
                    continue
            except PenstockError as failure:
                error = failure
            del self._waiting[request_id]
            if error is None:
                digest = waiting.adapter.digest
                self._adapters.touch(digest)
                self._digest_of[request_id] = digest
                self._in_use[digest] += 1
            yield waiting.arrival, error

    def close(self) -> None:
        self._waiting.clear()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _is_loaded(self, waiting: _Waiting, now: float) -> bool:
        adapter = waiting.adapter
        if waiting.gives_up_s <= now:
            if waiting.gives_up_s == waiting.arrival.request.deadline_s:
                raise DeadlineExceeded("The request's deadline passed while its adapter was loaded.")
            raise Overloaded(_ALL_IN_USE, retry_after_s=RETRY_AFTER_S)
        if adapter.digest in self._adapters:
            return True
        reading = self._reading.get(adapter.digest)
        if reading is None and len(self._reading) < MAX_READ_AHEAD:
            self._reading[adapter.digest] = self._reader.submit(self._adapters.read, adapter)
        if reading is None or not reading.done():
            return False
        failure = reading.exception()
        if failure is None and not self._adapters.make_room(frozenset(self._in_use)):
            return False
        del self._reading[adapter.digest]
        if isinstance(failure, PenstockError):
            raise failure
        if failure is not None:
            raise PenstockError(f"The adapter {adapter.name!r} could not be read: {failure}.")
        self._adapters.load(adapter.digest, reading.result())
        return True

    def _forget_unwanted(self) -> None:
        """Drop what was read for requests that have left since."""
        wanted = {waiting.adapter.digest for waiting in self._waiting.values()}
        for digest in [digest for digest in self._reading if digest not in wanted]:
            self._reading.pop(digest).cancel()
