"""The LoRA adapters that clients can ask for by name: given at the start, or added and removed while serving.

Added adapters are written to a file, which every gateway process of this machine reads again when the file changes,
and which the next start reads. Engines are told nothing; each request names its adapter, and an engine loads an
adapter that it does not have. Knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import msgspec

from penstock.core.errors import ConfigError, Conflict, InvalidRequest, NotFound
from penstock.core.gateway_config import NamesConfig
from penstock.core.hashing import adapter_digest
from penstock.core.request import Adapter

logger = logging.getLogger(__name__)

FILE_NAME = "adapters.json"
MAX_NAME_LENGTH = 256
_Stamp: TypeAlias = tuple[int, int] | None


class RegisteredAdapter(msgspec.Struct, frozen=True):
    adapter: Adapter
    base_model: str | None = None  # None: the first model that is served


_decode = msgspec.json.Decoder(list[RegisteredAdapter]).decode


class AdapterRegistry:
    """Used from one event loop. Without a file, what is added is forgotten with the process."""

    def __init__(self, given: Iterable[RegisteredAdapter] = (), file: Path | None = None) -> None:
        self._given = {entry.adapter.name: entry for entry in given}
        self._added: dict[str, RegisteredAdapter] = {}
        self._file = file
        self._stamp: _Stamp = None

    @property
    def given(self) -> list[RegisteredAdapter]:
        """At the start."""
        return list(self._given.values())

    def find(self, name: str) -> RegisteredAdapter | None:
        return self._given.get(name) or self._current().get(name)

    def all(self) -> list[RegisteredAdapter]:
        return list({**self._current(), **self._given}.values())

    async def add(self, entry: RegisteredAdapter) -> None:
        """Add an adapter, or replace the one of the same name. Raises Conflict for a name that was given at the
        start."""
        self._check_not_given(entry.adapter.name)

        def change(adapters: dict[str, RegisteredAdapter]) -> None:
            adapters[entry.adapter.name] = entry

        await self._change(change)

    async def remove(self, name: str) -> RegisteredAdapter:
        self._check_not_given(name)
        entry = self._current().get(name)
        if entry is None:
            raise NotFound(f"There is no adapter {name!r}.", param="lora_name")

        def change(adapters: dict[str, RegisteredAdapter]) -> None:
            adapters.pop(name, None)

        await self._change(change)
        return entry

    def _check_not_given(self, name: str) -> None:
        if name in self._given:
            raise Conflict(
                f"The adapter {name!r} was given when the server started.",
                hint="Change --lora-modules and start the server again.",
            )

    async def _change(self, change: Callable[[dict[str, RegisteredAdapter]], None]) -> None:
        if self._file is None:
            change(self._added)
        else:
            self._added = await asyncio.to_thread(_rewrite, self._file, change)
            self._stamp = _stamp_of(self._file)

    def _current(self) -> dict[str, RegisteredAdapter]:
        if self._file is not None and (stamp := _stamp_of(self._file)) != self._stamp:
            self._stamp = stamp
            try:
                self._added = _read(self._file)
            except (OSError, msgspec.DecodeError) as error:
                logger.error("the adapters stay as they are: %s cannot be read: %s", self._file, error)
        return self._added


async def register(name: str, folder: str, base_model: str | None = None) -> RegisteredAdapter:
    """Read an adapter from disk. Raises InvalidRequest when the folder holds no adapter. Only an engine can tell
    whether the adapter fits the model."""
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidRequest(
            f"The name of an adapter has 1 to {MAX_NAME_LENGTH} characters, all of them printable.",
            param="lora_name",
        )
    path = Path(folder).expanduser().resolve()
    try:
        digest = await asyncio.to_thread(adapter_digest, path)
    except OSError as error:
        raise InvalidRequest(
            f"{path} is no LoRA adapter: its {Path(error.filename).name} cannot be read.",
            hint="Give a folder as PEFT writes it.",
            param="lora_path",
        ) from error
    return RegisteredAdapter(Adapter(name, str(path), digest), base_model)


async def open_adapters(names: NamesConfig, folder: Path) -> AdapterRegistry:
    """The adapters given at the start, and those in the file in `folder`. Raises ConfigError."""
    try:
        given = [await register(name, path, base_model) for name, path, base_model in names.adapters]
    except InvalidRequest as error:
        raise ConfigError(error.message, hint=error.hint) from error
    return AdapterRegistry(given, folder / FILE_NAME)


def _rewrite(
    file: Path, change: Callable[[dict[str, RegisteredAdapter]], None]
) -> dict[str, RegisteredAdapter]:
    """Change the file under a lock, so that two processes do not lose each other's changes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        adapters = _read(file)
        change(adapters)
        new_file = file.with_suffix(".new")
        new_file.write_bytes(msgspec.json.encode(list(adapters.values())))
        os.replace(new_file, file)
    return adapters


def _read(file: Path) -> dict[str, RegisteredAdapter]:
    try:
        entries = _decode(file.read_bytes())
    except FileNotFoundError:
        return {}
    return {entry.adapter.name: entry for entry in entries}


def _stamp_of(file: Path) -> _Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
