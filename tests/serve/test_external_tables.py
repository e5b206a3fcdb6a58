"""External servers by flag and by file, and a real gateway process before a real server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.core.config import ExternalServerConfig, ServeConfig
from penstock.core.errors import ConfigError
from penstock.serve.config import read_config_file, resolve
from penstock.serve.environment import kubernetes_api
from tests.cli.test_serve_keys import running_server

TABLES = """
[[external]]
url = "http://gpu-1:8000"
name = "first"
models = { large = "meta/llama" }
region = "eu"
api_key_variable = "GPU_1_KEY"

[[external]]
url = "https://gpu-2/v1"
models = ["small"]
cost = 0.5
max_concurrent = 8
continues = false
shows_cached_tokens = true
api_key_header = "api-key"
"""


def config_of(tmp_path: Path, text: str = "", **flags: Any) -> ServeConfig:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return resolve(read_config_file(path), flags)


def test_servers_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_1_KEY", "secret")
    assert config_of(tmp_path, TABLES).external == (
        ExternalServerConfig(
            url="http://gpu-1:8000",
            name="first",
            models={"large": "meta/llama"},
            region="eu",
            api_key="secret",
        ),
        ExternalServerConfig(
            url="https://gpu-2/v1",
            models={"small": "small"},
            cost=0.5,
            max_concurrent=8,
            continues=False,
            shows_cached_tokens=True,
            api_key_header="api-key",
        ),
    )


def test_servers_by_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_EXTERNAL_API_KEY", "shared")
    urls = ("http://a:1", "http://b:1")
    by_flag = config_of(tmp_path, external=urls).external
    assert by_flag == tuple(ExternalServerConfig(url=url, api_key="shared") for url in urls)
    assert config_of(tmp_path, 'external = ["http://a:1"]').external == by_flag[:1]


def test_engines_of_our_own_run_when_a_model_is_named(tmp_path: Path) -> None:
    urls = ("http://a:1",)
    assert config_of(tmp_path).runs_engines
    assert not config_of(tmp_path, external=urls).runs_engines
    assert config_of(tmp_path, external=urls, model="echo").runs_engines
    assert config_of(tmp_path, external=urls, also_serve=("echo",)).runs_engines
    assert config_of(tmp_path, '[[models]]\npath = "echo"\n', external=urls).runs_engines


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[[external]]\nname = "x"\n', r"\[\[external\]\] number 1 of .* is wrong: .*url"),
        ('[[external]]\nurl = "http://a"\nkey = "x"\n', "unknown field `key`"),
        ('[[external]]\nurl = "gpu-1:8000"\n', "no URL"),
        ('[[external]]\nurl = "http://a"\n[[external]]\nurl = "http://a"\n', "Two external servers"),
        (
            '[[external]]\nurl = "http://a"\napi_key_variable = "NO_SUCH_KEY"\n',
            "NO_SUCH_KEY, which is not set",
        ),
        ('[[external]]\nurl = "http://a"\nmax_concurrent = 0\n', "max_concurrent"),
    ],
)
def test_wrong_tables_are_explained(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_of(tmp_path, text)


@contextmanager
def running_gateway(folder: Path, *arguments: str) -> Iterator[str]:
    """Without engines of its own; its URL."""
    folder.mkdir()
    log = folder / "gateway.log"
    command = [sys.executable, "-m", "penstock.main", "serve", "--port", "0", "--data-dir", str(folder)]
    with log.open("w") as output:
        process = subprocess.Popen([*command, *arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"at\s+(http://\S+)\s+passes", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


@pytest.mark.slow
def test_a_gateway_process_before_another_server(tmp_path: Path) -> None:
    with (
        running_server(tmp_path) as (theirs, _),
        running_gateway(tmp_path / "front", "--external", theirs) as ours,
    ):
        body = {"model": "echo", "messages": [{"role": "user", "content": "repeat this"}], "max_tokens": 40}
        direct, passed_on = [
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json() for url in (theirs, ours)
        ]
        assert passed_on["choices"] == direct["choices"]
        assert passed_on["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
        message = httpx.post(f"{ours}/v1/messages", json=body, timeout=60).json()
        assert message["content"][0]["text"] == direct["choices"][0]["message"]["content"]
        assert httpx.get(f"{ours}/ready", timeout=60).status_code == 200
        assert "penstock_external_up" in httpx.get(f"{ours}/metrics", timeout=60).text


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ('discover = "consul"', "it takes 'dns', 'srv' or 'kubernetes'"),
        ('dialect = "bedrock"', "it takes 'openai', 'azure' or 'anthropic'"),
    ],
)
def test_an_unknown_value_is_answered_with_those_that_there_are(
    tmp_path: Path, line: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(tmp_path, f'[[external]]\nurl = "http://gpu-1:8000"\n{line}\n')
    assert accepted in raised.value.message


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_the_api_server_of_the_cluster(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert kubernetes_api() is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    api = kubernetes_api()
    assert api is not None
    assert api.url == f"https://{host if '.' in host else f'[{host}]'}:6443"
