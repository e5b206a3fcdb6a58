"""The harness itself: what scripts print becomes reports, rows and skips, and no process outlives a script."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.clients import environments
from tests.clients.catalogue import CAPABILITIES, CLIENTS, OTHER, Client
from tests.clients.environments import CannotInstall, Environment, Finished, prepare, run
from tests.clients.outcome import BEGIN, END, PAGE, Outcome, Report, read_outcome, write_table

CLIENT = Client("one", "One", "openai_sdk.py", ("chat", "stream"), "one")


def lines(*fields: dict[str, object]) -> Finished:
    return Finished(0, "\n".join(["noise", "3", *map(json.dumps, fields)]), "")


def test_catalogue() -> None:
    names = [client.name for client in CLIENTS]
    assert names == sorted(set(names))
    headings = {
        line.lstrip("# ").lower().replace(" ", "-")
        for line in PAGE.read_text().splitlines()
        if line[:1] == "#"
    }
    for client in CLIENTS:
        assert client.path.exists(), client.script
        assert set(client.capabilities) <= {*CAPABILITIES, OTHER}, client.name
        assert client.recipe in headings, f"docs/clients.md has no recipe {client.recipe}"


def test_reports_of_one_capability_are_joined() -> None:
    found = read_outcome(
        CLIENT,
        "1.0",
        lines(
            {"capability": "chat", "ok": True, "note": "a"},
            {"capability": "chat", "ok": None, "note": "b"},
            {"capability": "stream", "ok": True},
            {"capability": "stream", "ok": False, "note": "broken"},
            {"capability": "tools", "ok": None, "note": "has none"},
            {"capability": "flying", "ok": True},
            {"version": "17"},
        ),
    )
    assert found.version == "17"
    assert found.reports == {
        "chat": Report(True, "a, b"),
        "stream": Report(False, "broken"),
        "tools": Report(None, "has none"),
    }


@pytest.mark.parametrize(
    ("finished", "why"),
    [
        (Finished(0, "", ""), "said nothing"),
        (Finished(3, "", "Traceback: no"), "status 3: Traceback: no"),
        (Finished(None, "", ""), "ran out of time"),
    ],
)
def test_a_capability_without_a_line_failed(finished: Finished, why: str) -> None:
    report = read_outcome(CLIENT, "1", finished).reports["stream"]
    assert report.ok is False
    assert why in report.note


def test_the_table_keeps_the_rows_of_clients_that_did_not_run(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text(f"# Clients\n\n{BEGIN}\n{END}\n\nAfter.\n")
    two = replace(CLIENT, name="two", title="Two", recipe="two")
    works = {"chat": Report(True), "stream": Report(None), "tools": Report(False), OTHER: Report(True, "a|b")}
    write_table((CLIENT, two), {"two": Outcome("2", works, lines())}, page)
    write_table((CLIENT, two), {"one": Outcome("1", {"chat": Report(True)}, lines())}, page)
    assert page.read_text().splitlines() == [
        "# Clients",
        "",
        BEGIN,
        "| client | version | chat | stream | tools | structured | files | errors | cancel | also |",
        "|---|---|:-:|:-:|:-:|:-:|:-:|:-:|:-:|---|",
        "| [One](#one) | 1 | ✓ |  |  |  |  |  |  |  |",
        "| [Two](#two) | 2 | ✓ | – | ✗ |  |  |  |  | a/b |",
        END,
        "",
        "After.",
    ]


def test_a_failure_with_many_lines_stays_in_its_row(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    log = Report(False, "it ended:\nline | two\n" + "x" * 5000)
    write_table((CLIENT,), {"one": Outcome("1", {"chat": Report(False), OTHER: log}, lines())}, page)
    row = page.read_text().splitlines()[3]
    assert row.startswith("| [One](#one) | 1 | ✗ |  |  |  |  |  |  | ✗ it ended: line / two xxx")
    assert len(row) < 300


def test_processes_end_with_the_run(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 600 & echo $! > {child}; sleep 600"
    timeout_s = 1.0
    while True:  # on a busy machine, bash needs longer for its first line
        assert run(["bash", "-c", script], timeout_s).status is None
        if child.exists() and (written := child.read_text()).endswith("\n"):
            break
        timeout_s *= 2
    pid = int(written)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_not_here_is_told(tmp_path: Path) -> None:
    with pytest.raises(CannotInstall, match="One needs no-such-command on PATH"):
        prepare(replace(CLIENT, commands=("no-such-command",)), tmp_path)
    with pytest.raises(CannotInstall, match="One does not install here"):
        prepare(replace(CLIENT, pip=(str(tmp_path / "no-such-package"),)), tmp_path)
    assert not (tmp_path / "one/installed.json").exists()


def test_one_process_installs_while_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installations into one folder would break each other."""
    installs = threading.Event()

    def install(client: Client, folder: Path) -> None:
        folder.mkdir()
        installs.set()

    monkeypatch.setattr(environments, "_install", install)
    other = threading.Thread(target=prepare, args=(CLIENT, tmp_path))
    with environments._alone(tmp_path / "one"):
        other.start()
        assert not installs.wait(0.2)
    other.join()
    assert installs.is_set()


def test_scripts_see_neither_the_home_nor_the_keys_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "show.sh"
    script.write_text("env\n")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    finished = Environment(tmp_path, "").run(replace(CLIENT, script=str(script)), {"BASE_URL": "http://x"})
    seen = dict(line.split("=", 1) for line in finished.stdout.splitlines())
    assert seen["BASE_URL"] == "http://x"
    assert seen["HOME"] != os.environ.get("HOME")
    assert "OPENAI_API_KEY" not in seen
