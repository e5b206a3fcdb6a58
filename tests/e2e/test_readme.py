"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.commands import penstock

from .conftest import RunningServer

README = (Path(__file__).parents[2] / "README.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_an_example_for_each_sdk() -> None:
    assert [re.search(r"from (\w+) import", example)[1] for example in EXAMPLES] == ["openai", "anthropic"]


@pytest.mark.e2e
@pytest.mark.parametrize("example", EXAMPLES, ids=["openai", "anthropic"])
def test_the_python_examples_print_paris(server: RunningServer, example: str) -> None:
    assert "http://127.0.0.1:8000" in example
    program = example.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True
    )
    assert "Paris" in done.stdout


def test_every_command_of_the_table_exists() -> None:
    commands = re.findall(r"^\| `penstock (\w+)(?: (\w+(?:\\\|\w+)*))?", README, re.MULTILINE)
    assert len(commands) >= 6
    for command, subcommands in commands:
        names = subcommands.split("\\|") if "\\|" in subcommands else [None]
        for name in names:
            call = [command, *([name] if name else []), "--help"]
            assert CliRunner().invoke(penstock, call).exit_code == 0, call


def test_the_two_make_commands_exist() -> None:
    folder = Path(__file__).parents[2]
    for target in ("serve", "test"):
        assert f"make {target}\n" in README
        shown = subprocess.run(
            ["make", "-n", target], cwd=folder, capture_output=True, text=True, timeout=600
        )
        assert shown.returncode == 0
