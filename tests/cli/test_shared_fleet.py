"""What `penstock engine` and `penstock gateway` say before they start anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.serve import control, engine, gateway

TOKEN = ["--join-token", "x" * 20]
REGISTRY = [*TOKEN, "--registry", "redis://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs a join token"),
        (TOKEN, "needs a registry"),
        (["--join-token", "short", "--registry", "redis://127.0.0.1:1"], "at least 20 characters"),
        ([*TOKEN, "--registry", "mysql://a"], "cannot be reached by 'mysql'"),
        ([*REGISTRY, "--cluster", "ray"], "has its own machines"),
        ([*REGISTRY, "--min-replicas", "4"], "does not decide how many replicas"),
    ],
)
def test_a_role_without_a_registry_or_a_token_says_so(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_REGISTRY", "PENSTOCK_JOIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for role, model in ((gateway, []), (engine, ["echo"])):
        result = CliRunner().invoke(role, [*model, *arguments, "--data-dir", str(tmp_path)])
        assert result.exit_code != 0
        assert said in result.output + result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-workers", "2"], "is one process"),
        (["--replicas", "3"], "starts no engines"),
        (["--max-replicas", "3"], "starts no engines"),
        (["--registry", "redis://127.0.0.1:port"], "URL cannot be read"),
        (["--registry", "kubernetes://LLM/blue"], "'LLM' is no name in Kubernetes"),
        (["--registry", "kubernetes://llm/blue"], "this process runs in no cluster"),
        ([], "The registry cannot be used"),
    ],
)
def test_a_gateway_that_cannot_start(flags: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(gateway, [*REGISTRY, "--data-dir", str(tmp_path), "--port", "0", *flags])
    assert result.exit_code != 0
    assert said in result.output + result.stderr


def test_a_host_has_room_for_its_own_replicas(tmp_path: Path) -> None:
    flags = ["--replicas", "3", "--max-replicas", "2", "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(engine, ["echo", *REGISTRY, *flags])
    assert "--max-replicas is less than --replicas" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs a join token"),
        (TOKEN, "needs a registry"),
        ([*REGISTRY, "--min-replicas", "0"], "at least one"),
        (REGISTRY, "The registry cannot be used"),
    ],
)
def test_a_control_process_that_cannot_start(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_REGISTRY", "PENSTOCK_JOIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(control, [*arguments, "--data-dir", str(tmp_path)])
    assert result.exit_code != 0
    assert said in result.output + result.stderr
