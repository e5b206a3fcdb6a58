"""A real server process: keys made and revoked by commands beside it, tokens of a provider, no secret in its logs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.cli.test_keys import Shell
from tests.gateway.tenants.identity_provider import IdentityProvider, running_provider

pytestmark = pytest.mark.slow


@contextmanager
def running_server(folder: Path, *arguments: str) -> Iterator[tuple[str, Path]]:
    """Its URL, and the file with everything it says."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "penstock.main", "serve", "echo", "--port", "0", "--data-dir"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(folder / "data"), *arguments, "--debug"], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"serves .* at\s+(http://\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[1], log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def models(url: str, credential: str | None) -> int:
    headers = {} if credential is None else {"authorization": f"Bearer {credential}"}
    return httpx.get(f"{url}/v1/models", headers=headers, timeout=60).status_code


@dataclass(frozen=True)
class Server:
    """One server that asks for keys and takes tokens of a provider. The last test of this module stops it."""

    url: str
    log: Path
    folder: Path
    provider: IdentityProvider
    stop: Callable[[], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    with ExitStack() as stack:
        provider = stack.enter_context(running_provider())
        provider.add_key("one", ec.generate_private_key(ec.SECP256R1()))
        config = folder / "penstock.toml"
        config.write_text(
            f'[oidc]\nissuer = "{provider.issuer}"\naudience = "penstock"\ndefault_workspace = "default"\n'
        )
        url, log = stack.enter_context(running_server(folder, "--require-keys", "--config", str(config)))
        yield Server(url, log, folder, provider, stack.close)


def test_tokens_of_a_provider(server: Server) -> None:
    provider, now = server.provider, time.time()
    claims = {"iss": provider.issuer, "aud": "penstock", "sub": "ann", "exp": now + 600}
    good = provider.token("one", "ES256", claims)
    expired = provider.token("one", "ES256", claims | {"exp": now - 600})
    assert [models(server.url, credential) for credential in (None, good, expired)] == [401, 200, 401]
    admin = httpx.get(f"{server.url}/admin/keys", headers={"authorization": f"Bearer {good}"})
    assert admin.status_code == 403
    assert good not in server.log.read_text()


def test_keys_made_and_revoked_beside_a_running_server(server: Server) -> None:
    shell, url = Shell(server.folder / "data"), server.url
    assert models(url, None) == 401
    key = shell.json("keys", "create", "--name", "k")
    secret = key["secret"]
    deadline = time.monotonic() + 240
    while models(url, secret) != 200:
        assert time.monotonic() < deadline, "the new key never worked"
    shell.ok("keys", "revoke", key["id"])
    while models(url, secret) != 401:
        assert time.monotonic() < deadline, "the revoked key kept working"
        time.sleep(0.05)
    assert models(url, "sk-ps-" + "x" * 48) == 401
    server.stop()
    assert shell.json("keys", "show", key["id"])["last_used_at"] is not None
    assert secret not in server.log.read_text()
