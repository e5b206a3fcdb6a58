"""The messages between gateways and the control plane, and sums of the gateways' reports. In one server, messages are
JSON lines over a private socket. In a shared fleet, gateways ask the leader over TCP, encrypted (CURVE), with the
join token.

A gateway reports what happened since its last report and gets the directive in return. The control plane adds the
reports up; a gateway that restarts only reports less. Time is an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from penstock.cluster.host_record import JoinTokens
from penstock.cluster.transport import AcceptedClients, KeyPair, bind, connect, with_key
from penstock.control.experiment import Arm
from penstock.control.gates import MAX_TIMES
from penstock.control.release import ReleaseConfig, ReleaseState
from penstock.core.cluster_view import (
    ClusterView,
    ExperimentOrder,
    ExperimentView,
    HostOrder,
    PoolView,
    ReleaseOrder,
    ReleaseView,
    ReplicaOrder,
)
from penstock.core.figures import percentile
from penstock.core.machine import free_port
from penstock.core.objective import RoutingWeights
from penstock.core.request import Tier

logger = logging.getLogger(__name__)

PAUSE_S = 0.1  # after an error, so that one that comes again and again does not fill the log
SILENT_S = 3.0  # after which a gateway counts as gone; it reports twice a second
ANSWER_TIMEOUT_S = 2.0
MAX_MESSAGE_BYTES = 1 << 24
MAX_ANSWERING = 256  # questions at a time; more are dropped, and asked again


class ControlServer:
    """Listens on an address of this machine. `answer` gets the number of a client and its message; `forget` is called
    with the number of a client that has gone silent."""

    def __init__(
        self,
        host: str,
        tokens: JoinTokens,
        answer: Callable[[int, bytes], Awaitable[bytes]],
        forget: Callable[[int], None],
    ) -> None:
        self._host = host
        self._tokens = tokens
        self._answer = answer
        self._forget = forget
        self._numbers = itertools.count(1)
        self._clients: dict[bytes, tuple[int, float]] = {}  # number, and when it was last heard
        self._answering: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Yields the endpoint for gateways."""
        keys = KeyPair.make()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        accepted = AcceptedClients(context, self._tokens.accepted_clients())
        socket: zmq.asyncio.Socket = zmq.asyncio.Context.shadow(context.underlying).socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"tcp://{host}:{free_port(self._host)}"
        bind(socket, address, keys.secret)
        serving = asyncio.create_task(self._serve(socket))
        try:
            yield with_key(address, keys.public)
        finally:
            tasks = (serving, *self._answering)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.close()
            accepted.close()
            context.term()

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            try:
                await self._take_message(socket)
                self._forget_silent()
            except Exception:  # one message must not keep all gateways without answers
                logger.exception("a gateway's message could not be taken; the next ones are")
                await asyncio.sleep(PAUSE_S)

    async def _take_message(self, socket: zmq.asyncio.Socket) -> None:
        if not await socket.poll(int(SILENT_S * 1000)):
            return
        client, *frames = await socket.recv_multipart()
        self._heard(client)
        if len(frames) == 2 and len(self._answering) < MAX_ANSWERING:
            task = asyncio.create_task(self._reply(socket, client, frames[0], frames[1]))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _reply(self, socket: zmq.asyncio.Socket, client: bytes, number: bytes, line: bytes) -> None:
        try:
            answer = await self._answer(self._clients[client][0], line)
        except (msgspec.MsgspecError, ValueError) as error:
            logger.warning("a gateway's message could not be read: %s", error)
            return
        await socket.send_multipart([client, number, answer])

    def _heard(self, client: bytes) -> None:
        known = self._clients.get(client)
        number = next(self._numbers) if known is None else known[0]
        self._clients[client] = number, time.monotonic()

    def _forget_silent(self) -> None:
        oldest_s = time.monotonic() - SILENT_S
        for client, (number, heard_s) in list(self._clients.items()):
            if heard_s < oldest_s:
                del self._clients[client]
                self._forget(number)


class CurveChannel:
    """Implements `control_messages.Channel`. One question at a time."""

    def __init__(self, endpoint: str, keys: KeyPair, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._limit: asyncio.Timeout | None = None  # of the question that waits for its answer
        self._has_given_up = False
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._asked = 0
        connect(self._socket, endpoint, keys)

    async def ask(self, line: bytes) -> bytes:
        if self._has_given_up:
            raise ConnectionAbortedError("it is no longer the leader")
        self._asked += 1
        number = str(self._asked).encode()
        try:
            async with asyncio.timeout(self._timeout_s) as self._limit:  # a TimeoutError is an OSError
                await self._socket.send_multipart([number, line])
                while True:
                    answered, answer = await self._socket.recv_multipart()
                    if answered == number:
                        return bytes(answer)
        finally:
            self._limit = None

    def give_up(self) -> None:
        """Expect no more answers: another process leads now, and the earlier leader may be dead."""
        self._has_given_up = True
        if self._limit is not None and not self._limit.expired():  # else the question ends by itself
            self._limit.reschedule(0.0)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One attempt that ended."""

    replica_id: str
    model: str
    revision: str
    stage_number: int | None  # of the release of its model when it began; None: there was none
    ttft_s: float | None
    itl_s: float | None
    has_failed: bool


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway's report about one model."""

    arrived_tokens: int = 0  # uncached, of prompts that came since the last report
    held_requests: int = 0  # now
    held_tokens: int = 0
    stage_number: int | None = None  # that the two counts below were made in
    num_compared: int = 0  # mirrored answers, since the last report
    num_diverged: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    directive_number: int  # of the directive that this gateway follows
    gateway: str = ""  # the name of a gateway of a shared fleet
    version: str = ""
    samples: tuple[Sample, ...] = ()
    models: dict[str, ModelReport] = {}
    token_s: dict[str, float] = {}  # by replica id: seconds that one more uncached prompt token takes there
    reasons: dict[str, int] = {}  # requests routed since the last report, by reason
    num_prompt_tokens: int = 0
    num_matched_tokens: int = 0
    arms: tuple[ArmSample, ...] = ()


class ArmSample(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of an experiment that ended."""

    experiment_id: str
    arm: Arm
    tier: Tier
    ttft_s: float | None
    itl_s: float | None
    is_dropped: bool
    num_tokens: int  # computed for it, as far as a gateway knows


class ShowCluster(msgspec.Struct, frozen=True, tag="show"):
    pass


class StartRelease(msgspec.Struct, frozen=True, tag="start_release"):
    order: ReleaseOrder


class PromoteRelease(msgspec.Struct, frozen=True, tag="promote_release"):
    model: str | None  # None: the only one


class RollBackRelease(msgspec.Struct, frozen=True, tag="roll_back_release"):
    model: str | None


class OperateHost(msgspec.Struct, frozen=True, tag="operate"):
    order: HostOrder


class OrderReplica(msgspec.Struct, frozen=True, tag="order_replica"):
    order: ReplicaOrder


class StartExperiment(msgspec.Struct, frozen=True, tag="start_experiment"):
    order: ExperimentOrder


class StopExperiment(msgspec.Struct, frozen=True, tag="stop_experiment"):
    model: str | None


class ShowExperiments(msgspec.Struct, frozen=True, tag="show_experiments"):
    pass


ToControl: TypeAlias = (
    Report
    | ShowCluster
    | StartRelease
    | PromoteRelease
    | RollBackRelease
    | OperateHost
    | OrderReplica
    | StartExperiment
    | StopExperiment
    | ShowExperiments
)


class ActiveRelease(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    state: ReleaseState
    config: ReleaseConfig


class ActiveExperiment(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment as a gateway carries it out. The arms are named by the revisions of their replicas."""

    id: str
    model: str
    is_running: bool  # False: `base` answers all requests
    share: float
    base: str
    a: str
    b: str
    routing: dict[str, RoutingWeights] = {}  # by revision

    def revision_of(self, arm: Arm) -> str:
        return self.a if arm is Arm.A else self.b


class Directive(msgspec.Struct, frozen=True, kw_only=True, tag="directive"):
    """Tells a gateway what to do until the next directive. `number` rises when `releases` change."""

    number: int
    releases: tuple[ActiveRelease, ...] = ()
    pools: tuple[PoolView, ...] = ()  # for its metrics
    experiments: tuple[ActiveExperiment, ...] = ()


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    view: ClusterView


class ReleaseShown(msgspec.Struct, frozen=True, tag="release_shown"):
    release: ReleaseView


class ExperimentsShown(msgspec.Struct, frozen=True, tag="experiments_shown"):
    experiments: tuple[ExperimentView, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An order was refused. `code` is one of core.errors."""

    code: str
    message: str
    param: str | None = None
    hint: str | None = None


FromControl: TypeAlias = Directive | Shown | ReleaseShown | ExperimentsShown | Refused


def encode_line(message: ToControl | FromControl) -> bytes:
    return msgspec.json.encode(message) + b"\n"


decode_to_control = msgspec.json.Decoder(ToControl).decode
decode_from_control = msgspec.json.Decoder(FromControl).decode


class Channel(Protocol):
    """A connection of a gateway to the control plane. Both methods raise OSError when the control plane is away."""

    async def ask(self, line: bytes) -> bytes:
        """Send a message and return the answer."""
        ...

    def close(self) -> None: ...


class RecentTimes:
    """Keeps the times of the last seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)

    def add(self, value_s: float, now: float) -> None:
        self._times.append((now, value_s))

    def percentile(self, percent: float, now: float) -> float | None:
        while self._times and now - self._times[0][0] > self._window_s:
            self._times.popleft()
        return _percentile([value_s for _, value_s in self._times], percent)


class RecentRate:
    """Measures an amount per second, over the last seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._amounts: deque[tuple[float, float]] = deque()

    def add(self, amount: float, now: float) -> None:
        if amount:
            self._amounts.append((now, amount))

    def per_s(self, now: float) -> float:
        while self._amounts and now - self._amounts[0][0] > self._window_s:
            self._amounts.popleft()
        return sum(amount for _, amount in self._amounts) / self._window_s


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(sorted(values), percent) if values else None
