"""A conversation with an OpenAI-compatible server. Knows HTTP; knows no terminal and starts no server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from penstock.core.errors import PenstockError, UsageError


class ChatClient:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # An answer may take long to begin on a busy server, but connecting may not.
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=httpx.Timeout(600.0, connect=5.0)
        )

    def served_models(self) -> list[str]:
        """Raises UsageError when no usable server answers."""
        try:
            response = self._http.get("/v1/models", timeout=5.0)
        except httpx.HTTPError as error:
            raise UsageError(
                f"No server answers at {self.url} ({error}).", hint="Start one with `penstock serve`."
            ) from error
        _raise_for_status(response)
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
        """Pieces of the answer as they arrive. Closing the iterator early makes the server stop."""
        body = {"model": model, "messages": messages, "stream": True, **settings}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    _raise_for_status(response)
                for line in response.iter_lines():
                    payload = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if payload == "[DONE]":
                        return
                    if payload:
                        yield _piece(json.loads(payload))
        except httpx.HTTPError as error:
            raise PenstockError(f"The connection to {self.url} broke ({error}).") from error

    def close(self) -> None:
        self._http.close()


def _piece(event: dict[str, Any]) -> str:
    if "error" in event:
        raise PenstockError(event["error"].get("message", "The server reported an error without a message."))
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"The server answered with status {response.status_code}."
    hint = (
        "Give the server's key with --api-key or PENSTOCK_API_KEY." if response.status_code == 401 else None
    )
    raise UsageError(message, hint=hint)
