"""Opens and closes one gateway's connections to all replicas, and collects the replicas' reports about their models
and statistics. Decides nothing and sends no request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq

from penstock.cluster.replica import Connector, Member, ReplicaClient
from penstock.cluster.staged_records import kv_kind_of
from penstock.cluster.transport import KeyPair, ZmqEngineClient
from penstock.core.messages import LATEST, EngineReady, EngineStats, KVEvent, added_up
from penstock.core.plan import TokenEvent
from penstock.dispatch import FleetStatus, ReplicaStatus
from penstock.router import ReplicaState

logger = logging.getLogger(__name__)


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[Any, ...]]  # ids by token, or in order: a token and its score


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


_decode = msgspec.json.Decoder(_Tokenizer).decode


def are_alike(tokenizer_json: bytes, other_json: bytes) -> bool:
    """Return whether token ids mean the same to two engines: a gateway tokenizes a request before an engine is
    chosen. Compares vocabularies, not bytes: versions of Penstock may write the same tokenizer differently. Of a file
    that cannot be read, only an exact copy is alike."""
    if tokenizer_json == other_json:
        return True
    try:
        return _ids(tokenizer_json) == _ids(other_json)
    except (msgspec.MsgspecError, IndexError):
        return False


def _ids(tokenizer_json: bytes) -> dict[str, int]:
    tokenizer = _decode(tokenizer_json)
    vocabulary = tokenizer.model.vocab
    if not isinstance(vocabulary, dict):
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    return vocabulary | {added.content: added.id for added in tokenizer.added_tokens}


_LOST = (ReplicaState.UNHEALTHY, ReplicaState.GONE)
# Figures that rise and fall, as opposed to counters: the value of a replica disappears with the replica.
_GAUGES = frozenset(
    {
        "num_running",
        "num_waiting",
        "num_waiting_tokens",
        "num_kv_blocks",
        "num_kv_blocks_used",
        "num_pinned_blocks",
        "num_host_blocks",
        "num_host_blocks_used",
        "num_disk_blocks",
        "num_disk_bytes",
        "image_cache_tokens",
        "gpu_memory_bytes",
        "gpu_memory_used_bytes",
        "step_tokens",
        "kv_fragmentation",
        *LATEST,
    }
)
_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name not in _GAUGES)


@dataclass(slots=True, eq=False)
class Connection:
    member: Member
    client: ReplicaClient
    kv_kind_of_settings: str
    _compared: tuple[EngineReady, EngineReady] | None = None  # with the description of the model, and
    _is_alike: bool = True  # whether both have one vocabulary

    def understands(self, model: EngineReady) -> bool:
        """Return whether the replica is ready, and takes token ids for what a gateway that follows `model` means."""
        ready = self.client.ready
        if ready is None:
            return False
        if self._compared is None or self._compared[0] is not ready or self._compared[1] is not model:
            self._compared = ready, model
            self._is_alike = are_alike(ready.model.tokenizer_json, model.model.tokenizer_json)
            if not self._is_alike:
                logger.warning(
                    "the replica %s gets no requests: its tokenizer is not that of the other replicas of %s; serve "
                    "it under a name of its own",
                    self.member.id,
                    self.member.spec.model,
                )
        return self._is_alike

    @property
    def kv_kind(self) -> str:
        """Return a name that is the same for replicas whose KV means the same."""
        ready = self.client.ready
        return (
            self.kv_kind_of_settings
            if ready is None
            else f"{self.kv_kind_of_settings}/{ready.model.weights_id}"
        )

    @property
    def is_serving(self) -> bool:
        return (
            self.member.replica.state is ReplicaState.READY
            and self.client.ready is not None
            and self.member.role != "prefill"
        )


class Listener(Protocol):
    """Receives the events of the connections."""

    def on_ready(self) -> None: ...

    def on_stats(self, replica_id: str, stats: EngineStats) -> None: ...

    def on_events(self, replica_id: str, events: Sequence[TokenEvent]) -> None: ...

    def on_kv_events(self, replica_id: str, events: tuple[KVEvent, ...]) -> None: ...

    def on_lost(self, replica_id: str) -> None:
        """Note that a connection over the network was cut."""
        ...


class Connections:
    def __init__(
        self, listener: Listener, connect: Connector | None = None, client_keys: KeyPair | None = None
    ) -> None:
        """`client_keys` are for engines that authenticate clients."""
        self.members: tuple[Member, ...] = ()
        self.by_id: dict[str, Connection] = {}
        self.models: dict[str, EngineReady] = {}  # every model that was ever served, by name
        self._listener = listener
        self._connect_to = connect or self._connect_by_zmq
        self._client_keys = client_keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stats: EngineStats | None = None  # added up when asked for
        self._departed: dict[str, EngineStats] = {}  # counters of replicas that have gone, by model
        self._odd: set[str] = set()  # replicas that were complained about, for their weights
        self._changed = asyncio.Event()

    @property
    def stats(self) -> EngineStats:
        if self._stats is None:
            stats = [connection.client.stats for connection in self.by_id.values()]
            self._stats = added_up([*stats, *self._departed.values()])
        return self._stats

    def stats_of(self, model: str) -> EngineStats:
        stats = [
            connection.client.stats
            for connection in self.by_id.values()
            if connection.member.spec.model == model
        ]
        return added_up([*stats, self._departed[model]] if model in self._departed else stats)

    @property
    def first_ready(self) -> EngineReady | None:
        """Return the model of the first replica that serves."""
        for connection in self.by_id.values():
            if connection.is_serving:
                return self.models.get(connection.member.spec.model)
        return None

    async def wait_ready(self) -> EngineReady:
        while (ready := self.first_ready) is None:
            self._changed.clear()
            await self._changed.wait()
        return ready

    def status(self, *, starts_on_demand: bool) -> FleetStatus:
        """Return the replicas for a dispatcher, and learn the models that connected replicas serve."""
        self._learn_models()
        self._stats = None
        self._changed.set()
        return FleetStatus(
            replicas=tuple(self._status_of(member) for member in self.members),
            models={name: ready.block_size for name, ready in self.models.items()},
            starts_on_demand=starts_on_demand,
        )

    def update(self, members: Sequence[Member]) -> None:
        """Connect to new replicas and close connections to lost ones, after replicas changed."""
        self.members = tuple(members)
        present = {member.id: member for member in members if member.replica.state not in _LOST}
        for connection in [lost for name, lost in self.by_id.items() if name not in present]:
            self._close(connection)
        for member in present.values():
            if member.id in self.by_id:
                self.by_id[member.id].member = member
            elif member.endpoint and member.replica.state is not ReplicaState.STARTING:
                self._connect(member)

    def note_stats(self) -> None:
        """Take over new statistics of a replica."""
        self._stats = None

    def close(self) -> None:
        for connection in self.by_id.values():
            connection.client.close()
        self.by_id.clear()
        self._context.term()

    def _status_of(self, member: Member) -> ReplicaStatus:
        connection = self.by_id.get(member.id)
        ready = None if connection is None else connection.client.ready
        model = self.models.get(member.spec.model)
        return ReplicaStatus(
            replica=member.replica,
            model=member.spec.model,
            role=member.role,
            is_connected=connection is not None and model is not None and connection.understands(model),
            kv_endpoint="" if ready is None else ready.kv_endpoint,
            kv_bytes_per_token=0 if ready is None else ready.kv_bytes_per_token,
            kv_kind="" if connection is None else connection.kv_kind,
        )

    def _close(self, connection: Connection) -> None:
        """Keep the counters of a replica that has gone, so that no sum of counters ever falls."""
        del self.by_id[connection.member.id]
        model = connection.member.spec.model
        before = [self._departed[model]] if model in self._departed else []
        self._departed[model] = added_up([*before, counters_of(connection.client.stats)])
        connection.client.close()

    def _connect(self, member: Member) -> None:
        client = self._connect_to(
            member,
            on_ready=self._listener.on_ready,
            on_stats=partial(self._listener.on_stats, member.id),
            on_events=partial(self._listener.on_events, member.id),
            on_kv_events=partial(self._listener.on_kv_events, member.id),
        )
        self.by_id[member.id] = Connection(member, client, kv_kind_of(member.spec))
        client.start()

    def _connect_by_zmq(self, member: Member, **callbacks: Any) -> ReplicaClient:
        if member.endpoint.startswith("tcp://"):
            callbacks["on_lost"] = partial(self._listener.on_lost, member.id)
        return ZmqEngineClient(
            member.endpoint, context=self._context, client_keys=self._client_keys, **callbacks
        )

    def _learn_models(self) -> None:
        """Record the models of connected replicas. A known description stays as long as any replica has it, so that
        objects built from it are not rebuilt needlessly."""
        told: dict[str, list[EngineReady]] = {}
        for connection in self.by_id.values():
            if connection.client.ready is not None:
                told.setdefault(connection.member.spec.model, []).append(connection.client.ready)
        for model, descriptions in told.items():
            if self.models.get(model) not in descriptions:
                self.models[model] = descriptions[0]
        self._compare_weights()

    def _compare_weights(self) -> None:
        """Complain once about each replica whose weights are not those that its revision stands for elsewhere."""
        first: dict[tuple[str, str], Connection] = {}  # by model and revision
        odd: set[str] = set()
        for connection in self.by_id.values():
            member, ready = connection.member, connection.client.ready
            if ready is None:
                continue
            known = first.setdefault((member.spec.model, member.replica.revision), connection)
            if known.client.ready is None or known.client.ready.model.weights_id == ready.model.weights_id:
                continue
            odd.add(member.id)
            if member.id not in self._odd:
                logger.warning(
                    "the replica %s has other weights of %s than %s, though the settings are the same: answers "
                    "differ, and the two exchange no KV; give all hosts the same files, or a path of their own",
                    member.id,
                    member.spec.model,
                    known.member.id,
                )
        self._odd = odd


def counters_of(stats: EngineStats) -> EngineStats:
    """Return only the counters, which stay when a replica has gone."""
    return EngineStats(**{name: getattr(stats, name) for name in _COUNTERS})


RECONNECT_S = 1.0


class EngineWatch:
    """The leader's connections to all engines of a shared fleet: their heartbeats and the models that they serve.
    Sends no request. Implements `Listener`."""

    def __init__(self, client_keys: KeyPair) -> None:
        self._connections = Connections(self, client_keys=client_keys)
        self._members: tuple[Member, ...] = ()
        self._lost: dict[str, asyncio.TimerHandle] = {}

    def update(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        self._connections.update([member for member in members if member.id not in self._lost])

    def stats(self, replica_id: str) -> EngineStats:
        connection = self._connections.by_id.get(replica_id)
        return EngineStats() if connection is None else connection.client.stats

    def ready(self, replica_id: str) -> EngineReady | None:
        connection = self._connections.by_id.get(replica_id)
        return None if connection is None else connection.client.ready

    def close(self) -> None:
        for timer in self._lost.values():
            timer.cancel()
        self._connections.close()

    def on_ready(self) -> None:
        pass

    def on_stats(self, replica_id: str, stats: EngineStats) -> None:
        pass

    def on_events(self, replica_id: str, events: Sequence[TokenEvent]) -> None:
        pass

    def on_kv_events(self, replica_id: str, events: tuple[KVEvent, ...]) -> None:
        pass

    def on_lost(self, replica_id: str) -> None:
        if replica_id not in self._lost:
            loop = asyncio.get_running_loop()
            self._lost[replica_id] = loop.call_later(RECONNECT_S, self._try_again, replica_id)
            loop.call_soon(self.update, self._members)

    def _try_again(self, replica_id: str) -> None:
        del self._lost[replica_id]
        self.update(self._members)
