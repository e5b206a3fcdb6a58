"""Releases in a database: what was written down is what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import update

from penstock.cluster.release_record import ReleaseRecord, changed
from penstock.control.release import Happening, ReleaseConfig, Releases
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.tables import releases
from penstock.serve.staged_store import DatabaseReleases
from tests.cluster.control_stage import SPEC


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(tmp_path))
    yield database
    database.close()


def record(name: str, created_at: float) -> ReleaseRecord:
    config = ReleaseConfig(canary_shares=(0.5,), min_stage_s=1.0)
    return ReleaseRecord(
        id=name,
        model="echo",
        base_revision=SPEC.revision,
        stable=(SPEC,),
        candidate=(changed(SPEC, weights=None, settings={"max_num_seqs": 7}, revision="v2"),),
        num_replicas=(2,),
        state=Releases(config).start(SPEC.revision, "v2", now=created_at),
        config=config,
        created_at=created_at,
    )


async def test_what_is_written_comes_back_oldest_first(database: Database) -> None:
    store = DatabaseReleases(database)
    older, newer = record("rel_b", 1.0), record("rel_a", 2.0)
    await store.save(newer)
    await store.save(older)
    state = Releases(older.config).happened(older.state, Happening.WARMED_UP, now=5.0)
    await store.save(older.at(state))
    assert await store.load() == (replace(older, state=state), newer)


async def test_a_server_that_releases_nothing_leaves_no_file(database: Database, tmp_path: Path) -> None:
    assert await DatabaseReleases(database).load() == ()
    assert list(tmp_path.iterdir()) == []


async def test_what_another_version_wrote_is_passed_over(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    store = DatabaseReleases(database)
    await store.save(record("rel_a", 1.0))
    await store.save(record("rel_b", 2.0))
    database.run_now(
        lambda connection: connection.execute(
            update(releases).where(releases.c.id == "rel_a").values(body=b'{"id": "rel_a"}')
        )
    )
    assert [known.id for known in await store.load()] == ["rel_b"]
    assert "rel_a" in caplog.text
