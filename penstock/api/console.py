"""Serves the files of the console, at /console, and of the chat page, at /. They hold no secrets and need no key:
everything that they show comes from the APIs, with the key of the person who looks.

The key travels in a header that the console's script sets, never in a cookie, so no other site's page can make a
browser use it. The content security policy allows scripts and styles from these files alone, and no text that is
turned into markup, so that text from a model or a tenant cannot become a script that reads the key.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.core.errors import NotFound

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
PAGE = "index.html"
CHAT_PAGE = "chat.html"  # the playground alone, at /
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class ServedFile(NamedTuple):
    body: bytes
    headers: dict[str, str]


class ConsoleFiles:
    """The files are read once: only these names exist, so no path can lead out of the folder."""

    def __init__(self) -> None:
        folder = resources.files("penstock.api").joinpath("static/console")
        self._files = {
            entry.name: _served(entry.name, entry.read_bytes())
            for entry in folder.iterdir()
            if entry.name.rpartition(".")[2] in _TYPES
        }

    def routes(self) -> list[Route]:
        return [
            Route("/", self.chat_page, methods=["GET"]),
            Route("/console", self.page, methods=["GET"]),
            Route("/console/{name}", self.file, methods=["GET"]),
        ]

    async def chat_page(self, request: Request) -> Response:
        return self._answer(request, CHAT_PAGE)

    async def page(self, request: Request) -> Response:
        return self._answer(request, PAGE)

    async def file(self, request: Request) -> Response:
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise NotFound(f"The console has no file {name[:80]!r}.")
        if request.headers.get("if-none-match") == found.headers["etag"]:
            return Response(status_code=304, headers=found.headers)
        return Response(found.body, headers=found.headers)


def _served(name: str, body: bytes) -> ServedFile:
    headers = {
        "content-type": _TYPES[name.rpartition(".")[2]],
        "content-security-policy": POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        # An upgrade of the server must not leave a browser with half of the old files.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return ServedFile(body, headers)
