"""Every environment variable that Penstock reads, and what it means. Knows nothing of flags or files."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

CONFIG_VARIABLE = "PENSTOCK_CONFIG"  # a TOML file, as --config
DEBUG_VARIABLE = "PENSTOCK_DEBUG"  # as --debug
API_KEY_VARIABLE = "PENSTOCK_API_KEY"  # as --api-key, without showing it in a list of processes
URL_VARIABLE = "PENSTOCK_URL"  # as --url: the server that a command speaks to

DATABASE_URL_VARIABLE = "PENSTOCK_DATABASE_URL"  # as --database-url, for one with a password in it
REDIS_URL_VARIABLE = "PENSTOCK_REDIS_URL"  # as --redis-url, for one with a password in it
DATA_DIR_VARIABLE = "PENSTOCK_DATA_DIR"  # as --data-dir
EXTERNAL_API_KEY_VARIABLE = "PENSTOCK_EXTERNAL_API_KEY"  # what servers given with --external want to see
RAY_ADDRESS_VARIABLE = "RAY_ADDRESS"  # as --ray-address; Ray's own name
OTLP_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"  # as --otlp-endpoint; OpenTelemetry's own name


def secret_in(variable: str) -> str | None:
    """A key that the operator keeps in a variable of their own choice."""
    return os.environ.get(variable) or None


def state_dir() -> Path:
    """Where a server keeps its data unless told otherwise: `penstock` in the user's state folder."""
    user_state = os.environ.get("XDG_STATE_HOME")
    return (Path(user_state) if user_state else Path.home() / ".local" / "state") / "penstock"


def cache_dir() -> Path:
    """Where models are kept: PENSTOCK_CACHE, else `penstock` in the user's cache folder."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "penstock"


def bytecode_dir() -> Path:
    """Where that of packages is kept which were installed without."""
    return cache_dir() / "bytecode"


def hub_token() -> str | None:
    """The user's Hugging Face token, for gated models."""
    return os.environ.get("HF_TOKEN") or None


def otlp_headers() -> dict[str, str]:
    """What a trace collector wants to see, such as a key: OTEL_EXPORTER_OTLP_HEADERS, as `name=value,name=value`."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip()}


def otel_service_name() -> str:
    return os.environ.get("OTEL_SERVICE_NAME") or "penstock"


def otel_sampled_share() -> float:
    """OTEL_TRACES_SAMPLER_ARG, a number from 0 to 1; everything when it is absent or makes no sense."""
    try:
        share = float(os.environ.get("OTEL_TRACES_SAMPLER_ARG") or 1.0)
    except ValueError:
        return 1.0
    return min(1.0, max(0.0, share))


def visible_gpus() -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES names them; without it, every NVIDIA device of this machine by its number."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip())
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(sorted((number for number in numbers if number.isdecimal()), key=int))
