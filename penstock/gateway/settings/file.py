"""Reads the settings file when it changes and when told to, and puts it to use all at once or not at all.

Each part that has settings attaches a function that takes over new settings. All functions run in one turn of the
event loop, so that no request ever sees half of a change. A file that is refused leaves the settings as they were.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.errors import ConfigError
from penstock.gateway.metrics.table import metric, metric_by
from penstock.gateway.settings.settings import Settings, changed_settings, parse_settings

logger = logging.getLogger(__name__)

POLL_S = 2.0
_MAX_LOGGED_CHANGES = 50

# A function that uses new settings. It raises ConfigError if it cannot, and has then changed nothing.
Apply: TypeAlias = Callable[[Settings], None]
_Stamp: TypeAlias = tuple[int, int, int] | None  # None when the file is not there


class SettingsFile(Collector):
    """`load` first. Used from the event loop; also a collector of metrics."""

    def __init__(self, file: Path) -> None:
        self.current = Settings()
        self._file = file
        self._applies: list[Apply] = []
        self._stamp: _Stamp = None
        self._reloading = asyncio.Lock()
        self.num_applied = 0
        self.num_refused = 0
        self._applied_at = 0.0

    def load(self) -> Settings:
        """Read the file for the first time. Raises ConfigError."""
        self.current = self._read()
        self._applied_at = time.time()
        return self.current

    def attach(self, apply: Apply) -> None:
        """Have a part use the current settings, and those to come."""
        apply(self.current)
        self._applies.append(apply)

    async def reload(self) -> list[str]:
        """Read the file again and use it; returns what changed. Raises ConfigError, and the old settings stay."""
        async with self._reloading:
            try:
                settings = await asyncio.to_thread(self._read)
                changes = changed_settings(self.current, settings)
                self._apply(settings)
            except ConfigError as error:
                self.num_refused += 1
                logger.error("the settings stay as they are: %s", error.message)
                raise
            self.num_applied += 1
            self._applied_at = time.time()
            logger.info("settings reloaded from %s, changes: %d", self._file, len(changes))
            for change in changes[:_MAX_LOGGED_CHANGES]:
                logger.info("setting %s", change)
            return changes

    async def watch(self) -> None:
        """Reload whenever the file has changed, until cancelled. A file that is away for a moment, because an editor
        replaces it, is waited for."""
        while True:
            await asyncio.sleep(POLL_S)
            stamp = await asyncio.to_thread(_stamp_of, self._file)
            if stamp is None or stamp == self._stamp:
                continue
            try:
                await self.reload()
            except ConfigError:
                continue  # said and counted; the same file is not tried again
            except Exception:
                logger.exception("the settings could not be reloaded")

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

    def _read(self) -> Settings:
        self._stamp = _stamp_of(self._file)  # before reading: what is written meanwhile is another change
        try:
            text = self._file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"The settings file {self._file} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"The settings file {self._file} is not UTF-8: {error.reason}.") from error
        return parse_settings(text, self._file.name)

    def collect(self) -> Iterator[Metric]:
        yield metric_by("settings_reloads", {"applied": self.num_applied, "refused": self.num_refused})
        yield metric("settings_applied_timestamp_seconds", self._applied_at)


def _stamp_of(file: Path) -> _Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
