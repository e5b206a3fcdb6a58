"""The messages between engines when KV moves from one to another. They do not carry the bytes of the blocks.

The receiver, which serves a request, asks the sender for the leading blocks of it, and reads them from the sender's
memory as they become ready: those before `num_whole_blocks` in every layer, and those up to `num_begun_blocks` in the
first `num_layers` layers. When it has read all, it says so, and what it read counts only once the sender has answered
that the blocks were kept until then.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.core.request import Request


class KVSource(msgspec.Struct, frozen=True):
    """Where the KV of a request's first tokens can be had. `computes`: the engine there computes what it does not
    have; otherwise it sends only what is in its cache."""

    endpoint: str  # EngineReady.kv_endpoint
    computes: bool = True


class MemoryRegion(msgspec.Struct, frozen=True, array_like=True):
    address: int
    block_bytes: int


class KVLayout(msgspec.Struct, frozen=True, tag="layout"):
    """The first thing that a receiver hears: how to reach the sender's memory, and what lies where, by layer."""

    agent_name: str
    agent_metadata: bytes
    memory: str  # "DRAM" or "VRAM", as NIXL calls them
    device_id: int
    model: str  # a fingerprint: KV of other weights or another number format is of no use
    layers: tuple[tuple[MemoryRegion, ...], ...]


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    """Asks for KVLayout."""


class AskForBlocks(msgspec.Struct, frozen=True, tag="ask"):
    """Asks for the first `num_blocks` blocks of this request. `fetch` is a number of the receiver's choice."""

    fetch: int
    request: Request
    num_blocks: int
    computes: bool


class BlocksRead(msgspec.Struct, frozen=True, tag="read"):
    """All that was to be read is read. Answered by ReadConfirmed."""

    fetch: int


class CancelTransfer(msgspec.Struct, frozen=True, tag="cancel"):
    """The request has ended, or the receiver does without. Nothing is read any more; not answered."""

    fetch: int


ToSender: TypeAlias = Introduce | AskForBlocks | BlocksRead | CancelTransfer


class BlocksOffered(msgspec.Struct, frozen=True, tag="offered"):
    """These blocks are kept for the receiver. They may be fewer than asked for where nothing is computed."""

    fetch: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int  # that the sender had before


class BlocksReady(msgspec.Struct, frozen=True, tag="ready"):
    fetch: int
    num_whole_blocks: int
    num_begun_blocks: int
    num_layers: int


class CannotSend(msgspec.Struct, frozen=True, tag="cannot_send"):
    """There will be no more than what was ready before, and that may be gone any moment."""

    fetch: int
    reason: str


class ReadConfirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    fetch: int
    was_kept: bool


class SenderAlive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent to every receiver, also while its requests wait."""


ToReceiver: TypeAlias = KVLayout | BlocksOffered | BlocksReady | CannotSend | ReadConfirmed | SenderAlive


class TransferCodec:
    """Encoders and decoders for both directions, made once."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
        self._to_receiver: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)

    def encode(self, message: ToSender | ToReceiver) -> bytes:
        return self._encoder.encode(message)

    def decode_to_sender(self, data: bytes) -> ToSender:
        return self._to_sender.decode(data)

    def decode_to_receiver(self, data: bytes) -> ToReceiver:
        return self._to_receiver.decode(data)
