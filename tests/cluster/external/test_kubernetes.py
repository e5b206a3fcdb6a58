"""Pods behind a service, as an API server tells of them; and SRV records of a name server."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.external import kubernetes, srv
from penstock.cluster.external.discovery import Discovery
from penstock.cluster.external.kubernetes import Endpoint, Kubernetes, LookupFailed
from penstock.cluster.external.kubernetes_api import KubernetesApi
from penstock.cluster.external.srv import srv_targets
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import ConfigError
from penstock.core.machine import free_port


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a silent server."""
    monkeypatch.setattr(kubernetes, "ANSWER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(srv, "ANSWER_TIMEOUT_S", 60.0)


def pods(*addresses: str, ready: bool | None = True, port: int = 8000, **more: Any) -> dict[str, Any]:
    endpoints = [{"addresses": [address], "conditions": {"ready": ready}} for address in addresses]
    ports = [{"name": "http", "port": port, "protocol": "TCP"}, {"name": "metrics", "port": 9}]
    return {"addressType": "IPv4", "endpoints": endpoints, "ports": ports, **more}


class ApiServer:
    """Answers like the API server of Kubernetes, as far as lists of EndpointSlices go."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.status = 200
        self.body: bytes | None = None
        self.asked: list[tuple[str, str | None]] = []  # paths and credentials
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                self.asked.append((line.decode().split()[1], headers.get("authorization")))
                body = json.dumps({"items": self.slices}).encode() if self.body is None else self.body
                head = f"HTTP/1.1 {self.status} X\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
        finally:
            writer.close()


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    api = ApiServer()
    server = await asyncio.start_server(api.answer, "127.0.0.1", 0)
    api.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield api
    server.close()


@pytest.fixture
async def cluster(api: ApiServer, tmp_path: Path) -> AsyncIterator[Kubernetes]:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("here")
    cluster = Kubernetes(KubernetesApi(api.url, tmp_path))
    yield cluster
    await cluster.close()


async def test_ready_pods_of_all_slices_are_servers(api: ApiServer, cluster: Kubernetes) -> None:
    api.slices = [
        pods("10.0.0.2"),
        pods("10.0.0.1", "10.0.0.2", ready=None),  # a pod may be in two slices for a moment
        pods("10.0.0.3", ready=False),
        pods("name.example", addressType="FQDN"),
        {"endpoints": None, "ports": None},
    ]
    table = ExternalServerConfig(url="http://vllm.models:8000/v1", discover="kubernetes", region="eu")
    servers = await Discovery(kubernetes=cluster).servers([table])
    assert [(server.address, server.port, server.region) for server in servers] == [
        ("10.0.0.1", 8000, "eu"),
        ("10.0.0.2", 8000, "eu"),
    ]
    assert servers[0].name == "vllm.models:8000/10.0.0.1:8000"
    assert servers[0].discover is None
    path = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
    selector = "?labelSelector=kubernetes.io%2Fservice-name%3Dvllm"
    assert api.asked == [(path + selector, "Bearer first")]


async def test_the_port_and_the_namespace_may_be_left_to_the_cluster(
    api: ApiServer, cluster: Kubernetes
) -> None:
    api.slices = [pods("10.0.0.1", port=30_000)]
    assert await cluster.endpoints("vllm", None) == [Endpoint("10.0.0.1", 30_000)]
    assert "/namespaces/here/" in api.asked[0][0]
    assert await cluster.endpoints("vllm.other.svc.cluster.local", 30_000) == [Endpoint("10.0.0.1", 30_000)]
    assert "/namespaces/other/" in api.asked[1][0]
    assert await cluster.endpoints("vllm", 1234) == [], "no pod listens there"


async def test_a_replaced_token_is_used(api: ApiServer, cluster: Kubernetes, tmp_path: Path) -> None:
    await cluster.endpoints("vllm", None)
    (tmp_path / "token").write_text("second")
    await cluster.endpoints("vllm", None)
    assert [credential for _, credential in api.asked] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (403, b"{}", "may not list endpointslices in here"),
        (500, b"", "answers 500"),
        (200, b"<html>", "no EndpointSlices"),
    ],
)
async def test_trouble_is_told_and_changes_nothing(
    api: ApiServer,
    cluster: Kubernetes,
    caplog: pytest.LogCaptureFixture,
    status: int,
    body: bytes,
    sentence: str,
) -> None:
    discovery = Discovery(kubernetes=cluster)
    table = ExternalServerConfig(url="http://vllm:8000", discover="kubernetes")
    api.slices = [pods("10.0.0.1")]
    before = await discovery.servers([table])
    api.status, api.body = status, body
    with pytest.raises(LookupFailed, match=sentence):
        await cluster.endpoints("vllm", 8000)
    assert await discovery.servers([table]) == before
    assert sentence in caplog.text


async def test_outside_of_a_cluster_it_is_a_mistake() -> None:
    table = ExternalServerConfig(url="http://vllm:8000", discover="kubernetes")
    with pytest.raises(ConfigError, match="runs in no "):
        await Discovery().servers([table])


class NameServer(asyncio.DatagramProtocol):
    """Answers every question with the same records."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, bytes]] = []  # priority, port, the target on the wire
        self.flags = 0x8180
        self.is_cut = False
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        cut = 0x0200 if self.is_cut else 0
        self.transport.sendto(self.answer(data, self.flags | cut), address)

    def answer(self, question: bytes, flags: int) -> bytes:
        head = question[:2] + struct.pack("!5H", flags, 1, 0 if flags & 0x0200 else len(self.records), 0, 0)
        if flags & 0x0200:
            return head + question[12:]
        records = b""
        for priority, port, target in self.records:
            data = struct.pack("!3H", priority, 10, port) + target
            records += b"\xc0\x0c" + struct.pack("!HHIH", 33, 1, 30, len(data)) + data
        return head + question[12:] + records

    async def answer_by_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        answer = self.answer(await reader.readexactly(length), self.flags)
        writer.write(struct.pack("!H", len(answer)) + answer)
        writer.close()


@asynccontextmanager
async def name_server() -> AsyncIterator[tuple[NameServer, list[tuple[str, int]]]]:
    loop = asyncio.get_running_loop()
    port = free_port()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", port))
    tcp = await asyncio.start_server(server.answer_by_tcp, "127.0.0.1", port)
    try:
        yield server, [("127.0.0.1", port)]
    finally:
        tcp.close()
        transport.close()


def wire(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


@pytest.mark.parametrize("is_cut", [False, True])
async def test_srv_records(is_cut: bool) -> None:
    async with name_server() as (server, places):
        server.is_cut = is_cut
        # "gpus.example" stands in the question: a target may refer to it.
        inside = 12 + len(wire("_http._tcp")) - 1
        server.records = [
            (5, 8001, wire("b.example")),
            (5, 8000, b"\x01a" + struct.pack("!H", 0xC000 | inside)),
            (9, 9999, wire("spare.example")),
        ]
        found = await srv_targets("_http._tcp.gpus.example", places)
        assert found == [("a.gpus.example", 8000), ("b.example", 8001)]

        async def addresses(host: str, port: int) -> list[str]:
            return {"a.gpus.example": ["10.0.0.9", "10.0.0.8"], "b.example": ["10.0.0.7"]}[host]

        discovery = Discovery(addresses, lambda host: srv_targets(host, places))
        table = ExternalServerConfig(url="http://_http._tcp.gpus.example", discover="srv")
        assert [(each.address, each.port) for each in await discovery.servers([table])] == [
            ("10.0.0.7", 8001),
            ("10.0.0.8", 8000),
            ("10.0.0.9", 8000),
        ]


@pytest.mark.parametrize("target", [b"\xc0\xff", b"\x3fshort", b"\x01\xff\0", b"\xc0\x30"])
async def test_records_that_cannot_be_read_are_an_error(target: bytes) -> None:
    async with name_server() as (server, places):
        server.records = [(1, 80, target)]
        with pytest.raises(OSError, match="no SRV records"):
            await srv_targets("_http._tcp.a", places)


async def test_no_records_and_refusals() -> None:
    async with name_server() as (server, places):
        server.flags = 0x8183
        assert await srv_targets("gone.example", places) == []
        server.flags = 0x8182
        with pytest.raises(OSError, match="code 2"):
            await srv_targets("gone.example", places)
    with pytest.raises(OSError, match="no name of the DNS"):
        await srv_targets("a..b", places)


async def test_a_name_server_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srv, "ANSWER_TIMEOUT_S", 0.01)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="no SRV records: no answer in time"):
            await srv_targets("gone.example", [silent.getsockname()])
