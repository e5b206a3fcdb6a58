"""Asks the API server of a Kubernetes cluster, in the name of a service account.

The token and the certificate are read before every question, because Kubernetes replaces both now and then. Knows no
kind of object.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.cluster.external.connection import Answer, HttpError
from penstock.cluster.external.http import HttpClient
from penstock.core.errors import ConfigError

MAX_ANSWER_BYTES = 64 << 20
_TOO_MANY_REQUESTS = 429
_GUESSED_WAIT_S = 1.0  # when the server is too busy to say how long
_MAX_SAID = 300  # characters of a message of the server that are passed on


class KubernetesError(Exception):
    """The API server cannot be asked, or refuses. The message is the rest of a sentence."""


class Reply(NamedTuple):
    status: int
    body: bytes


class _Status(msgspec.Struct, frozen=True):
    """The answer of the API server in place of an object, after an error."""

    message: str = ""


_decode_status = msgspec.json.Decoder(_Status).decode


class KubernetesApi:
    """The API server at `url`. `account` is the folder with the token, the namespace and the certificate."""

    def __init__(self, url: str, account: Path) -> None:
        self.url = url
        self._account = account
        self._trusted = ("", "")
        self._http: HttpClient | None = None

    def namespace(self) -> str:
        """Return the namespace of the service account. Raises KubernetesError."""
        return self._read("namespace")

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        content_type: str = "application/json",
        timeout_s: float,
    ) -> Reply:
        """Return the answer, whatever its status. A server that is busy is asked again when it says so, if that is
        within the time. Raises KubernetesError."""
        is_busy = False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    answer = await self._client().send(method, path, body, content_type=content_type)
                    try:
                        reply = Reply(answer.status, await answer.read_all(MAX_ANSWER_BYTES))
                    finally:
                        answer.release()
                    if reply.status != _TOO_MANY_REQUESTS:
                        return reply
                    is_busy = True
                    await asyncio.sleep(_wait_s(answer))
        except HttpError as error:
            raise KubernetesError(f"the Kubernetes API cannot be asked: {error}") from error
        except TimeoutError as error:
            why = "it has too many requests" if is_busy else "it did not answer in time"
            raise KubernetesError(f"the Kubernetes API cannot be asked: {why}") from error

    async def follow(self, path: str, *, timeout_s: float, silence_s: float) -> Answer:
        """Ask for a stream, which the caller reads and releases. It fails when nothing comes for `silence_s`. Raises
        KubernetesError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client().send("GET", path, silence_s=silence_s)
        except HttpError as error:
            raise KubernetesError(f"the Kubernetes API cannot be asked: {error}") from error
        except TimeoutError as error:
            raise KubernetesError("the Kubernetes API cannot be asked: it did not answer in time") from error

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _client(self) -> HttpClient:
        certificate = self._account / "ca.crt"
        is_trusted = (self._read("token"), self._read("ca.crt") if self.url.startswith("https:") else "")
        if self._http is None or is_trusted != self._trusted:
            headers = {"authorization": f"Bearer {is_trusted[0]}", "accept": "application/json"}
            try:
                self._http = HttpClient(self.url, headers, trusts=certificate)
            except (ConfigError, OSError) as error:
                raise KubernetesError(
                    f"the service account in {self._account} cannot be used: {error}"
                ) from error
            self._trusted = is_trusted
        return self._http

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise KubernetesError(f"the service account has no {name}: {error}") from error


def refusal(reply: Reply, verb: str, resource: str, namespace: str) -> str:
    """Return the rest of a sentence about an answer that is no success."""
    if reply.status == 401:
        return "the Kubernetes API answers 401: it does not accept the token of the service account"
    if reply.status == 403:
        return f"the Kubernetes API answers 403: the service account may not {verb} {resource} in {namespace}"
    try:
        said = _decode_status(reply.body).message[:_MAX_SAID]
    except msgspec.DecodeError:
        said = ""
    return f"the Kubernetes API answers {reply.status}" + (f": {said}" if said else "")


def _wait_s(answer: Answer) -> float:
    said = answer.headers.get(b"retry-after", b"")
    return float(said) if said.isdigit() else _GUESSED_WAIT_S
