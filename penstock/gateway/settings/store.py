"""The settings in the database: every change is checked first, and is one transaction with its audit entry.

The admin API and the commands work through `SettingsStore`. It does not decide who may do so, and it knows no running
gateway: `live.SharedSettings` delivers the changes that are written here to the gateways.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

import msgspec
from sqlalchemy import Connection

from penstock.core.errors import ConfigError, InvalidRequest, NotFound
from penstock.gateway.settings.settings import (
    Document,
    Settings,
    changed_settings,
    check_document,
    parse_file,
)
from penstock.gateway.store.database import Database
from penstock.gateway.store.versions import (
    DocumentVersion,
    append,
    lock_kind,
    read_history,
    read_latest,
    read_version,
)
from penstock.gateway.tenants.directory import Actor, announce, write_entry
from penstock.gateway.tenants.records import Page

KIND = "settings"
CheckedT = TypeVar("CheckedT")
_MAX_AUDITED_CHANGES = 200
encode = msgspec.json.Encoder(decimal_format="number").encode  # prices keep their digits as numbers


class SettingsVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` is None where the database was told to say nothing: each gateway then uses its file."""

    version: int
    created_at: float
    actor: str
    note: str
    settings: Document | None


class SettingsChange(msgspec.Struct, frozen=True):
    """The record of a change in the audit log. Texts are not shown, because they may be private."""

    version: int
    changes: list[str]


def parse_json(body: bytes | str) -> Document:
    """Return a JSON object whose fractions keep their digits. Raises InvalidRequest."""
    try:
        document = json.loads(body, parse_float=_fraction, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The settings are not valid JSON: {error}.") from error
    if not isinstance(document, dict):
        raise InvalidRequest(
            "The settings are a JSON object, with one key for each table of a settings file."
        )
    return document


def parse_toml(body: bytes) -> Document:
    """Return the document of a settings file. Raises InvalidRequest, with the line of a mistake."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The settings are not UTF-8: {error}.") from error
    document, _ = _checked(lambda: parse_file(text, "the settings"))
    return document


def check(document: Document, name: str = "the settings") -> Settings:
    """Return the settings of a document that a client sent. Raises InvalidRequest."""
    return _checked(lambda: check_document(document, name))


def _checked(work: Callable[[], CheckedT]) -> CheckedT:
    try:
        return work()
    except ConfigError as error:
        raise InvalidRequest(
            f"The settings stay as they are: {error.message}", param=error.param, hint=error.hint
        ) from error
    except RecursionError as error:
        raise InvalidRequest("The settings are nested too deeply.") from error


def merged(document: Document, patch: Document) -> Document:
    """Apply a JSON merge patch (RFC 7396): null removes a key, an object is merged, anything else replaces."""
    result = dict(document)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inside = result.get(key)
            result[key] = merged(inside if isinstance(inside, dict) else {}, value)
        else:
            result[key] = value
    return result


class SettingsStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def latest(self) -> SettingsVersion | None:
        """Return the current version; None if the database never had settings."""
        if not self._database.exists:
            return None
        found = await self._database.run(lambda connection: read_latest(connection, KIND), reads_only=True)
        return None if found is None else _shown(found)

    async def version(self, version: int) -> SettingsVersion:
        found = None
        if self._database.exists:
            found = await self._database.run(
                lambda connection: read_version(connection, KIND, version), reads_only=True
            )
        if found is None:
            raise NotFound(f"There is no version {version} of the settings.", param="version")
        return _shown(found)

    async def history(self, *, limit: int, before: int | None = None) -> Page[SettingsVersion]:
        if not self._database.exists:
            return Page((), has_more=False)
        found = await self._database.run(
            lambda connection: read_history(connection, KIND, limit=limit + 1, before=before), reads_only=True
        )
        return Page(tuple(map(_shown, found[:limit])), len(found) > limit)

    async def replace(
        self, actor: Actor, document: Document | None, expected: int | None, *, note: str = ""
    ) -> SettingsVersion:
        """Make a document the current settings; None leaves the settings to the gateways' files."""
        return await self._write(actor, lambda _, __: document, expected, note)

    async def patch(
        self, actor: Actor, patch: Document, expected: int | None, *, base: Document
    ) -> SettingsVersion:
        """Merge a patch into the current settings, or into `base` if the database has none."""
        return await self._write(
            actor,
            lambda _, now: merged(base if now is None or now.settings is None else now.settings, patch),
            expected,
            "",
        )

    async def revert(self, actor: Actor, version: int, expected: int | None) -> SettingsVersion:
        """Make an earlier version the current one again, as a new version. Version 0 stands for the gateways'
        files."""

        def find(connection: Connection, _: SettingsVersion | None) -> Document | None:
            if version == 0:
                return None
            found = read_version(connection, KIND, version)
            if found is None:
                raise NotFound(f"There is no version {version} of the settings.", param="version")
            return _shown(found).settings

        return await self._write(actor, find, expected, f"back to version {version}")

    async def _write(
        self,
        actor: Actor,
        make: Callable[[Connection, SettingsVersion | None], Document | None],
        expected: int | None,
        note: str,
    ) -> SettingsVersion:
        def write(connection: Connection) -> tuple[DocumentVersion, Any]:
            lock_kind(connection, KIND)
            latest = read_latest(connection, KIND)
            now = None if latest is None else _shown(latest)
            document = make(connection, now)
            body = None
            settings = Settings()
            if document is not None:
                settings = check(document)
                body = encode(document)
            at = time.time()
            made = append(connection, KIND, body, expected=expected, actor=actor.name, note=note, at=at)
            change = SettingsChange(
                made.version, changed_settings(_usable(now), settings)[:_MAX_AUDITED_CHANGES]
            )
            return made, write_entry(connection, actor, "settings.change", KIND, at=at, after=change)

        made, entry = await self._database.run(write)
        announce(entry)
        return _shown(made)


def _usable(version: SettingsVersion | None) -> Settings:
    """Return the settings of a version, for a comparison. Another release may have written what this one does not
    know."""
    try:
        return check_document((version.settings if version else None) or {}, KIND)
    except ConfigError:
        return Settings()


def _shown(found: DocumentVersion) -> SettingsVersion:
    return SettingsVersion(
        version=found.version,
        created_at=found.created_at,
        actor=found.actor,
        note=found.note,
        settings=None if found.body is None else parse_json(found.body),
    )


def _fraction(text: str) -> Decimal:
    return Decimal(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
