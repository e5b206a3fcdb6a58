"""Connects a gateway to the control plane: reports figures of the fleet, follows the directive, and passes on orders
of operators. While the control plane does not answer, the gateway follows the last directive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from weakref import WeakSet

from msgspec.structs import replace

from penstock import __version__
from penstock.cluster.control_messages import (
    Channel,
    CurveChannel,
    Directive,
    ExperimentsShown,
    FromControl,
    OperateHost,
    OrderReplica,
    PromoteRelease,
    Refused,
    ReleaseShown,
    Report,
    RollBackRelease,
    ShowCluster,
    ShowExperiments,
    Shown,
    StartExperiment,
    StartRelease,
    StopExperiment,
    ToControl,
    decode_from_control,
    encode_line,
)
from penstock.cluster.control_plane import ReplicaTimes, replica_view
from penstock.cluster.fleet import Fleet
from penstock.cluster.host_record import JoinTokens
from penstock.cluster.leadership import DIRECTIVE, LEADER, DocumentReader, LeaderDocument
from penstock.cluster.traffic import ExperimentTraffic, ReleaseTraffic
from penstock.core.cluster_view import (
    ClusterView,
    ExperimentOrder,
    ExperimentView,
    HostOrder,
    PoolView,
    ReleaseOrder,
    ReleaseView,
    ReplicaOrder,
    RoutingView,
)
from penstock.core.errors import EngineUnavailable, error_from_code
from penstock.core.messages import EngineStats
from penstock.core.request import Request
from penstock.core.tasks import running

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
RECONNECT_S = 1.0
MAX_LINE_BYTES = 1 << 24
_AWAY = "The control plane of this server does not answer."


class SocketChannel:
    """Implements `control_messages.Channel` over a private socket of this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def connect(socket: Path) -> SocketChannel:
        return SocketChannel(*await asyncio.open_unix_connection(str(socket), limit=MAX_LINE_BYTES))

    async def ask(self, line: bytes) -> bytes:
        self._writer.write(line)
        answer = await self._reader.readline()
        if not answer:
            raise ConnectionResetError("it has closed the connection")
        return answer

    def close(self) -> None:
        self._writer.close()


class ControlLink:
    """Implements `FleetControl` and `ExperimentControl`. `connect` makes a connection; it raises OSError while the
    control plane is away. `name` is the name of a gateway of a shared fleet."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Channel]],
        fleet: Fleet,
        *,
        interval_s: float = REPORT_INTERVAL_S,
        name: str = "",
    ) -> None:
        self._connect = connect
        self._fleet = fleet
        self._interval_s = interval_s
        self._name = name
        self.traffic = ReleaseTraffic(fleet, self._only_model)
        self.experiment_traffic = ExperimentTraffic(fleet, self._only_model)
        self._directive = Directive(number=-1)
        self._is_urgent = asyncio.Event()
        self._told_reasons: Counter[str] = Counter()
        self._told_tokens = (0, 0)  # routed and matched

    @property
    def pools(self) -> tuple[PoolView, ...]:
        """Return the pools of the last directive."""
        return self._directive.pools

    @contextlib.asynccontextmanager
    async def running(self, *, must_connect: bool = True) -> AsyncIterator[None]:
        """With `must_connect`, yields when the gateway follows its first directive: before that, revisions cannot be
        chosen. Gateways of a shared fleet start without a control plane too."""
        self._fleet.on_wait = self._is_urgent.set
        channel: Channel | None = None
        if must_connect:
            channel = await self._connect()
            await self._exchange(channel)
        async with running(self._keep_reporting(channel)):
            yield

    def follow(self, directive: Directive) -> bool:
        """Follow a directive, unless a later one is known: an earlier leader of a shared fleet may still send some.
        Returns whether it is followed."""
        if directive.number < self._directive.number:
            logger.warning("a directive of an earlier leader is refused")
            return False
        self._directive = directive
        self.traffic.follow(directive.releases)
        self.experiment_traffic.follow(directive.experiments)
        return True

    async def operate(self, order: HostOrder) -> ClusterView:
        answer = await self._ask(OperateHost(order))
        assert isinstance(answer, Shown)
        return answer.view

    async def cluster(self) -> ClusterView:
        answer = await self._ask(ShowCluster())
        assert isinstance(answer, Shown)
        return answer.view

    async def start_release(self, order: ReleaseOrder) -> ReleaseView:
        return await self._release(StartRelease(order))

    async def promote_release(self, model: str | None) -> ReleaseView:
        return await self._release(PromoteRelease(model))

    async def roll_back_release(self, model: str | None) -> ReleaseView:
        return await self._release(RollBackRelease(model))

    async def order_replica(self, order: ReplicaOrder) -> ClusterView:
        answer = await self._ask(OrderReplica(order))
        assert isinstance(answer, Shown)
        return answer.view

    async def experiments(self) -> tuple[ExperimentView, ...]:
        answer = await self._ask(ShowExperiments())
        assert isinstance(answer, ExperimentsShown)
        return answer.experiments

    async def start_experiment(self, order: ExperimentOrder) -> ExperimentView:
        return await self._experiment(StartExperiment(order))

    async def stop_experiment(self, model: str | None) -> ExperimentView:
        return await self._experiment(StopExperiment(model))

    def choose_revision(self, request: Request) -> str | None:
        """Return the revision that must answer an attempt; None: any."""
        decides, revision = self.experiment_traffic.choose_revision(request)
        return revision if decides else self.traffic.choose_revision(request)

    async def _experiment(self, message: ToControl) -> ExperimentView:
        answer = await self._ask(message)
        assert isinstance(answer, ExperimentsShown)
        return answer.experiments[0]

    async def _release(self, message: ToControl) -> ReleaseView:
        answer = await self._ask(message)
        assert isinstance(answer, ReleaseShown)
        return answer.release

    async def _ask(self, message: ToControl) -> FromControl:
        """Send an order over a connection of its own: it may take a while, and reports continue meanwhile."""
        try:
            with contextlib.closing(await self._connect()) as channel:
                line = await channel.ask(encode_line(message))
        except OSError as error:
            raise EngineUnavailable(_AWAY, retry_after_s=1.0) from error
        answer: FromControl = decode_from_control(line)
        if isinstance(answer, Refused):
            refusal = error_from_code(answer.code, answer.message)
            refusal.param, refusal.hint = answer.param, answer.hint
            raise refusal
        return answer

    async def _keep_reporting(self, channel: Channel | None) -> None:
        is_away = False
        while True:
            channel = channel or await self._reconnect()
            try:
                while True:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._interval_s):
                            await self._is_urgent.wait()
                    self._is_urgent.clear()
                    await self._exchange(channel)
                    if is_away:
                        logger.info("the control plane answers again")
                    is_away = False
            except OSError as error:
                if not is_away:
                    logger.warning("the control plane does not answer (%s)", str(error) or "too late")
                is_away = True
            except Exception:  # the next report may succeed
                logger.exception("a report to the control plane failed")
            finally:
                channel.close()
                channel = None

    async def _reconnect(self) -> Channel:
        while True:
            with contextlib.suppress(OSError):
                return await self._connect()
            await asyncio.sleep(RECONNECT_S)

    async def _exchange(self, channel: Channel) -> None:
        """Report until the control plane knows that this gateway follows the newest directive."""
        while True:
            before = self._directive.number
            directive = decode_from_control(await channel.ask(encode_line(self._report())))
            assert isinstance(directive, Directive)
            if not self.follow(directive):
                raise ConnectionAbortedError("it is no longer the leader")
            if directive.number == before:
                return

    def _report(self) -> Report:
        fleet, traffic = self._fleet, self.traffic
        reasons = Counter(fleet.reasons)
        routed, matched = fleet.routed_tokens, fleet.matched_tokens
        told_routed, told_matched = self._told_tokens
        new_reasons, self._told_reasons = reasons - self._told_reasons, reasons
        self._told_tokens = routed, matched
        models = {member.spec.model for member in fleet.members}
        models.update(pool.model for pool in self.pools)
        return Report(
            directive_number=self._directive.number,
            gateway=self._name,
            version=__version__,
            samples=traffic.take_samples(),
            models={
                model: traffic.take_report(
                    model, fleet.waiting.num_requests(model), fleet.waiting.num_tokens(model)
                )
                for model in models
            },
            token_s={
                member.id: load.token_s
                for member in fleet.members
                for router in (fleet.router, fleet.dispatcher.table.prefill_router)  # one knows the replica
                if (load := router.load(member.id)) is not None
            },
            reasons=dict(new_reasons),
            num_prompt_tokens=routed - told_routed,
            num_matched_tokens=matched - told_matched,
            arms=self.experiment_traffic.take_samples(),
        )

    def _only_model(self) -> str | None:
        models = {pool.model for pool in self.pools}
        return next(iter(models)) if len(models) == 1 else None


_NO_LEADER = "No control process leads this fleet at the moment."
_HINT = "Start one with `penstock control`, or wait 10 s if one was lost just now."


class FleetLink(ControlLink):
    """A gateway's connection to the leader of a shared fleet. Without a leader the gateway continues with the last
    directive, which the registry keeps. `take` gets the documents of the registry."""

    def __init__(self, fleet: Fleet, tokens: JoinTokens, name: str) -> None:
        super().__init__(self._connect_leader, fleet, name=name)
        self._tokens = tokens
        self._reader = DocumentReader(tokens)
        self._leader: LeaderDocument | None = None
        self._channels: WeakSet[CurveChannel] = WeakSet()  # to the leader
        fleet.observers += [self.traffic, self.experiment_traffic]
        fleet.choose_revisions(self.choose_revision)

    def take(self, documents: Mapping[str, bytes]) -> None:
        """Follow the documents of the leader that are new."""
        taken = self._reader.take(documents)
        if (document := taken.get(LEADER)) is not None:
            self._follow_leader(document.read(LeaderDocument))
        if (document := taken.get(DIRECTIVE)) is not None:
            directive = document.read(Directive)
            if directive is not None:
                self.follow(replace(directive, pools=self.pools))

    def _follow_leader(self, leader: LeaderDocument | None) -> None:
        if self._leader is not None and (leader is None or leader.endpoint != self._leader.endpoint):
            for channel in self._channels:
                channel.give_up()
            self._channels.clear()
        self._leader = leader

    @contextlib.asynccontextmanager
    async def running(self, *, must_connect: bool = False) -> AsyncIterator[None]:
        async with super().running(must_connect=must_connect):
            yield

    async def cluster(self) -> ClusterView:
        """Return the leader's view; without a leader, this gateway's view."""
        try:
            return await super().cluster()
        except EngineUnavailable:
            return self._own_view()

    async def _ask(self, message: ToControl) -> FromControl:
        if self._leader is None:
            raise EngineUnavailable(_NO_LEADER, hint=_HINT, retry_after_s=1.0)
        return await super()._ask(message)

    async def _connect_leader(self) -> Channel:
        if self._leader is None:
            raise ConnectionRefusedError(_NO_LEADER)
        channel = CurveChannel(self._leader.endpoint, self._tokens.client_keys())
        self._channels.add(channel)
        return channel

    def _own_view(self) -> ClusterView:
        fleet = self._fleet
        now = asyncio.get_running_loop().time()
        connections = fleet.connections.by_id
        replicas = [
            replica_view(
                member,
                connections[member.id].client.stats if member.id in connections else EngineStats(),
                ReplicaTimes(),
                now,
            )
            for member in fleet.members
        ]
        routing = RoutingView(
            num_gateways=1,
            reasons=dict(fleet.reasons),
            num_prompt_tokens=fleet.routed_tokens,
            num_matched_tokens=fleet.matched_tokens,
        )
        return ClusterView(replicas=tuple(replicas), pools=(), releases=(), routing=routing, at=time.time())
