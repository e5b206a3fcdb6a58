"""The settings while a server runs: /admin/settings.

A change names the version that it was made from (`If-Match`), and is refused if another change came first. The
middleware has checked that the caller has the scope `admin`.
"""

from __future__ import annotations

import re
import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http.answers import json_response, shown_as
from penstock.api.http.context import headers_of, principal_of, request_id_of
from penstock.api.http.parsing import BodyDecoder, integer_of, read_body
from penstock.api.http.routes import PAGE, Operation
from penstock.core.errors import ConfigError, Conflict, InvalidRequest, NotFound, PreconditionRequired
from penstock.gateway.settings.live import SharedSettings
from penstock.gateway.settings.settings import Document, to_toml
from penstock.gateway.settings.store import SettingsVersion, encode, parse_json, parse_toml
from penstock.gateway.store.database import Database
from penstock.gateway.store.versions import MAX_BODY_BYTES
from penstock.gateway.tenants.directory import Actor, announce, write_entry


def actor_of(request: Request) -> Actor:
    return Actor(principal_of(request).key_id, request_id_of(request))


async def audit(
    database: Database, request: Request, action: str, target: str, after: msgspec.Struct
) -> None:
    actor, at = actor_of(request), time.time()
    announce(
        await database.run(
            lambda connection: write_entry(connection, actor, action, target, at=at, after=after)
        )
    )


_TOML = b"application/toml"
_ETAG = re.compile(r'(?:W/)?"?(\d{1,18})"?')


class SettingsObject(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in use at the gateway that answers. `version` is 0 where the database has no settings."""

    version: int
    source: str
    settings: Document
    latest_version: int
    refusal: str | None = None  # why the latest version is not in use
    object: Literal["settings"] = "settings"


class SettingsVersionObject(SettingsVersion, frozen=True, kw_only=True):
    object: Literal["settings.version"] = "settings.version"


class SettingsHistory(msgspec.Struct, frozen=True, kw_only=True):
    data: list[SettingsVersionObject]
    has_more: bool
    object: Literal["list"] = "list"


class RevertSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int


class Reloaded(msgspec.Struct, frozen=True):
    """The names of the changed settings. Their texts are not shown, because they may be private."""

    changes: list[str]
    object: Literal["settings.reload"] = "settings.reload"


class SettingsEndpoints:
    def __init__(self, shared: SharedSettings, database: Database) -> None:
        self._shared = shared
        self._database = database
        self._revert = BodyDecoder(RevertSettings)

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/settings", self.show, SettingsObject),
            Operation("PUT /admin/settings", self.replace, SettingsVersionObject),
            Operation("PATCH /admin/settings", self.change, SettingsVersionObject),
            Operation("POST /admin/settings/reload", self.reload, Reloaded, takes_body=False),
            Operation(
                "POST /admin/settings/revert", self.revert, SettingsVersionObject, request=RevertSettings
            ),
            Operation("GET /admin/settings/versions", self.history, SettingsHistory, query=PAGE),
            Operation("GET /admin/settings/versions/{version}", self.show_version, SettingsVersionObject),
        ]

    async def show(self, request: Request) -> Response:
        live = self._shared.live
        if _TOML in headers_of(request).get(b"accept", b""):
            return _private(to_toml(live.source.document).encode(), _TOML.decode(), live.source.version)
        return _answer(
            SettingsObject(
                version=live.source.version,
                source=live.source.name,
                settings=live.source.document,
                latest_version=live.latest_version,
                refusal=live.refusal,
            ),
            live.source.version,
        )

    async def replace(self, request: Request) -> Response:
        """Replace all settings. The body is JSON, or TOML as in a file; errors in TOML name their line."""
        expected = _expected(request)
        body = await read_body(request, MAX_BODY_BYTES)
        is_toml = headers_of(request).get(b"content-type", b"").startswith(_TOML)
        document = parse_toml(body) if is_toml else parse_json(body)
        return await self._done(await self._shared.store.replace(actor_of(request), document, expected))

    async def change(self, request: Request) -> Response:
        """Change some settings. The body is a JSON merge patch, which applies to the settings of this gateway's file
        if the database has none."""
        expected = _expected(request)
        patch = parse_json(await read_body(request, MAX_BODY_BYTES))
        base = self._shared.live.source.document
        return await self._done(await self._shared.store.patch(actor_of(request), patch, expected, base=base))

    async def revert(self, request: Request) -> Response:
        expected = _expected(request)
        version = (await self._revert.read(request)).version
        return await self._done(await self._shared.store.revert(actor_of(request), version, expected))

    async def history(self, request: Request) -> Response:
        before = integer_of(request, "after", default=0, low=1, high=10**9)
        page = await self._shared.store.history(
            limit=integer_of(request, "limit", default=20, low=1, high=100), before=before or None
        )
        return _answer(SettingsHistory(data=list(map(_shown, page.data)), has_more=page.has_more))

    async def show_version(self, request: Request) -> Response:
        text = request.path_params["version"]
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise NotFound(f"There is no version {text[:20]!r} of the settings.", param="version")
        return _answer(_shown(await self._shared.store.version(int(text))))

    async def reload(self, request: Request) -> Response:
        file = self._shared.file
        if file is None:
            raise NotFound("This server has no settings file.", hint="Start it with --settings FILE.")
        if file.is_overruled:
            raise Conflict(
                "The settings are in the database, so the file is not used.",
                hint="To bring the file in, run: penstock settings apply FILE",
            )
        try:
            reloaded = Reloaded(await file.reload())
        except ConfigError as error:
            raise InvalidRequest(
                f"The settings stay as they are: {error.message}", param=error.param, hint=error.hint
            ) from error
        await audit(self._database, request, "settings.reload", "settings", reloaded)
        return json_response(reloaded)

    async def _done(self, made: SettingsVersion) -> Response:
        await self._shared.catch_up()  # the gateway that made the change need not wait for the notification
        return _answer(_shown(made), made.version)


def _expected(request: Request) -> int | None:
    """Return the version that a change was made from; None for any."""
    given = headers_of(request).get(b"if-match", b"").decode("latin-1").strip()
    if not given:
        raise PreconditionRequired(
            "A change of the settings names the version that it was made from.",
            hint='Send it as a header, such as If-Match: "3"; If-Match: * changes whatever is there.',
        )
    if given == "*":
        return None
    match = _ETAG.fullmatch(given)
    if match is None:
        raise InvalidRequest(f"If-Match holds the number of a version, not {given[:40]!r}.", param="If-Match")
    return int(match[1])


def _answer(shown: msgspec.Struct, version: int | None = None) -> Response:
    """Return the settings as JSON, with all digits of prices. The answer may hold private texts, so no proxy may
    cache it."""
    return _private(encode(shown), "application/json", version)


def _private(body: bytes, media_type: str, version: int | None) -> Response:
    response = Response(body, headers={"cache-control": "no-store"}, media_type=media_type)
    if version is not None:
        response.headers["etag"] = f'"{version}"'
    return response


def _shown(version: SettingsVersion) -> SettingsVersionObject:
    return shown_as(SettingsVersionObject, version)
