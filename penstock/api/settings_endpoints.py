"""/admin/settings/reload: read the settings file again, now. Whoever comes here has the scope `admin`: the middleware
has seen to that."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.api.context import principal_of, request_id_of
from penstock.core.errors import ConfigError, InvalidRequest, NotFound
from penstock.gateway.settings_keeper import SettingsKeeper
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.audit import Actor, announce, write_entry


class Reloaded(msgspec.Struct, frozen=True):
    """What changed. Texts are not shown, because they may be private."""

    changes: list[str]
    object: str = "settings.reload"


class SettingsEndpoints:
    def __init__(self, keeper: SettingsKeeper | None, database: Database) -> None:
        self._keeper = keeper
        self._database = database

    def routes(self) -> list[Route]:
        return [Route("/admin/settings/reload", self.reload, methods=["POST"])]

    async def reload(self, request: Request) -> Response:
        if self._keeper is None:
            raise NotFound("This server has no settings file.", hint="Start it with --settings FILE.")
        try:
            reloaded = Reloaded(await self._keeper.reload())
        except ConfigError as error:
            raise InvalidRequest(
                f"The settings stay as they are: {error.message}", param=error.param, hint=error.hint
            ) from error
        actor = Actor(principal_of(request).key_id, request_id_of(request))
        announce(
            await self._database.run(
                lambda connection: write_entry(
                    connection, actor, "settings.reload", "settings", at=time.time(), after=reloaded
                )
            )
        )
        return Response(msgspec.json.encode(reloaded), media_type="application/json")
