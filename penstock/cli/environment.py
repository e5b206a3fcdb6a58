"""Every environment variable that Penstock reads, and what it means. Knows nothing of flags or files."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_VARIABLE = "PENSTOCK_CONFIG"  # a TOML file, as --config
DEBUG_VARIABLE = "PENSTOCK_DEBUG"  # as --debug
API_KEY_VARIABLE = "PENSTOCK_API_KEY"  # as --api-key, without showing it in a list of processes


def cache_dir() -> Path:
    """Where models are kept: PENSTOCK_CACHE, else `penstock` in the user's cache folder."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "penstock"


def hub_token() -> str | None:
    """The user's Hugging Face token, for gated models."""
    return os.environ.get("HF_TOKEN") or None
