"""The messages between engines when KV moves from one to another. They do not carry the bytes of the blocks.

The receiver serves a request. It asks the sender for the leading blocks of the request, and reads blocks from the
sender's memory as they become ready: all layers of blocks before `num_whole_blocks`, and the first `num_layers`
layers of blocks up to `num_begun_blocks`. The receiver says when it has read all, and may use the blocks once the
sender has answered that they were kept until then.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.core.request import Request


class KVSource(msgspec.Struct, frozen=True):
    """Another engine that can send the KV of a request's first tokens. With `computes`, that engine computes the
    missing KV; otherwise it sends only the blocks in its cache."""

    endpoint: str  # EngineReady.kv_endpoint
    computes: bool = True


class MemoryRegion(msgspec.Struct, frozen=True, array_like=True):
    """A part of every block, in `num_strips` equal pieces, in each of which KV heads follow one another."""

    address: int
    block_bytes: int
    num_strips: int = 1


class KVHeads(msgspec.Struct, frozen=True, array_like=True):
    """The KV heads of the model that a rank has, in the same order in every layer. Several ranks may have the same
    one."""

    start: int
    stop: int


class KVLayout(msgspec.Struct, frozen=True, tag="layout"):
    """The first message to a receiver: how to reach the sender's memory, and the address of each layer."""

    agent_name: str
    agent_metadata: bytes
    memory: str  # "DRAM" or "VRAM", as NIXL calls them
    device_id: int
    model: str  # a fingerprint: KV of other weights or another dtype cannot be used
    layers: tuple[tuple[MemoryRegion, ...], ...]
    others: tuple[KVLayout, ...] = ()  # of the other ranks, each of which has its own part of every block
    kv_dtype: str = ""
    block_size: int = 0
    # None: layers differ, so that only the same rank of as many can use the blocks.
    heads: KVHeads | None = None


class AskForLayout(msgspec.Struct, frozen=True, tag="introduce"):
    """Asks for KVLayout."""


class AskForBlocks(msgspec.Struct, frozen=True, tag="ask"):
    """Asks for the first `num_blocks` blocks of this request. `fetch` is a number of the receiver's choice."""

    fetch: int
    request: Request
    num_blocks: int
    computes: bool


class BlocksRead(msgspec.Struct, frozen=True, tag="read"):
    """The receiver has read all blocks. Answered by ReadConfirmed."""

    fetch: int


class CancelTransfer(msgspec.Struct, frozen=True, tag="cancel"):
    """The request has ended, or the receiver needs no KV. The receiver reads nothing more; there is no answer."""

    fetch: int


ToSender: TypeAlias = AskForLayout | AskForBlocks | BlocksRead | CancelTransfer


class BlocksOffered(msgspec.Struct, frozen=True, tag="offered"):
    """The sender keeps these blocks for the receiver. A sender that computes nothing may offer fewer than asked
    for."""

    fetch: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int  # that the sender had cached


class BlocksReady(msgspec.Struct, frozen=True, tag="ready"):
    fetch: int
    num_whole_blocks: int
    num_begun_blocks: int
    num_layers: int


class CannotSend(msgspec.Struct, frozen=True, tag="cannot_send"):
    """No more blocks will become ready, and the ready blocks may be gone at any moment."""

    fetch: int
    reason: str


class ReadConfirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    fetch: int
    was_kept: bool


class SenderAlive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent to every receiver, also while its requests wait."""


ToReceiver: TypeAlias = KVLayout | BlocksOffered | BlocksReady | CannotSend | ReadConfirmed | SenderAlive


class TransferCodec:
    """Encoders and decoders for both directions, created once."""

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
