"""One API worker process: a gateway on an inherited listening socket. `penstock serve --api-workers` starts it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import BinaryIO

import uvloop

from penstock.cluster.fleet import Fleet
from penstock.dispatch import DispatchConfig
from penstock.gateway.siblings import MetricsExchange, Siblings
from penstock.serve.api_workers import (
    Begin,
    CutShort,
    Drain,
    Members,
    ToWorker,
    WorkerReady,
    decode_to_worker,
    encode_line,
)
from penstock.serve.control import open_link
from penstock.serve.gateway import open_gateway
from penstock.serve.process import configure_server_logging, prepare_process, until

MAX_LINE_BYTES = 1 << 26  # the first line holds the models' vocabularies


def main() -> int:
    # Ctrl-C reaches the whole process group. Only the parent reacts, and tells its workers to drain.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    uvloop.run(_run(_take_standard_output()))
    return 0


def _take_standard_output() -> BinaryIO:
    """Return the pipe to the parent, and send later output of `print` to standard error. The parent reads one line
    only, so a `print` into the pipe would fill it and block this process."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


class Orders:
    """The parent's messages, followed from the start, so that the process can leave while it waits for an engine. The
    end of the parent counts as an order to leave at once."""

    def __init__(self, lines: asyncio.StreamReader, fleet: Fleet) -> None:
        self._lines = lines
        self._fleet = fleet
        self.drain = asyncio.Event()  # always set when `cut_short` is set
        self.cut_short = asyncio.Event()

    async def follow(self) -> None:
        try:
            while not self.cut_short.is_set() and (line := await self._lines.readline()):
                self._obey(decode_to_worker(line))
        finally:
            self.drain.set()
            self.cut_short.set()

    def _obey(self, order: ToWorker) -> None:
        match order:
            case Members(members=members):
                self._fleet.update(members)
            case Drain():
                self.drain.set()
            case CutShort():
                self.cut_short.set()


async def _run(replies: BinaryIO) -> None:
    lines = await _standard_input()
    begin = decode_to_worker(await lines.readline())
    assert isinstance(begin, Begin)
    configure_server_logging(begin.config.telemetry)
    log_file = begin.config.cluster.record_dispatch
    fleet = Fleet(
        DispatchConfig(routing_policy=begin.config.cluster.routing_policy),
        starts_on_demand=begin.config.scaling.min_replicas == 0,
        record_to=None if log_file is None else Path(f"{log_file}.{os.getpid()}"),  # one file per worker
    )
    fleet.know(begin.models)
    fleet.update(begin.members)
    orders = Orders(lines, fleet)
    following = asyncio.create_task(orders.follow())
    try:
        has_engines = begin.config.runs_engines
        if not has_engines or await until(fleet.wait_ready(), orders.drain) is not None:
            await _serve(begin, fleet, orders, replies)
    finally:
        following.cancel()
        fleet.close()


async def _serve(begin: Begin, fleet: Fleet, orders: Orders, replies: BinaryIO) -> None:
    config = prepare_process(begin.config)
    listener = socket.socket(fileno=begin.listener_fd)
    listener.setblocking(False)
    siblings = Siblings(begin.siblings, begin.number)
    async with (
        open_link(Path(begin.control_socket), fleet) as link,
        open_gateway(
            config, fleet, listener, is_open=begin.is_open, control=link, siblings=siblings
        ) as running,
        siblings.serving(),
    ):
        running.gateway.metrics_exchange = MetricsExchange(siblings, running.gateway.render_own_metrics)
        replies.write(encode_line(WorkerReady()))
        await orders.drain.wait()
        await until(running.leave(config.server), orders.cut_short)
        await running.close()


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    return reader


if __name__ == "__main__":
    sys.exit(main())
