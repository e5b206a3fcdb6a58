"""The journal loses nothing that was written, wherever a crash cuts it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.ledger import journal as journal_module
from penstock.gateway.ledger.journal import (
    BegunRequest,
    Journal,
    JournalEntry,
    JournalFull,
    OrphanedJournal,
    Position,
    UsageRow,
    begun_request,
    claim_orphans,
    decode_line,
    encode_line,
    usage_row,
)
from penstock.gateway.ledger.ledger import recovered_rows
from tests.gateway.ledger.samples import claim, outcome


def begin(name: str) -> BegunRequest:
    return begun_request(claim(name), 1.0)


def settled(name: str, **changes: Any) -> UsageRow:
    return usage_row(begun_request(claim(name), 1.0), outcome(**changes), 7)


def read_all(journal: Journal) -> list[JournalEntry | None]:
    position, entries = Position(1, 0), []
    while position != journal.end:
        lines, position = journal.read(position, journal.end, max_bytes=100)
        entries += map(decode_line, lines)
    return entries


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path, segment_bytes=400)
    yield journal
    journal.close(delete=True)


def test_what_is_appended_is_read_back(journal: Journal) -> None:
    entries = [begin("ä\n"), settled("ä\n"), begin("b")]
    for entry in entries:
        journal.append(encode_line(entry))
    assert read_all(journal) == entries


def test_a_changed_byte_is_noticed() -> None:
    line = encode_line(settled("a"))
    for place in range(len(line) - 1):
        assert decode_line(line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :]) != settled("a")
    assert decode_line(line) == settled("a")


def test_segments_are_read_in_turn_and_given_up_when_they_are_done(journal: Journal) -> None:
    entries = [settled(str(number)) for number in range(20)]
    for entry in entries:
        if journal.is_due_to_rotate:
            journal.rotate([])
        journal.append(encode_line(entry))
    assert read_all(journal) == entries
    assert journal.end.segment > 3
    gone = journal.forget(journal.end)
    assert len(gone) == journal.end.segment - 1
    assert journal.num_bytes == journal.end.num_bytes


def test_a_file_that_somebody_cut_is_not_read_for_ever(journal: Journal) -> None:
    for name in ("a", "b"):
        journal.append(encode_line(settled(name)))
    os.truncate(journal.folder / "00000001.journal", len(encode_line(settled("a"))))
    assert read_all(journal) == [settled("a")]


def test_it_is_bounded(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_bytes=1000)
    line = encode_line(settled("a"))
    while journal.num_bytes < 1000:
        journal.append(line)
    with pytest.raises(JournalFull):
        journal.append(line)


def no_space(file: int, start: int, num_bytes: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_that_did_not_fit_does_not_spoil_the_next(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_ROOM_BYTES", 1)  # each line needs room of its own
    journal.append(encode_line(settled("first")))
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_allocate", no_space)
        with pytest.raises(OSError, match="No space"):
            journal.append(encode_line(settled("none")))
    journal.append(encode_line(settled("second")))
    assert read_all(journal) == [settled("first"), settled("second")]


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_lines_longer_than_the_room_and_files_without_fallocate(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, has_fallocate: bool
) -> None:
    monkeypatch.setattr(journal_module, "_ROOM_BYTES", 5_000)
    if not has_fallocate:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    entries = [settled(str(number) * (1 + 700 * (number % 9))) for number in range(60)]
    for entry in entries:
        journal.append(encode_line(entry))
    assert read_all(journal) == entries


def test_a_failed_rotation_leaves_everything_as_it_was(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(encode_line(begin("a")))
    before = journal.end
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_allocate", no_space)
        with pytest.raises(OSError, match="No space"):
            journal.rotate([encode_line(begin("a"))])
    assert journal.end == before
    journal.append(encode_line(settled("a")))
    journal.rotate([])
    assert read_all(journal) == [begin("a"), settled("a")]
    first = journal.folder / "00000001.journal"
    assert b"\0" not in first.read_bytes(), "a segment that is over gives back its room"


def test_the_journal_of_a_living_process_is_nobodys_orphan(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert claim_orphans(tmp_path) == []
    journal.close(delete=False)
    (orphan,) = claim_orphans(tmp_path)
    assert claim_orphans(tmp_path) == [], "claimed twice"
    orphan.release(delete=True)
    assert claim_orphans(tmp_path) == []


def test_what_cannot_be_claimed_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "stray file").touch()
    odd = tmp_path / "odd" / "owner.lock"
    odd.mkdir(parents=True)  # a folder where the lock should be
    assert claim_orphans(tmp_path) == []


def test_a_killed_process_leaves_what_it_wrote(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from penstock.gateway.ledger.journal import Journal\n"
        "journal = Journal(pathlib.Path(sys.argv[1]))\n"
        "journal.append(sys.stdin.buffer.read())\n"
        "os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.run([sys.executable, "-c", script, tmp_path], input=encode_line(settled("a")))
    assert process.returncode == -9
    (orphan,) = claim_orphans(tmp_path)
    assert list(orphan.entries()) == [settled("a")]
    assert orphan.num_damaged_lines == 0, "the room behind the last line is no line"
    orphan.release(delete=False)


steps = st.lists(st.tuples(st.sampled_from(["begin", "settle", "rotate"]), st.integers(0, 9)), max_size=40)


@settings(deadline=None)  # it writes files
@given(steps, st.data())
def test_recovery_after_a_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Write a history of requests in rotating segments, cut the last segment anywhere, and recover: every request
    whose settling was written whole has its row, every other that began is interrupted, and nothing else is there."""
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    open_lines: dict[str, bytes] = {}
    written: list[tuple[int, JournalEntry]] = []  # with the end of its line, in the last segment
    for serial, (step, number) in enumerate(history):
        names = sorted(open_lines)
        if step == "rotate":
            journal.rotate(open_lines.values())
            written = [(0, entry) for _, entry in written]
            continue
        if step == "begin":
            entry: JournalEntry = begin(str(serial))
            open_lines[str(serial)] = encode_line(entry)
        elif names:
            name = names[number % len(names)]
            entry = settled(name)
            del open_lines[name]
        else:
            continue
        journal.append(encode_line(entry))
        written.append((journal.end.num_bytes, entry))
    last = sorted(journal.folder.glob("*.journal"))[-1]
    cut = data.draw(st.integers(0, journal.end.num_bytes))
    os.truncate(last, cut)
    survived = [entry for end, entry in written if end <= cut]
    journal.close(delete=False)

    (orphan,) = claim_orphans(folder)
    rows = list(recovered_rows(orphan.entries()))
    orphan.release(delete=True)
    settled_names = {entry.request_id for entry in survived if isinstance(entry, UsageRow)}
    begun_names = {entry.request_id for entry in survived}
    assert sorted(row.request_id for row in rows) == sorted(begun_names)
    for row in rows:
        assert row.status == ("completed" if row.request_id in settled_names else "interrupted")


def test_a_damaged_line_in_the_middle_costs_only_itself(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for entry in (settled("a"), settled("b"), settled("c")):
        journal.append(encode_line(entry))
    path = journal.folder / "00000001.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"b", b"x") + lines[2])
    orphan = OrphanedJournal(journal.folder, os.open(path, os.O_RDONLY))
    assert [entry.request_id for entry in orphan.entries()] == ["a", "c"]
    assert orphan.num_damaged_lines == 1
    orphan.release(delete=False)
    journal.close(delete=True)
