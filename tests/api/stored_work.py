"""A real HTTP server with files and batches around a fake engine. The API key names the workspace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
from starlette.types import Receive, Scope, Send

from penstock.api.app import create_app
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.batches.runner import BatchesConfig, StoredWork
from penstock.gateway.blobs.blobs import Blobs, FileFolder
from penstock.gateway.files import FilesConfig
from penstock.gateway.gateway import Gateway
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.authenticator import Authenticator
from tests.gateway.fake_engine import FakeEngine
from tests.servers import listening_in_thread


class WorkspaceKeys(Authenticator):
    """An authenticator that takes every key's word for its workspace."""

    async def identify(self, credential: str | None) -> Principal:
        return Principal(workspace_id=credential or "default", key_id="test", best_tier=Tier.PRIORITY)


@dataclass
class ServedWork:
    engine: FakeEngine
    gateway: Gateway
    work: StoredWork
    url: str

    def openai(self, workspace: str = "w1") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=workspace, max_retries=0)

    def anthropic(self, workspace: str = "w1") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=workspace, max_retries=0)


@contextmanager
def serving_work(
    engine: FakeEngine, data_dir: Path, blobs: Blobs | None = None, **files: Any
) -> Iterator[ServedWork]:
    work = StoredWork(
        Database(f"sqlite:///{data_dir / 'penstock.db'}"),
        blobs or FileFolder(data_dir / "files"),
        files=FilesConfig(**{"max_file_bytes": 1 << 20} | files),
        batches=BatchesConfig(poll_s=0.02),
    )
    tenants: Any = SimpleNamespace(authenticator=WorkspaceKeys(), directory=None, sign_in=None)
    gateway = Gateway(engine, GatewayConfig())
    gateway.images.files = gateway.documents.files = work.files
    app = create_app(gateway, ServerConfig(), tenants=tenants, work=work)

    async def with_runner(scope: Scope, receive: Receive, send: Send) -> None:
        """Batches run on the server's event loop, which begins and ends with its lifespan."""
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        assert (await receive())["type"] == "lifespan.startup"
        work.runner.start()
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        await work.runner.stop()
        await send({"type": "lifespan.shutdown.complete"})

    with listening_in_thread(with_runner, is_forced=False) as port:
        yield ServedWork(engine, gateway, work, f"http://127.0.0.1:{port}")
