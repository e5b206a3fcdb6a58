"""Reads the settings file when it changes and when told to. `LiveSettings` puts the settings to use.

While the database has settings, the file is not used: `is_overruled` says so.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TypeAlias

from penstock.core.errors import ConfigError
from penstock.gateway.settings.live import LiveSettings, Source
from penstock.gateway.settings.settings import Settings, parse_file

logger = logging.getLogger(__name__)

POLL_S = 2.0

_Stamp: TypeAlias = tuple[int, int, int] | None  # None when the file is not there


class SettingsFile:
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
