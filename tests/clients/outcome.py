"""What a client's script reported, and the table of all clients in docs/clients.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.catalogue import CAPABILITIES, OTHER, Client
from tests.clients.environments import Finished

PAGE = Path(__file__).parents[2] / "docs/clients.md"
BEGIN = "<!-- make test-clients ARGS=--write-table: begin -->"
END = "<!-- make test-clients ARGS=--write-table: end -->"
_HEADER = ("client", "version", *CAPABILITIES, "also")
_MAX_NOTE_CHARS = 200  # of what failed
_SIGNS = {True: "✓", False: "✗", None: "–"}


@dataclass(frozen=True)
class Report:
    """One capability: whether it works. None: the client does not have it, and the note says why."""

    ok: bool | None
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    version: str
    reports: Mapping[str, Report]
    finished: Finished


def read_outcome(client: Client, version: str, finished: Finished) -> Outcome:
    """Several lines about one capability are one report: it works if all of them say so. A capability without a line
    does not work, because the script ended before."""
    found: dict[str, list[Report]] = {}
    for line in finished.stdout.splitlines():
        fields = _fields(line)
        if "version" in fields:
            version = str(fields["version"])
        elif fields.get("capability") in (*CAPABILITIES, OTHER):
            ok, note = fields.get("ok", False), str(fields.get("note") or "")
            found.setdefault(str(fields["capability"]), []).append(
                Report(ok if ok is None else ok is True, note)
            )
    if finished.status == 0:
        ending = "the script said nothing about it"
    else:
        how = "ran out of time" if finished.status is None else f"ended with status {finished.status}"
        ending = f"the script {how}: {finished.stderr.strip()[-1500:]}"
    missing = Report(False, ending)
    return Outcome(
        version,
        {
            name: _together(found[name]) if name in found else missing
            for name in (*client.capabilities, *found)
        },
        finished,
    )


def _fields(line: str) -> dict[str, object]:
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _together(reports: Sequence[Report]) -> Report:
    worst = next((report for report in reports if report.ok is False), None)
    if worst is not None:
        return worst
    ok = True if any(report.ok for report in reports) else None
    return Report(ok, ", ".join(report.note for report in reports if report.note))


def write_table(clients: Sequence[Client], outcomes: Mapping[str, Outcome], page: Path = PAGE) -> None:
    """Replace the rows of the clients that ran. The rows of other clients stay as they are."""
    before, rest = page.read_text().split(BEGIN)
    old, after = rest.split(END)
    rows = {match[1]: line for line in old.splitlines() if (match := re.match(r"\| \[(.+?)\]", line))}
    rows |= {
        client.title: _row(client, outcomes[client.name]) for client in clients if client.name in outcomes
    }
    lines = [
        f"| {' | '.join(_HEADER)} |",
        "|---|---|" + ":-:|" * len(CAPABILITIES) + "---|",
        *(rows[client.title] for client in clients if client.title in rows),
    ]
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


def _row(client: Client, outcome: Outcome) -> str:
    reports = outcome.reports
    signs = [_SIGNS[reports[name].ok] if name in reports else "" for name in CAPABILITIES]
    other = reports.get(OTHER, Report(None))
    also = " ".join(other.note.replace("|", "/").split())  # a row is one line
    if other.ok is False:
        also = f"✗ {also[:_MAX_NOTE_CHARS]}"
    cells = [f"[{client.title}](#{client.recipe})", outcome.version, *signs, also]
    return f"| {' | '.join(cells)} |"
