"""Finds the pods behind a service of Kubernetes: the endpoints of its EndpointSlices that are ready.

Asks the API server of the cluster that this process runs in, with the token of the pod's service account. The token
is read before every question, because Kubernetes replaces it now and then. Knows no pool and no environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from penstock.cluster.external.http import HttpClient, HttpError
from penstock.core.errors import ConfigError

ANSWER_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 16 << 20
_SERVICE_LABEL = "kubernetes.io/service-name"
_PORT_NAME = "http"  # the port of a pod with several, unless the URL names one


class LookupFailed(Exception):
    """The servers behind a name could not be learned."""


class Endpoint(NamedTuple):
    address: str
    port: int | None = None  # None: the URL's


class _Port(msgspec.Struct, frozen=True):
    port: int | None = None
    name: str | None = None
    protocol: str | None = "TCP"


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None  # not known counts as ready, by the rules of Kubernetes


class _Member(msgspec.Struct, frozen=True):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions = _Conditions()


class _Slice(msgspec.Struct, frozen=True, rename="camel"):
    address_type: str = "IPv4"
    endpoints: tuple[_Member, ...] | None = None
    ports: tuple[_Port, ...] | None = None


class _SliceList(msgspec.Struct, frozen=True):
    items: tuple[_Slice, ...]


_decode = msgspec.json.Decoder(_SliceList).decode


class Kubernetes:
    """The API server at `url`. `account` is the folder with the token, the namespace and the certificate."""

    def __init__(self, url: str, account: Path) -> None:
        self._url = url
        self._account = account
        self._token = ""
        self._http: HttpClient | None = None

    async def endpoints(self, host: str, port: int | None) -> list[Endpoint]:
        """Return the ready endpoints of the service that a host names: `service`, `service.namespace`, or the full
        name. With a port, endpoints that listen on it; else on their only port, or on the one called http. Raises
        LookupFailed."""
        service, namespace = self._service_of(host)
        path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"
        selector = quote(f"{_SERVICE_LABEL}={service}", safe="")
        try:
            status, body = await self._client().get(
                f"{path}?labelSelector={selector}", timeout_s=ANSWER_TIMEOUT_S, max_bytes=MAX_ANSWER_BYTES
            )
        except HttpError as error:
            raise LookupFailed(f"the Kubernetes API cannot be asked: {error}") from error
        if status in (401, 403):
            raise LookupFailed(
                f"the Kubernetes API answers {status}: the service account may not list endpointslices in "
                f"{namespace}"
            )
        if status != 200:
            raise LookupFailed(f"the Kubernetes API answers {status}")
        try:
            slices = _decode(body).items
        except msgspec.DecodeError as error:
            raise LookupFailed(f"the Kubernetes API answers with no EndpointSlices: {error}") from error
        found = {endpoint for each in slices for endpoint in _ready(each, port)}
        return sorted(found)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _service_of(self, host: str) -> tuple[str, str]:
        service, _, rest = host.partition(".")
        namespace = rest.partition(".")[0] or self._read("namespace")
        return service, namespace

    def _client(self) -> HttpClient:
        token = self._read("token")
        if self._http is None or token != self._token:
            self._token = token
            headers = {"authorization": f"Bearer {token}", "accept": "application/json"}
            certificate = self._account / "ca.crt"
            try:
                self._http = HttpClient(self._url, headers, trusts=certificate)
            except (ConfigError, OSError) as error:
                raise LookupFailed(
                    f"the service account in {self._account} cannot be used: {error}"
                ) from error
        return self._http

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LookupFailed(f"the service account has no {name}: {error}") from error


def _ready(each: _Slice, port: int | None) -> list[Endpoint]:
    if each.address_type == "FQDN" or not (listens_on := _port_of(each.ports or (), port)):
        return []
    return [
        Endpoint(member.addresses[0], listens_on)  # all addresses of one endpoint are the same pod
        for member in each.endpoints or ()
        if member.addresses and member.conditions.ready is not False
    ]


def _port_of(ports: tuple[_Port, ...], wanted: int | None) -> int | None:
    tcp = [each for each in ports if each.protocol in (None, "TCP") and each.port]
    if wanted is not None:
        return next((each.port for each in tcp if each.port == wanted), None)
    named = [each for each in tcp if each.name == _PORT_NAME] or (tcp if len(tcp) == 1 else [])
    return named[0].port if named else None
