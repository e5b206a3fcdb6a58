from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.core.clock import VirtualClock
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.directory import Actor, Directory
from penstock.gateway.tenants.keyring import KeyRing
from tests.gateway.store.ready_made import ready_made_database

ACTOR = Actor("test", "request-1")


@dataclass
class Time:
    """Both clocks, moving together. Starts at a Unix time that is easy to read."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    started_at: float = 1_000_000.0

    def wall(self) -> float:
        return self.started_at + self.clock.now()

    def pass_s(self, seconds: float) -> None:
        self.clock.advance(seconds)


@dataclass
class World:
    """A database, and as many gateways on it as a test wants."""

    database: Database
    time: Time

    @property
    def directory(self) -> Directory:
        return Directory(self.database, self.time.wall)

    def ring(self) -> KeyRing:
        return KeyRing(self.database, clock=self.time.clock, wall_time=self.time.wall)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(ready_made_database(tmp_path), Time())
    yield world
    world.database.close()
