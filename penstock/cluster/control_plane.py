"""The control plane of a server, in the process that owns the replicas. Adds up the reports of gateways, has pools
scaled and releases carried out, and answers operators. Gateways reach it over a private socket (`control_link`).

Decides nothing itself: `control` does, through `scaling` and `releases`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from penstock.cluster.control_messages import (
    Directive,
    ExperimentsShown,
    FromControl,
    OperateHost,
    OrderReplica,
    PromoteRelease,
    RecentTimes,
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
    decode_to_control,
    encode_line,
)
from penstock.cluster.experiments import ExperimentService
from penstock.cluster.leadership import Leadership
from penstock.cluster.releases import ReleaseOwner, ReleaseService, Resolve
from penstock.cluster.replica import Member, ReplicaManager, ReplicaSpec
from penstock.cluster.role_scaling import RolePair, role_pairs
from penstock.cluster.scaling import PoolScaler
from penstock.cluster.staged_records import (
    ExperimentRecord,
    MemoryRecords,
    RecordStore,
    ReleaseRecord,
    serving_spec,
)
from penstock.control.autoscaler import ROLES, AutoscalerConfig
from penstock.core.cluster_view import (
    ClusterView,
    GatewayView,
    HostOrder,
    PoolView,
    ReplicaOrder,
    ReplicaView,
    RoutingView,
)
from penstock.core.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.core.messages import EngineStats
from penstock.core.tasks import end_task

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
HEARD_TIMEOUT_S = 5.0  # for every gateway to follow a new directive; a slower gateway counts as gone
MAX_LINE_BYTES = 1 << 24
_TIMES_WINDOW_S = 60.0  # over which the latencies of each replica are shown


@dataclass(slots=True)
class _Gateway:
    directive_number: int = -1
    name: str = ""
    version: str = ""


@dataclass(slots=True)
class ReplicaTimes:
    ttfts_s: RecentTimes = field(default_factory=lambda: RecentTimes(_TIMES_WINDOW_S))
    itls_s: RecentTimes = field(default_factory=lambda: RecentTimes(_TIMES_WINDOW_S))


def replica_view(member: Member, stats: EngineStats, times: ReplicaTimes, now: float) -> ReplicaView:
    """Describe a replica to operators."""
    queries = stats.prefix_cache_queries
    return ReplicaView(
        id=member.id,
        model=member.spec.model,
        revision=member.replica.revision,
        state=member.replica.state,
        role=member.role,
        region=member.replica.region,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_tokens=stats.num_waiting_tokens,
        kv_usage=stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0,
        cached_share=stats.prefix_cache_hits / queries if queries else None,
        accepted_share=stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_drafts else None,
        tokens_per_draft=1 + stats.num_accepted_tokens / stats.num_drafts if stats.num_drafts else None,
        ttft_p50_s=times.ttfts_s.percentile(50, now),
        ttft_p95_s=times.ttfts_s.percentile(95, now),
        itl_p50_s=times.itls_s.percentile(50, now),
        itl_p95_s=times.itls_s.percentile(95, now),
    )


class ControlPlane:
    """Looks after pools and releases. `pools` are the specs of the pools, from the server's settings, and their
    scaling; None: the pool does not scale."""

    def __init__(
        self,
        manager: ReplicaManager,
        pools: Sequence[tuple[ReplicaSpec, AutoscalerConfig | None]],
        store: RecordStore[ReleaseRecord],
        resolve_weights: Resolve,
        *,
        drain_timeout_s: float = 60.0,
        look_interval_s: float = LOOK_INTERVAL_S,
        first_directive: int = 0,
        publish: Callable[[Directive], Awaitable[None]] | None = None,
        operate: Callable[[HostOrder], Awaitable[None]] | None = None,
        described: Callable[[ClusterView], ClusterView] = lambda view: view,
        is_looking: Callable[[], bool] = lambda: True,
        experiments: RecordStore[ExperimentRecord] | None = None,
        ownership: Leadership | None = None,
    ) -> None:
        """With `ownership`, other servers share the database, and one of them carries out releases.

        In a shared fleet, `first_directive` is greater than the numbers of earlier leaders. `publish` gets every new
        directive, `operate` carries out orders about hosts, and `described` adds hosts to the view. `is_looking` is
        true until enough is known for decisions."""
        self._manager = manager
        self._base_revisions = {spec.model: spec.revision for spec, _ in pools}
        self._store = store
        self._experiments: RecordStore[ExperimentRecord] = experiments or MemoryRecords()
        self._look_interval_s = look_interval_s
        self._drain_timeout_s = drain_timeout_s
        self._publish = publish
        self._operate = operate
        self._described = described
        self._is_looking = is_looking
        self.pools = [PoolScaler(manager, spec, scaling, drain_timeout_s) for spec, scaling in pools]
        self._pairs = role_pairs(manager, self.pools)
        self.releases = ReleaseService(
            self.pools, manager, store, resolve_weights, self.announce, interval_s=look_interval_s
        )
        self.experiments = ExperimentService(
            self.pools,
            manager,
            self._experiments,
            self.announce,
            self.releases.is_active,
            interval_s=look_interval_s,
        )
        self.releases.is_tested = self.experiments.is_active
        self._owner: ReleaseOwner | None = None
        if ownership is not None:
            self._owner = ReleaseOwner(ownership, self.releases, store, self._base_revisions)
        self._directive_number = first_directive
        self._gateways: dict[int, _Gateway] = {}
        self._num_gateways = 0  # that ever connected
        self._heard = asyncio.Condition()
        self._should_look = asyncio.Event()
        self._reasons: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_matched_tokens = 0
        self._times: dict[str, ReplicaTimes] = {}
        self._pool_views: tuple[PoolView, ...] = ()
        self._next_views_s = 0.0

    async def prepare(self) -> tuple[ReplicaSpec, ...]:
        """Return the specs to start for each pool, in order. A promoted release survives a restart of the server."""
        records = await self._store.load()
        for pool in self.pools:
            spec = serving_spec(pool.spec, records)
            if spec is not pool.spec:
                logger.info(
                    "%s: serving the revision %s, which a release promoted", spec.model, spec.revision
                )
            pool.spec = spec
        return tuple(pool.spec for pool in self.pools)

    async def add_pools(
        self, pools: Sequence[tuple[ReplicaSpec, AutoscalerConfig | None]]
    ) -> list[PoolScaler]:
        """Look after all pools of another model from now on, with the model's releases."""
        records = await self._store.load()
        added = [
            PoolScaler(self._manager, serving_spec(spec, records), scaling, self._drain_timeout_s)
            for spec, scaling in pools
        ]
        revisions = {spec.model: spec.revision for spec, _ in reversed(pools)}
        new = {model: name for model, name in revisions.items() if model not in self._base_revisions}
        self._base_revisions |= revisions
        self.pools += added
        self._pairs = role_pairs(self._manager, self.pools)
        if new:
            await self.releases.resume(records, new)
            await self.experiments.resume(await self._experiments.load(), new)
        return added

    @contextlib.asynccontextmanager
    async def running(self, socket: Path | None = None) -> AsyncIterator[None]:
        """Serve gateways, on a socket of this machine if one is named, and look after pools and releases, once the
        first replicas are there."""
        server = None
        if socket is not None:
            server = await asyncio.start_unix_server(self._serve, str(socket), limit=MAX_LINE_BYTES)
        if self._owner is None:
            await self.releases.resume(await self._store.load(), self._base_revisions)
        else:
            await self._owner.begin()
        await self.experiments.resume(await self._experiments.load(), self._base_revisions)
        tasks = [asyncio.create_task(self._keep_looking())]
        if self._owner is not None:
            tasks.append(asyncio.create_task(self._owner.keep_looking()))
        try:
            yield
        finally:
            for task in tasks:
                await end_task(task)
            await self.experiments.close()
            await self.releases.close()
            if self._owner is not None:
                await self._owner.close()
            for pool in self.pools:
                await pool.close()
            if server is not None:
                server.close()

    def report(self, gateway_number: int, report: Report) -> Directive:
        now = asyncio.get_running_loop().time()
        for pool in self.pools:
            pool.figures.add(gateway_number, pool.spec.model, self._revisions_of(pool), report, now)
            if pool.figures.held_requests:
                self._should_look.set()  # a request waits for a replica
        self.releases.observe(report)
        self.experiments.observe(report)
        self._note(report, now)
        self._gateways[gateway_number].directive_number = report.directive_number
        return self.directive(now)

    def _revisions_of(self, pool: PoolScaler) -> set[str]:
        """Return the revisions whose request times tell the load of a pool. A request counts for both roles of its
        model, which may have different settings."""
        roles = ("both",) if pool.spec.role == "both" else ROLES
        specs = (each.spec for each in self.pools)
        return {spec.revision for spec in specs if spec.model == pool.spec.model and spec.role in roles}

    def directive(self, now: float) -> Directive:
        # Every gateway asks; the percentiles are computed once for all of them.
        if now >= self._next_views_s:
            self._next_views_s = now + 0.5 * self._look_interval_s
            self._pool_views = tuple(pool.view(now) for pool in self.pools)
        return Directive(
            number=self._directive_number,
            releases=self.releases.active(),
            pools=self._pool_views,
            experiments=self.experiments.active(),
        )

    def view(self) -> ClusterView:
        now = asyncio.get_running_loop().time()
        members = self._manager.members()
        present = {member.id for member in members}
        self._times = {name: times for name, times in self._times.items() if name in present}
        view = ClusterView(
            replicas=tuple(
                replica_view(
                    member, self._manager.stats(member.id), self._times.get(member.id, ReplicaTimes()), now
                )
                for member in members
            ),
            pools=tuple(pool.view(now) for pool in self.pools),
            releases=self.releases.views(),
            routing=RoutingView(
                num_gateways=len(self._gateways),
                reasons=dict(self._reasons),
                num_prompt_tokens=self._num_prompt_tokens,
                num_matched_tokens=self._num_matched_tokens,
            ),
            at=time.time(),
            gateways=tuple(
                GatewayView(
                    name=gateway.name,
                    version=gateway.version,
                    follows=gateway.directive_number >= self._directive_number,
                )
                for gateway in self._gateways.values()
                if gateway.name
            ),
            decisions=tuple(
                sorted(
                    chain(*(pool.decisions for pool in self.pools)), key=lambda each: each.at, reverse=True
                )
            ),
        )
        return self._described(view)

    def _note(self, report: Report, now: float) -> None:
        """Record the state of the cluster for operators."""
        self._reasons.update(report.reasons)
        self._num_prompt_tokens += report.num_prompt_tokens
        self._num_matched_tokens += report.num_matched_tokens
        for sample in report.samples:
            times = self._times.setdefault(sample.replica_id, ReplicaTimes())
            if sample.ttft_s is not None:
                times.ttfts_s.add(sample.ttft_s, now)
            if sample.itl_s is not None:
                times.itls_s.add(sample.itl_s, now)

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_interval_s):
                    await self._should_look.wait()
            self._should_look.clear()
            if not self._is_looking():
                continue
            scalers: list[PoolScaler | RolePair] = [*self.pools, *self._pairs]
            for scaler in scalers:
                try:
                    scaler.look(loop.time(), time.time())
                except Exception:  # one failure must not end all scaling
                    logger.exception("the autoscaler stumbled")

    async def announce(self) -> None:
        """Wait until every gateway follows the present state of releases, or the time for that is over."""
        self._directive_number += 1
        number = self._directive_number
        if self._publish is not None:
            await self._publish(self.directive(asyncio.get_running_loop().time()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_TIMEOUT_S), self._heard:
                await self._heard.wait_for(
                    lambda: all(known.directive_number >= number for known in self._gateways.values())
                )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_gateways += 1
        number = self._num_gateways
        try:
            while line := await reader.readline():
                writer.write(await self.answer(number, line))
                await writer.drain()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("a gateway's report could not be read: %s", error)
        finally:
            self.forget(number)
            writer.close()

    async def answer(self, number: int, line: bytes) -> bytes:
        """Answer a message of a gateway. Gateways have numbers. Raises MsgspecError."""
        answer = encode_line(await self._answer(number, decode_to_control(line)))
        async with self._heard:
            self._heard.notify_all()
        return answer

    def forget(self, number: int) -> None:
        """Forget a gateway that has gone."""
        self._gateways.pop(number, None)
        for pool in self.pools:
            pool.figures.forget(number)

    def _order_replica(self, order: ReplicaOrder) -> None:
        if order.action == "convert":
            self._convert(order)
            return
        if order.action == "start":
            wanted = [
                pool
                for pool in self.pools
                if order.model in (None, pool.spec.model) and pool.spec.role == order.role
            ]
        else:
            wanted = [
                pool for pool in self.pools if any(member.id == order.replica_id for member in pool.members())
            ]
            if not wanted:
                raise NotFound(f"There is no replica {order.replica_id!r}.")
        if len(wanted) != 1:
            served = ", ".join(sorted({f"{pool.spec.model} ({pool.spec.role})" for pool in self.pools}))
            raise InvalidRequest(f"Name the model and the role to start: there are {served}.", param="model")
        wanted[0].obey(order, asyncio.get_running_loop().time(), time.time())

    def _convert(self, order: ReplicaOrder) -> None:
        replica_id = order.replica_id or ""
        models = {
            member.spec.model for pool in self.pools for member in pool.members() if member.id == replica_id
        }
        if not models:
            raise NotFound(f"There is no replica {replica_id!r}.")
        for pair in self._pairs:
            if pair.model in models:
                pair.obey(replica_id, order.role, asyncio.get_running_loop().time(), time.time())
                return
        raise Conflict(f"The model {models.pop()!r} has no prefill and decode replicas.")

    async def _answer(self, number: int, message: ToControl) -> FromControl:
        try:
            match message:
                case Report():
                    self._gateways.setdefault(number, _Gateway(name=message.gateway, version=message.version))
                    return self.report(number, message)
                case ShowCluster():
                    return Shown(self.view())
                case StartRelease(order=order):
                    async with self._owner.claimed() if self._owner else contextlib.nullcontext():
                        return ReleaseShown(await self.releases.start(order))
                case PromoteRelease(model=model):
                    return ReleaseShown(await self.releases.promote(model))
                case RollBackRelease(model=model):
                    return ReleaseShown(await self.releases.roll_back(model))
                case OperateHost(order=order):
                    if self._operate is None:
                        raise InvalidRequest("This server is one machine, and has no hosts to operate.")
                    await self._operate(order)
                    return Shown(self.view())
                case OrderReplica(order=order):
                    self._order_replica(order)
                    return Shown(self.view())
                case ShowExperiments():
                    return ExperimentsShown(self.experiments.views())
                case StartExperiment(order=ordered):
                    return ExperimentsShown((await self.experiments.start(ordered),))
                case StopExperiment(model=model):
                    return ExperimentsShown((await self.experiments.stop(model),))
        except PenstockError as error:
            return Refused(error.code, error.message, error.param, error.hint)
        except Exception as error:
            logger.exception("the control plane stumbled over %s", type(message).__name__)
            return Refused(PenstockError.code, f"The control plane stumbled: {type(error).__name__}.")
