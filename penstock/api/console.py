"""Serves the files of the console, at /console, and of the chat page, at /. They hold no secrets and need no key:
everything that they show comes from the APIs, with the key of the person who looks.

The key travels in a header that the console's script sets, never in a cookie, so no other site's page can make a
browser use it. The content security policy allows scripts and styles only from these files, and forbids turning text
into markup. Text from a model or a tenant therefore cannot become a script that reads the key.

A sign-in at an identity provider comes back to /console with a code, which the page exchanges for a token at
/console/sign-in. Only a page that began the sign-in has the code's verifier, so this path needs no key either.

The data of the pages (/admin/console, /admin/history, /admin/requests and /admin/simulations) needs the scope
`admin`, which the middleware has checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from importlib import resources
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.api.http.answers import DisconnectWatch, private_json
from penstock.api.http.parsing import choice_of, integer_of
from penstock.api.http.routes import Operation
from penstock.core.errors import InvalidRequest, NotFound, StoreUnavailable
from penstock.gateway.history.history import SPANS, History, HistoryView
from penstock.gateway.history.requests import RecentRequests, RequestView
from penstock.gateway.simulations import SimulationChoices, SimulationObject, SimulationOrder, Simulations
from penstock.gateway.tenants.tokens import Provider, SignIn

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
SIGN_IN_PATH = "/console/sign-in"
PAGE = "index.html"
CHAT_PAGE = "chat.html"  # the playground alone, at /
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class SignInOffer(msgspec.Struct, frozen=True):
    """The methods by which users sign in to this server."""

    needs_key: bool
    provider: Provider | None  # signs users in without a key
    object: Literal["sign_in"] = "sign_in"


_Secret = Annotated[str, Meta(min_length=1, max_length=4096)]


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: _Secret
    code_verifier: Annotated[str, Meta(min_length=43, max_length=128)]  # RFC 7636
    nonce: Annotated[str, Meta(min_length=16, max_length=256)]
    redirect_uri: _Secret


class SignedIn(msgspec.Struct, frozen=True):
    token: str
    object: Literal["sign_in.token"] = "sign_in.token"


class ServedFile(NamedTuple):
    body: bytes
    headers: dict[str, str]


class ConsoleFiles:
    """The files are read once: only these names exist, so no path can lead out of the folder."""

    def __init__(self, sign_in: SignIn | None = None, *, needs_key: bool = False) -> None:
        self._sign_in = sign_in
        self._needs_key = needs_key
        self._files = _all_files()

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /", self.chat_page, content_type="text/html"),
            Operation("GET /console", self.page, content_type="text/html"),
            Operation(f"GET {SIGN_IN_PATH}", self.offer, SignInOffer),
            Operation(f"POST {SIGN_IN_PATH}", self.exchange, SignedIn, reads=Exchange),
            Operation("GET /console/{name}", self.file, content_type="application/octet-stream"),
        ]

    async def chat_page(self, request: Request) -> Response:
        return self._answer(request, CHAT_PAGE)

    async def page(self, request: Request) -> Response:
        return self._answer(request, PAGE)

    async def file(self, request: Request) -> Response:
        return self._answer(request, request.path_params["name"])

    async def offer(self, request: Request) -> Response:
        provider = None
        if self._sign_in is not None:
            with contextlib.suppress(StoreUnavailable):  # a key is still a way in
                provider = await self._sign_in.provider()
        return private_json(SignInOffer(self._needs_key, provider))

    async def exchange(self, request: Request, asked: Exchange) -> Response:
        if self._sign_in is None:
            raise NotFound("This server offers no sign-in at an identity provider.")
        return private_json(SignedIn(await self._sign_in.exchange(**msgspec.structs.asdict(asked))))

    def _answer(self, request: Request, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise NotFound(f"The console has no file {name[:80]!r}.")
        if request.headers.get("if-none-match") == found.headers["etag"]:
            return Response(status_code=304, headers=found.headers)
        return Response(found.body, headers=found.headers)


@functools.cache
def _all_files() -> dict[str, ServedFile]:
    folder = resources.files("penstock.api").joinpath("static/console")
    return {
        entry.name: _served(entry.name, entry.read_bytes())
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }


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


HISTORY_PARAMETERS = ("span", "model", "tier")
REQUEST_PARAMETERS = ("limit", "status", "model")
STATUSES = ("any", "running", "completed", "cancelled", "failed")
MAX_REQUESTS = 500


class ConsoleObject(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this server that the console's pages show."""

    version: str
    shows_prompts: bool  # whether the operator lets the console show prompts
    object: Literal["console"] = "console"


class RequestList(msgspec.Struct, frozen=True):
    """The last requests, the newest first."""

    data: list[RequestView]
    object: Literal["list"] = "list"


class HistoryEndpoints:
    def __init__(self, history: History, recent: RecentRequests) -> None:
        self._history = history
        self._recent = recent

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/console", self.show_console, ConsoleObject),
            Operation("GET /admin/history", self.show_history, HistoryView, query=HISTORY_PARAMETERS),
            Operation("GET /admin/requests", self.list_requests, RequestList, query=REQUEST_PARAMETERS),
        ]

    async def show_console(self, request: Request) -> Response:
        return private_json(ConsoleObject(version=__version__, shows_prompts=self._recent.keeps_prompts))

    async def show_history(self, request: Request) -> Response:
        check_parameters(request, HISTORY_PARAMETERS)
        span = choice_of(request, "span", default="live", choices=tuple(SPANS))
        model, tier = (request.query_params.get(name) for name in ("model", "tier"))
        return private_json(await self._history.view(span, model, tier))

    async def list_requests(self, request: Request) -> Response:
        check_parameters(request, REQUEST_PARAMETERS)
        limit = integer_of(request, "limit", default=100, low=1, high=MAX_REQUESTS)
        status = choice_of(request, "status", default="any", choices=STATUSES)
        model = request.query_params.get("model")
        found = await self._recent.latest(limit, status=None if status == "any" else status, model=model)
        return private_json(RequestList(found))


def check_parameters(request: Request, known: tuple[str, ...]) -> None:
    """Raises InvalidRequest for a parameter that does not exist: a misspelt filter must not show everything."""
    unknown = sorted(request.query_params.keys() - set(known))
    if unknown:
        raise InvalidRequest(
            f"{unknown[0][:40]!r} is no parameter of this path.",
            param=unknown[0][:40],
            hint=f"There are: {', '.join(known)}.",
        )


class SimulationEndpoints:
    """The simulator: GET and POST /admin/simulations."""

    def __init__(self, simulations: Simulations) -> None:
        self._simulations = simulations

    def routes(self) -> list[Operation]:
        return [
            Operation("GET /admin/simulations", self.show_choices, SimulationChoices),
            Operation("POST /admin/simulations", self.run, SimulationObject, reads=SimulationOrder),
        ]

    async def show_choices(self, request: Request) -> Response:
        return private_json(self._simulations.choices)

    async def run(self, request: Request, order: SimulationOrder) -> Response:
        departure = DisconnectWatch(request)  # a reader that goes ends the simulation
        try:
            return private_json(await self._simulations.run(order))
        except asyncio.CancelledError:
            departure.check()
            raise
        finally:
            departure.stop()
