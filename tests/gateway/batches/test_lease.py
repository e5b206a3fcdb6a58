"""A dead holder of the lease is recognised where its process id is valid; no other process is taken for dead."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.gateway.batches.store import BatchStore, is_dead, new_holder
from penstock.gateway.responses.store import ResponseStore
from penstock.gateway.store.database import Database

_MAKE = "from penstock.gateway.batches.store import new_holder; print(new_holder())"


def test_dead_and_alive() -> None:
    mine = new_holder()
    assert mine != new_holder()
    assert not is_dead(mine)
    ended = subprocess.run([sys.executable, "-c", _MAKE], capture_output=True, check=True, text=True)
    holder = ended.stdout.strip()
    assert is_dead(holder)
    assert not is_dead("0" + holder[1:] if holder[0] != "0" else "1" + holder[1:])  # of another machine
    assert len(mine) <= 64


async def test_clocks_of_gateways_that_differ_take_no_lease_away() -> None:
    database = Database("sqlite://")
    behind, ahead = (BatchStore(database, wall_clock=lambda now=now: now) for now in (1e9, 2e9))
    assert await behind.take_lease("a", 1000)
    assert not await ahead.take_lease("b", 1000)
    stores = [ResponseStore(database, now=lambda now=now: now) for now in (1e9, 2e9)]
    first, second = [await store.time() for store in stores]
    assert first <= second < first + 1000
    database.close()


async def test_a_clock_that_is_set_back_keeps_no_lease_of_a_lost_process() -> None:
    database, now = Database("sqlite://"), 10_000.0
    store = BatchStore(database, lease_clock=lambda connection: now)
    assert await store.take_lease("lost", 20)
    now -= 3600
    assert not await store.take_lease("next", 20), "its holder may live"
    now += 19
    assert not await store.take_lease("next", 20)
    now += 1
    assert await store.take_lease("next", 20)
    now -= 3600
    assert await store.take_lease("next", 20)
    database.close()


def test_a_process_id_of_another_container_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers of one machine may have one host name, and process ids of their own."""
    ended = subprocess.run([sys.executable, "-c", _MAKE], capture_output=True, check=True, text=True)
    holder = ended.stdout.strip()
    assert is_dead(holder)
    stat = os.stat

    def stat_elsewhere(path: Any, **options: Any) -> Any:
        if path == "/proc/self/ns/pid":
            return SimpleNamespace(st_ino=1)
        return stat(path, **options)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "stat", stat_elsewhere)
        assert not is_dead(holder)


def test_a_machine_that_names_no_namespace_believes_nobody_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, **options: Any) -> Any:
        raise PermissionError

    ended = subprocess.run([sys.executable, "-c", _MAKE], capture_output=True, check=True, text=True)
    with monkeypatch.context() as blind:
        blind.setattr(os, "stat", refuse)
        mine = new_holder()
        assert not is_dead(ended.stdout.strip())
        assert not is_dead(mine)
    assert not is_dead(mine)


def test_other_names() -> None:
    assert not any(map(is_dead, ("", "a", "a:b", "a:b:c", f"{new_holder().split(':')[0]}::x")))
