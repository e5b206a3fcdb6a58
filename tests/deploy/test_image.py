"""Carries out the steps of the Dockerfile in a folder of this machine, without Docker, and runs what came out.

Packages of the distribution are not installed: a compiler must be there. Everything else is as the Dockerfile says,
with `/opt/penstock` and `/source` below the folder. `make test-image` runs it, and installs all dependencies anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.deploy.chart import CHART

ROOT = CHART.parents[2]
FOLDER_VARIABLE = "PENSTOCK_IMAGE_FOLDER"
pytestmark = pytest.mark.skipif(
    FOLDER_VARIABLE not in os.environ, reason="the image is built by make test-image"
)


class Build:
    """The state of a build: where the container's paths lie here, and what ENV and ARG have set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables: dict[str, str] = {}
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self._work = "/"

    def here(self, text: str) -> str:
        return re.sub(
            r"(?<![\w.])/(opt/penstock|source|models|data)(?=[/\s:\"']|$)", rf"{self.folder}/\1", text
        )

    def step(self, instruction: str, rest: str) -> None:
        match instruction:
            case "WORKDIR":
                self._work = self.here(rest)
                Path(self._work).mkdir(parents=True, exist_ok=True)
            case "COPY" if "--from" not in rest:
                *sources, target = rest.split()
                for source in sources:
                    self._copy(ROOT / source, Path(self._work) / target)
            case "ARG":
                name, _, value = rest.partition("=")
                self.variables[name] = os.environ.get(name, value.strip('"'))
            case "ENV":
                for name, value in re.findall(r"(\w+)=(\S+)", rest):
                    self.variables[name] = self.here(value).replace("$PATH", os.environ["PATH"])
            case "RUN" if "apt-get" not in rest and "useradd" not in rest:
                environment = os.environ | self.variables
                subprocess.run(["bash", "-ec", self.here(rest)], cwd=self._work, env=environment, check=True)
            case "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            case "CMD":
                self.command = json.loads(rest)

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
        else:
            shutil.copy(source, target)


def steps() -> list[tuple[str, str]]:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


def test_what_the_dockerfile_builds_serves(tmp_path: Path) -> None:
    build = Build(Path(os.environ[FOLDER_VARIABLE]).absolute())
    python = shutil.which("python3") or sys.executable
    (build.folder / "bin").mkdir(parents=True, exist_ok=True)
    link = build.folder / "bin" / "python"
    link.unlink(missing_ok=True)
    link.symlink_to(python)
    os.environ["PATH"] = f"{link.parent}:{os.environ['PATH']}"
    for instruction, rest in steps():
        build.step(instruction, rest)
    for name in ("models", "data"):
        (build.folder / name).mkdir(exist_ok=True)
    program = shutil.which(build.entrypoint[0], path=build.variables["PATH"])
    assert program == str(build.folder / "opt" / "penstock" / "bin" / "penstock")
    assert build.command[0] == "serve"
    arguments = [word.replace("0.0.0.0", "127.0.0.1") for word in build.command[1:]]
    environment = build.variables | {"PENSTOCK_API_KEY": "a-key-for-this-test"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "serve", "echo", *arguments, "--port", "0"],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        chat = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        headers = {"Authorization": "Bearer a-key-for-this-test"}
        answer = httpx.post(f"{found[0]}/v1/chat/completions", json=chat, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        extras = "import redis, psycopg, opentelemetry.sdk, huggingface_hub"
        subprocess.run([Path(program).with_name("python"), "-c", extras], env=environment, check=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
