"""The admin API: organisations, workspaces, keys, and the audit log of what was done to them.

Lists have the shape of OpenAI's. The middleware has checked that the caller has the scope `admin`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.admin.settings import actor_of
from penstock.api.http.answers import ObjectList, private_json, shown_as
from penstock.api.http.routes import PAGE, Operation
from penstock.core.errors import InvalidRequest
from penstock.gateway.tenants.directory import DEFAULT_PAGE, AuditEntry, Directory
from penstock.gateway.tenants.records import (
    DEFAULT_ID,
    KEYS,
    ORGANIZATIONS,
    WORKSPACES,
    Key,
    KeyChanges,
    KeyStatus,
    NewKey,
    Organization,
    Page,
    Workspace,
)

Record = TypeVar("Record", bound=msgspec.Struct)


class NewOrganization(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NewWorkspace(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    organization_id: str = DEFAULT_ID


class Renaming(msgspec.Struct, forbid_unknown_fields=True):
    name: str


# A misspelt expires_at must not make a key that lives forever, so unknown fields are refused.
class NewKeyBody(NewKey, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class KeyChangesBody(KeyChanges, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class OrganizationObject(Organization, frozen=True, kw_only=True):
    object: Literal["organization"] = "organization"


class WorkspaceObject(Workspace, frozen=True, kw_only=True):
    object: Literal["workspace"] = "workspace"


class KeyObject(Key, frozen=True, kw_only=True):
    """`status` is of the moment that it is shown."""

    status_now: KeyStatus = msgspec.field(name="status")
    object: Literal["key"] = "key"


class NewKeyObject(KeyObject, frozen=True, kw_only=True):
    secret: str

    def __repr__(self) -> str:
        return f"NewKeyObject({self.id!r})"


class AuditObject(AuditEntry, frozen=True, kw_only=True):
    object: Literal["audit_entry"] = "audit_entry"


class OrganizationList(ObjectList[OrganizationObject]): ...


class WorkspaceList(ObjectList[WorkspaceObject]): ...


class KeyList(ObjectList[KeyObject]): ...


class AuditList(ObjectList[AuditObject]): ...


class AdminEndpoints:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/organizations", self.list_organizations, OrganizationList, query=PAGE),
            Operation(
                "POST /admin/organizations",
                self.create_organization,
                OrganizationObject,
                reads=NewOrganization,
            ),
            Operation("GET /admin/organizations/{id}", self.get_organization, OrganizationObject),
            Operation(
                "PATCH /admin/organizations/{id}",
                self.update_organization,
                OrganizationObject,
                reads=Renaming,
            ),
            Operation("DELETE /admin/organizations/{id}", self.archive_organization, OrganizationObject),
            Operation(
                "GET /admin/workspaces", self.list_workspaces, WorkspaceList, query=(*PAGE, "organization_id")
            ),
            Operation("POST /admin/workspaces", self.create_workspace, WorkspaceObject, reads=NewWorkspace),
            Operation("GET /admin/workspaces/{id}", self.get_workspace, WorkspaceObject),
            Operation("PATCH /admin/workspaces/{id}", self.update_workspace, WorkspaceObject, reads=Renaming),
            Operation("DELETE /admin/workspaces/{id}", self.archive_workspace, WorkspaceObject),
            Operation("GET /admin/keys", self.list_keys, KeyList, query=(*PAGE, "workspace_id")),
            Operation("POST /admin/keys", self.create_key, NewKeyObject, reads=NewKeyBody),
            Operation("GET /admin/keys/{id}", self.get_key, KeyObject),
            Operation("PATCH /admin/keys/{id}", self.update_key, KeyObject, reads=KeyChangesBody),
            Operation("DELETE /admin/keys/{id}", self.revoke_key, KeyObject),
            Operation("GET /admin/audit", self.list_audit, AuditList, query=(*PAGE, "target")),
        ]

    async def list_organizations(self, request: Request) -> Response:
        page = await self._directory.organizations(limit=_limit(request), after=_query(request, "after"))
        return _list(page, partial(shown_as, OrganizationObject))

    async def create_organization(self, request: Request, wire: NewOrganization) -> Response:
        made = await self._directory.create_organization(actor_of(request), wire.name)
        return _show(OrganizationObject, made)

    async def get_organization(self, request: Request) -> Response:
        found = await self._directory.find(ORGANIZATIONS, _id(request))
        return _show(OrganizationObject, found)

    async def update_organization(self, request: Request, wire: Renaming) -> Response:
        renamed = await self._directory.rename(actor_of(request), ORGANIZATIONS, _id(request), wire.name)
        return _show(OrganizationObject, renamed)

    async def archive_organization(self, request: Request) -> Response:
        archived = await self._directory.archive(actor_of(request), ORGANIZATIONS, _id(request))
        return _show(OrganizationObject, archived)

    async def list_workspaces(self, request: Request) -> Response:
        page = await self._directory.workspaces(
            limit=_limit(request),
            after=_query(request, "after"),
            organization_id=_query(request, "organization_id"),
        )
        return _list(page, partial(shown_as, WorkspaceObject))

    async def create_workspace(self, request: Request, wire: NewWorkspace) -> Response:
        made = await self._directory.create_workspace(actor_of(request), wire.name, wire.organization_id)
        return _show(WorkspaceObject, made)

    async def get_workspace(self, request: Request) -> Response:
        found = await self._directory.find(WORKSPACES, _id(request))
        return _show(WorkspaceObject, found)

    async def update_workspace(self, request: Request, wire: Renaming) -> Response:
        renamed = await self._directory.rename(actor_of(request), WORKSPACES, _id(request), wire.name)
        return _show(WorkspaceObject, renamed)

    async def archive_workspace(self, request: Request) -> Response:
        archived = await self._directory.archive(actor_of(request), WORKSPACES, _id(request))
        return _show(WorkspaceObject, archived)

    async def list_keys(self, request: Request) -> Response:
        page = await self._directory.keys(
            limit=_limit(request),
            after=_query(request, "after"),
            workspace_id=_query(request, "workspace_id"),
        )
        return _list(page, self._shown_key)

    async def create_key(self, request: Request, wire: NewKeyBody) -> Response:
        issued = await self._directory.create_key(actor_of(request), wire)
        return _show(NewKeyObject, self._shown_key(issued.key), secret=issued.secret)

    async def get_key(self, request: Request) -> Response:
        return private_json(self._shown_key(await self._directory.find(KEYS, _id(request))))

    async def update_key(self, request: Request, wire: KeyChangesBody) -> Response:
        updated = await self._directory.update_key(actor_of(request), _id(request), wire)
        return private_json(self._shown_key(updated))

    async def revoke_key(self, request: Request) -> Response:
        revoked = await self._directory.revoke_key(actor_of(request), _id(request))
        return private_json(self._shown_key(revoked))

    async def list_audit(self, request: Request) -> Response:
        after = _query(request, "after")
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 19):
            raise InvalidRequest("after is the id of an entry of the audit log.", param="after")
        page = await self._directory.audit(
            limit=_limit(request),
            before_id=None if after is None else int(after),
            target=_query(request, "target"),
        )
        return _list(page, partial(shown_as, AuditObject))

    def _shown_key(self, key: Key) -> KeyObject:
        return shown_as(KeyObject, key, status_now=key.status(self._directory.wall_time()))


def _show(shape: type[msgspec.Struct], record: msgspec.Struct, **more: Any) -> Response:
    return private_json(shown_as(shape, record, **more))


def _list(page: Page[Record], shown: Callable[[Record], msgspec.Struct]) -> Response:
    return private_json(ObjectList.of([shown(record) for record in page.data], has_more=page.has_more))


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _query(request: Request, name: str) -> str | None:
    return request.query_params.get(name)


def _limit(request: Request) -> int:
    text = _query(request, "limit")
    if text is None:
        return DEFAULT_PAGE
    # Whatever is no number is out of range too; the directory says what the range is.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
