"""The LoRA adapters that clients can ask for by name: given at the start, or added and removed while serving.

Added adapters are in the database, as a document with versions that every gateway follows, so that one that is added
at one gateway can be asked for at all of them. Engines are told nothing; each request names its adapter, and an
engine loads an adapter that it does not have. Knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from sqlalchemy import Connection

from penstock.core.errors import ConfigError, Conflict, InvalidRequest, NotFound, PreconditionFailed, quoted
from penstock.core.gateway_config import NamesConfig
from penstock.core.hashing import adapter_digest
from penstock.core.request import Adapter
from penstock.gateway.store.database import Database
from penstock.gateway.store.versions import DocumentVersion, append, lock_kind, read_latest

logger = logging.getLogger(__name__)

KIND = "adapters"  # of the document
FILE_NAME = "adapters.json"  # where an earlier release kept them
MAX_NAME_LENGTH = 256


class RegisteredAdapter(msgspec.Struct, frozen=True):
    adapter: Adapter
    base_model: str | None = None  # None: the first model that is served


_decode = msgspec.json.Decoder(list[RegisteredAdapter]).decode


class AdapterRegistry:
    """Used from one event loop. Without a database, what is added is forgotten with the process."""

    def __init__(self, given: Iterable[RegisteredAdapter] = (), database: Database | None = None) -> None:
        self._given = {entry.adapter.name: entry for entry in given}
        self._added: dict[str, RegisteredAdapter] = {}
        self._database = database

    @property
    def given(self) -> list[RegisteredAdapter]:
        """At the start."""
        return list(self._given.values())

    def find(self, name: str) -> RegisteredAdapter | None:
        return self._given.get(name) or self._added.get(name)

    def all(self) -> list[RegisteredAdapter]:
        return list({**self._added, **self._given}.values())

    async def add(self, entry: RegisteredAdapter, actor: str = "") -> None:
        """Add an adapter, or replace the one of the same name. Raises Conflict for a name that was given at the
        start."""
        self._check_not_given(entry.adapter.name)

        def change(adapters: dict[str, RegisteredAdapter]) -> None:
            adapters[entry.adapter.name] = entry

        await self._change(change, actor, f"added {entry.adapter.name}")

    async def remove(self, name: str, actor: str = "") -> RegisteredAdapter:
        self._check_not_given(name)
        entry = self._added.get(name)
        if entry is None:
            raise NotFound(f"There is no adapter {quoted(name)}.", param="lora_name")

        def change(adapters: dict[str, RegisteredAdapter]) -> None:
            adapters.pop(name, None)

        await self._change(change, actor, f"removed {name}")
        return entry

    async def load(self) -> int:
        """Take over the current version of the database, and return its number. A version that cannot be read leaves
        the adapters as they were."""
        if self._database is None or not self._database.exists:
            return 0
        latest = await self._database.run(lambda connection: read_latest(connection, KIND), reads_only=True)
        if latest is None:
            return 0
        try:
            self._added = _adapters(latest)
        except msgspec.DecodeError as error:
            logger.error(
                "the adapters stay as they are: version %d in the database cannot be read: %s",
                latest.version,
                error,
            )
        return latest.version

    async def seed(self, file: Path) -> None:
        """Bring in the adapters that an earlier release kept in a file, unless the database has some."""
        try:
            entries = _decode(await asyncio.to_thread(file.read_bytes))
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            logger.error("the adapters in %s are not used: %s", file, error)
            return
        assert self._database is not None
        body = msgspec.json.encode(entries)
        with contextlib.suppress(PreconditionFailed):
            await self._database.run(
                lambda connection: append(
                    connection, KIND, body, expected=0, actor="seed", note=f"from {file.name}"
                )
            )

    def _check_not_given(self, name: str) -> None:
        if name in self._given:
            raise Conflict(
                f"The adapter {quoted(name)} was given when the server started.",
                hint="Change --lora-modules and start the server again.",
            )

    async def _change(
        self, change: Callable[[dict[str, RegisteredAdapter]], None], actor: str, note: str
    ) -> None:
        if self._database is None:
            change(self._added)
            return

        def write(connection: Connection) -> dict[str, RegisteredAdapter]:
            lock_kind(connection, KIND)  # so that two gateways do not lose each other's changes
            latest = read_latest(connection, KIND)
            adapters = {} if latest is None else _adapters(latest)
            change(adapters)
            body = msgspec.json.encode(list(adapters.values()))
            append(connection, KIND, body, expected=None, actor=actor, note=note)
            return adapters

        self._added = await self._database.run(write)


async def register(name: str, folder: str, base_model: str | None = None) -> RegisteredAdapter:
    """Read an adapter from disk. Raises InvalidRequest when the folder holds no adapter. Only an engine can tell
    whether the adapter fits the model."""
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidRequest(
            f"The name of an adapter has 1 to {MAX_NAME_LENGTH} characters, all of them printable.",
            param="lora_name",
        )
    hint = "Give a folder as PEFT writes it."
    try:
        path = Path(folder).expanduser().resolve()
    except (
        ValueError,
        RuntimeError,
        OSError,
    ) as error:  # a NUL, the home of an unknown user, a loop of links
        raise InvalidRequest(
            f"{folder[:200]!r} is no path on this server.", hint=hint, param="lora_path"
        ) from error
    try:
        digest = await asyncio.to_thread(adapter_digest, path)
    except OSError as error:
        raise InvalidRequest(
            f"{path} is no LoRA adapter: its {Path(error.filename).name} cannot be read.",
            hint=hint,
            param="lora_path",
        ) from error
    return RegisteredAdapter(Adapter(name, str(path), digest), base_model)


async def open_adapters(names: NamesConfig, folder: Path, database: Database) -> AdapterRegistry:
    """Return the adapters given at the start, and those in the database. Raises ConfigError."""
    try:
        given = [await register(name, path, base_model) for name, path, base_model in names.adapters]
    except InvalidRequest as error:
        raise ConfigError(error.message, hint=error.hint) from error
    registry = AdapterRegistry(given, database)
    if not await registry.load():
        await registry.seed(folder / FILE_NAME)
        await registry.load()
    return registry


def _adapters(version: DocumentVersion) -> dict[str, RegisteredAdapter]:
    return {entry.adapter.name: entry for entry in _decode(version.body or b"[]")}
