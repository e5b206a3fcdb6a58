"""Messages between the engine's loop and the thread that moves KV. Knows neither of them.

The loop decides which blocks are offered and filled, and when they are free again; the thread talks to other engines
and reads their memory. Neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import zmq

from penstock.core.kv_transfer import KVSource
from penstock.core.request import Request


class Marker(Protocol):
    """A point in the device's work. On a CPU nothing is ever outstanding, and there are no markers."""

    def synchronize(self) -> None:
        """Wait until the device has reached the marker."""
        ...


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the first blocks of a request from another engine, from block `first_block` on."""

    number: int
    source: KVSource
    request: Request
    first_block: int
    block_ids: tuple[int, ...]  # of this engine, to be filled
    marker: Marker | None  # nothing may be written to the blocks before it


@dataclass(frozen=True, slots=True)
class CancelFetch:
    number: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks are kept for the receiver of this transfer."""

    transfer: TransferKey
    block_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Tells how many blocks of a transfer are computed, once the device has reached the marker."""

    transfer: TransferKey
    num_whole_blocks: int
    num_begun_blocks: int
    num_layers: int
    marker: Marker | None


@dataclass(frozen=True, slots=True)
class Refuse:
    transfer: TransferKey
    reason: str


Order: TypeAlias = Fetch | CancelFetch | Offer | Ready | Refuse
TransferKey: TypeAlias = tuple[bytes, int]  # the receiver, and the number it gave to the transfer


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch has ended: nothing writes to its blocks any more, and this many of them are filled."""

    number: int
    num_filled: int
    num_cached_tokens: int  # that the sender had cached
    trouble: str | None  # the reason why blocks are missing
    # The bytes read of blocks that the sender had cached, and the seconds from the sender's offer on.
    num_read_bytes: int = 0
    read_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """Another engine asks for blocks."""

    transfer: TransferKey
    request: Request
    num_blocks: int
    computes: bool


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The receiver no longer reads the blocks of this transfer, or waits for them."""

    transfer: TransferKey


News: TypeAlias = Fetched | Asked | TransferEnded


@dataclass(frozen=True, slots=True)
class LoopCalls:
    """The calls of KV transfers on the loop and its device."""

    add: Callable[[Request], None]
    abort: Callable[[str], None]
    mark: Callable[[], Marker | None]


@dataclass(frozen=True, slots=True)
class Wire:
    """Connects sockets of engines. `bind` returns the endpoint, with its key if any; `connect` takes that."""

    bind: Callable[[zmq.Socket[bytes]], str]
    connect: Callable[[zmq.Socket[bytes], str], None]


class KVPort(Protocol):
    """The loop's interface to the thread."""

    def order(self, order: Order) -> None: ...

    def news(self) -> list[News]:
        """Return the events since the last call."""
        ...
