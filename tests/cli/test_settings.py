"""`penstock settings`: from a file to the database and back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.cli.test_keys import Shell

FILE = '[prices.models."org/m"]\ninput = 0.15\noutput = 0.6\n'


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "data")


def test_apply_show_history_revert(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    assert "each gateway uses its own file" in shell.run("settings", "show").stderr
    assert not shell.folder.exists(), "looking makes no database"
    file.write_text(FILE)
    applied = shell.run("settings", "apply", str(file), "--note", "first")
    assert applied.exit_code == 0, applied.output
    assert "now at version 1" in applied.stdout
    shown = shell.run("settings", "show").stdout
    assert tomllib.loads(shown) == tomllib.loads(FILE)
    file.write_text("[response_cache]\nttl_s = 3\n")
    assert json.loads(shell.run("settings", "apply", str(file), "--json").stdout)["version"] == 2
    history = shell.run("settings", "history").stdout
    assert "first" in history
    assert "from settings.toml" in history
    assert "now at version 3" in shell.run("settings", "revert", "1", "--if-version", "2").stdout
    assert json.loads(shell.run("settings", "show", "--json").stdout)["settings"]["prices"]
    assert len(json.loads(shell.run("settings", "history", "--json").stdout)["data"]) == 3
    assert "settings.change" in shell.run("audit").stdout


def test_a_file_may_begin_with_a_byte_order_mark(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(b"\xef\xbb\xbf" + FILE.replace("\n", "\r\n").encode())
    assert shell.run("settings", "apply", str(file)).exit_code == 0
    assert tomllib.loads(shell.run("settings", "show").stdout) == tomllib.loads(FILE)


def test_what_is_refused(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("\n[response_cash]\n")
    refused = shell.run("settings", "apply", str(file))
    assert refused.exit_code == 2
    assert "settings.toml, line 2: there is no setting 'response_cash'" in refused.stderr
    assert not shell.folder.exists()
    assert shell.run("settings", "apply", str(tmp_path / "none.toml")).exit_code == 2
    file.write_text("")
    lost = shell.run("settings", "apply", str(file), "--if-version", "4")
    assert lost.exit_code == 1
    assert "somebody else changed them" in lost.stderr
    assert "There is no version 9" in shell.run("settings", "revert", "9").stderr
    assert "There is no version 9" in shell.run("settings", "show", "--version", "9").stderr
