"""Brings the settings of the database to one gateway, and keeps the old ones where the new ones are refused.

Settings in the database count for every gateway. A gateway whose database has none uses its file, or the defaults. A
file can seed an empty database. A version that this gateway cannot use leaves the version before it in use; the log,
the metrics and the admin API say so.
"""

from __future__ import annotations

import logging

from penstock.core.errors import ConfigError, PreconditionFailed
from penstock.gateway.settings.file import SettingsFile
from penstock.gateway.settings.live import LiveSettings, Source
from penstock.gateway.settings.settings import Settings, check_document
from penstock.gateway.settings.store import KIND, SettingsStore, SettingsVersion
from penstock.gateway.store.versions import Follower
from penstock.gateway.tenants.directory import Actor

logger = logging.getLogger(__name__)

_SEED_ACTOR = Actor("seed")
_NUM_TRIED = 20  # versions that a start goes back to, at most


class SharedSettings:
    """Used from the event loop. `start` first, then let the follower run."""

    def __init__(self, store: SettingsStore, live: LiveSettings, file: SettingsFile | None) -> None:
        self.store = store
        self.live = live
        self.file = file

    async def start(self, follower: Follower, *, seeds: bool) -> Settings:
        """Find the settings to begin with. Raises ConfigError if there are none that can be used."""
        from_file = self.file.read() if self.file is not None else None
        latest = await self.store.latest()
        if seeds and from_file is not None and latest is None:
            try:
                latest = await self.store.replace(
                    _SEED_ACTOR, from_file[1].document, 0, note=f"from {from_file[1].name}"
                )
                logger.info("the settings of %s are now in the database", from_file[1].name)
            except PreconditionFailed:
                latest = await self.store.latest()  # another gateway was first
        if latest is not None and latest.settings is not None:
            await self._begin_with(latest)
        elif from_file is not None:
            self.live.begin(*from_file)
        follower.follow(KIND, self.catch_up, seen=0 if latest is None else latest.version)
        self.live.checked_at = lambda: follower.checked_at
        return self.live.current

    async def catch_up(self) -> None:
        """Use the current version of the database. Refused settings leave the old ones."""
        latest = await self.store.latest()
        if latest is None or latest.settings is None:
            await self._return_to_file()
            return
        if latest.version == self.live.latest_version:
            return  # in use, or refused, already
        try:
            self.live.use(check_document(latest.settings, _name(latest)), _source(latest))
        except ConfigError as error:
            if self.live.latest_version != latest.version:  # not said and counted by `use`
                self.live.refuse(error, latest.version)
            return
        self._overrule_file()

    async def _begin_with(self, latest: SettingsVersion) -> None:
        history = await self.store.history(limit=_NUM_TRIED, before=latest.version)
        refusal: ConfigError | None = None
        for version in (latest, *history.data):
            if version.settings is None:
                continue
            try:
                settings = check_document(version.settings, _name(version))
            except ConfigError as error:
                if refusal is None:
                    refusal = error
                    self.live.refuse(error, version.version)
                continue
            self.live.begin(settings, _source(version))
            self._overrule_file()
            return
        assert refusal is not None
        raise refusal

    async def _return_to_file(self) -> None:
        settings, source = Settings(), Source()
        if self.file is not None:
            self.file.is_overruled = False
            try:
                settings, source = self.file.read()
            except ConfigError as error:
                self.live.refuse(error)
                return
        try:
            self.live.use(settings, source)
        except ConfigError:
            return  # said and counted

    def _overrule_file(self) -> None:
        if self.file is None or self.file.is_overruled:
            return
        self.file.is_overruled = True
        logger.warning(
            "the settings are those of %s; %s is not used. To bring the file in: penstock settings apply %s",
            self.live.source.name,
            self.file.path,
            self.file.path,
        )


def _name(version: SettingsVersion) -> str:
    return f"version {version.version} of the settings in the database"


def _source(version: SettingsVersion) -> Source:
    assert version.settings is not None
    return Source(_name(version), version.version, version.settings)
