"""Sign-in with a browser at a small identity provider: a code becomes a token, and false ones are refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from penstock.core.errors import (
    AuthenticationFailed,
    ConfigError,
    Overloaded,
    PermissionDenied,
    StoreUnavailable,
)
from penstock.core.gateway_config import OidcConfig
from penstock.core.identity import Scope
from penstock.gateway.tenants.tokens import PublicKeys, SignIn, TokenVerifier
from tests.gateway.tenants.conftest import World
from tests.gateway.tenants.identity_provider import IdentityProvider, running_provider

VERIFIER, NONCE, BACK = "v" * 43, "n" * 16, "http://127.0.0.1:8000/console"
KEY = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with running_provider() as provider:
        provider.add_key("ec", KEY)
        yield provider


@pytest.fixture(autouse=True)
def same_time(world: World) -> None:
    world.time.started_at = time.time()


def sign_in(world: World, provider: IdentityProvider, **config: Any) -> tuple[SignIn, TokenVerifier]:
    settings = {"default_workspace": "default", "client_id": "console"} | config
    oidc = OidcConfig(issuer=provider.issuer, audience="penstock", **settings)
    keys = PublicKeys(oidc.issuer, None, world.time.clock)
    verifier = TokenVerifier(oidc, keys, world.ring(), world.time.wall)
    return SignIn(oidc, verifier, world.time.clock), verifier


def code_of(provider: IdentityProvider, **changes: str) -> str:
    """The code of a browser that was at the provider."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).rstrip(b"=").decode()
    query = {"client_id": "console", "redirect_uri": BACK, "state": "s", "nonce": NONCE}
    provider.signed_in(query | {"code_challenge": digest} | changes)
    return list(provider.codes)[-1]


def asked(code: str) -> dict[str, str]:
    return {"code": code, "code_verifier": VERIFIER, "redirect_uri": BACK, "nonce": NONCE}


async def test_a_code_becomes_a_token(world: World, provider: IdentityProvider, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s:e cret\n")
    signing, verifier = sign_in(world, provider, client_secret_file=str(tmp_path / "secret"))
    offered = await signing.provider()
    assert offered.authorization_endpoint == f"{provider.issuer}/authorize"
    assert (offered.client_id, offered.scope) == ("console", "openid")
    code = code_of(provider)
    principal = await verifier.identify(await signing.exchange(**asked(code)))
    assert (principal.key_id, principal.scopes) == ("oidc:ann", {Scope.ADMIN})
    basic = base64.b64encode(b"console:s%3Ae%20cret").decode()
    assert provider.authorizations == [f"Basic {basic}"]
    with pytest.raises(AuthenticationFailed, match="refused the sign-in: invalid_grant"):
        await signing.exchange(**asked(code))  # a second time


async def test_the_id_token_serves_where_the_access_token_is_for_others(
    world: World, provider: IdentityProvider
) -> None:
    provider.access_audience = "https://graph.example"
    signing, verifier = sign_in(world, provider, client_id="penstock")
    token = await signing.exchange(**asked(code_of(provider, client_id="penstock")))
    assert (await verifier.identify(token)).key_id == "oidc:ann"
    other, _ = sign_in(world, provider)
    with pytest.raises(AuthenticationFailed, match="meant for another audience"):
        await other.exchange(**asked(code_of(provider)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"code": "made-up"}, "invalid_grant"),
        ({"code_verifier": "w" * 43}, "invalid_grant"),
        ({"redirect_uri": "http://elsewhere/console"}, "invalid_grant"),
        ({"nonce": "m" * 16}, "another sign-in"),
    ],
)
async def test_a_false_exchange_is_refused(
    world: World, provider: IdentityProvider, change: dict[str, str], sentence: str
) -> None:
    signing, _ = sign_in(world, provider)
    with pytest.raises(AuthenticationFailed, match=sentence):
        await signing.exchange(**(asked(code_of(provider)) | change))


async def test_a_user_of_no_workspace_is_told_so(world: World, provider: IdentityProvider) -> None:
    provider.user["workspace"] = "nowhere"
    signing, _ = sign_in(world, provider)
    with pytest.raises(PermissionDenied, match="names no workspace"):
        await signing.exchange(**asked(code_of(provider)))


async def test_a_provider_that_is_away_is_left_alone_for_a_while(
    world: World, provider: IdentityProvider
) -> None:
    provider.status = 500
    signing, _ = sign_in(world, provider)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await signing.provider()
    assert len(provider.paths) == 1
    provider.status = 200
    world.time.clock.advance(5)
    assert (await signing.provider()).issuer == provider.issuer


async def test_endpoints_must_be_safe(
    world: World, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "answer", lambda path: (200, b'{"issuer": "%s", "authorization_endpoint": "https://a",'
        b' "token_endpoint": "http://a.example/token"}' % provider.issuer.encode()))  # fmt: skip
    signing, _ = sign_in(world, provider)
    with pytest.raises(StoreUnavailable):
        await signing.provider()


async def test_exchanges_are_bounded(
    world: World, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    signing, _ = sign_in(world, provider)
    released = asyncio.Event()

    async def answer_late(*_: str) -> dict[str, Any]:
        await released.wait()
        raise AuthenticationFailed("late")

    monkeypatch.setattr(signing, "_ask", answer_late)
    running = [asyncio.create_task(signing.exchange(**asked("c"))) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await signing.exchange(**asked("c"))
    released.set()
    await asyncio.gather(*running, return_exceptions=True)
    with pytest.raises(AuthenticationFailed, match="late"):  # those that ended make room
        await signing.exchange(**asked("c"))


async def test_a_secret_that_cannot_be_read_is_an_error_at_start(
    world: World, provider: IdentityProvider
) -> None:
    with pytest.raises(ConfigError, match="client secret"):
        sign_in(world, provider, client_secret_file="/no/such/file")
