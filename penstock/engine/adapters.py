"""Loads the LoRA adapters of an engine, and runs the model with them.

At most `max_loras` adapters are loaded. The least recently used adapter without a live request is dropped for
another. `AdapterQueue` holds the requests that wait for their adapter, before the scheduler. A thread reads an
adapter from disk while steps continue. The engine's loop packs the weights, which is short work. A request that waits
can be aborted and has its deadline, like any other.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.engine_config import LoRAConfig
from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PenstockError
from penstock.core.hashing import adapter_digest
from penstock.core.plan import Chunk
from penstock.core.request import Adapter, Request
from penstock.engine.collaborator import Arrival, Collaborator
from penstock.engine.images import PlacedImages
from penstock.engine.staging import Staging
from penstock.kernels.adapted import NO_ADAPTER, AdaptedProduct, Delta, adapters_on
from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.models.lora import Shapes, adaptable_products, read_lora
from penstock.models.model import Model

Slots: TypeAlias = NDArray[np.int32]  # of each token's adapter, or NO_ADAPTER

RETRY_AFTER_S = 5.0  # when requests with other adapters may have ended


class LoRAModel:
    """A model and the adapters that are loaded for it, by digest. Without adapters in a step, the model runs as it
    is."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        staging: Staging,
        limits: LoRAConfig,
        around: Callable[[Ops], Ops] = lambda ops: ops,
        elsewhere: Shapes | None = None,
    ) -> None:
        """`ops` compute the products of this rank alone; `around` wraps them for several ranks. `elsewhere` are the
        matrices of other pipeline stages."""
        self._elsewhere = elsewhere
        self.max_rank = limits.max_lora_rank
        self.on_load: Callable[[Adapter], None] = _ignore  # called when an adapter was loaded ...
        self.on_drop: Callable[[str], None] = _ignore  # ... or dropped
        self.products = adaptable_products(model.products)
        products = [
            AdaptedProduct(product.packed, tuple(map(len, product.own_rows)), len(product.own_columns))
            for product in self.products
        ]
        self._adapters = adapters_on(ops, products, limits.max_loras)
        self._model = model
        self._staging = staging
        self._around = around
        self.adapted = self.on(ops)
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._free = list(range(limits.max_loras))
        self._digest_of: dict[str, str] = {}  # of live requests

    def __contains__(self, digest: str) -> bool:
        return digest in self._slot_of

    def on(self, ops: Ops) -> Model:
        """Return the model with adapters, run by other operations of the same backend."""
        return self._model.with_ops(self._around(self._adapters.around(ops)))

    @property
    def version(self) -> int:
        """Return a number that changes when recorded steps become invalid."""
        return self._adapters.version

    @property
    def records_graphs(self) -> bool:
        return self._adapters.records_graphs

    def read(self, adapter: Adapter) -> Any:
        """Read an adapter from disk, on any thread. Raises InvalidRequest for an adapter that cannot be used, or
        whose files have changed since it was registered: cached KV of the old weights would be reused."""
        folder = Path(adapter.path)
        weights = read_lora(folder, self.products, self.max_rank, self._elsewhere)
        if adapter_digest(folder) != adapter.digest:
            raise InvalidRequest(
                f"The adapter {adapter.name!r} has changed on disk since it was added.", hint="Add it again."
            )
        return self.pack(weights.deltas)

    def pack(self, deltas: Mapping[int, Delta]) -> Any:
        """Prepare the changes of an adapter to `products`, by index, for `load`; on any thread."""
        return self._adapters.pack(deltas)

    def make_room(self, in_use: frozenset[str]) -> bool:
        """Return whether one more adapter can be loaded, and drop an unused adapter for it if necessary."""
        if self._free:
            return True
        unused = next((digest for digest in self._slot_of if digest not in in_use), None)
        if unused is None:
            return False
        self.drop(unused)
        self.on_drop(unused)
        return True

    def drop(self, digest: str) -> None:
        slot = self._slot_of.pop(digest)
        self._adapters.unload(slot)
        self._free.append(slot)

    def load(self, adapter: Adapter, packed: Any) -> None:
        """Load an adapter that `read` returned. Raises Overloaded when a GPU has no memory left."""
        try:
            self._adapters.load(self._free[-1], packed)
        except torch.OutOfMemoryError as error:
            raise Overloaded(
                "The device has no memory left for this adapter.", retry_after_s=RETRY_AFTER_S
            ) from error
        self._slot_of[adapter.digest] = self._free.pop()
        self.on_load(adapter)

    def touch(self, digest: str) -> None:
        """Note that a request begins to use an adapter."""
        self._slot_of.move_to_end(digest)

    def begin(self, request: Request) -> None:
        if request.adapter is not None:
            self._digest_of[request.id] = request.adapter.digest

    def end(self, request_id: str) -> None:
        self._digest_of.pop(request_id, None)

    def slots_of(self, chunks: Sequence[Chunk], starts: NDArray[np.int32]) -> Slots | None:
        """Return the slot of each token's adapter; None when no chunk has one. The chunks' tokens begin at
        `starts`."""
        if not self._digest_of:
            return None
        digests = [self._digest_of.get(chunk.request_id) for chunk in chunks]
        return self.token_slots(digests, starts) if any(digests) else None

    def token_slots(self, digests: Sequence[str | None], starts: NDArray[np.int32]) -> Slots:
        slots = [NO_ADAPTER if digest is None else self._slot_of[digest] for digest in digests]
        return np.repeat(np.array(slots, dtype=np.int32), np.diff(starts))

    def use(self, slots: Slots) -> None:
        """Set the adapter of each row of the next forward pass of an adapted model."""
        self._adapters.use(slots, self._staging.copy_into)

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: KVStore,
        slots: Slots,
        placed: PlacedImages | None = None,
    ) -> Tensor:
        """Like `Model.forward`. `placed` replaces the embeddings of image tokens."""
        self.use(slots)
        if placed is not None:
            return placed.forward(self.adapted, token_ids, batch, kv)
        return self.adapted.forward(token_ids, batch, kv)


def _ignore(_: object) -> None:
    pass


Weights = TypeVar("Weights")

_ALL_IN_USE = "Too many requests wait for LoRA adapters that are not loaded."
_IDLE_WAIT_S = 0.002  # for an adapter, when the engine has nothing else to do
MAX_READ_AHEAD = 2  # adapters that are read into memory before a slot is free


class LoadedAdapters(Protocol[Weights]):
    """The loaded adapters, by digest. `engine.adapters.LoRAModel` implements it."""

    def __contains__(self, digest: str) -> bool: ...

    def read(self, adapter: Adapter) -> Weights:
        """Read an adapter's files, on any thread. Raises PenstockError if they cannot be used."""
        ...

    def make_room(self, in_use: frozenset[str]) -> bool: ...
    def load(self, adapter: Adapter, weights: Weights) -> None: ...
    def touch(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    arrival: Arrival
    adapter: Adapter
    gives_up_s: float


class AdapterQueue(Collaborator, Generic[Weights]):
    """Holds requests until their adapter is loaded, within the bounds of the scheduler's queue: at most `max_waiting`
    requests, each for at most `queue_timeout_s`."""

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
        """Return the requests that can continue, in order of arrival."""
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
        self._adapters.load(adapter, reading.result())
        return True

    def _forget_unwanted(self) -> None:
        """Drop the adapters of requests that have left since."""
        wanted = {waiting.adapter.digest for waiting in self._waiting.values()}
        for digest in [digest for digest in self._reading if digest not in wanted]:
            self._reading.pop(digest).cancel()
