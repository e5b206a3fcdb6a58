"""One API worker process: a gateway on a listening socket it inherited. Started by `penstock serve --api-workers`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

import uvloop

from penstock.cli.front_door import FrontDoor, open_front_door, prepare_process
from penstock.cli.telemetry import configure_server_logging
from penstock.cli.worker_messages import (
    Begin,
    CutShort,
    Drain,
    EngineGone,
    EngineStarting,
    WorkerReady,
    decode_to_worker,
    encode_line,
)
from penstock.cluster.transport import ZmqEngineClient
from penstock.core.errors import EngineUnavailable
from penstock.gateway.metrics_exchange import MetricsExchange

MAX_LINE_BYTES = 1 << 24


def main() -> int:
    # Ctrl-C reaches the whole process group; the parent alone decides what happens then, and says so.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    uvloop.run(_run())
    return 0


async def _run() -> None:
    orders = await _standard_input()
    begin = decode_to_worker(await orders.readline())
    assert isinstance(begin, Begin)
    configure_server_logging(begin.config.telemetry)
    config = prepare_process(begin.config)
    listener = socket.socket(fileno=begin.listener_fd)
    listener.setblocking(False)
    engine = ZmqEngineClient(begin.engine_endpoint)
    engine.start()
    await engine.wait_ready()
    try:
        async with open_front_door(config, engine, listener, is_open=begin.is_open) as door:
            exchange = MetricsExchange(begin.siblings, begin.number, door.gateway.render_own_metrics)
            door.gateway.metrics_exchange = exchange
            async with exchange.serving():
                sys.stdout.buffer.write(encode_line(WorkerReady()))
                sys.stdout.buffer.flush()
                await _obey(orders, engine, door, config.server.drain_timeout)
    finally:
        engine.close()


async def _obey(
    orders: asyncio.StreamReader, engine: ZmqEngineClient, door: FrontDoor, drain_timeout_s: float
) -> None:
    """Until there is nothing left to do: drained, cut short, or the parent has gone."""
    drained: asyncio.Task[None] | None = None
    while line := await _next_order(orders, drained):
        match decode_to_worker(line):
            case EngineGone(message=message):
                engine.fail(EngineUnavailable(message, retry_after_s=5.0))
            case EngineStarting():
                engine.start()
            case Drain() if drained is None:
                drained = asyncio.create_task(door.drain(drain_timeout_s))
            case CutShort():
                break
    if drained is not None:
        drained.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await drained
    await door.close()


async def _next_order(orders: asyncio.StreamReader, drained: asyncio.Task[None] | None) -> bytes:
    """The next line; nothing when the drain is over or the parent has gone."""
    if drained is None:
        return await orders.readline()
    reading = asyncio.ensure_future(orders.readline())
    await asyncio.wait((reading, drained), return_when=asyncio.FIRST_COMPLETED)
    if drained.done():
        reading.cancel()
        return b""
    return reading.result()


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    return reader


if __name__ == "__main__":
    sys.exit(main())
