"""LoRA adapters while a server runs: /admin/adapters, and the same under the names that vLLM has for it.

The middleware has checked that the caller has the scope `admin`.
"""

from __future__ import annotations

import logging
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.api.http.answers import json_response
from penstock.api.http.context import principal_of
from penstock.api.http.routes import Operation
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.catalogue import RegisteredAdapter, register, try_adapter

logger = logging.getLogger(__name__)


class LoadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`lora_path` is a folder as PEFT writes it, which this server and its engines both see."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False  # one of the same name is replaced in any case


class UnloadAdapter(msgspec.Struct, frozen=True):
    lora_name: str


class AdapterObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    path: str
    digest: str
    base_model: str | None
    object: Literal["adapter"] = "adapter"


class AdapterList(msgspec.Struct, frozen=True):
    data: list[AdapterObject]
    object: Literal["list"] = "list"


class AdapterDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["adapter"] = "adapter"


class AdapterEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/adapters", self.list_adapters, AdapterList),
            Operation("POST /admin/adapters", self.create_adapter, AdapterObject, reads=LoadAdapter),
            Operation("DELETE /admin/adapters/{name:path}", self.delete_adapter, AdapterDeleted),
            Operation(
                "POST /v1/load_lora_adapter",
                self.load_lora_adapter,
                reads=LoadAdapter,
                content_type="text/plain",
            ),
            Operation(
                "POST /v1/unload_lora_adapter",
                self.unload_lora_adapter,
                reads=UnloadAdapter,
                content_type="text/plain",
            ),
        ]

    async def list_adapters(self, request: Request) -> Response:
        return json_response(AdapterList([_shown(entry) for entry in self._gateway.catalogue.adapters.all()]))

    async def create_adapter(self, request: Request, wire: LoadAdapter) -> Response:
        return json_response(_shown(await self._load(request, wire)))

    async def delete_adapter(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._unload(request, name)
        return json_response(AdapterDeleted(name))

    async def load_lora_adapter(self, request: Request, wire: LoadAdapter) -> Response:
        entry = await self._load(request, wire)
        return PlainTextResponse(f"Success: LoRA adapter '{entry.adapter.name}' added successfully.")

    async def unload_lora_adapter(self, request: Request, wire: UnloadAdapter) -> Response:
        await self._unload(request, wire.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{wire.lora_name}' removed successfully.")

    async def _load(self, request: Request, wire: LoadAdapter) -> RegisteredAdapter:
        entry = await register(wire.lora_name, wire.lora_path, wire.base_model_name)
        self._gateway.catalogue.check_free(entry)
        await try_adapter(self._gateway.engine, self._gateway.catalogue, entry)
        await self._gateway.catalogue.adapters.add(entry, principal_of(request).key_id)
        logger.info(
            "adapter %s added from %s by %s", wire.lora_name, wire.lora_path, principal_of(request).key_id
        )
        return entry

    async def _unload(self, request: Request, name: str) -> None:
        await self._gateway.catalogue.adapters.remove(name, principal_of(request).key_id)
        logger.info("adapter %s removed by %s", name, principal_of(request).key_id)


def _shown(entry: RegisteredAdapter) -> AdapterObject:
    adapter = entry.adapter
    return AdapterObject(
        id=adapter.name, path=adapter.path, digest=adapter.digest, base_model=entry.base_model
    )
