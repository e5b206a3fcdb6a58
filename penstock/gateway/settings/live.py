"""The settings in use. New settings are put to use all at once or not at all.

Each part that has settings attaches a function that takes over new settings. All functions run in one turn of the
event loop, so that no request ever sees half of a change. Settings that are refused leave the old ones in use. Does
not know where settings come from: `file` and `shared` supply them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.errors import ConfigError
from penstock.gateway.metrics.table import metric, metric_by
from penstock.gateway.settings.settings import Document, Settings, changed_settings

logger = logging.getLogger(__name__)

_MAX_LOGGED_CHANGES = 50

# A function that uses new settings. It raises ConfigError if it cannot, and has then changed nothing.
Apply: TypeAlias = Callable[[Settings], None]


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of settings. `version` is that of the database; 0 for a file and for the defaults."""

    name: str = "the defaults"
    version: int = 0
    document: Document = field(default_factory=dict)


class LiveSettings(Collector):
    """`begin` first. Used from the event loop; also a collector of metrics."""

    def __init__(self) -> None:
        self.current = Settings()
        self.source = Source()
        self.latest_version = 0  # the newest one known, in use or refused
        self.refusal: str | None = None  # why the latest version is not in use
        self.checked_at: Callable[[], float] = time.time  # when the database was last asked; set by `shared`
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

    def collect(self) -> Iterator[Metric]:
        yield metric_by("settings_reloads", {"applied": self.num_applied, "refused": self.num_refused})
        yield metric("settings_applied_timestamp_seconds", self._applied_at)
        yield metric("settings_stale", 0 if self.refusal is None else 1)
        yield metric("settings_version", self.source.version)
        yield metric("settings_latest_version", self.latest_version)
        yield metric("settings_checked_timestamp_seconds", self.checked_at())
