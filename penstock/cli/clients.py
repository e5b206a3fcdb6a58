"""HTTP clients of a running server, for commands: conversations, and the admin API. Knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

import httpx
import msgspec

from penstock.core.cluster_view import ClusterView, ExperimentView, ReleaseView
from penstock.core.errors import PenstockError, UsageError
from penstock.core.machine import is_loopback
from penstock.serve.environment import API_KEY_VARIABLE

ANSWER_TIMEOUT_S = 600.0  # a release may have to fetch weights first
Shape = TypeVar("Shape")


def http_client(url: str, api_key: str | None, timeout: httpx.Timeout) -> httpx.Client:
    """Return an HTTP client of the server at `url`, through the environment's proxy unless the server is on this
    machine. Raises UsageError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        is_here = is_loopback(httpx.URL(url).host)  # proxies of the environment seldom except loopback
        # With the certificates that the environment names, also for loopback.
        verify = httpx.create_ssl_context()
        return httpx.Client(
            base_url=url, headers=headers, timeout=timeout, trust_env=not is_here, verify=verify
        )
    except httpx.InvalidURL as error:
        raise UsageError(f"'{url}' is not the URL of a server ({error}).") from error
    except (ImportError, ValueError) as error:  # httpx needs a package for SOCKS
        raise UsageError(
            f"The proxy in the environment cannot be used: {error}",
            hint="Change or unset HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, or name the server in NO_PROXY.",
        ) from error


class _Client:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        # A busy server may take long to answer, but not to accept a connection.
        self._http = http_client(self.url, api_key, httpx.Timeout(ANSWER_TIMEOUT_S, connect=5.0))

    def close(self) -> None:
        self._http.close()


class _Experiments(msgspec.Struct):
    data: tuple[ExperimentView, ...]


class AdminClient(_Client):
    def cluster(self) -> ClusterView:
        return self._ask("GET", "/admin/cluster", ClusterView)

    def operate(self, order: dict[str, Any]) -> ClusterView:
        return self._ask("POST", "/admin/cluster", ClusterView, order)

    def order_replica(self, order: dict[str, Any]) -> ClusterView:
        return self._ask("POST", "/admin/replicas", ClusterView, order)

    def start_release(self, order: dict[str, Any]) -> ReleaseView:
        return self._ask("POST", "/admin/releases", ReleaseView, order)

    def promote_release(self, model: str | None) -> ReleaseView:
        return self._ask("POST", "/admin/releases/promote", ReleaseView, {"model": model})

    def roll_back_release(self, model: str | None) -> ReleaseView:
        return self._ask("POST", "/admin/releases/rollback", ReleaseView, {"model": model})

    def experiments(self) -> tuple[ExperimentView, ...]:
        return self._ask("GET", "/admin/experiments", _Experiments).data

    def start_experiment(self, order: dict[str, Any]) -> ExperimentView:
        return self._ask("POST", "/admin/experiments", ExperimentView, order)

    def stop_experiment(self, model: str | None) -> ExperimentView:
        return self._ask("POST", "/admin/experiments/stop", ExperimentView, {"model": model})

    def _ask(self, method: str, path: str, shape: type[Shape], body: Any = None) -> Shape:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UsageError(
                f"No server answers at {self.url} ({error}).",
                hint="Start one with `penstock serve`, or say where it is with --url.",
            ) from error
        _raise_for_status(response, "Give a key with the scope admin")
        try:
            return msgspec.json.decode(response.content, type=shape)
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"What answers at {self.url} is not this version of Penstock ({error})."
            ) from error


class ChatClient(_Client):
    def served_models(self) -> list[str]:
        """Return the names of the served models. Raises UsageError if no OpenAI-compatible server answers."""
        try:
            response = self._http.get("/v1/models", timeout=5.0)
        except httpx.HTTPError as error:
            raise UsageError(
                f"No server answers at {self.url} ({error}).", hint="Start one with `penstock serve`."
            ) from error
        _raise_for_status(response, "Give the server's key")
        try:
            return [entry["id"] for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"What answers at {self.url} does not speak the OpenAI API.") from error

    def is_ready(self) -> bool:
        try:
            return self._http.get("/ready", timeout=5.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def answer(self, model: str, messages: list[dict[str, str]], **settings: Any) -> Iterator[str]:
        """Yield pieces of the answer as they arrive. Closing the iterator cancels the request."""
        body = {"model": model, "messages": messages, "stream": True, **settings}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    _raise_for_status(response, "Give the server's key")
                for line in response.iter_lines():
                    payload = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if payload == "[DONE]":
                        return
                    if payload:
                        yield _piece(json.loads(payload))
        except httpx.HTTPError as error:
            raise PenstockError(f"The connection to {self.url} broke ({error}).") from error


def _piece(event: dict[str, Any]) -> str:
    if "error" in event:
        raise PenstockError(event["error"].get("message", "The server reported an error without a message."))
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _raise_for_status(response: httpx.Response, hint: str) -> None:
    """Raise the server's own sentence about an error. `hint` is for a caller without the right key."""
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"The server answered with status {response.status_code}."
    is_about_keys = response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    raise UsageError(message, hint=f"{hint}: --api-key or {API_KEY_VARIABLE}." if is_about_keys else None)
