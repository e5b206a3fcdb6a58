"""aider: one message about a file, streamed and whole, and a wrong key. A model this small edits nothing sensible, so
the script looks at what aider says of the exchange."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from report import API_KEY, BASE_URL, MODEL, capability

Path("hello.py").write_text("print('hello')\n")
Path("models.json").write_text(
    f'{{"openai/{MODEL}": {{"max_input_tokens": 8192, "max_output_tokens": 256, "litellm_provider": "openai", '
    '"mode": "chat", "input_cost_per_token": 0, "output_cost_per_token": 0}}'
)
Path("settings.yml").write_text(
    f"- name: openai/{MODEL}\n  edit_format: whole\n  use_repo_map: false\n  extra_params: {{max_tokens: 40}}\n"
)


def aider(*options: str, key: str = API_KEY) -> str:
    command = ["aider", "--model", f"openai/{MODEL}", "--message", "/ask What does this program print?"]
    command += ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-pretty"]
    command += ["--analytics-disable", "--no-detect-urls", "--model-metadata-file", "models.json"]
    command += ["--model-settings-file", "settings.yml", *options, "hello.py"]
    settings = {**os.environ, "OPENAI_API_BASE": f"{BASE_URL}/v1", "OPENAI_API_KEY": key}
    finished = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=200, check=False)
    return finished.stdout + finished.stderr


for name, option in (("stream", "--stream"), ("chat", "--no-stream")):
    with capability(name):
        said = aider(option)
        assert "received" in said, said[-1500:]

with capability("errors"):
    said = aider("--no-stream", key="wrong")
    assert "AuthenticationError" in said, said[-1500:]
