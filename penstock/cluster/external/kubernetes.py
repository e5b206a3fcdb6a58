"""Finds the pods behind a service of Kubernetes: the endpoints of its EndpointSlices that are ready.

Asks the API server of the cluster that this process runs in. Knows no pool and no environment.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

import msgspec

from penstock.cluster.external.kubernetes_api import KubernetesApi, KubernetesError, refusal

ANSWER_TIMEOUT_S = 5.0
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
    """Looks services up at an API server."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    async def endpoints(self, host: str, port: int | None) -> list[Endpoint]:
        """Return the ready endpoints of the service that a host names: `service`, `service.namespace`, or the full
        name. With a port, endpoints that listen on it; else on their only port, or on the one called http. Raises
        LookupFailed."""
        try:
            service, namespace = self._service_of(host)
            path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"
            selector = quote(f"{_SERVICE_LABEL}={service}", safe="")
            reply = await self._api.ask("GET", f"{path}?labelSelector={selector}", timeout_s=ANSWER_TIMEOUT_S)
        except KubernetesError as error:
            raise LookupFailed(str(error)) from error
        if reply.status != 200:
            raise LookupFailed(refusal(reply, "list", "endpointslices", namespace))
        try:
            slices = _decode(reply.body).items
        except msgspec.DecodeError as error:
            raise LookupFailed(f"the Kubernetes API answers with no EndpointSlices: {error}") from error
        found = {endpoint for each in slices for endpoint in _ready(each, port)}
        return sorted(found)

    async def close(self) -> None:
        await self._api.close()

    def _service_of(self, host: str) -> tuple[str, str]:
        service, _, rest = host.partition(".")
        namespace = rest.partition(".")[0] or self._api.namespace()
        return service, namespace


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
