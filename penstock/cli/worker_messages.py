"""What `penstock serve` and its API worker processes say to each other: JSON lines over the worker's standard input
and output."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.cluster.replica import Member
from penstock.core.config import ServeConfig
from penstock.core.messages import EngineReady


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first line to a worker. The listening socket is the inherited descriptor."""

    config: ServeConfig
    members: tuple[Member, ...]
    models: dict[str, EngineReady]  # what is served, where there may be no replica to tell
    control_socket: str
    listener_fd: int
    is_open: bool
    siblings: tuple[str, ...]  # sockets where each worker, this one included, tells its own metrics
    number: int  # of this worker among them


class Members(msgspec.Struct, frozen=True, tag="members"):
    """The replicas that there are now, all of them."""

    members: tuple[Member, ...]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Let running answers finish, then leave."""


class CutShort(msgspec.Struct, frozen=True, tag="cut_short"):
    """Leave now."""


ToWorker: TypeAlias = Begin | Members | Drain | CutShort


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    pass


def encode_line(message: ToWorker | WorkerReady) -> bytes:
    return msgspec.json.encode(message) + b"\n"


decode_to_worker = msgspec.json.Decoder(ToWorker).decode
