"""The settings in use. New settings are put to use all at once or not at all.

Each part that has settings attaches a function that takes over new settings. All functions run in one turn of the
event loop, so that no request ever sees half of a change. Settings that are refused leave the old ones in use.
Settings come from a file or from the database.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from penstock.core.errors import ConfigError, PreconditionFailed
from penstock.gateway.metrics.table import Figures
from penstock.gateway.settings.settings import (
    Document,
    Settings,
    changed_settings,
    check_document,
    parse_file,
)
from penstock.gateway.settings.store import KIND, SettingsStore, SettingsVersion
from penstock.gateway.store.versions import Follower
from penstock.gateway.tenants.directory import Actor

logger = logging.getLogger(__name__)

_MAX_LOGGED_CHANGES = 50

# A function that uses new settings. It raises ConfigError if it cannot, and has then changed nothing.
Apply: TypeAlias = Callable[[Settings], None]


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of settings. `version` is the database's version; 0 for a file and for the defaults."""

    name: str = "the defaults"
    version: int = 0
    document: Document = field(default_factory=dict)


class LiveSettings:
    """`begin` first. Used from the event loop."""

    def __init__(self) -> None:
        self.current = Settings()
        self.source = Source()
        self.latest_version = 0  # the newest one known, in use or refused
        self.refusal: str | None = None  # why the latest version is not in use
        # When the database was last asked; set by `SharedSettings`.
        self.checked_at: Callable[[], float] = time.time
        self._applies: list[Apply] = []
        self.num_applied = 0
        self.num_refused = 0
        self._applied_at = 0.0

    def begin(self, settings: Settings, source: Source) -> None:
        """Use settings before any part is attached."""
        self.current, self.source = settings, source
        self.latest_version = max(self.latest_version, source.version)
        self._applied_at = time.time()

    def attach(self, apply: Apply) -> None:
        """Have a part use the current settings, and those to come."""
        apply(self.current)
        self._applies.append(apply)

    def use(self, settings: Settings, source: Source) -> list[str]:
        """Use new settings; returns what changed. Raises ConfigError, and the old settings stay."""
        changes = changed_settings(self.current, settings)
        try:
            self._apply(settings)
        except ConfigError as error:
            self.refuse(error, source.version)
            raise
        self.source = source
        self.latest_version, self.refusal = source.version, None
        self.num_applied += 1
        self._applied_at = time.time()
        logger.info("settings taken over from %s, changes: %d", source.name, len(changes))
        for change in changes[:_MAX_LOGGED_CHANGES]:
            logger.info("setting %s", change)
        return changes

    def refuse(self, error: ConfigError, version: int = 0) -> None:
        """Count and log settings that cannot be used. `version` is theirs in the database."""
        self.num_refused += 1
        if version:
            self.latest_version, self.refusal = version, error.message
        logger.error("the settings stay as they are: %s", error.message)

    def _apply(self, settings: Settings) -> None:
        applied: list[Apply] = []
        try:
            for apply in self._applies:
                apply(settings)
                applied.append(apply)
        except BaseException:
            for apply in applied:
                apply(self.current)
            raise
        self.current = settings

    def figures(self) -> Figures:
        return {
            "settings_reloads": {"applied": self.num_applied, "refused": self.num_refused},
            "settings_applied_timestamp_seconds": self._applied_at,
            "settings_stale": 0 if self.refusal is None else 1,
            "settings_version": self.source.version,
            "settings_latest_version": self.latest_version,
            "settings_checked_timestamp_seconds": self.checked_at(),
        }


POLL_S = 2.0

_Stamp: TypeAlias = tuple[int, int, int] | None  # None when the file is not there


class SettingsFile:
    """Reads the settings file when it changes and when told to. While the database has settings, the file is not
    used: `is_overruled` says so."""

    def __init__(self, path: Path, live: LiveSettings) -> None:
        self.path = path
        self.is_overruled = False
        self._live = live
        self._stamp: _Stamp = None
        self._reloading = asyncio.Lock()

    def read(self) -> tuple[Settings, Source]:
        """Raises ConfigError."""
        self._stamp = _stamp_of(self.path)  # before reading: what is written meanwhile is another change
        try:
            text = self.path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise ConfigError(f"The settings file {self.path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"The settings file {self.path} is not UTF-8: {error.reason}.") from error
        document, settings = parse_file(text, self.path.name)
        return settings, Source(str(self.path), document=document)

    async def reload(self) -> list[str]:
        """Read the file again and use it; returns what changed. Raises ConfigError, and the old settings stay."""
        async with self._reloading:
            try:
                settings, source = await asyncio.to_thread(self.read)
            except ConfigError as error:
                self._live.refuse(error)
                raise
            return self._live.use(settings, source)

    async def watch(self) -> None:
        """Reload whenever the file has changed, until cancelled. A file that is away for a moment, because an editor
        replaces it, is waited for."""
        while True:
            await asyncio.sleep(POLL_S)
            stamp = await asyncio.to_thread(_stamp_of, self.path)
            if stamp is None or stamp == self._stamp:
                continue
            if self.is_overruled:
                self._stamp = stamp
                logger.warning(
                    "%s has changed but is not used: the database has settings. To bring the file in: "
                    "penstock settings apply %s",
                    self.path,
                    self.path,
                )
                continue
            try:
                await self.reload()
            except ConfigError:
                continue  # said and counted; the same file is not tried again
            except Exception:
                logger.exception("the settings could not be reloaded")


def _stamp_of(file: Path) -> _Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


_SEED_ACTOR = Actor("seed")
_NUM_TRIED = 20  # versions that a start goes back to, at most


class SharedSettings:
    """Brings the settings of the database to one gateway, and keeps the old ones where the new ones are refused.

    Settings in the database count for every gateway. A gateway whose database has none uses its file, or the
    defaults. A file can seed an empty database. A version that this gateway cannot use leaves the version before it
    in use; the log, the metrics and the admin API say so. Used from the event loop: `start` first, then let the
    follower run.
    """

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
            "the settings come from %s; %s is not used. To bring the file in: penstock settings apply %s",
            self.live.source.name,
            self.file.path,
            self.file.path,
        )


def _name(version: SettingsVersion) -> str:
    return f"version {version.version} of the settings in the database"


def _source(version: SettingsVersion) -> Source:
    assert version.settings is not None
    return Source(_name(version), version.version, version.settings)
