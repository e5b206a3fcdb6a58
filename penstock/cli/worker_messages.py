"""What `penstock serve` and its API worker processes say to each other: JSON lines over the worker's standard input
and output."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.core.config import ServeConfig


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first line to a worker. The listening socket is the inherited descriptor."""

    config: ServeConfig
    engine_endpoint: str
    listener_fd: int
    is_open: bool
    siblings: tuple[str, ...]  # sockets where each worker, this one included, tells its own metrics
    number: int  # of this worker among them


class EngineGone(msgspec.Struct, frozen=True, tag="engine_gone"):
    message: str


class EngineStarting(msgspec.Struct, frozen=True, tag="engine_starting"):
    """A new engine process listens at the old endpoint."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Let running answers finish, then leave."""


class CutShort(msgspec.Struct, frozen=True, tag="cut_short"):
    """Leave now."""


ToWorker: TypeAlias = Begin | EngineGone | EngineStarting | Drain | CutShort


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    pass


def encode_line(message: ToWorker | WorkerReady) -> bytes:
    return msgspec.json.encode(message) + b"\n"


decode_to_worker = msgspec.json.Decoder(ToWorker).decode
