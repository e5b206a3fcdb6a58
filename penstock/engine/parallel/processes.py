"""Runs the other ranks of an engine: child processes, and processes of other nodes that connect; and every message
between the first rank and the others. Imports no torch.

A rank that ends takes the engine with it, because its part of every step is lost. No rank outlives the engine: each
rank dies with its parent, and leaves when its connection closes.
"""

from __future__ import annotations

import logging
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import msgspec

from penstock.core.engine_config import EngineConfig, Rendezvous
from penstock.core.errors import ConfigError, EngineUnavailable, PenstockError, error_from_code
from penstock.core.log_format import JsonFormatter
from penstock.core.machine import usable_cores
from penstock.core.plan import SampledToken, ScoredChunk, StepPlan, StepResult
from penstock.core.request import Adapter, Request
from penstock.engine.parallel.rendezvous import (
    JOIN_TIMEOUT_S,
    RankListener,
    StoreAccess,
    disconnect,
    shut_down,
)

logger = logging.getLogger(__name__)


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message, once."""

    rank: int
    config: EngineConfig
    model_path: str
    store_file: str  # a file; empty where the ranks are on several nodes
    log_level: int
    log_format: str
    # For ranks on several nodes: the address of the first rank's node.
    rendezvous: Rendezvous | None = None


class Added(msgspec.Struct, frozen=True, tag="added"):
    request: Request


class Appended(msgspec.Struct, frozen=True, tag="appended"):
    request_id: str
    token_ids: tuple[int, ...]


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    request_id: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag="adapter_loaded"):
    adapter: Adapter


class AdapterDropped(msgspec.Struct, frozen=True, tag="adapter_dropped"):
    digest: str


class ExpertsPlaced(msgspec.Struct, frozen=True, tag="experts_placed"):
    """The experts of all slots of a layer from the next plan on. `layer` counts the layers with experts."""

    layer: int
    experts: tuple[int, ...]


News: TypeAlias = Added | Appended | Removed | AdapterLoaded | AdapterDropped | ExpertsPlaced


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Apply the updates, in order, then run the plan. `in_flight` holds tokens that the plan needs and that no update
    has delivered yet, by request. `others_compute`: with data-parallel attention, other ranks have tokens, whose
    experts this rank may hold."""

    news: tuple[News, ...]
    plan: StepPlan
    in_flight: dict[str, int] = {}
    others_compute: bool = False


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Send the result of the oldest step that was not reported: a rank with requests of its own samples for them."""


class CountExperts(msgspec.Struct, frozen=True, tag="count_experts"):
    """Add up the tokens of experts, together with all ranks, and count from 0 again."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """There will be no more steps."""


ToRank: TypeAlias = Begin | Step | Report | CountExperts | Leave


class RankStarted(msgspec.Struct, frozen=True, tag="present"):
    """The rank has started and is about to join the others."""

    weights_id: str = ""  # of a rank on several nodes, which must have the same weights


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """The samples of a rank for one plan, and its scores of prompt tokens: of the last stage of a pipeline, or of a
    rank with requests of its own."""

    sampled: tuple[SampledToken, ...]
    scored: tuple[ScoredChunk, ...] = ()
    elapsed_s: float = 0.0
    encoder_s: float = 0.0
    is_unusual: bool = False

    @classmethod
    def of(cls, result: StepResult) -> Sampled:
        return cls(result.sampled, result.scored, result.elapsed_s, result.encoder_s, result.is_unusual)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot continue, and ends after this."""

    code: str
    message: str
    hint: str | None = None


FromRank: TypeAlias = RankStarted | Sampled | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


_LAST_WORDS_S = 2.0  # how long after a lost connection the reason may still arrive
_LEAVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes] | None  # None on another node
    connection: Connection


def rank_config(config: EngineConfig, rendezvous: Rendezvous | None = None) -> EngineConfig:
    """Return the config of every rank, with its part of the cores."""
    num_threads = config.num_threads
    if num_threads is None:
        num_threads = usable_cores()
        # As many nodes.
        num_threads *= config.parallel.pipeline_parallel_size if rendezvous is not None else 1
    return msgspec.structs.replace(config, num_threads=max(1, num_threads // config.parallel.num_ranks))


class RankProcesses:
    """Runs ranks 1 and up; the caller's process is rank 0. With a `rendezvous`, the ranks of later stages are on
    other nodes: they are started there, and connect by themselves."""

    def __init__(self, config: EngineConfig, model_path: Path, rendezvous: Rendezvous | None = None) -> None:
        # Only this user can enter the folder in which the ranks of one machine find each other.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        # The samples of each rank. None means that the rank failed: see `failure`.
        self.sampled: dict[int, queue.SimpleQueue[Sampled | None]] = {
            rank: queue.SimpleQueue() for rank in range(1, config.parallel.num_ranks)
        }
        self.failure: PenstockError | None = None
        self._failed = threading.Event()
        self._is_closing = False
        self._present = threading.Semaphore(0)
        self._weights_ids: dict[int, str] = {}  # of the ranks that are present
        self._num_ranks = config.parallel.num_ranks
        self._config = config
        self._model_path = model_path
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        self.kv_connections: list[Connection] = []  # to the threads of the ranks that move KV
        self._listeners: list[threading.Thread] = []
        self._listener: RankListener | None = None
        self.num_ranks_here = self._num_ranks if rendezvous is None else config.parallel.ranks_per_stage
        self.store_access: Path | StoreAccess = self._folder / "store"
        if rendezvous is not None:
            elsewhere = range(self.num_ranks_here, self._num_ranks)
            self._listener = RankListener(rendezvous, elsewhere, self._num_ranks, self._join_in, self._fail)
            self.store_access = StoreAccess(self._listener.table, rendezvous.node_host)
        for child in [self._start(rank) for rank in range(1, self.num_ranks_here)]:
            self._begin(child)

    @property
    def pids(self) -> Sequence[int]:
        """Return the process ids of the ranks on this node."""
        return [child.process.pid for child in self._children if child.process is not None]

    def wait_until_present(self, weights_id: str = "") -> None:
        """Wait until every rank is about to join the others. Ranks of other nodes must have the same weights."""
        for _ in range(1, self._num_ranks):
            if not self._present.acquire(timeout=None if self._rendezvous is None else JOIN_TIMEOUT_S):
                raise EngineUnavailable(
                    f"Not all of {self._num_ranks} ranks came within {JOIN_TIMEOUT_S:.0f} s.",
                    hint="Nodes must reach each other on all TCP ports.",
                    retry_after_s=5.0,
                )
        self.check()
        for rank, found in sorted(self._weights_ids.items()):
            if found != weights_id:
                raise ConfigError(
                    f"Rank {rank} has other weights under {self._model_path} than the first rank.",
                    hint="Give every node the same files.",
                )

    def tell(self, message: ToRank) -> None:
        data = encode(message)
        for child in self._children:
            self._send(child, data)

    def tell_each(self, message_of: Callable[[int], ToRank]) -> None:
        """Tell each rank what is for it alone."""
        for child in self._children:
            self._send(child, encode(message_of(child.rank)))

    def next_sampled(self, rank: int) -> Sampled:
        """Wait for the next samples of a rank. Raises when a rank has gone."""
        while True:
            sampled = self.sampled[rank].get()
            if sampled is not None:
                return sampled
            self.check()

    def check(self) -> None:
        """Raise the reason when a rank has gone."""
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the reason why a rank has gone, if common work of the ranks fails because of that."""
        try:
            yield
        except (RuntimeError, OSError):
            self._failed.wait(_LAST_WORDS_S)
            self.check()
            raise

    def close(self) -> None:
        """Let the ranks leave after their last step, or kill them if one has failed: the others may never end their
        step."""
        self._is_closing = True
        if self.failure is None:
            for child in self._children:
                self._send(child, encode(Leave()))
            gives_up_s = time.monotonic() + _LEAVE_TIMEOUT_S
            for listener in self._listeners:  # each ends with its rank
                listener.join(max(0.0, gives_up_s - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the ranks of this node, and the connections to ranks of other nodes, which then end too."""
        self._is_closing = True
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            children, listeners = tuple(self._children), tuple(self._listeners)
        for child in children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()
            else:
                shut_down(child.connection)
        for listener in listeners:
            listener.join()
        for connection in (*(child.connection for child in children), *self.kv_connections):
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> _Child:
        ours, theirs = Pipe()
        passed = [theirs]
        if self._config.kv_transfer:
            to_agent, from_thread = Pipe()
            self.kv_connections.append(to_agent)
            passed.append(from_thread)
        command = [sys.executable, "-m", "penstock.engine.parallel.rank"]
        numbers = [connection.fileno() for connection in passed]
        process = subprocess.Popen([*command, *map(str, numbers)], stdin=subprocess.DEVNULL, pass_fds=numbers)
        for connection in passed:
            connection.close()
        return _Child(rank, process, ours)

    def _join_in(self, rank: int, connection: Connection) -> None:
        """Begin with a rank of another node, which has just come."""
        self._begin(_Child(rank, None, connection))

    def _begin(self, child: _Child) -> None:
        root = logging.getLogger()
        is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
        begin = Begin(
            rank=child.rank,
            config=self._config,
            model_path=str(self._model_path),
            store_file="" if self._rendezvous is not None else str(self.store_access),
            log_level=root.getEffectiveLevel(),
            log_format="json" if is_json else "text",
            rendezvous=self._rendezvous if child.process is not None else None,
        )
        listener = threading.Thread(
            target=self._listen, args=(child,), name=f"rank {child.rank}", daemon=True
        )
        with self._lock:
            if self._is_closing and child.process is None:
                disconnect(child.connection)
                return
            self._children.append(child)
            self._listeners.append(listener)
        self._send(child, encode(begin))
        listener.start()

    def _send(self, child: _Child, data: bytes) -> None:
        try:
            child.connection.send_bytes(data)
        except OSError:
            if not self._is_closing:
                self._failed.wait(_LAST_WORDS_S)
                self.check()
                raise

    def _listen(self, child: _Child) -> None:
        """Handle the messages of a rank, in a thread of its own, until the rank has gone."""
        while True:
            try:
                message = decode_from_rank(child.connection.recv_bytes())
            except (EOFError, OSError):
                self._lost(child)
                return
            match message:
                case RankStarted(weights_id=weights_id):
                    if self._rendezvous is not None:
                        self._weights_ids[child.rank] = weights_id
                    self._present.release()
                case Sampled():
                    self.sampled[child.rank].put(message)
                case Failed(code=code, message=sentence, hint=hint):
                    error = error_from_code(code, sentence)
                    error.hint = hint
                    self._fail(error)

    def _lost(self, child: _Child) -> None:
        if self._is_closing:
            return
        if child.process is None:
            where, ended = "on another node", "and closed its connection"
        else:
            code = child.process.wait()
            where = f"process {child.process.pid}"
            ended = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        sentence = f"Rank {child.rank} of {self._num_ranks} ({where}) ended {ended}."
        logger.error("%s", sentence)
        self._fail(EngineUnavailable(sentence, retry_after_s=5.0))

    def _fail(self, error: PenstockError) -> None:
        if self.failure is None:  # later failures follow from the first
            self.failure = error
            self._failed.set()
        for sampled in self.sampled.values():
            sampled.put(None)
        for _ in range(1, self._num_ranks):
            self._present.release()
