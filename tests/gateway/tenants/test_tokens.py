"""Tokens of a real (small) identity provider: the good ones become principals, every kind of bad one is refused."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.core.errors import AuthenticationFailed, ConfigError, PermissionDenied, StoreUnavailable
from penstock.core.gateway_config import OidcConfig
from penstock.core.identity import Scope
from penstock.core.request import Tier
from penstock.gateway.tenants import tokens
from penstock.gateway.tenants.keyring import TRUST_S
from penstock.gateway.tenants.records import WORKSPACES
from penstock.gateway.tenants.tokens import (
    LOOK_AGAIN_AFTER_S,
    REFRESH_EVERY_S,
    RETRY_AFTER_S,
    PublicKeys,
    TokenVerifier,
)
from tests.gateway.tenants.conftest import ACTOR, World
from tests.gateway.tenants.identity_provider import IdentityProvider, running_provider

RSA_KEY = rsa.generate_private_key(65537, 2048)
OTHER_RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with running_provider() as provider:
        provider.add_key("rsa", RSA_KEY)
        provider.add_key("ec", EC_KEY)
        yield provider


def verifier(world: World, provider: IdentityProvider, **config: Any) -> TokenVerifier:
    settings = {"default_workspace": "default", "jwks_url": provider.jwks_url} | config
    oidc = OidcConfig(issuer=provider.issuer, audience="penstock", **settings)
    keys = PublicKeys(oidc.issuer, oidc.jwks_url, world.time.clock)
    return TokenVerifier(oidc, keys, world.ring(), world.time.wall)


@pytest.fixture(autouse=True)
def same_time(world: World) -> None:
    """PyJWT reads the real clock, so the world's begins at the same moment."""
    world.time.started_at = time.time()


def claims(world: World, provider: IdentityProvider, **extra: Any) -> dict[str, Any]:
    issued, expires = world.time.started_at, world.time.wall() + 3600
    standard = {"iss": provider.issuer, "aud": "penstock", "sub": "ann", "iat": issued, "exp": expires}
    merged = standard | extra
    return {name: value for name, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("key_id", "algorithm"),
    [("rsa", "RS256"), ("rsa", "PS256"), ("rsa", "RS512"), ("ec", "ES256"), ("ed", "EdDSA")],
)
async def test_a_good_token_is_accepted(
    world: World, provider: IdentityProvider, key_id: str, algorithm: str
) -> None:
    provider.add_key("ed", ED_KEY)
    checks = verifier(world, provider, algorithms=("RS256", "RS512", "PS256", "ES256", "EdDSA"))
    principal = await checks.identify(provider.token(key_id, algorithm, claims(world, provider)))
    assert (principal.workspace_id, principal.organization_id) == ("default", "default")
    assert principal.key_id == "oidc:ann"
    assert principal.scopes == {Scope.INFERENCE}
    assert (principal.best_tier, principal.allowed_models) == (Tier.DEFAULT, None)


async def test_claims_are_translated(world: World, provider: IdentityProvider) -> None:
    organization = await world.directory.create_organization(ACTOR, "Acme")
    workspace = await world.directory.create_workspace(ACTOR, "W", organization.id)
    checks = verifier(
        world,
        provider,
        workspace_claim="resource.team",
        workspaces={"platform": workspace.id},
        scopes_claim="roles",
        scopes={"llm-admin": Scope.ADMIN, "llm-user": Scope.INFERENCE},
        tier_claim="plan",
        tiers={"gold": Tier.PRIORITY},
        models_claim="models",
    )
    token = provider.token(
        "rsa",
        "RS256",
        claims(
            world,
            provider,
            resource={"team": "platform"},
            roles=["llm-admin", "unrelated"],
            plan="gold",
            models=["small"],
        ),
    )
    principal = await checks.identify(token)
    assert (principal.organization_id, principal.workspace_id) == (organization.id, workspace.id)
    assert principal.scopes == {Scope.ADMIN}
    assert principal.best_tier is Tier.PRIORITY
    assert principal.allowed_models == {"small"}

    silent = claims(world, provider, resource={"team": "platform"})
    principal = await checks.identify(provider.token("rsa", "RS256", silent))
    assert principal.scopes == {Scope.INFERENCE}
    assert principal.best_tier is Tier.DEFAULT
    assert principal.allowed_models == frozenset(), "a claim that is missing must not allow more"


async def test_plain_scope_words_give_nothing_away(world: World, provider: IdentityProvider) -> None:
    """A provider's own "admin" is not ours."""
    checks = verifier(world, provider)
    token = provider.token("rsa", "RS256", claims(world, provider, scope="openid admin penstock:usage"))
    assert (await checks.identify(token)).scopes == {Scope.USAGE}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"exp": 1}, "has expired"),
        ({"exp": None}, "lacks the claim 'exp'"),
        ({"sub": None}, "lacks the claim 'sub'"),
        ({"aud": "another"}, "another audience"),
        ({"aud": None}, "lacks the claim 'aud'|another audience"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"nbf": 4_000_000_000}, "not valid yet"),
        ({"sub": "a" * 201}, "subject"),
        ({"sub": "a\0b"}, "subject"),
        ({"sub": ""}, "subject"),
    ],
)
async def test_bad_claims_are_refused(
    world: World, provider: IdentityProvider, changes: dict[str, Any], sentence: str
) -> None:
    token = provider.token("rsa", "RS256", claims(world, provider, **changes))
    with pytest.raises(AuthenticationFailed, match=sentence):
        await verifier(world, provider).identify(token)


def unsigned(header: dict[str, Any], payload: dict[str, Any]) -> str:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part(header)}.{part(payload)}."


async def test_algorithms_cannot_be_confused(world: World, provider: IdentityProvider) -> None:
    good = claims(world, provider)
    checks = verifier(world, provider)
    public_pem = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    # The public key used as if it were a shared secret; PyJWT refuses to make such a token, so it is made by hand.
    start = unsigned({"alg": "HS256", "typ": "JWT", "kid": "rsa"}, good).rstrip(".")
    mac = hmac.new(public_pem, start.encode(), hashlib.sha256).digest()
    forged = f"{start}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    with pytest.raises(AuthenticationFailed, match="algorithm that is not accepted"):
        await checks.identify(forged)
    for name in ("none", "None", "nOnE"):
        with pytest.raises(AuthenticationFailed, match="algorithm that is not accepted"):
            await checks.identify(unsigned({"alg": name, "kid": "rsa"}, good))
    # A key is not used for another family than its own, whatever the token says.
    with pytest.raises(AuthenticationFailed, match="does not have"):
        await checks.identify(provider.token("rsa", "ES256", good, signed_by=EC_KEY))
    # An algorithm of the right family that is not on the list.
    with pytest.raises(AuthenticationFailed, match="algorithm that is not accepted"):
        await checks.identify(provider.token("rsa", "RS384", good))


def test_shared_secret_algorithms_cannot_even_be_configured() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"issuer": "https://i", "audience": "a", "algorithms": ["HS256"]}, OidcConfig)


async def test_a_key_declared_for_one_algorithm_is_used_for_no_other(
    world: World, provider: IdentityProvider
) -> None:
    provider.public_keys.clear()
    provider.add_key("only-rs256", RSA_KEY, alg="RS256")
    provider.add_key("for-encryption", OTHER_RSA_KEY, use="enc")
    checks = verifier(world, provider, algorithms=("RS256", "PS256"))
    await checks.identify(provider.token("only-rs256", "RS256", claims(world, provider)))
    for key_id, algorithm in (("only-rs256", "PS256"), ("for-encryption", "RS256")):
        with pytest.raises(AuthenticationFailed, match="does not have"):
            await checks.identify(provider.token(key_id, algorithm, claims(world, provider)))


async def test_forgeries_are_refused(world: World, provider: IdentityProvider) -> None:
    checks = verifier(world, provider)
    good = claims(world, provider)
    with pytest.raises(AuthenticationFailed, match="signature is wrong"):
        await checks.identify(provider.token("rsa", "RS256", good, signed_by=OTHER_RSA_KEY))
    head, _, signature = provider.token("rsa", "RS256", good).split(".")
    other_body = provider.token("rsa", "RS256", good | {"sub": "root"}).split(".")[1]
    with pytest.raises(AuthenticationFailed, match="signature is wrong"):
        await checks.identify(f"{head}.{other_body}.{signature}")
    # A key that the token brings along is not a key that the provider has.
    embedded = jwt.encode(
        good,
        OTHER_RSA_KEY,
        "RS256",
        headers={"kid": "rsa", "jku": "https://evil.example/keys", "jwk": {"kty": "RSA"}},
    )
    with pytest.raises(AuthenticationFailed, match="signature is wrong"):
        await checks.identify(embedded)


@pytest.mark.parametrize("token", ["a.b.c", "..", "e30.e30.e30", "x" * 20_000 + ".y.z", "\xff.\xff.\xff"])
async def test_rubbish_is_refused(world: World, provider: IdentityProvider, token: str) -> None:
    with pytest.raises(AuthenticationFailed):
        await verifier(world, provider).identify(token)


async def test_rotated_keys_are_found_and_unknown_ids_do_not_hammer_the_provider(
    world: World, provider: IdentityProvider
) -> None:
    checks = verifier(world, provider)
    await checks.identify(provider.token("rsa", "RS256", claims(world, provider)))
    assert provider.paths == ["/keys"]
    rotated = provider.token("new", "RS256", claims(world, provider), signed_by=OTHER_RSA_KEY)
    for _ in range(20):
        with pytest.raises(AuthenticationFailed, match="does not have"):
            await checks.identify(rotated)
    assert provider.paths == ["/keys"], "not again so soon"
    provider.add_key("new", OTHER_RSA_KEY)
    world.time.pass_s(LOOK_AGAIN_AFTER_S)
    assert (await checks.identify(rotated)).key_id == "oidc:ann"
    assert provider.paths == ["/keys"] * 2


async def test_a_key_that_the_provider_withdrew_is_forgotten(
    world: World, provider: IdentityProvider
) -> None:
    checks = verifier(world, provider)
    token = provider.token("rsa", "RS256", claims(world, provider, exp=world.time.wall() + 86_400))
    await checks.identify(token)
    del provider.public_keys[0]
    world.time.pass_s(REFRESH_EVERY_S)
    await checks.identify(provider.token("ec", "ES256", claims(world, provider)))  # refreshes beside itself
    assert checks._public_keys._fetching is not None
    await checks._public_keys._fetching
    with pytest.raises(AuthenticationFailed, match="does not have"):
        await checks.identify(token)  # although it was good once and has not expired


async def test_without_a_key_id_the_only_fitting_key_is_taken(
    world: World, provider: IdentityProvider
) -> None:
    checks = verifier(world, provider)
    token = provider.token(None, "RS256", claims(world, provider))
    assert (await checks.identify(token)).key_id == "oidc:ann"
    provider.add_key("second", OTHER_RSA_KEY)
    checks = verifier(world, provider)
    with pytest.raises(AuthenticationFailed, match="does not have"):
        await checks.identify(token)


async def test_the_key_set_is_found_by_discovery(world: World, provider: IdentityProvider) -> None:
    checks = verifier(world, provider, jwks_url=None)
    await checks.identify(provider.token("rsa", "RS256", claims(world, provider)))
    assert provider.paths == ["/.well-known/openid-configuration", "/keys"]


@pytest.mark.parametrize("trouble", ["status", "body", "issuer", "huge", "empty"])
async def test_a_provider_in_trouble_is_our_fault_not_the_callers(
    world: World, provider: IdentityProvider, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    if trouble == "status":
        provider.status = 500
    elif trouble == "issuer":
        provider.claimed_issuer = "https://evil.example"
    else:
        provider.body = {"body": b"<html>", "huge": b" " * (2 << 20), "empty": b'{"keys": []}'}[trouble]
    checks = verifier(world, provider, jwks_url=None)
    token = provider.token("rsa", "RS256", claims(world, provider))
    with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable):
        await checks.identify(token)
    assert provider.issuer in caplog.text
    assert token not in caplog.text
    provider.status, provider.body, provider.claimed_issuer = 200, None, provider.issuer
    world.time.pass_s(RETRY_AFTER_S)
    await checks.identify(token)


async def test_keys_that_never_end_are_given_up(
    world: World, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:  # never silent for as long as the timeout
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()

    monkeypatch.setattr(tokens, "TIMEOUT_S", 0.2)
    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server, asyncio.timeout(60):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys"
        with pytest.raises(StoreUnavailable):
            await verifier(world, provider, jwks_url=url).identify(
                provider.token("rsa", "RS256", claims(world, provider))
            )


async def test_known_keys_outlive_a_providers_outage(world: World, provider: IdentityProvider) -> None:
    checks = verifier(world, provider)
    await checks.identify(provider.token("rsa", "RS256", claims(world, provider)))
    provider.status = 503
    world.time.pass_s(REFRESH_EVERY_S)
    await checks.identify(provider.token("rsa", "RS256", claims(world, provider, sub="bob")))


async def test_a_remembered_token_still_expires(world: World, provider: IdentityProvider) -> None:
    checks = verifier(world, provider, leeway_s=0)
    token = provider.token("rsa", "RS256", claims(world, provider, exp=int(world.time.wall()) + 100))
    await checks.identify(token)
    decodes: list[str] = []
    checks._decode = lambda *arguments: decodes.append("again") or {}  # type: ignore[method-assign, func-returns-value]
    await checks.identify(token)
    assert decodes == [], "a signature is checked once"
    world.time.pass_s(100)
    with pytest.raises(KeyError):  # it asks for the claims again, which the fake above does not have
        await checks.identify(token)
    assert decodes == ["again"]


async def test_a_workspace_that_is_not_there_or_archived_is_no_way_in(
    world: World, provider: IdentityProvider
) -> None:
    workspace = await world.directory.create_workspace(ACTOR, "W")
    checks = verifier(world, provider, default_workspace=None)
    token = provider.token("rsa", "RS256", claims(world, provider, workspace=workspace.id))
    await checks.identify(token)
    await world.directory.archive(ACTOR, WORKSPACES, workspace.id)
    world.time.pass_s(TRUST_S)
    with pytest.raises(PermissionDenied):
        await checks.identify(token)
    for extra in ({}, {"workspace": "ws_none"}, {"workspace": "\0"}, {"workspace": ["default"]}):
        with pytest.raises(PermissionDenied, match="names no workspace"):
            await checks.identify(provider.token("rsa", "RS256", claims(world, provider, **extra)))


@pytest.mark.parametrize(
    "url", ["http://example.org", "ftp://example.org", "example.org", "https://", "http://10.0.0.1"]
)
def test_keys_are_not_fetched_over_plain_http(url: str) -> None:
    with pytest.raises(ConfigError, match="https"):
        PublicKeys(url, None)
    with pytest.raises(ConfigError, match="https"):
        PublicKeys("https://example.org", url)
