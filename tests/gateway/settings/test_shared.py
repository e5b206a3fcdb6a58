"""Settings in the database: which win, what happens to a version that cannot be used, how changes arrive."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, InvalidRequest, NotFound, PreconditionFailed
from penstock.gateway.settings import live as live_module
from penstock.gateway.settings.live import LiveSettings, SettingsFile, SharedSettings
from penstock.gateway.settings.settings import Settings, to_toml
from penstock.gateway.settings.store import KIND, SettingsStore, merged, parse_json
from penstock.gateway.store import versions
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.versions import Follower, append
from penstock.gateway.tenants.directory import Actor, read_entries
from tests.gateway.fake_engine import until
from tests.gateway.store.ready_made import ready_made_database

ACTOR = Actor("test")


def cache(ttl_s: float) -> dict[str, Any]:
    return {"response_cache": {"ttl_s": ttl_s}}


class OneGateway:
    """The settings of a gateway process: its own connections, its own file."""

    def __init__(self, folder: Path, text: str | None = None) -> None:
        self.database = Database(sqlite_url(folder))
        self.store = SettingsStore(self.database)
        self.live = LiveSettings()
        self.follower = Follower(self.database)
        file = None
        if text is not None:
            path = folder / "settings.toml"
            path.write_text(text)
            file = SettingsFile(path, self.live)
        self.file = file
        self.shared = SharedSettings(self.store, self.live, file)
        self.used: list[float] = []

    async def start(self, *, seeds: bool = False) -> None:
        await self.shared.start(self.follower, seeds=seeds)
        self.live.attach(self._apply)

    def _apply(self, settings: Settings) -> None:
        if settings.response_cache.ttl_s == 13:
            raise ConfigError("13 cannot be used here.")
        self.used.append(settings.response_cache.ttl_s)

    def metrics(self) -> dict[str, Any]:
        return {f"penstock_{name}": value for name, value in self.live.figures().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    ready_made_database(tmp_path).close()
    return tmp_path


async def test_a_change_reaches_every_gateway(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "POLL_S", 0.005)
    first, second = OneGateway(folder), OneGateway(folder)
    following = []
    for gateway in (first, second):
        await gateway.start()
        following.append(asyncio.create_task(gateway.follower.run()))
    await first.store.replace(ACTOR, cache(5), 0)
    await until(lambda: first.used[-1] == second.used[-1] == 5)
    await second.store.patch(ACTOR, {"tiers": {"best": "batch"}}, 1, base={})
    await until(lambda: first.live.current.tiers.best == second.live.current.tiers.best == "batch")
    assert first.used[-1] == 5, "a patch leaves the rest"
    assert first.live.source.version == second.live.source.version == 2
    for task in following:
        task.cancel()


async def test_a_refused_document_never_becomes_current(folder: Path) -> None:
    gateway = OneGateway(folder)
    await gateway.start()
    await gateway.store.replace(ACTOR, cache(5), 0)
    with pytest.raises(InvalidRequest, match=r"there is no setting 'response_cache\.tl_s'") as refusal:
        await gateway.store.patch(ACTOR, {"response_cache": {"tl_s": 1}}, 1, base={})
    assert refusal.value.hint == "Did you mean 'ttl_s'?"
    latest = await gateway.store.latest()
    assert latest is not None
    assert (latest.version, latest.settings) == (1, cache(5))


async def test_a_gateway_that_cannot_use_a_version_keeps_the_old_one_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = OneGateway(folder)
    await gateway.store.replace(ACTOR, cache(5), 0)
    await gateway.start()
    await gateway.store.replace(ACTOR, cache(13), 1)
    await gateway.follower.look()
    assert gateway.live.current.response_cache.ttl_s == 5
    assert gateway.live.refusal == "13 cannot be used here."
    metrics = gateway.metrics()
    assert (metrics["penstock_settings_version"], metrics["penstock_settings_latest_version"]) == (1, 2)
    assert metrics["penstock_settings_stale"] == 1
    assert gateway.live.num_refused == 1
    assert "the settings stay as they are: 13 cannot be used here." in caplog.text
    await gateway.store.replace(ACTOR, cache(6), 2)
    await gateway.follower.look()
    assert gateway.live.current.response_cache.ttl_s == 6
    assert gateway.metrics()["penstock_settings_stale"] == 0


async def write_unknown(gateway: OneGateway) -> None:
    """A version that a newer release wrote."""
    await gateway.database.run(
        lambda connection: append(connection, KIND, b'{"novelty": {}}', expected=None, actor="newer")
    )


async def test_a_start_goes_back_to_a_version_that_it_understands(folder: Path) -> None:
    writer = OneGateway(folder)
    await writer.store.replace(ACTOR, cache(5), 0)
    await write_unknown(writer)
    gateway = OneGateway(folder)
    await gateway.start()
    assert gateway.live.current.response_cache.ttl_s == 5
    assert (gateway.live.source.version, gateway.live.latest_version) == (1, 2)
    assert "there is no setting 'novelty'" in (gateway.live.refusal or "")


async def test_a_start_without_any_version_that_it_understands_fails(folder: Path) -> None:
    await write_unknown(OneGateway(folder))
    with pytest.raises(ConfigError, match="version 1 of the settings in the database: there is no setting"):
        await OneGateway(folder, "[response_cache]\nttl_s = 2\n").start()


async def test_lost_races_reverts_and_history(folder: Path) -> None:
    store = OneGateway(folder).store
    await store.replace(ACTOR, cache(1), 0, note="first")
    await store.replace(ACTOR, cache(2), 1)
    with pytest.raises(PreconditionFailed):
        await store.replace(ACTOR, cache(3), 1)
    with pytest.raises(PreconditionFailed):
        await store.patch(ACTOR, cache(3), 0, base={})
    with pytest.raises(NotFound):
        await store.revert(ACTOR, 9, None)
    assert (await store.revert(ACTOR, 1, 2)).settings == cache(1)
    page = await store.history(limit=2)
    assert [row.version for row in page.data] == [3, 2]
    assert page.has_more
    assert (await store.version(1)).note == "first"
    with pytest.raises(NotFound):
        await store.version(7)


async def test_changes_are_in_the_audit_log_without_texts(folder: Path) -> None:
    gateway = OneGateway(folder)
    await gateway.store.replace(ACTOR, {**cache(1), "models": {"aliases": {"a": "secret"}}}, 0)
    entries = await gateway.database.run(
        lambda connection: read_entries(connection, limit=5, before_id=None, where=())
    )
    assert entries.data[0].action == "settings.change"
    assert entries.data[0].after is not None
    assert "response_cache.ttl_s: 300.0 → 1.0" in entries.data[0].after["changes"]
    assert "secret" not in str(entries.data[0].after)


class TestFileAndDatabase:
    TEXT = "[response_cache]\nttl_s = 2\n"

    async def test_the_file_counts_until_the_database_has_settings(self, folder: Path) -> None:
        gateway = OneGateway(folder, self.TEXT)
        await gateway.start()
        assert gateway.used == [2]
        await gateway.store.replace(ACTOR, cache(5), 0)
        await gateway.follower.look()
        assert gateway.used == [2, 5]
        assert gateway.file is not None
        assert gateway.file.is_overruled

    async def test_the_database_wins_at_the_start(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        await OneGateway(folder).store.replace(ACTOR, cache(5), 0)
        gateway = OneGateway(folder, self.TEXT)
        await gateway.start(seeds=True)
        assert gateway.used == [5]
        assert "settings.toml is not used. To bring the file in: penstock settings apply" in caplog.text
        assert (await gateway.store.history(limit=5)).data[0].version == 1

    async def test_a_file_seeds_an_empty_database_once(self, folder: Path) -> None:
        first, second = OneGateway(folder, self.TEXT), OneGateway(folder, self.TEXT)
        await first.start(seeds=True)
        await second.start(seeds=True)
        assert first.live.source.version == second.live.source.version == 1
        assert len((await first.store.history(limit=5)).data) == 1

    async def test_a_bad_file_stops_the_start_also_where_the_database_wins(self, folder: Path) -> None:
        await OneGateway(folder).store.replace(ACTOR, cache(5), 0)
        with pytest.raises(ConfigError, match="line 1"):
            await OneGateway(folder, "[response_cash]\n").start()

    async def test_back_to_the_file(self, folder: Path) -> None:
        gateway = OneGateway(folder, self.TEXT)
        await gateway.store.replace(ACTOR, cache(5), 0)
        await gateway.start()
        await gateway.store.revert(ACTOR, 0, 1)
        await gateway.follower.look()
        assert gateway.used == [5, 2]
        assert gateway.live.source.version == 0
        again = OneGateway(folder, self.TEXT)
        await again.start()
        assert again.used == [2]

    async def test_a_change_of_an_overruled_file_is_noted_and_not_used(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(live_module, "POLL_S", 0.001)
        gateway = OneGateway(folder, self.TEXT)
        await gateway.store.replace(ACTOR, cache(5), 0)
        await gateway.start()
        assert gateway.file is not None
        watching = asyncio.create_task(gateway.file.watch())
        gateway.file.path.write_text("[response_cache]\nttl_s = 77\n")
        await until(lambda: "has changed but is not used" in caplog.text)
        assert gateway.used == [5]
        watching.cancel()


def test_a_merge_patch() -> None:
    before = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged(before, {"a": {"b": None, "e": {"f": 1}}, "d": 2}) == {"a": {"c": 2, "e": {"f": 1}}, "d": 2}
    assert merged({"a": 1}, {"a": {"b": None}}) == {"a": {}}
    assert before == {"a": {"b": 1, "c": 2}, "d": [1]}


@pytest.mark.parametrize("body", ["[]", "{", '{"a": NaN}', "[" * 100_000, "1" * 5000, "\udcff"])
def test_bad_json(body: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_json(body)


def test_a_document_survives_as_toml() -> None:
    document = {
        "top": True,
        "prices": {"models": {'org/"x".v1': {"input": Decimal("0.150"), "output": 7}}, "default": {}},
        "guards": {"policies": {"p": {"rules": [{"guard": "pii", "terms": ["a\n\x7f", "ü"]}, {}]}}},
        "big": Decimal("1E+3"),
    }
    assert tomllib.loads(to_toml(document), parse_float=Decimal) == document
    assert to_toml({}) == ""
