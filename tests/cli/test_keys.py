"""`penstock keys`, `workspaces`, `organizations` and `audit`, on a database of their own."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.cli.commands import penstock
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.tenants.keyring import KeyRing
from tests.gateway.store.ready_made import ready_made_database


class Shell:
    """Runs commands on one data folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(penstock, [*arguments, "--data-dir", str(self.folder)])

    def ok(self, *arguments: str) -> Result:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--json").stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    ready_made_database(tmp_path / "data").close()
    return Shell(tmp_path / "data")


def test_a_key_is_made_and_works_and_its_place_is_said(shell: Shell) -> None:
    result = shell.ok("keys", "create", "--name", "laptop")
    secret = result.stdout.strip()
    assert "\n" not in secret
    assert secret.startswith("sk-ps-")
    assert str(shell.folder / "penstock.db") in result.stderr
    assert "not shown again" in result.stderr
    database = Database(sqlite_url(shell.folder))
    principal = asyncio.run(KeyRing(database).identify(secret))
    database.close()
    assert principal.workspace_id == "default"


def test_the_first_key_makes_the_database(tmp_path: Path) -> None:
    Shell(tmp_path / "new").ok("keys", "create", "--name", "first")
    assert (tmp_path / "new" / "penstock.db").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "list"),
        ("keys", "show", "key_x"),
        ("workspaces", "list"),
        ("organizations", "list"),
        ("audit",),
    ],
)
def test_looking_makes_no_database(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    looked = Shell(tmp_path / "new").run(*arguments)
    assert looked.exit_code == (1 if "show" in arguments else 0)
    assert not (tmp_path / "new").exists()


def test_everything_about_a_key_can_be_said(shell: Shell) -> None:
    workspace = shell.json("workspaces", "create", "Production")
    key = shell.json(
        *("keys", "create", "--name", "ci", "--workspace", workspace["id"], "--scope", "usage"),
        *("--scope", "inference", "--model", "b", "--model", "a", "--tier", "priority"),
        *("--expires-in", "2d", "--cache-responses"),
    )
    assert key["secret"].startswith(key["prefix"])
    assert key["workspace_id"] == workspace["id"]
    assert key["scopes"] == ["inference", "usage"]
    assert key["allowed_models"] == ["a", "b"]
    assert (key["best_tier"], key["caches_responses"], key["status"]) == ("priority", True, "active")
    assert abs(key["expires_at"] - time.time() - 2 * 86400) < 60
    shown = shell.ok("keys", "show", key["id"]).stdout
    for word in ("ci", "inference, usage", "a, b", "priority", "on", key["prefix"]):
        assert word in shown
    assert key["secret"] not in shown


def test_keys_are_listed_changed_and_revoked(shell: Shell) -> None:
    assert "There are no keys" in shell.ok("keys", "list").stderr
    made = [shell.json("keys", "create", "--name", f"key {n}") for n in range(3)]
    listed = shell.ok("keys", "list")
    for key in made:
        assert key["id"] in listed.stdout
        assert key["secret"] not in listed.stdout
    first_page = shell.ok("keys", "list", "--limit", "2")
    assert "--after" in first_page.stderr
    page = shell.json("keys", "list", "--limit", "2")
    assert page["has_more"]
    rest = shell.json("keys", "list", "--after", page["data"][-1]["id"])
    assert {key["id"] for key in [*page["data"], *rest["data"]]} == {key["id"] for key in made}

    key_id = made[0]["id"]
    changed = shell.json("keys", "update", key_id, "--scope", "admin", "--model", "m", "--expires-in", "5m")
    assert (changed["scopes"], changed["allowed_models"]) == (["admin"], ["m"])
    changed = shell.json("keys", "update", key_id, "--every-model", "--never-expires")
    assert (changed["allowed_models"], changed["expires_at"]) == (None, None)

    assert key_id in shell.ok("keys", "revoke", key_id).stdout
    again = shell.run("keys", "revoke", key_id)
    assert again.exit_code == 1
    assert "is revoked" in again.stderr


def test_workspaces_and_organizations(shell: Shell) -> None:
    organization = shell.json("organizations", "create", "Acme")
    workspace = shell.json("workspaces", "create", "W", "--organization", organization["id"])
    assert workspace["organization_id"] == organization["id"]
    assert "W2" in shell.ok("workspaces", "rename", workspace["id"], "W2").stdout
    assert "Acme2" in shell.ok("organizations", "rename", organization["id"], "Acme2").stdout
    listed = shell.ok("workspaces", "list", "--organization", organization["id"]).stdout
    assert "W2" in listed
    assert "Default" not in listed
    assert "Acme2" in shell.ok("organizations", "list").stdout
    shell.ok("workspaces", "archive", workspace["id"])
    shell.ok("organizations", "archive", organization["id"])
    assert shell.json("workspaces", "list")["data"][0]["archived_at"] is not None
    assert shell.run("keys", "create", "--name", "k", "--workspace", workspace["id"]).exit_code == 1


def test_the_audit_log_names_who_did_what(shell: Shell) -> None:
    key = shell.json("keys", "create", "--name", "k")
    shell.ok("keys", "revoke", key["id"])
    shell.ok("workspaces", "create", "W")
    entries = shell.json("audit", "--target", key["id"])["data"]
    assert [entry["action"] for entry in entries] == ["key.revoke", "key.create"]
    assert all(entry["actor"].startswith("cli") for entry in entries)
    text = shell.ok("audit", "--limit", "1")
    assert "workspace.create" in text.stdout
    assert "--after" in text.stderr
    assert key["secret"] not in shell.ok("audit").output


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (["keys", "create"], 2, "--name"),
        (["keys", "create", "--name", ""], 1, "A name has"),
        (["keys", "create", "--name", "k", "--scope", "root"], 2, "root"),
        (["keys", "create", "--name", "k", "--expires-in", "soon"], 2, "'soon' is not a duration"),
        (["keys", "create", "--name", "k", "--expires-in", "0d"], 1, "in the future"),
        (["keys", "create", "--name", "k", "--workspace", "ws_none"], 1, "There is no workspace"),
        (["keys", "show", "key_none"], 1, "There is no key"),
        (["keys", "update", "key_none"], 1, "Nothing to change"),
        (["keys", "update", "key_none", "--model", "m", "--every-model"], 2, "exclude each other"),
        (["keys", "update", "key_none", "--expires-in", "1d", "--never-expires"], 2, "exclude each other"),
        (["workspaces", "archive", "default"], 1, "cannot be archived"),
        (["keys", "list", "--database-url", "mysql://x"], 2, "does not know"),
        (["keys", "creat"], 2, "Did you mean 'create'?"),
    ],
)
def test_mistakes_are_sentences(shell: Shell, arguments: list[str], exit_code: int, sentence: str) -> None:
    result = shell.run(*arguments)
    assert (result.exit_code, sentence in result.stderr) == (exit_code, True), result.output


def test_the_database_can_be_named_in_the_environment_and_in_a_file(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "a")
    runner = CliRunner(env={"PENSTOCK_DATABASE_URL": url})
    assert runner.invoke(penstock, ["keys", "create", "--name", "k"]).exit_code == 0
    config = tmp_path / "penstock.toml"
    config.write_text(f'[store]\ndatabase_url = "{url}"\n')
    listed = CliRunner().invoke(penstock, ["keys", "list", "--config", str(config), "--json"])
    assert [key["name"] for key in json.loads(listed.stdout)["data"]] == ["k"]
