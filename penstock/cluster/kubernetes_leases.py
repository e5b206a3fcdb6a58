"""The Lease objects of Kubernetes that a shared fleet consists of, as requests to an API server, and a copy of some
of them that a watch keeps up to date. Knows no record and no document.

Every write of an object that several processes write names the `resourceVersion` that the writer has read: the API
server refuses the write if the object has changed since. Times are those of the observer, as in the leader election
of Kubernetes: a lease has ended when the observer saw no renewal for the duration of the lease. So clocks may differ.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from penstock.cluster.external.connection import Answer, HttpError
from penstock.cluster.external.kubernetes_api import (
    MAX_ANSWER_BYTES,
    KubernetesApi,
    KubernetesError,
    Reply,
    refusal,
)
from penstock.cluster.registry import RegistryError
from penstock.core.tasks import end_task

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
RETRY_S = 1.0
WATCH_S = 300  # after which the API server ends a watch
FLEET_LABEL, KIND_LABEL = "penstock/fleet", "penstock/kind"
Kind = Literal["host", "leader", "documents"]


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    resource_version: str
    annotations: dict[str, str] = {}


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None
    renew_time: str | None = None


class Lease(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: Spec = Spec()

    @property
    def epoch(self) -> int:
        return self.spec.lease_transitions or 0


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class _LeaseList(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: tuple[Lease, ...]


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: _ListMetadata


class Leases:
    """The Leases of one fleet in one namespace. Every method raises RegistryError."""

    def __init__(self, api: KubernetesApi, namespace: str, fleet: str) -> None:
        self._api = api
        self.namespace = namespace
        self.fleet = fleet
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace, safe='')}/leases"

    async def get(self, name: str) -> Lease | None:
        reply = await self._ask("GET", f"{self._path}/{name}")
        return None if reply.status == 404 else self._object(reply, "get")

    async def create(self, name: str, kind: Kind, body: dict[str, Any]) -> Lease | None:
        """Return None if there is one already."""
        labels = {"app.kubernetes.io/name": "penstock", FLEET_LABEL: self.fleet, KIND_LABEL: kind}
        metadata = {**body.get("metadata", {}), "name": name, "labels": labels}
        whole = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **body, "metadata": metadata}
        reply = await self._ask("POST", self._path, whole)
        return None if reply.status == 409 else self._object(reply, "create")

    async def change(self, name: str, body: dict[str, Any]) -> Lease | Literal["gone", "changed"]:
        """Merge `body` into an object: None removes a field. With a resourceVersion in it, nothing happens unless the
        object still has that one."""
        reply = await self._ask("PATCH", f"{self._path}/{name}", body)
        if reply.status == 404:
            return "gone"
        return "changed" if reply.status == 409 else self._object(reply, "patch")

    async def remove(self, lease: Lease) -> None:
        """Remove an object unless it has changed."""
        version = {"preconditions": {"resourceVersion": lease.metadata.resource_version}}
        reply = await self._ask("DELETE", f"{self._path}/{lease.metadata.name}", version)
        if reply.status not in (200, 202, 404, 409):
            raise RegistryError(refusal(reply, "delete", "leases", self.namespace))

    async def all(self, kind: Kind) -> tuple[list[Lease], str]:
        """Return the objects of one kind, and the version from which a watch goes on."""
        reply = await self._ask("GET", f"{self._path}?{self._selector(kind)}")
        if reply.status != 200:
            raise RegistryError(refusal(reply, "list", "leases", self.namespace))
        found = _decoded(reply.body, _LeaseList)
        return list(found.items), found.metadata.resource_version

    async def watch(self, kind: Kind, version: str, silence_s: float) -> Answer:
        """Return a stream of the changes since `version`, which the caller reads and releases."""
        path = (
            f"{self._path}?{self._selector(kind)}&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}"
            f"&resourceVersion={quote(version, safe='')}"
        )
        try:
            answer = await self._api.follow(path, timeout_s=TIMEOUT_S, silence_s=silence_s)
            if answer.status == 200:
                return answer
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    reply = Reply(answer.status, await answer.read_all(MAX_ANSWER_BYTES))
            finally:
                answer.release()
        except (KubernetesError, HttpError, TimeoutError) as error:
            raise RegistryError(str(error) or "the Kubernetes API did not answer in time") from error
        raise RegistryError(refusal(reply, "watch", "leases", self.namespace))

    async def close(self) -> None:
        await self._api.close()

    def _selector(self, kind: Kind) -> str:
        return "labelSelector=" + quote(f"{FLEET_LABEL}={self.fleet},{KIND_LABEL}={kind}", safe="")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else msgspec.json.encode(body)
        try:
            return await self._api.ask(method, path, data, content_type=content_type, timeout_s=TIMEOUT_S)
        except KubernetesError as error:
            raise RegistryError(str(error)) from error

    def _object(self, reply: Reply, verb: str) -> Lease:
        if reply.status not in (200, 201):
            raise RegistryError(refusal(reply, verb, "leases", self.namespace))
        lease: Lease = _decoded(reply.body, Lease)
        return lease


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease, and when it was seen to change last, by the clock of this process."""

    lease: Lease
    since_s: float


class LeaseCache:
    """A copy of the Leases of one kind. It begins with a list, and a watch keeps it up to date. A watch that ends,
    breaks or is silent for `silence_s` is followed by another list, which also shows whether the API server still
    answers. `on_change` is called for every change but a renewal."""

    def __init__(self, leases: Leases, kind: Kind, silence_s: float, on_change: Callable[[], None]) -> None:
        self._leases = leases
        self._kind: Kind = kind
        self._silence_s = silence_s
        self._on_change = on_change
        self._seen: dict[str, ObservedLease] = {}
        self._version = ""
        self._error: RegistryError | None = None
        self._is_outdated = False
        self._reading = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self.heard_s = 0.0  # when the API server last said anything about these objects

    async def read(self) -> dict[str, ObservedLease]:
        """Return the objects by name. The first call begins to follow them. Raises RegistryError while the API server
        does not answer."""
        async with self._reading:
            if self._following is None:
                await self._list()
                answer = await self._leases.watch(self._kind, self._version, self._silence_s)
                self._following = asyncio.create_task(self._keep_following(answer))
            elif self._is_outdated:
                await self._list(is_watching=True)
        if self._error is not None:
            raise self._error
        return self._seen

    def outdate(self) -> None:
        """Note that this process has changed an object: the next reading shows it."""
        self._is_outdated = True

    async def close(self) -> None:
        if self._following is not None:
            await end_task(self._following)

    async def _keep_following(self, answer: Answer | None) -> None:
        while True:
            begun_s = time.monotonic()
            try:
                if answer is None:
                    await self._list()
                    answer = await self._leases.watch(self._kind, self._version, self._silence_s)
                    self._error = None
                await self._follow(answer)
            except RegistryError as error:
                self._error = error
            except Exception:
                logger.exception("the watch of Leases broke; it begins again")
            answer = None
            # A server that ends every watch at once must not be asked without a pause.
            await asyncio.sleep(max(0.0, RETRY_S - (time.monotonic() - begun_s)))

    async def _follow(self, answer: Answer) -> None:
        """Take over changes until the watch ends."""
        rest = b""

        def take(piece: bytes) -> None:
            nonlocal rest
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MAX_ANSWER_BYTES:
                raise RegistryError("the Kubernetes API sends an event without an end")
            for line in lines:
                self._take_event(line)

        try:
            await answer.deliver(take)
        except HttpError as error:
            logger.debug("the watch of Leases ends: %s", error)  # the list that follows shows what is wrong
        except _WatchEnded:
            pass
        finally:
            answer.release()

    def _take_event(self, line: bytes) -> None:
        event = _decoded(line, _Event)
        self.heard_s = time.monotonic()
        if event.type in ("ADDED", "MODIFIED"):
            self._put(_decoded(event.object, Lease))
        elif event.type == "DELETED":
            name = _decoded(event.object, Lease).metadata.name
            if self._seen.pop(name, None) is not None:
                self._on_change()
        elif event.type == "BOOKMARK":
            self._version = _decoded(event.object, _Bookmark).metadata.resource_version
        else:  # ERROR, with 410 when the version is too old to go on from
            raise _WatchEnded

    async def _list(self, *, is_watching: bool = False) -> None:
        """Take over all objects. A watch that goes on tells of what is removed: it may be ahead of the list."""
        self._is_outdated = False
        asked_s = time.monotonic()
        try:
            leases, version = await self._leases.all(self._kind)
        except RegistryError:
            self._is_outdated = True
            raise
        if self._error is not None:
            # No lease could be renewed in the meantime, nor a renewal be seen.
            self._seen = {name: ObservedLease(each.lease, asked_s) for name, each in self._seen.items()}
        if not is_watching:
            self._version = version
            present = {lease.metadata.name for lease in leases}
            for name in [name for name in self._seen if name not in present]:
                del self._seen[name]
                self._on_change()
        for lease in leases:
            self._put(lease)
        self.heard_s = time.monotonic()

    def _put(self, lease: Lease) -> None:
        known = self._seen.get(lease.metadata.name)
        if known is not None and not _is_later(lease, known.lease):
            return
        self._seen[lease.metadata.name] = ObservedLease(lease, time.monotonic())
        if known is None or known.lease.metadata.annotations != lease.metadata.annotations:
            self._on_change()


class _WatchEnded(Exception):
    """The API server has ended a watch by an event."""


def now_text() -> str:
    """Return the time as Kubernetes writes it, to the microsecond. Only people read it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _is_later(lease: Lease, known: Lease) -> bool:
    """Return whether a Lease is a later state of a known one: a watch may tell of states from before a list."""
    new, old = lease.metadata.resource_version, known.metadata.resource_version
    return int(new) > int(old) if new.isdecimal() and old.isdecimal() else new != old


def _decoded(data: bytes | msgspec.Raw, shape: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.DecodeError as error:
        raise RegistryError(f"the Kubernetes API answers with no Leases: {error}") from error
