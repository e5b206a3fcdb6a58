"""Runs a rank other than the first: it follows the messages of the first rank, step by step.

The engine process starts a rank as `python -m penstock.engine.parallel.rank FD`, with the number of the open file of
their connection, and a second one where KV moves between engines. A rank on another node is started with
`--rendezvous FILE RANK`, and connects. A rank ends on a message from the first rank, when the connection closes, or
with its parent. It also ends on any error, because ranks that do not agree on a step would wait for each other
forever.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from penstock.core.clock import SystemClock
from penstock.core.engine_config import Rendezvous, decode_rendezvous
from penstock.core.errors import PenstockError
from penstock.core.log_format import set_up_logs
from penstock.engine.decoder import load_decoder
from penstock.engine.parallel.executor import LocalRank
from penstock.engine.parallel.processes import (
    Begin,
    CountExperts,
    Failed,
    Leave,
    RankStarted,
    Report,
    Sampled,
    Step,
    decode_to_rank,
    encode,
)
from penstock.engine.parallel.rendezvous import RemoteTable, StoreAccess, connect
from penstock.engine.parallel.setup import join
from penstock.engine.transfer.rank_agents import serve_rank
from penstock.models.load import weights_identity
from penstock.models.overrides import overridden

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the engine decides
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    try:
        connection, rendezvous = _connect(sys.argv[1:])
        begin = decode_to_rank(connection.recv_bytes())
        assert isinstance(begin, Begin)
        set_up_logs(f"rank {begin.rank}", begin.log_format, begin.log_level)
        rendezvous = rendezvous or begin.rendezvous
        weights_id = weights_identity(Path(begin.model_path)) if rendezvous is not None else ""
        connection.send_bytes(encode(RankStarted(weights_id)))
        failure = _run(begin, connection, rendezvous)
        if failure is not None:
            connection.send_bytes(encode(failure))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the first rank has gone
    return 0 if failure is None else 1


def _connect(arguments: list[str]) -> tuple[Connection, Rendezvous | None]:
    """Return the connection to the first rank, and the rendezvous if the rank is on another node."""
    if arguments[0] != "--rendezvous":
        return Connection(int(arguments[0])), None
    rendezvous = decode_rendezvous(Path(arguments[1]).read_bytes())
    return connect(rendezvous, int(arguments[2]), "messages"), rendezvous


def _run(begin: Begin, connection: Connection, rendezvous: Rendezvous | None) -> Failed | None:
    """Run the rank until it is told to leave, or cannot continue."""
    try:
        model_path = overridden(Path(begin.model_path), begin.config.model)
        store_access: Path | StoreAccess = Path(begin.store_file)
        if rendezvous is not None:
            store_access = StoreAccess(
                RemoteTable(connect(rendezvous, begin.rank, "store")), rendezvous.node_host
            )
        setup = join(begin.config, model_path, begin.rank, store_access)
        loaded = load_decoder(begin.config, model_path, SystemClock(), None, setup)
        if loaded.shared_kv is not None and len(sys.argv) == 3:
            serve_rank(loaded.shared_kv.memory, Connection(int(sys.argv[2])))
        rank = setup.local
        try:
            _serve(rank, connection)
        finally:
            rank.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except PenstockError as error:
        return Failed(error.code, error.message, error.hint)
    except Exception as error:
        logger.exception("the rank failed")
        return Failed("engine_unavailable", f"Rank {begin.rank} stopped: {type(error).__name__}: {error}")
    return None


def _serve(rank: LocalRank, connection: Connection) -> None:
    while True:
        match decode_to_rank(connection.recv_bytes()):
            case Step(news=news, plan=plan, in_flight=in_flight, others_compute=others_compute):
                rank.take(news)
                result = rank.run(plan, in_flight, others_compute=others_compute)
                if result is not None:
                    connection.send_bytes(encode(Sampled.of(result)))
            case Report():
                connection.send_bytes(encode(Sampled.of(rank.collect())))
            case CountExperts():
                rank.count_experts()
            case Leave():
                return


def _die_with_parent() -> None:
    """Have Linux kill this process when its parent ends. On other systems the closed connection ends it."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
