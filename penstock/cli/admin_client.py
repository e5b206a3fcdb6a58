"""The admin API of a running server, for commands. Knows HTTP; knows no terminal."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import msgspec

from penstock.core.cluster_view import ClusterView, ReleaseView
from penstock.core.errors import UsageError
from penstock.serve.environment import API_KEY_VARIABLE

ORDER_TIMEOUT_S = 600.0  # weights may have to be fetched first
Shape = TypeVar("Shape")


class AdminClient:
    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=httpx.Timeout(ORDER_TIMEOUT_S, connect=5.0)
        )

    def cluster(self) -> ClusterView:
        return self._ask("GET", "/admin/cluster", ClusterView)

    def start_release(self, order: dict[str, Any]) -> ReleaseView:
        return self._ask("POST", "/admin/releases", ReleaseView, order)

    def promote_release(self, model: str | None) -> ReleaseView:
        return self._ask("POST", "/admin/releases/promote", ReleaseView, {"model": model})

    def roll_back_release(self, model: str | None) -> ReleaseView:
        return self._ask("POST", "/admin/releases/rollback", ReleaseView, {"model": model})

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, path: str, shape: type[Shape], body: Any = None) -> Shape:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UsageError(
                f"No server answers at {self.url} ({error}).",
                hint="Start one with `penstock serve`, or say where it is with --url.",
            ) from error
        if response.is_error:
            raise _error(response)
        try:
            return msgspec.json.decode(response.content, type=shape)
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"What answers at {self.url} is not this version of Penstock ({error})."
            ) from error


def _error(response: httpx.Response) -> UsageError:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"The server answered with status {response.status_code}."
    hint = None
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        hint = f"Give a key with the scope admin: --api-key or {API_KEY_VARIABLE}."
    return UsageError(message, hint=hint)
