"""Vercel's AI SDK, whose schemas are stricter than those of the providers' own SDKs, accepts every answer."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api.conftest import Serve
from tests.api.scripted import scripted

PACKAGES = (
    "ai@6",
    "@ai-sdk/anthropic@3",
    "@ai-sdk/openai@3",
)  # the last that refuse a null for an absent field
SCRIPT = Path(__file__).with_name("vercel_ai_sdk.mjs")


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages and a copy of the script, which Node looks for packages beside."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Vercel's AI SDK needs node and npm, which are not installed.")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text("{}")
    installed = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", *PACKAGES], cwd=folder, capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip(f"npm could not install Vercel's AI SDK: {installed.stderr.strip()[-300:]}")
    shutil.copy(SCRIPT, folder)
    return folder


@pytest.mark.slow
def test_every_way_to_ask(serve: Serve, node_folder: Path) -> None:
    served = serve(scripted("Hello there"))
    run = subprocess.run(
        ["node", SCRIPT.name, served.url],
        cwd=node_folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answered = {"text": "Hello there", "finishReason": "stop", "outputTokens": 12}
    found = json.loads(run.stdout)
    assert len(found) == 9
    assert found == dict.fromkeys(found, answered)
