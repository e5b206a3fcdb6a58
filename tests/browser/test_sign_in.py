"""Sign-in at an identity provider, in Chromium: a redirect there and back, for the console and the playground."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.browser.conftest import OpenPage
from tests.browser.test_console import Take
from tests.e2e.conftest import start_server
from tests.gateway.tenants.identity_provider import IdentityProvider, running_provider

pytestmark = [pytest.mark.browser, pytest.mark.e2e]

TOKEN = "sessionStorage.getItem('penstock-key')"


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    with running_provider() as provider:
        provider.add_key("one", ec.generate_private_key(ec.SECP256R1()))
        yield provider


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, provider: IdentityProvider) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("sign-in")
    config = folder / "penstock.toml"
    config.write_text(
        f'[oidc]\nissuer = "{provider.issuer}"\naudience = "penstock"\ndefault_workspace = "default"\n'
        'client_id = "console"\n'
    )
    server = start_server(folder, "echo", "--data-dir", str(folder / "data"), "--config", str(config))
    yield server.url
    server.stop()


def test_one_signs_in_at_the_provider_and_comes_back_to_the_same_page(
    open_page: OpenPage, url: str, provider: IdentityProvider, take_picture: Take
) -> None:
    page = open_page(f"{url}/console#/settings")
    page.wait_for_selector("text=Sign in with your organisation")
    take_picture(page, "sign-in-provider")
    page.click("text=Sign in with your organisation")
    page.wait_for_selector("h1 >> text=Settings")
    page.wait_for_selector("text=Save the changes")
    assert page.url == f"{url}/console#/settings", "the code is not in the address"
    assert page.evaluate(TOKEN).count(".") == 2
    assert page.evaluate("sessionStorage.getItem('penstock-sign-in')") is None
    assert page.context.cookies() == []
    page.click("text=Sign out")
    page.wait_for_selector("text=Sign in with your organisation")
    assert page.evaluate(TOKEN) is None


def test_somebody_elses_code_signs_nobody_in(
    open_page: OpenPage, url: str, provider: IdentityProvider
) -> None:
    foreign = {"redirect_uri": f"{url}/console", "state": "another-tab", "client_id": "console"}
    page = open_page(provider.signed_in(foreign))
    page.wait_for_selector("[role=alert] >> text=This sign-in was not begun in this tab.")
    assert "code=" not in page.url
    assert page.evaluate(TOKEN) is None
    page = open_page(f"{url}/console?error=access_denied&state=x")
    page.wait_for_selector("[role=alert] >> text=not begun in this tab")


def test_a_user_without_the_scope_gets_a_sentence(
    open_page: OpenPage, url: str, provider: IdentityProvider
) -> None:
    provider.user = {"sub": "bob", "scope": "penstock:inference"}
    page = open_page(f"{url}/console")
    page.click("text=Sign in with your organisation")
    page.wait_for_selector("[role=alert] >> text=This page needs a key with the scope 'admin'")


def test_the_playground_signs_in_too(open_page: OpenPage, url: str, provider: IdentityProvider) -> None:
    provider.user = {"sub": "bob", "scope": "penstock:inference"}
    page = open_page(f"{url}/")
    page.click("dialog >> text=Sign in with your organisation")
    page.wait_for_function(f"() => location.pathname === '/' && {TOKEN}")
    page.fill("textarea.entry", "Hello")
    page.press("textarea.entry", "Enter")
    page.wait_for_selector(".answer-text >> text=Hello")
