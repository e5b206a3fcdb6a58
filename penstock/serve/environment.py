"""Every environment variable that Penstock reads; the places where a server keeps its data, its database and its
models; and the servers that run on this machine, for `penstock ps`. Knows no flags.

Each running server has a file, which the server's process holds locked. The lock ends with the process, however it
ends, so that a file without a lock belongs to a server that has ended.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.core.errors import ConfigError
from penstock.core.gateway_config import StoreConfig

if TYPE_CHECKING:
    from penstock.cluster.external.kubernetes_api import KubernetesApi
    from penstock.gateway.blobs.blobs import Blobs
    from penstock.gateway.blobs.bucket import S3Access
    from penstock.gateway.store.database import Database
    from penstock.models.hub import ModelHub

import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

import msgspec

CONFIG_VARIABLE = "PENSTOCK_CONFIG"  # a TOML file, as --config
DEBUG_VARIABLE = "PENSTOCK_DEBUG"  # as --debug
API_KEY_VARIABLE = "PENSTOCK_API_KEY"  # as --api-key, without showing the key in a list of processes
URL_VARIABLE = "PENSTOCK_URL"  # as --url: the server that a command connects to

DATABASE_URL_VARIABLE = "PENSTOCK_DATABASE_URL"  # as --database-url, for a URL with a password in it
FILES_URL_VARIABLE = "PENSTOCK_FILES_URL"  # as --files-url
REDIS_URL_VARIABLE = "PENSTOCK_REDIS_URL"  # as --redis-url, for a URL with a password in it
DATA_DIR_VARIABLE = "PENSTOCK_DATA_DIR"  # as --data-dir
EXTERNAL_API_KEY_VARIABLE = "PENSTOCK_EXTERNAL_API_KEY"  # the key for servers given with --external
RAY_ADDRESS_VARIABLE = "RAY_ADDRESS"  # as --ray-address; Ray's own name
REGISTRY_VARIABLE = "PENSTOCK_REGISTRY"
JOIN_TOKEN_VARIABLE = "PENSTOCK_JOIN_TOKEN"
OTLP_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"  # as --otlp-endpoint; OpenTelemetry's own name


def secret_in(variable: str) -> str | None:
    """Return the key in a variable that the operator chose, or None if the variable is not set."""
    return os.environ.get(variable) or None


def kubernetes_api() -> KubernetesApi | None:
    """Return the API server of the Kubernetes cluster that this process runs in, or None. Each pod has the folder of
    its service account at the same place; PENSTOCK_SERVICE_ACCOUNT names another folder, for a process that runs
    elsewhere."""
    from penstock.cluster.external.kubernetes_api import KubernetesApi

    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host:
        return None
    account = os.environ.get("PENSTOCK_SERVICE_ACCOUNT") or "/var/run/secrets/kubernetes.io/serviceaccount"
    url = f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
    return KubernetesApi(url, Path(account))


def own_pod() -> tuple[str, str] | None:
    """Return the name and the uid of the pod that this process runs in, if the pod's manifest gives them."""
    name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
    return (name, uid) if name and uid else None


def state_dir() -> Path:
    """Return the default data folder of a server: `penstock` in the user's state folder."""
    user_state = os.environ.get("XDG_STATE_HOME")
    return (Path(user_state) if user_state else Path.home() / ".local" / "state") / "penstock"


def cache_dir() -> Path:
    """Return the folder for models: PENSTOCK_CACHE, else `penstock` in the user's cache folder."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "penstock"


def bytecode_dir() -> Path:
    """Return the folder for the bytecode of packages that were installed without bytecode."""
    return cache_dir() / "bytecode"


def hub_token() -> str | None:
    """Return the user's Hugging Face token, for gated models."""
    return os.environ.get("HF_TOKEN") or None


def shared_hub_dir() -> Path:
    """Return the folder in which other programs keep models of the Hugging Face hub, as its library finds it."""
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "huggingface" / "hub"


def otlp_headers() -> dict[str, str]:
    """Return the headers for the trace collector: OTEL_EXPORTER_OTLP_HEADERS, as `name=value,name=value`."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip()}


def otel_service_name() -> str:
    return os.environ.get("OTEL_SERVICE_NAME") or "penstock"


def otel_sampled_share() -> float:
    """Return OTEL_TRACES_SAMPLER_ARG, a number from 0 to 1, or 1 if it is absent or not a number."""
    try:
        share = float(os.environ.get("OTEL_TRACES_SAMPLER_ARG") or 1.0)
    except ValueError:
        return 1.0
    return min(1.0, max(0.0, share))


def visible_gpus() -> tuple[str, ...]:
    """Return the names in CUDA_VISIBLE_DEVICES, or else the numbers of all NVIDIA devices of this machine."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip())
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(sorted((number for number in numbers if number.isdecimal()), key=int))


def data_dir(config: StoreConfig) -> Path:
    """Return the data folder of a server as an absolute path. The folder may not exist yet."""
    folder = (Path(config.data_dir).expanduser() if config.data_dir else state_dir()).absolute()
    if os.path.isfile(folder):
        raise ConfigError(f"The data folder {folder} is a file.", hint="Choose another one with --data-dir.")
    return folder


def open_database(config: StoreConfig) -> Database:
    """Return the database of a server. Nothing is read or written before the first query."""
    from penstock.gateway.store.database import Database, sqlite_url

    return Database(config.database_url or sqlite_url(data_dir(config)))


def open_blobs(config: StoreConfig) -> Blobs:
    """Return the place for the bytes of files and batches. A bucket is looked for. Raises ConfigError."""
    from penstock.gateway.blobs.blobs import FileFolder
    from penstock.gateway.blobs.bucket import Bucket, S3Client

    url = config.files_url
    if url is None:
        return FileFolder(data_dir(config) / "files")
    kind, separator, path = url.partition("://")
    if kind == "s3" and separator:
        client = S3Client(url, _s3_access())
        client.check()
        return Bucket(client)
    if separator and kind != "file":
        raise ConfigError(
            f"Files cannot be kept at '{kind}://'.", hint="Use s3://bucket/prefix, or the path of a folder."
        )
    return FileFolder(Path(path if separator else url).expanduser().absolute())


def _s3_access() -> S3Access:
    """Return the credentials in the variables that Amazon's own tools read."""
    from penstock.gateway.blobs.bucket import S3Access

    key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key_id or not secret:
        raise ConfigError(
            "The object store needs credentials.", hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    return S3Access(
        key_id,
        secret,
        token=os.environ.get("AWS_SESSION_TOKEN") or None,
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        endpoint=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None,
    )


def model_hub() -> ModelHub:
    """Return the cache of models on this machine, with the user's Hugging Face token."""
    from penstock.models.hub import ModelHub

    return ModelHub(cache_dir(), hub_token=hub_token(), shared_hub_dir=shared_hub_dir())


logger = logging.getLogger(__name__)


class RunningServer(msgspec.Struct, frozen=True):
    pid: int
    url: str
    models: tuple[str, ...]
    started_at: float  # Unix time


_decode = msgspec.json.Decoder(RunningServer).decode

Announce = Callable[[str, Sequence[str]], None]


@contextmanager
def announced(folder: Path | None = None) -> Iterator[Announce]:
    """Yield a function that tells the server's URL and models to `penstock ps`, until the block ends."""
    files: list[tuple[Path, BinaryIO]] = []

    def announce(url: str, models: Sequence[str]) -> None:
        try:
            files.append(_write(_folder(folder), RunningServer(os.getpid(), url, tuple(models), time.time())))
        except OSError as error:  # the server can run without this file
            logger.debug("penstock ps will not list this server: %s", error)

    try:
        yield announce
    finally:
        for path, file in files:
            path.unlink(missing_ok=True)
            file.close()


def running_servers(folder: Path | None = None) -> list[RunningServer]:
    """Return the servers that run now, oldest first. Files of servers that were killed are removed."""
    found = []
    for path in _folder(folder).glob("*.json"):
        with suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                with suppress(msgspec.MsgspecError):
                    found.append(_decode(file.read()))
            else:
                path.unlink()
    return sorted(found, key=lambda server: server.started_at)


def _write(folder: Path, server: RunningServer) -> tuple[Path, BinaryIO]:
    """Write the file. It appears under its name only when it is complete and locked."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, unfinished = folder / f"{server.pid}.json", folder / f"{server.pid}.new"
    file = unfinished.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(msgspec.json.encode(server))
        file.flush()
        unfinished.replace(path)
    except BaseException:
        file.close()
        raise
    return path, file


def _folder(folder: Path | None) -> Path:
    return folder or state_dir() / "servers"
