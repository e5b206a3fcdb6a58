"""Environments of clients below `.clients`: packages from PyPI and npm, installed once per list of packages."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

from tests.clients.catalogue import Client

ROOT = Path(__file__).parents[2] / ".clients"
INSTALL_TIMEOUT_S = 1500.0
_INTERPRETERS = {".mjs": "node", ".sh": "bash", ".java": "java"}
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "JAVA_HOME")


class CannotInstall(Exception):
    """Says why a client cannot be had here: no network, no build for this processor, a missing command."""


@dataclass(frozen=True)
class Finished:
    """A process that ended, or that was killed at its time limit: then `status` is None."""

    status: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Environment:
    folder: Path
    version: str  # empty where only the script can tell

    @property
    def python(self) -> str:
        own = self.folder / "venv/bin/python"
        return str(own) if own.exists() else sys.executable

    def run(self, client: Client, variables: Mapping[str, str]) -> Finished:
        """Run the script away from the user's home and keys. No process of the script outlives the run."""
        with tempfile.TemporaryDirectory(prefix=f"client-{client.name}-") as home:
            kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            bins = [self.folder / "venv/bin", self.folder / "node_modules/.bin", kept["PATH"]]
            settings = {
                **kept,
                "PATH": ":".join(map(str, bins)),
                "HOME": home,
                "NO_PROXY": "127.0.0.1",
                "SCRIPTS": str(client.path.parent),
                **variables,
            }
            return run(self._command(client), client.timeout_s, cwd=Path(home), env=settings)

    def _command(self, client: Client) -> list[str]:
        suffix = client.path.suffix
        if suffix == ".py":
            return [self.python, str(client.path)]
        if suffix == ".mjs":  # Node looks for packages beside the script
            shutil.copy(client.path.with_name("report.mjs"), self.folder)
            return ["node", str(shutil.copy(client.path, self.folder))]
        return [_INTERPRETERS[suffix], str(client.path)]


def prepare(client: Client, root: Path = ROOT) -> Environment:
    """Install what the client needs, unless that was done before. Raises CannotInstall."""
    interpreter = _INTERPRETERS.get(client.path.suffix)
    commands = {*client.commands, *([interpreter] if interpreter else []), *(["npm"] if client.npm else [])}
    if missing := sorted(command for command in commands if shutil.which(command) is None):
        raise CannotInstall(f"{client.title} needs {', '.join(missing)} on PATH")
    folder = root / client.folder
    if client.quick:
        return Environment(folder, version(_bare_name(client.pip[0])))
    stamp = folder / "installed.json"
    wanted = [*client.pip, *client.npm]
    with _alone(folder):
        if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
            _install(client, folder)
            stamp.write_text(json.dumps(wanted))
    return Environment(folder, _version(client, folder))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Several processes of pytest may want one folder: one of them installs, and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(
    command: Sequence[str], timeout_s: float, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Finished:
    """Run a command in a process group of its own, which is killed at the end."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Finished(status, _text(stdout), _text(stderr))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _install(client: Client, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.pip:
        # The pip of this environment installs into the new one: another pip takes longer than most clients.
        _step(client, [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv/bin/python"), "install"]
        _step(client, [*pip, "-q", "--prefer-binary", *client.pip])
    if client.npm:
        (folder / "package.json").write_text("{}")
        _step(client, ["npm", "install", "--no-audit", "--no-fund", *client.npm], cwd=folder)


def _step(client: Client, command: list[str], cwd: Path | None = None) -> None:
    finished = run(command, INSTALL_TIMEOUT_S, cwd=cwd)
    if finished.status != 0:
        lines = finished.stderr.strip().splitlines() or [f"status {finished.status}"]
        # Node ends the story of its own crash with its version, and npm ends with the place of its log.
        why = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise CannotInstall(f"{client.title} does not install here: {why[:300]}")


def _version(client: Client, folder: Path) -> str:
    if client.pip:
        python = str(folder / "venv/bin/python")
        code = f"from importlib.metadata import version; print(version({_bare_name(client.pip[0])!r}))"
        return run([python, "-c", code], 60.0).stdout.strip()
    if client.npm:
        name = client.npm[0]
        name = name[: name.index("@", 1)] if "@" in name[1:] else name
        return str(json.loads((folder / "node_modules" / name / "package.json").read_text())["version"])
    return ""


def _bare_name(requirement: str) -> str:
    for end in "[<>=!~; ":
        requirement = requirement.split(end)[0]
    return requirement
