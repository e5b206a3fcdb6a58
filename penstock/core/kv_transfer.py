"""What engines tell each other when KV moves between them. The bytes of the blocks do not travel in these messages.

The borrower, which serves a request, asks the lender for the leading blocks of it, and reads them from the lender's
memory as they become ready: those before `num_whole_blocks` in every layer, and those up to `num_begun_blocks` in the
first `num_layers` layers. When it has read all, it says so, and what it read counts only once the lender has answered
that the blocks were kept until then.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.core.request import Request


class KVSource(msgspec.Struct, frozen=True):
    """Where the KV of a request's first tokens can be had. `computes`: the engine there computes what it does not
    have; otherwise it lends only what is in its cache."""

    endpoint: str  # EngineReady.kv_endpoint
    computes: bool = True


class MemoryRegion(msgspec.Struct, frozen=True, array_like=True):
    address: int
    block_bytes: int


class KVLayout(msgspec.Struct, frozen=True, tag="layout"):
    """The first thing that a borrower hears: how to reach the lender's memory, and what lies where, by layer."""

    agent_name: str
    agent_metadata: bytes
    memory: str  # "DRAM" or "VRAM", as NIXL calls them
    device_id: int
    model: str  # a fingerprint: KV of other weights or another number format is of no use
    layers: tuple[tuple[MemoryRegion, ...], ...]


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    """Asks for KVLayout."""


class Borrow(msgspec.Struct, frozen=True, tag="borrow"):
    """Lend me the first `num_blocks` blocks of this request. `fetch` is a number of the borrower's choice."""

    fetch: int
    request: Request
    num_blocks: int
    computes: bool


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
    """All that was to be read is read. Answered by Returned."""

    fetch: int


class CancelBorrow(msgspec.Struct, frozen=True, tag="cancel"):
    """The request has ended, or the borrower does without. Nothing is read any more; not answered."""

    fetch: int


ToLender: TypeAlias = Introduce | Borrow | GiveBack | CancelBorrow


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """These blocks are kept for the borrower. They may be fewer than asked for where nothing is computed."""

    fetch: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int  # that the lender had before


class BlocksReady(msgspec.Struct, frozen=True, tag="ready"):
    fetch: int
    num_whole_blocks: int
    num_begun_blocks: int
    num_layers: int


class CannotLend(msgspec.Struct, frozen=True, tag="cannot_lend"):
    """There will be no more than what was ready before, and that may be gone any moment."""

    fetch: int
    reason: str


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    fetch: int
    was_kept: bool


class LenderAlive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent to everyone who borrows, also while their requests wait."""


ToBorrower: TypeAlias = KVLayout | Lent | BlocksReady | CannotLend | Returned | LenderAlive


class TransferCodec:
    """Encoders and decoders for both directions, made once."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_lender: msgspec.msgpack.Decoder[ToLender] = msgspec.msgpack.Decoder(ToLender)
        self._to_borrower: msgspec.msgpack.Decoder[ToBorrower] = msgspec.msgpack.Decoder(ToBorrower)

    def encode(self, message: ToLender | ToBorrower) -> bytes:
        return self._encoder.encode(message)

    def decode_to_lender(self, data: bytes) -> ToLender:
        return self._to_lender.decode(data)

    def decode_to_borrower(self, data: bytes) -> ToBorrower:
        return self._to_borrower.decode(data)
