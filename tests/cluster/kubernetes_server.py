"""The API server of Kubernetes as far as Lease objects go, for tests. No real one was found on PyPI, npm or Debian.

Kept are the promises that a registry builds on. One counter gives resourceVersions. A write that names another
version than the object's is a conflict. A watch tells of all changes after a version, or of 410 Gone when these are
forgotten. A change that changes nothing makes no new version. Rights, fields and sizes are checked. Tests make the
server silent, busy or forgetful, or cut it off.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from penstock.cluster.external.kubernetes_api import KubernetesApi
from penstock.cluster.kubernetes_leases import Leases
from penstock.cluster.kubernetes_registry import KubernetesRegistry, Pod
from tests.certificates import self_signed

NAMESPACE = "llm"
PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([^/]+)/leases(?:/([^/]+))?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
MAX_ANNOTATION_BYTES = 256 << 10
SPEC_FIELDS: dict[str, type] = {
    "holderIdentity": str,
    "leaseDurationSeconds": int,
    "leaseTransitions": int,
    "acquireTime": str,
    "renewTime": str,
}
Object = dict[str, Any]


class Refusal(Exception):
    def __init__(self, code: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.code, self.message, self.headers = code, message, headers

    @property
    def status(self) -> Object:
        return {"kind": "Status", "status": "Failure", "message": self.message, "code": self.code}


class KubernetesServer:
    """Runs on a thread of its own, so that processes and every event loop can ask it. `account` is the folder of a
    service account that may do everything."""

    def __init__(self, folder: Path, *, is_encrypted: bool = False) -> None:
        self.account = folder / "account"
        self.account.mkdir()
        (self.account / "namespace").write_text(NAMESPACE)
        (self.account / "token").write_text("first")
        self.tokens = {"first"}
        self.rules: dict[str, list[Object]] = {}  # of a Role, for tokens that may not do everything
        self._folder = folder
        self.namespaces = {NAMESPACE}
        self.forbidden: set[str] = set()  # verbs
        self.num_busy = 0  # requests that are told to come back later
        self.is_silent = False  # takes connections, and answers nothing
        self.garbage: bytes | None = None  # the body of every answer
        self.objects: dict[tuple[str, str], Object] = {}
        self.asked: list[tuple[str, str]] = []  # verbs and names
        self._version = 100
        self._changes: deque[tuple[int, str, Object]] = deque()
        self._oldest = 100  # version that a watch may go on from
        self._watches: set[asyncio.Event] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tls = _certificate(folder, self.account / "ca.crt") if is_encrypted else None
        server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls))
        self.port: int = server.sockets[0].getsockname()[1]
        self._server: asyncio.Server = server
        self.url = f"{'https' if is_encrypted else 'http'}://127.0.0.1:{self.port}"

    def environment(self, account: str = "account", rules: list[Object] | None = None) -> dict[str, str]:
        """What a process needs to find this server, as a service account with the rights of some rules."""
        if rules is not None:
            shutil.copytree(self.account, self._folder / account)
            (self._folder / account / "token").write_text(account)
            self.tokens.add(account)
            self.rules[account] = rules
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self.port),
            "PENSTOCK_SERVICE_ACCOUNT": str(self._folder / account),
        }

    def registry(self, fleet: str = "penstock", pod: Pod | None = None) -> KubernetesRegistry:
        return KubernetesRegistry(Leases(KubernetesApi(self.url, self.account), NAMESPACE, fleet), pod)

    def forget_changes(self) -> None:
        """Every watch that begins now is too late, as after the API server has compacted its history."""

        async def forget() -> None:
            self._changes.clear()
            self._version += 1
            self._oldest = self._version

        self._run(forget())

    def end_watches(self) -> None:
        self._run(self._cut(only_watches=True))

    def cut(self) -> None:
        """Break every connection."""
        self._run(self._cut(only_watches=False))

    def edit(self, name: str, change: Object) -> None:
        """As a person does with kubectl."""

        async def edit() -> None:
            self._patch((NAMESPACE, name), change)

        self._run(edit())

    def remove(self, name: str) -> None:
        async def remove() -> None:
            self._remove((NAMESPACE, name), {})

        self._run(remove())

    def close(self) -> None:
        self._server.get_loop().call_soon_threadsafe(self._server.close)
        self.cut()

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _cut(self, *, only_watches: bool) -> None:
        for event in tuple(self._watches):
            event.end = True  # type: ignore[attr-defined]
            event.set()
        if not only_watches:
            for writer in tuple(self._writers):
                writer.transport.abort()

    # Requests.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                headers: dict[str, str] = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                while self.is_silent:
                    await asyncio.sleep(0.01)
                method, target, _ = line.decode().split()
                try:
                    await self._answer(method, target, headers, data, writer)
                except Refusal as refusal:
                    self._write(writer, refusal.code, refusal.status, refusal.headers)
        self._writers.discard(writer)
        writer.close()

    def _write(
        self, writer: asyncio.StreamWriter, status: int, body: Object, headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(body).encode() if self.garbage is None else self.garbage
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{lines}content-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    async def _answer(
        self, method: str, target: str, headers: dict[str, str], data: bytes, writer: asyncio.StreamWriter
    ) -> None:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        found = PATH.fullmatch(unquote(parts.path))
        if found is None:
            raise Refusal(404, "the server could not find the requested resource")
        namespace, name = found.groups()
        verb = _verb(method, name, query)
        self.asked.append((verb, name or ""))
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise Refusal(401, "Unauthorized")
        if self.num_busy > 0:
            self.num_busy -= 1
            raise Refusal(429, "too many requests, please try again later", **{"retry-after": "0"})
        if verb in self.forbidden or not self._may(token, verb, name):
            raise Refusal(403, f'leases.coordination.k8s.io is forbidden: User "x" cannot {verb} resource')
        if verb == "watch":
            await self._watch(namespace, query, writer)
            return
        body = json.loads(data) if data else {}
        if verb == "list":
            self._write(writer, 200, self._list(namespace, query))
        elif verb == "create":
            self._write(writer, 201, self._create(namespace, body))
        elif verb == "get":
            self._write(writer, 200, self._find((namespace, name)))
        elif verb == "patch":
            if headers.get("content-type") != "application/merge-patch+json":
                raise Refusal(415, "the body of the request was in an unknown format")
            self._write(writer, 200, self._patch((namespace, name), body))
        else:
            self._write(writer, 200, self._remove((namespace, name), body))

    def _may(self, token: str, verb: str, name: str | None) -> bool:
        return token not in self.rules or any(
            verb in rule["verbs"] and (name in rule["resourceNames"] if "resourceNames" in rule else True)
            for rule in self.rules[token]
            if "leases" in rule["resources"]
        )

    def _list(self, namespace: str, query: dict[str, str]) -> Object:
        items = [each for key, each in self.objects.items() if key[0] == namespace and _selected(each, query)]
        return {"kind": "LeaseList", "metadata": {"resourceVersion": str(self._version)}, "items": items}

    def _create(self, namespace: str, body: Object) -> Object:
        if namespace not in self.namespaces:
            raise Refusal(404, f'namespaces "{namespace}" not found')
        key = namespace, body["metadata"]["name"]
        if key in self.objects:
            raise Refusal(409, f'leases.coordination.k8s.io "{key[1]}" already exists')
        if "resourceVersion" in body["metadata"]:
            raise Refusal(422, "resourceVersion should not be set on objects to be created")
        return self._keep(key, "ADDED", body)

    def _find(self, key: tuple[str, str]) -> Object:
        if key not in self.objects:
            raise Refusal(404, f'leases.coordination.k8s.io "{key[1]}" not found')
        return self.objects[key]

    def _patch(self, key: tuple[str, str], body: Object) -> Object:
        before = self._find(key)
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, before["metadata"]["resourceVersion"]):
            raise Refusal(
                409, "the object has been modified; please apply your changes to the latest version"
            )
        after = _merged(before, body)
        return before if after == before else self._keep(key, "MODIFIED", after)

    def _remove(self, key: tuple[str, str], body: Object) -> Object:
        before = self._find(key)
        version = body.get("preconditions", {}).get("resourceVersion")
        if version not in (None, before["metadata"]["resourceVersion"]):
            raise Refusal(409, "the ResourceVersion in the precondition does not match")
        del self.objects[key]
        self._change("DELETED", deepcopy(before))
        return {"kind": "Status", "status": "Success"}

    def _keep(self, key: tuple[str, str], change: str, body: Object) -> Object:
        _check(body)
        self.objects[key] = deepcopy(body)
        self._change(change, self.objects[key])
        return self.objects[key]

    def _change(self, change: str, body: Object) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._changes.append((self._version, change, deepcopy(body)))
        for event in self._watches:
            event.set()

    async def _watch(self, namespace: str, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        version = int(query["resourceVersion"])
        changed = asyncio.Event()
        changed.set()
        self._watches.add(changed)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        ends_s = time.monotonic() + float(query["timeoutSeconds"])
        try:
            while time.monotonic() < ends_s and not getattr(changed, "end", False):
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await changed.wait()
                changed.clear()
                if version < self._oldest:
                    _event(writer, "ERROR", Refusal(410, "too old resource version").status)
                    break
                for number, change, body in tuple(self._changes):
                    if (
                        number > version
                        and body["metadata"]["namespace"] == namespace
                        and _selected(body, query)
                    ):
                        _event(writer, change, body)
                if version < self._version:
                    version = self._version
                    _event(writer, "BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
                await writer.drain()
        finally:
            self._watches.discard(changed)
        writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, change: str, body: Object) -> None:
    data = json.dumps({"type": change, "object": body}).encode() + b"\n"
    for piece in (data[:7], data[7:]):  # the pieces of a stream are no lines
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def _verb(method: str, name: str | None, query: dict[str, str]) -> str:
    if method == "GET":
        return "get" if name else "watch" if "watch" in query else "list"
    return {"POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]


def _selected(body: Object, query: dict[str, str]) -> bool:
    wanted = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
    labels: dict[str, str] = body["metadata"].get("labels", {})
    return wanted.items() <= labels.items()


def _merged(before: Any, change: Any) -> Any:
    """Merge as RFC 7386 says."""
    if not isinstance(change, dict):
        return change
    after = dict(before) if isinstance(before, dict) else {}
    for name, value in change.items():
        after[name] = _merged(after.get(name), value)
        if value is None:
            del after[name]
    return after


def _check(body: Object) -> None:
    """Refuse what the API server refuses."""
    metadata, spec = body["metadata"], body.get("spec", {})
    metadata.setdefault("namespace", NAMESPACE)
    annotations = metadata.get("annotations", {})
    if not NAME.fullmatch(metadata["name"]) or len(metadata["name"]) > 253:
        raise Refusal(422, f"metadata.name: Invalid value: {metadata['name']!r}")
    if sum(len(name) + len(value) for name, value in annotations.items()) > MAX_ANNOTATION_BYTES:
        raise Refusal(
            422, f"metadata.annotations: Too long: may not be more than {MAX_ANNOTATION_BYTES} bytes"
        )
    for name in (*annotations, *metadata.get("labels", {})):
        if not re.fullmatch(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", name):
            raise Refusal(422, f"metadata.annotations: Invalid value: {name!r}")
    value: Any
    for name, value in spec.items():
        if name not in SPEC_FIELDS or type(value) is not SPEC_FIELDS[name]:
            raise Refusal(400, f"Lease in version v1 cannot be handled as a Lease: {name}")
        if name.endswith("Time") and not MICRO_TIME.fullmatch(str(value)):
            raise Refusal(400, f"parsing time {value!r}")
    if spec.get("leaseDurationSeconds", 1) <= 0 or not 0 <= spec.get("leaseTransitions", 0) < 1 << 31:
        raise Refusal(422, "spec: must be greater than 0")
    if spec.get("holderIdentity") == "":
        raise Refusal(422, "spec.holderIdentity: must not be empty")


def _certificate(folder: Path, trusted: Path) -> ssl.SSLContext:
    certificate, key = self_signed(folder)
    trusted.write_bytes(certificate.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@contextmanager
def running_kubernetes(folder: Path, *, is_encrypted: bool = False) -> Iterator[KubernetesServer]:
    folder.mkdir(parents=True, exist_ok=True)
    server = KubernetesServer(folder, is_encrypted=is_encrypted)
    try:
        yield server
    finally:
        server.close()
