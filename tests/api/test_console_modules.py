"""The logic of the playground's scripts, run in Node: Markdown, colours, requests, answers, conversations, code."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

FOLDER = resources.files("penstock.api").joinpath("static/console")
SUITES = sorted(Path(__file__).with_name("console_modules").glob("*.mjs"))

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts and their suites in one folder that tells Node that .js files are modules."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "package.json").write_text('{"type": "module"}')
    for entry in FOLDER.iterdir():
        if entry.name.endswith(".js"):
            (folder / entry.name).write_text(entry.read_text())
    for suite in SUITES:
        shutil.copy(suite, folder)
    return folder


@pytest.mark.parametrize("suite", [suite.name for suite in SUITES])
def test_suite(modules: Path, suite: str) -> None:
    done = subprocess.run(
        ["node", "--test", "--test-reporter=spec", suite],
        cwd=modules,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
