"""`penstock usage` on a database with a few rows."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli.commands import penstock
from penstock.gateway.ledger.journal import begun_request, usage_row
from penstock.gateway.ledger.usage_store import insert_rows
from penstock.gateway.store.database import Database, sqlite_url
from tests.gateway.ledger.samples import claim, outcome


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    now = time.time()
    rows = [
        usage_row(begun_request(asked, started_at), ended, cost)
        for asked, ended, started_at, cost in (
            (claim("a", key="key_1"), outcome(), now, 1_500_000),
            (claim("b", key="key_1"), outcome(status="failed", error_code="overloaded"), now, 0),
            (claim("c", key="key_2", model="other"), outcome(), now, 10**12),
            (claim("d", key="key_2"), outcome(), now - 40 * 86_400, 7),
        )
    ]
    database = Database(sqlite_url(tmp_path))
    database.run_now(lambda connection: insert_rows(connection, rows))
    database.close()
    return tmp_path


def run(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(penstock, ["usage", "--data-dir", str(data_dir), *arguments])


def test_a_table_by_key_and_model(data_dir: Path) -> None:
    lines = [line.split() for line in run(data_dir, "--by", "key,model").stdout.splitlines()]
    assert lines[0][:4] == ["key", "model", "requests", "completed"]
    assert [(line[0], line[1], line[2], line[-1]) for line in lines[1:]] == [
        ("key_1", "m", "2", "0.0000015"),
        ("key_2", "other", "1", "1.00"),
    ]


def test_csv(data_dir: Path) -> None:
    found = list(csv.DictReader(io.StringIO(run(data_dir, "--by", "status", "--csv").stdout)))
    assert [(row["status"], row["requests"], row["prompt_tokens"]) for row in found] == [
        ("completed", "2", "20"),
        ("failed", "1", "10"),
    ]


def test_no_cell_of_a_csv_is_a_formula(data_dir: Path) -> None:
    """Subjects of identity providers are ids of keys."""
    row = usage_row(begun_request(claim("e", key='=HYPERLINK("x")'), time.time()), outcome(), 0)
    database = Database(sqlite_url(data_dir))
    database.run_now(lambda connection: insert_rows(connection, [row]))
    database.close()
    found = list(csv.DictReader(io.StringIO(run(data_dir, "--by", "key", "--csv").stdout)))
    assert [row["key"] for row in found] == ['\'=HYPERLINK("x")', "key_1", "key_2"]


@pytest.mark.parametrize("name", ["x\r=1+1", "\t=1+1", "\x1b[2Jx", "\x9b2Jx", "a\u202eb"])
def test_no_control_character_of_a_name_is_in_csv_or_json(data_dir: Path, name: str) -> None:
    """A lone carriage return begins a row for spreadsheets, and terminals obey the others."""
    row = usage_row(begun_request(claim("e", key=name), time.time()), outcome(), 0)
    database = Database(sqlite_url(data_dir))
    database.run_now(lambda connection: insert_rows(connection, [row]))
    database.close()
    for form in ("--csv", "--json"):
        text = run(data_dir, "--by", "key", form).stdout
        assert all(character.isprintable() for line in text.split("\n") for character in line)
    assert name in [entry["key"] for entry in json.loads(text)["data"]]


def test_no_name_of_a_client_reaches_the_terminal_as_a_command(data_dir: Path) -> None:
    row = usage_row(begun_request(claim("e", key="a\x1b[2J\nb"), time.time()), outcome(), 0)
    database = Database(sqlite_url(data_dir))
    database.run_now(lambda connection: insert_rows(connection, [row]))
    database.close()
    lines = run(data_dir, "--by", "key").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["key", r"a\x1b[2J\nb", "key_1", "key_2"]


def test_json_pages_and_filters(data_dir: Path) -> None:
    first = run(data_dir, "--by", "key", "--limit", "1", "--json")
    page = json.loads(first.stdout)
    assert [entry["key"] for entry in page["data"]] == ["key_1"]
    again = run(data_dir, "--by", "key", "--limit", "1", "--json", "--page", page["next_page"])
    assert [entry["key"] for entry in json.loads(again.stdout)["data"]] == ["key_2"]
    only = json.loads(run(data_dir, "--by", "", "--model", "other", "--json").stdout)
    assert only["data"][0]["requests"]["total"] == 1


def test_older_usage_when_asked_for(data_dir: Path) -> None:
    (total,) = json.loads(run(data_dir, "--by", "", "--start", "2020-01-01", "--json").stdout)["data"]
    assert total["requests"]["total"] == 4


def test_without_a_database_there_is_nothing_and_none_is_made(tmp_path: Path) -> None:
    result = run(tmp_path / "none")
    assert result.exit_code == 0
    assert "There was no usage" in result.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--by", "modle"), "Usage cannot be grouped by 'modle'."),
        (("--start", "soon"), "--start must be a day"),
        (("--json", "--csv"), "Choose either --json or --csv."),
        (("--page", "x"), "page is not what an earlier answer called next_page."),
    ],
)
def test_mistakes_are_sentences(data_dir: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = run(data_dir, *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
