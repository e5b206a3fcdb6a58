"""Guard settings from the dictionaries that tests write, checked as a settings file is."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.errors import ConfigError
from penstock.gateway.guards.settings import GuardSettings, check_guard_settings


def guard_settings(raw: Any) -> GuardSettings:
    try:
        settings = msgspec.convert(raw, GuardSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The guard settings are wrong: {error}.") from error
    check_guard_settings(settings)
    return settings
