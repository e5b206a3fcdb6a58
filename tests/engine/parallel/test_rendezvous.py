"""Ranks that connect over TCP: only those with the key come in, and a rank elsewhere answers as a local one."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, Rendezvous
from penstock.core.errors import ConfigError, EngineUnavailable, PenstockError
from penstock.core.machine import free_port
from penstock.engine.build import Engine, build_engine
from penstock.engine.parallel import rendezvous as rendezvous_module
from penstock.engine.parallel.mesh import interface_with
from penstock.engine.parallel.rendezvous import (
    RankListener,
    RemoteTable,
    StoreAnswer,
    StoreCall,
    StoreTable,
    connect,
    disconnect,
)
from tests.engine.tiny import request, run, tokens, write_tiny_model

WAIT_S = 240.0


def new_rendezvous(key: str = "secret") -> Rendezvous:
    return Rendezvous(host="127.0.0.1", port=free_port(), key=key, node_host="127.0.0.1")


class Room:
    """A listener that waits for rank 1 of 2, and what it was told."""

    def __init__(self) -> None:
        self.rendezvous = new_rendezvous()
        self.came: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[PenstockError] = queue.SimpleQueue()
        self.listener = RankListener(
            self.rendezvous, [1], 2, lambda rank, line: self.came.put((rank, line)), self.failures.put
        )


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.listener.close()


def test_a_rank_with_the_key_comes_in_and_then_nobody_can(room: Room) -> None:
    messages = connect(room.rendezvous, 1, "messages")
    rank, line = room.came.get(timeout=WAIT_S)
    assert rank == 1
    messages.send_bytes(b"here")
    assert line.recv_bytes() == b"here"
    store = RemoteTable(connect(room.rendezvous, 1, "store"))
    assert store.call(StoreCall("add", ("count",), number=2)).number == 2
    assert room.listener.table.call(StoreCall("add", ("count",), number=3)).number == 5
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((room.rendezvous.host, room.rendezvous.port))
    disconnect(messages)
    disconnect(line)


def test_neither_end_goes_on_with_a_peer_without_the_key(room: Room) -> None:
    with pytest.raises((OSError, EOFError)):
        connect(msgspec.structs.replace(room.rendezvous, key="guess"), 1, "messages").recv_bytes()
    with (
        socket.create_connection((room.rendezvous.host, room.rendezvous.port)) as silent,
        silent.makefile("rb"),
    ):
        silent.sendall(b"\xff\xff\xff\x7f GET / HTTP/1.1")
    # A peer that says nothing keeps no rank waiting.
    with socket.create_connection((room.rendezvous.host, room.rendezvous.port)):
        disconnect(connect(room.rendezvous, 1, "messages"))
        assert room.came.get(timeout=WAIT_S)[0] == 1


def test_a_rank_that_is_not_awaited_is_sent_away(room: Room) -> None:
    with pytest.raises((OSError, EOFError)):
        connect(room.rendezvous, 7, "messages").recv_bytes()


def test_another_version_is_named(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = msgspec.defstruct("Hello", [("rank", int), ("purpose", str), ("version", str, "0.0.1")])
    monkeypatch.setattr(rendezvous_module, "Hello", stale)
    with pytest.raises((OSError, EOFError)):
        connect(room.rendezvous, 1, "messages").recv_bytes()
    failure = room.failures.get(timeout=WAIT_S)
    assert "Rank 1 runs Penstock 0.0.1" in failure.message
    assert "same version" in (failure.hint or "")


def test_the_store_waits_for_keys_and_says_when_they_are_late() -> None:
    table = StoreTable()
    assert table.call(StoreCall("wait", ("a",), timeout_s=0.0)) == StoreAnswer(is_late=True)
    found: queue.SimpleQueue[StoreAnswer] = queue.SimpleQueue()
    thread = threading.Thread(
        target=lambda: found.put(table.call(StoreCall("get", ("a",), timeout_s=WAIT_S)))
    )
    thread.start()
    table.call(StoreCall("set", ("a",), b"value"))
    assert found.get(timeout=WAIT_S).value == b"value"
    thread.join()
    assert table.call(StoreCall("check", ("a", "b"))).number == 0
    assert table.call(StoreCall("delete", ("a",))).number == 1
    assert table.call(StoreCall("check", ("a",))).number == 0


def test_the_interface_of_a_node_is_found_by_its_address() -> None:
    assert interface_with("127.0.0.1").startswith("lo")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9"):
        interface_with("203.0.113.9")


def engine_of(model: Path, parallel: ParallelConfig, rendezvous: Rendezvous | None = None) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=64),
        parallel=parallel,
        speculate="off",
        num_threads=2,
    )
    return build_engine(config, model, rendezvous=rendezvous)


def rank_elsewhere(rendezvous: Rendezvous, folder: Path) -> subprocess.Popen[bytes]:
    file = folder / "rendezvous"
    file.write_bytes(msgspec.json.encode(rendezvous))
    command = [sys.executable, "-m", "penstock.engine.parallel.rank", "--rendezvous", str(file), "1"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def test_a_rank_elsewhere_gives_the_same_tokens_and_ends_the_engine_when_it_is_lost(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    one = engine_of(model, ParallelConfig())
    requests = [request(f"r{n}", list(range(3, 20 + 9 * n)), 16) for n in range(3)]
    expected = {name: tokens(events) for name, events in run(one, requests).items()}
    rendezvous = new_rendezvous()
    process = rank_elsewhere(rendezvous, tmp_path)
    try:
        several = engine_of(model, ParallelConfig(pipeline_parallel_size=2), rendezvous)
        assert {name: tokens(events) for name, events in run(several, requests).items()} == expected
        assert several.ranks is not None
        assert not several.ranks.pids  # none is a child of this engine
        several.loop.add(request("unfinished", [5, 6, 7], 400))
        process.kill()
        with pytest.raises(EngineUnavailable, match=r"Rank 1 of 2 .on another node. ended"):
            run(several, [])
        several.close()
    finally:
        process.kill()
        process.wait()


def test_a_rank_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "model")
    rendezvous = new_rendezvous()
    monkeypatch.setattr("penstock.models.load.weights_identity", lambda path: "other")
    process = rank_elsewhere(rendezvous, tmp_path)
    try:
        with pytest.raises(ConfigError, match="Rank 1 has other weights"):
            engine_of(model, ParallelConfig(pipeline_parallel_size=2), rendezvous)
    finally:
        process.wait(WAIT_S)  # it leaves when the first rank does
