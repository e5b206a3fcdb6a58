"""The write-ahead files of the usage ledger: one process appends to them; its flusher reads them back or, after a
crash, another process does.

Each process has a folder of numbered segments, and holds a lock in it for as long as it lives. A line is a checksum
and one JSON entry. It is copied into the mapped pages of a file, which belong to the kernel: it outlives the process,
and costs no system call. Only the loss of power can take lines that were not yet synced. Room for lines is allocated
before it is mapped, so that a full disk is an error there; behind the last line, a segment holds zeros.

Knows no database and no price.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from penstock.gateway.accounts import Claim, Outcome

SECONDS_PER_DAY = 86_400
MAX_NAME_CHARS = 256

# "interrupted": the gateway died between the beginning and the end; what was used is unknown and not charged.
RowStatus: TypeAlias = Literal["completed", "cancelled", "failed", "interrupted"]


class _RequestFields(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a request that are known when it begins."""

    request_id: str
    started_at: float  # Unix seconds
    organization_id: str
    workspace_id: str
    key_id: str
    model: str
    endpoint: str
    tier: str
    user: str | None


class BegunRequest(_RequestFields, frozen=True, array_like=True, tag="begin"):
    """A request that runs. Enough to write a row if the process dies before the request's end."""


class UsageRow(_RequestFields, frozen=True, array_like=True, tag="settle"):
    """A request that is over. Written once; field names are the columns of the table `usage`."""

    status: RowStatus
    error_code: str | None = None
    is_cached: bool = False  # answered from the response cache or an idempotency key: no engine tokens
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    reasoning_tokens: int = 0
    cost_picodollars: int = 0
    duration_s: float = 0.0
    first_token_s: float | None = None

    @property
    def day(self) -> int:
        """Days since the epoch, in UTC."""
        return int(self.started_at // SECONDS_PER_DAY)


JournalEntry: TypeAlias = BegunRequest | UsageRow


def begun_request(claim: Claim, started_at: float) -> BegunRequest:
    principal = claim.principal
    return BegunRequest(
        claim.request_id,
        started_at,
        principal.organization_id,
        principal.workspace_id,
        _bounded(principal.key_id),
        claim.model,
        claim.endpoint,
        str(claim.tier),
        None if claim.user is None else _bounded(claim.user),
    )


def usage_row(begun: BegunRequest, outcome: Outcome, cost_picodollars: int) -> UsageRow:
    usage = outcome.usage
    return UsageRow(
        begun.request_id,
        begun.started_at,
        begun.organization_id,
        begun.workspace_id,
        begun.key_id,
        begun.model,
        begun.endpoint,
        begun.tier,
        begun.user,
        status=outcome.status,
        error_code=outcome.error_code,
        is_cached=outcome.is_cached,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_5m_tokens=usage.cache_write_5m_tokens,
        cache_write_1h_tokens=usage.cache_write_1h_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cost_picodollars=cost_picodollars,
        duration_s=outcome.duration_s,
        first_token_s=outcome.first_token_s,
    )


def interrupted_row(begun: BegunRequest) -> UsageRow:
    return UsageRow(**msgspec.structs.asdict(begun), status="interrupted")


def _bounded(name: str) -> str:
    """Shorten a name for its column. Clients choose the names of users, and tokens the names of subjects."""
    return name[:MAX_NAME_CHARS].replace("\0", "")


SEGMENT_BYTES = 16 << 20
MAX_BYTES = 1 << 30

_OWNER_LOCK = "owner.lock"
_CLAIM_LOCK = "claim.lock"
_SUFFIX = ".journal"
_READ_BYTES = 1 << 20
_ROOM_BYTES = 1 << 20  # that is allocated and mapped at a time

_encode = msgspec.json.Encoder().encode
_decode: Callable[[bytes], JournalEntry] = msgspec.json.Decoder(JournalEntry).decode


class JournalFull(OSError):
    """The journal holds as much as it may, because the database has been away for long."""


def encode_line(entry: JournalEntry) -> bytes:
    payload = _encode(entry)
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def decode_line(line: bytes) -> JournalEntry | None:
    """Decode a line of the journal; None for a line that was torn or damaged."""
    checksum, _, payload = line.rstrip(b"\n").partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(payload):
            return None
        return _decode(payload)
    except (ValueError, msgspec.DecodeError):
        return None


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the journal: how far into which segment."""

    segment: int
    num_bytes: int


class Journal:
    """One process's own journal. One thread changes it; `read` and `sync` may be called from another."""

    def __init__(self, root: Path, *, segment_bytes: int = SEGMENT_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        self.folder, self._lock = _make_folder(root)
        self.num_bytes = 0  # in all segments
        self._sizes: dict[int, int] = {}  # of the segments that still exist, by number
        self._number = 0
        self._file = -1
        self._room: mmap.mmap | None = None  # the part of the file that lines are copied to
        self._room_start = 0
        self._room_end = 0
        self._open_segment()

    @property
    def end(self) -> Position:
        return Position(self._number, self._sizes[self._number])

    @property
    def is_due_to_rotate(self) -> bool:
        return self._sizes[self._number] >= self._segment_bytes

    def append(self, line: bytes) -> None:
        """Write a line. Raises OSError if the line is not in the journal."""
        if self.num_bytes >= self._max_bytes:
            raise JournalFull(f"the usage journal is over its limit of {self._max_bytes} bytes")
        start = self._sizes[self._number]
        end = start + len(line)
        if end > self._room_end:
            self._make_room(start, len(line))
        assert self._room is not None
        self._room[start - self._room_start : end - self._room_start] = line
        self._sizes[self._number] = end
        self.num_bytes += len(line)

    def rotate(self, carried: Iterable[bytes]) -> None:
        """Begin a new segment with the lines that must outlive the old one. Raises OSError, and the old one stays."""
        head = b"".join(carried)
        previous = self._file, self._number, self._room, self._room_start, self._room_end
        self._open_segment()
        try:
            if head:
                self.append(head)
        except OSError:
            # The lines of an incomplete head are in the old segment too, which is deleted later than the new one.
            os.close(self._file)
            (self.folder / _segment_name(self._number)).unlink(missing_ok=True)
            self.num_bytes -= self._sizes.pop(self._number)
            self._file, self._number, self._room, self._room_start, self._room_end = previous
            raise
        self._close_segment(previous[0], previous[1])

    def read(
        self, start: Position, end: Position, max_bytes: int = _READ_BYTES
    ) -> tuple[list[bytes], Position]:
        """Return the next whole lines from `start` on, of one segment, up to `end`; and where the next read
        begins."""
        limit = end.num_bytes if start.segment == end.segment else self._sizes[start.segment]
        with (self.folder / _segment_name(start.segment)).open("rb") as file:
            file.seek(start.num_bytes)
            data = file.read(min(max_bytes, limit - start.num_bytes))
            if not data.endswith(b"\n") and start.num_bytes + len(data) < limit:
                data += file.readline()
        # Without data another process cut the file; missing lines are not waited for.
        reached = Position(start.segment, start.num_bytes + len(data) if data else limit)
        if reached.num_bytes >= limit and start.segment < end.segment:
            reached = Position(start.segment + 1, 0)
        return data.splitlines(keepends=True), reached

    def forget(self, before: Position) -> list[Path]:
        """Give up the segments that lie wholly before a position. The caller deletes the files, off this thread."""
        numbers = [number for number in self._sizes if number < before.segment]
        for number in numbers:
            self.num_bytes -= self._sizes.pop(number)
        return [self.folder / _segment_name(number) for number in numbers]

    def sync(self) -> None:
        """Have the kernel put everything so far on the disk."""
        descriptor = os.dup(self._file)  # a rotation may close the file meanwhile
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, *, delete: bool) -> None:
        """Release the lock. Another process recovers the files that are not deleted."""
        self._room = None
        self._close_segment(self._file, self._number)
        if delete:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _open_segment(self) -> None:
        number = self._number + 1
        path = self.folder / _segment_name(number)
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self._number = number
        self._sizes[number] = 0
        self._room, self._room_start, self._room_end = None, 0, 0

    def _close_segment(self, file: int, number: int) -> None:
        """Give back the room that no line needed."""
        with contextlib.suppress(OSError):  # the rest is zeros, which readers skip
            os.truncate(file, min(self._sizes[number], os.fstat(file).st_size))
        os.close(file)

    def _make_room(self, start: int, num_bytes: int) -> None:
        """Map the file from `start` on, with room for `num_bytes` at least. Raises OSError where the disk is full."""
        first = start - start % mmap.ALLOCATIONGRANULARITY
        length = start - first + max(num_bytes, _ROOM_BYTES)
        _allocate(self._file, first, length)
        self._room = mmap.mmap(self._file, length, offset=first)
        self._room_start, self._room_end = first, first + length


def _allocate(file: int, start: int, num_bytes: int) -> None:
    """Have the file system keep room, which a store into mapped pages could not be refused."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, num_bytes)
        return
    end = os.fstat(file).st_size
    missing = start + num_bytes - end
    if missing > 0 and os.pwrite(file, bytes(missing), end) < missing:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class OrphanedJournal:
    """The journal of a dead process, claimed by this process, so that no other process reads it."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock
        self.num_damaged_lines = 0

    def entries(self) -> Iterator[JournalEntry]:
        """Yield every entry in the order of writing. A last line without an end was being written when the process
        died."""
        self.num_damaged_lines = 0
        for segment in sorted(self.folder.glob(f"*{_SUFFIX}")):
            with segment.open("rb") as file:
                for line in file:
                    entry = decode_line(line) if line.endswith(b"\n") else None
                    if entry is not None:
                        yield entry
                    elif line.endswith(b"\n") and line != b"\n":
                        self.num_damaged_lines += 1

    def release(self, *, delete: bool) -> None:
        if delete:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def claim_orphans(root: Path) -> list[OrphanedJournal]:
    """Claim every journal whose process has died. The caller must release each of them."""
    if not root.is_dir():
        return []
    orphans = []
    with _claiming(root):
        for folder in sorted(path for path in root.iterdir() if path.is_dir()):
            try:
                lock = os.open(folder / _OWNER_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            except OSError:
                continue  # it was just deleted, or belongs to another user
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)  # its owner lives
            else:
                orphans.append(OrphanedJournal(folder, lock))
    return orphans


def _make_folder(root: Path) -> tuple[Path, int]:
    """Make a folder for this process, and lock the folder before another process can take it for an orphan."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = f"{time.time_ns() // 1_000_000:014d}-{os.getpid()}-{secrets.token_hex(4)}"
    with _claiming(root):
        folder = root / name
        folder.mkdir(mode=0o700)
        lock = os.open(folder / _OWNER_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


@contextlib.contextmanager
def _claiming(root: Path) -> Iterator[None]:
    """Hold the lock under which one process at a time makes or claims journals."""
    lock = os.open(root / _CLAIM_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _segment_name(number: int) -> str:
    return f"{number:08d}{_SUFFIX}"
