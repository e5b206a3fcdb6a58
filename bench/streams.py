"""Many streams through one gateway process at the pace of a large accelerator: does the engine ever wait for it?

    python -m bench.streams [--streams 256] [--tokens-per-s 11000] [--seconds 10] [--json FILE]

An engine process of its own (`bench.paced_engine`) makes one token for every stream per step and sends them over
ZeroMQ. The gateway has all of `penstock serve`: keys from a database, limits, the usage ledger, HTTP. The streams are
read by this process from plain sockets. One token a chunk means that the gateway had every step out before the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop

from bench.echo_server import ServerState, cpu_s, started
from bench.sockets import HOST, Call
from penstock.cluster.control_link import ControlLink
from penstock.cluster.fleet import Fleet
from penstock.cluster.replica import Member, ReplicaSpec
from penstock.core.config import ServeConfig
from penstock.core.engine_config import EngineConfig
from penstock.core.gateway_config import GatewayConfig, LedgerConfig, ServerConfig, StoreConfig
from penstock.core.machine import free_port
from penstock.engine.echo import ECHO_MODEL
from penstock.router import Replica
from penstock.serve.gateway import open_gateway
from penstock.serve.process import prepare_process
from penstock.serve.server import bind

_PATH = "/v1/chat/completions"
_CHUNK = b'"content":"a'  # what the engine writes


async def serve(endpoint: str, port: int, data_dir: str, settings: str) -> None:
    """The gateway process of `penstock serve`, with an engine that this script started."""
    config = ServeConfig(
        gateway=GatewayConfig(settings=settings),
        store=StoreConfig(data_dir=data_dir),
        ledger=LedgerConfig(usage_ledger=True),
        server=ServerConfig(port=port),
    )
    config = prepare_process(config)
    listener = bind(config.server)
    spec = ReplicaSpec(model=ECHO_MODEL, engine=EngineConfig(), model_path=ECHO_MODEL)
    replica = Replica(id="paced", models=frozenset((ECHO_MODEL,)))
    fleet = Fleet()
    fleet.update([Member(replica=replica, spec=spec, endpoint=endpoint)])
    await fleet.wait_ready()
    unconnected = ControlLink(Path(data_dir) / "control.sock", fleet)  # no control plane listens there
    async with open_gateway(config, fleet, listener, is_open=False, control=unconnected):
        await asyncio.Event().wait()


class Stream(asyncio.Protocol):
    """Reads one answer: in how many chunks it came, and the longest time between two of them."""

    def __init__(self, request: bytes, is_over: asyncio.Future[None]) -> None:
        self._request = request
        self._is_over = is_over
        self._tail = b""
        self._read_at = 0.0
        self.num_chunks = 0
        self.longest_gap_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._read_at:
            self.longest_gap_s = max(self.longest_gap_s, now - self._read_at)
        self._read_at = now
        self.num_chunks += data.count(_CHUNK)
        self._tail = (self._tail + data)[-200:]
        if self._tail.endswith(b"0\r\n\r\n") and not self._is_over.done():
            self._is_over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_over.done():
            self._is_over.set_exception(RuntimeError(f"a stream broke off: {self._tail!r}"))


@dataclass(frozen=True, slots=True)
class Pace:
    num_streams: int
    tokens_per_stream: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What the streams saw."""

    tokens_per_s: float  # from the first connection to the last token
    tokens_per_chunk: float
    gateway_cpu_share: float  # of one core
    gateway_cpu_us_per_token: float
    worst_gap_ms: float  # between two chunks of one stream


async def read_streams(call: Call, gateway: psutil.Process, pace: Pace) -> Figures:
    loop = asyncio.get_running_loop()
    before_s, started_at = cpu_s(gateway), time.perf_counter()
    streams: list[Stream] = []
    ends: list[asyncio.Future[None]] = []
    for _ in range(pace.num_streams):
        ends.append(loop.create_future())
        streams.append(Stream(call.request, ends[-1]))
        await loop.create_connection(lambda stream=streams[-1]: stream, HOST, call.port)  # type: ignore[misc]
    await asyncio.gather(*ends)
    elapsed_s, used_s = time.perf_counter() - started_at, cpu_s(gateway) - before_s
    tokens = pace.num_streams * pace.tokens_per_stream
    return Figures(
        tokens_per_s=tokens / elapsed_s,
        tokens_per_chunk=tokens / sum(stream.num_chunks for stream in streams),
        gateway_cpu_share=used_s / elapsed_s,
        gateway_cpu_us_per_token=1e6 * used_s / tokens,
        worst_gap_ms=1e3 * max(stream.longest_gap_s for stream in streams),
    )


def measure(pace: Pace) -> tuple[Figures, float]:
    """What the streams saw, and how late the engine's latest step was, in milliseconds."""
    port = free_port()
    with ServerState.made() as state:
        endpoint = f"ipc://{state.data_dir / 'engine.sock'}"
        paced = [sys.executable, "-m", "bench.paced_engine", endpoint, str(pace.step_s)]
        engine = subprocess.Popen(paced, stdout=subprocess.PIPE, text=True)
        arguments = (endpoint, port, str(state.data_dir), str(state.settings))
        program = f"import uvloop; from bench.streams import serve; uvloop.run(serve(*{arguments!r}))"
        try:
            with started([sys.executable, "-c", program], port, "/ready") as gateway:
                chat = {
                    "messages": [{"role": "user", "content": "go"}],
                    "max_tokens": pace.tokens_per_stream,
                    "stream": True,
                }
                headers = {"Authorization": f"Bearer {state.api_key}"}
                call = Call.post(port, _PATH, json.dumps(chat).encode(), headers)
                figures = uvloop.run(read_streams(call, gateway, pace))
        finally:
            engine.terminate()
            latest_s, _ = engine.communicate()
    return figures, 1e3 * float(latest_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens-per-s", type=float, default=11_000, help="of all streams together")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    step_s = arguments.streams / arguments.tokens_per_s
    pace = Pace(arguments.streams, max(1, round(arguments.seconds / step_s)), step_s)
    figures, latest_ms = measure(pace)
    print(
        f"{pace.num_streams} streams: {figures.tokens_per_s:,.0f} tok/s in chunks of "
        f"{figures.tokens_per_chunk:.2f} tokens; gateway {figures.gateway_cpu_share:.0%} of a core, "
        f"{figures.gateway_cpu_us_per_token:.1f} µs per token\n"
        f"a step every {1e3 * pace.step_s:.1f} ms; longest gap in a stream {figures.worst_gap_ms:.1f} ms; "
        f"engine never more than {latest_ms:.1f} ms late"
    )
    if arguments.json is not None:
        found = asdict(pace) | asdict(figures) | {"engine_latest_ms": latest_ms}
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
