"""The application with a real tenants' database behind it, called without a socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from penstock.api.app import create_app
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.identity import Scope
from penstock.gateway.gateway import Gateway
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.tenants.authenticator import Tenants
from penstock.gateway.tenants.directory import Actor
from penstock.gateway.tenants.records import IssuedKey, NewKey
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.store.ready_made import ready_made_database

ACTOR = Actor("test")


class TenantServer:
    def __init__(
        self,
        folder: Path,
        engine: FakeEngine | None = None,
        config: ServerConfig | None = None,
        **tenants: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.database = ready_made_database(folder) if folder.exists() else Database(sqlite_url(folder))
        self.tenants = Tenants(self.database, **tenants)
        self.gateway = Gateway(self.engine, GatewayConfig())
        self.app = create_app(self.gateway, config or ServerConfig(), tenants=self.tenants)

    async def make_key(self, *scopes: Scope, **fields: Any) -> IssuedKey:
        new_key = NewKey(**{"name": "k", "scopes": scopes or (Scope.INFERENCE,)} | fields)
        return await self.tenants.directory.create_key(ACTOR, new_key)

    def client(self, secret: str | None = None) -> httpx.AsyncClient:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    async def close(self) -> None:
        await self.tenants.close()
        self.database.close()
