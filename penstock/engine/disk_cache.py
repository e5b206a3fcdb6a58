"""Keeps cached prefixes on disk, as a collaborator of the engine's loop, and reads them back for requests. Decides
only whether reading a prefix is faster than computing it.

Blocks that leave the device go to host memory (`kvcache.host`). From there a thread writes the blocks to files, so
that they are on disk when host memory drops them. Blocks are lost if the disk is too slow, or if one step needs more
room than host memory has. When the engine closes, blocks that are still on the device are written for a few seconds,
for the next start.

A request whose prefix continues in files waits before the scheduler while threads read, if reading is predicted
to be faster than computing. Its blocks are imported like blocks of another engine (`scheduler.exchange`). When a
file is missing or damaged, the request continues with the blocks that were read before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import struct
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec

from penstock.core.errors import DeadlineExceeded, PenstockError
from penstock.core.figures import format_bytes
from penstock.core.hashing import BlockHash, chain_hashes, root_hash
from penstock.core.messages import EngineStats
from penstock.core.plan import BlockCopy, Draft, StepPlan, StepResult
from penstock.core.request import Request
from penstock.engine.collaborator import Arrival, Collaborator, RecordedExchange
from penstock.kernels.interface import KVStore
from penstock.scheduler.exchange import BlockImport
from penstock.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


FORMAT_VERSION = 1
_HEADER = struct.Struct("<4s16s32sIQ")  # magic, model, block, checksum, bytes that follow
_MAGIC = b"PKV%d" % FORMAT_VERSION
_REST_S = 60.0  # after a failed write, before the next attempt
_STALE_S = 3600.0  # of a file that was never completed


def model_digest(*facts: object) -> bytes:
    """Return the digest of what the bytes of a block depend on."""
    return blake2b(repr((FORMAT_VERSION, facts)).encode(), digest_size=16).digest()


class BlockFiles:
    """KV blocks in files, one for each block, within a size. Knows bytes and hashes; no engine and no request. All
    methods may be called from any thread.

        DIRECTORY/MODEL/ab/abcd….kv     a header with a checksum, then the bytes of a block

    MODEL is `model_digest`. Files of another model are never read, but count in the size, and the oldest files go
    first whichever model they belong to. A file appears under its name only when it is complete. Errors of reads
    and writes are logged, and never raised. Only the user of the process can read the files.
    """

    def __init__(self, directory: Path, max_bytes: int, model: bytes, block_bytes: int) -> None:
        """Raises OSError if files cannot be written there."""
        self._directory = directory / model.hex()
        self._max_bytes = max_bytes
        self._model = model
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._own: set[BlockHash] = set()
        self._rests_until = 0.0
        self.num_written = 0
        self.num_read = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        probe = self._directory / f".probe-{os.getpid()}"
        probe.touch(mode=0o600)
        probe.unlink()
        self._scan(directory)

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._own

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def read(self, block_hash: BlockHash) -> bytes | None:
        """Return the bytes of a block; None if there is no such file, or it is damaged and was removed."""
        path = self._path(block_hash)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            self._forget(path, block_hash)
            return None
        except OSError as error:
            logger.warning("the KV block %s cannot be read: %s", path, error.strerror)
            self._forget(path, block_hash)
            return None
        problem = self._problem(data, block_hash)
        if problem:
            logger.warning("the KV block %s is damaged (%s) and was removed", path, problem)
            self._remove(path, block_hash)
            return None
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
            self.num_read += 1
        return data[_HEADER.size :]

    def write(self, block_hash: BlockHash, contents: bytes) -> bool:
        """Write a block, and remove the oldest files that have no room any more. Returns whether that succeeded."""
        size = _HEADER.size + len(contents)
        if block_hash in self._own or size > self._max_bytes or time.monotonic() < self._rests_until:
            return False
        header = _HEADER.pack(_MAGIC, self._model, block_hash, zlib.crc32(contents), len(contents))
        path = self._path(block_hash)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            self._make_room(size)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(header)
                file.write(contents)
            part.replace(path)
        except OSError as error:
            self._rests_until = time.monotonic() + _REST_S
            logger.warning(
                "KV blocks cannot be written to %s: %s; the next attempt is in %.0f s",
                self._directory,
                error.strerror,
                _REST_S,
            )
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        with self._lock:
            self._sizes[path] = size
            self._num_bytes += size
            self._own.add(block_hash)
            self.num_written += 1
        return True

    def _problem(self, data: bytes, block_hash: BlockHash) -> str:
        if len(data) < _HEADER.size:
            return "it is cut off"
        magic, model, name, checksum, length = _HEADER.unpack_from(data)
        if magic != _MAGIC or model != self._model or name[: len(block_hash)] != block_hash:
            return "it belongs to another block, model or version"
        if length != self._block_bytes or len(data) != _HEADER.size + length:
            return f"it has {len(data) - _HEADER.size} bytes of {self._block_bytes}"
        return "" if zlib.crc32(memoryview(data)[_HEADER.size :]) == checksum else "its checksum is wrong"

    def _scan(self, directory: Path) -> None:
        """Find the files of earlier runs, of this model and of others."""
        found = []
        for path in directory.glob("*/*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix == ".kv":
                    found.append((status.st_mtime, path, status.st_size))
                elif path.suffix == ".part" and time.time() - status.st_mtime > _STALE_S:
                    path.unlink()
        for _, path, size in sorted(found):
            self._sizes[path] = size
            self._num_bytes += size
            if path.parent.parent == self._directory:
                with contextlib.suppress(ValueError):
                    self._own.add(bytes.fromhex(path.stem))
        self._make_room(0)
        if found:
            logger.info(
                "%d KV blocks of this model are on disk, in %s of %s",
                len(self._own),
                format_bytes(self._num_bytes),
                format_bytes(self._max_bytes),
            )

    def _make_room(self, size: int) -> None:
        while self._sizes and self._num_bytes + size > self._max_bytes:
            path = next(iter(self._sizes))
            with contextlib.suppress(ValueError):
                self._remove(path, bytes.fromhex(path.stem))

    def _remove(self, path: Path, block_hash: BlockHash) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
        self._forget(path, block_hash)

    def _forget(self, path: Path, block_hash: BlockHash) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(path, 0)
            if path.parent.parent == self._directory:
                self._own.discard(block_hash)

    def _path(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self._directory / name[:2] / f"{name}.kv"


FEWEST_BLOCKS = 2  # fewer are computed at once
READERS = 4  # requests whose blocks are read at the same time
MOST_WAITING_BYTES = 64 << 20  # for the writer
STEP_BYTES = 32 << 20  # copied between two steps
CLOSING_S = 3.0
PATIENCE_S = 2.0  # wait for free blocks in the cache, once blocks are read
_TOO_LATE = "The deadline passed while cached KV was read from disk."
_FIRST_BYTES_PER_S = 1e9  # before the first read
_FILE_S = 2e-4
_GAIN = 0.2  # of the newest read in the average


@dataclass(slots=True)
class _Read:
    """A prefix that is being read for a request, and the requests that wait for the same prefix."""

    arrival: Arrival
    hashes: list[BlockHash]  # of the blocks to be read
    truncated: Request  # whose full blocks end with the last of them
    # None: there are no more.
    blocks: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    followers: list[Arrival] = field(default_factory=list)
    begun: BlockImport | None = None
    num_filled: int = 0
    room_sought_s: float | None = None
    is_over: bool = False


class DiskCache(Collaborator):
    def __init__(
        self, files: BlockFiles, kv: KVStore, scheduler: Scheduler, exchange: RecordedExchange
    ) -> None:
        self._files = files
        self._kv = kv
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._exchange = exchange
        self._reads: dict[BlockHash, _Read] = {}  # by the first block to be read
        self._forgotten: set[str] = set()
        self._block_s = kv.block_bytes / _FIRST_BYTES_PER_S + _FILE_S
        # By plan in flight: blocks, and their slots.
        self._spilled: deque[list[tuple[BlockHash, int]]] = deque()
        self._to_write: queue.Queue[tuple[BlockHash, bytes] | None] = queue.Queue()
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()  # of the number before
        self._progress = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-reader")
        self._writer = threading.Thread(target=self._write_all, name="kv-writer", daemon=True)
        self._writer.start()

    def __len__(self) -> int:
        return sum(1 + len(read.followers) for read in self._reads.values())

    def must_wait(self, arrival: Arrival) -> bool:
        return bool(self._worth_reading(arrival.request))

    def enter(self, arrival: Arrival, now: float) -> None:
        hashes = self._worth_reading(arrival.request)
        read = self._reads.get(hashes[0])
        if read is not None:
            read.followers.append(arrival)
            return
        num_blocks = self._cache.match_on_device(self._hashes(arrival.request)) + len(hashes)
        tokens = arrival.request.prompt_token_ids[: num_blocks * self._cache.block_size + 1]
        truncated = msgspec.structs.replace(arrival.request, prompt_token_ids=tokens, output_token_ids=())
        read = self._reads[hashes[0]] = _Read(arrival, hashes, truncated)
        self._readers.submit(self._read_all, read)

    def ready(self, now: float, *, is_idle: bool) -> Iterator[tuple[Arrival, PenstockError | None]]:
        if not self._reads:
            return
        if is_idle:
            self._progress.wait(0.002)
            self._progress.clear()
        budget = max(1, STEP_BYTES // max(1, self._kv.block_bytes))
        for key, read in list(self._reads.items()):
            budget -= self._bring_in(read, budget, now)
            late = read.arrival.request.deadline_s
            if not read.is_over and late is not None and late <= now:
                self._finish(read)
            if read.is_over:
                del self._reads[key]
                for arrival in (read.arrival, *read.followers):
                    if arrival.request.id in self._forgotten:
                        self._forgotten.discard(arrival.request.id)
                        continue
                    deadline_s = arrival.request.deadline_s
                    is_late = deadline_s is not None and deadline_s <= now
                    yield arrival, DeadlineExceeded(_TOO_LATE) if is_late else None

    def forget(self, request_id: str) -> None:
        if any(
            arrival.request.id == request_id
            for read in self._reads.values()
            for arrival in (read.arrival, *read.followers)
        ):
            self._forgotten.add(request_id)

    def planned(self, plan: StepPlan | None, drafts: Mapping[str, Draft], now: float) -> None:
        if plan is None:
            return
        slots = {copy.host_slot for copy in plan.copies if isinstance(copy, BlockCopy) and copy.to_host}
        held = ((self._cache.pool.host.hash_at(slot), slot) for slot in sorted(slots))
        self._spilled.append([(each, slot) for each, slot in held if each is not None])

    def committed(self, result: StepResult, now: float) -> None:
        """Hand blocks that have arrived in host memory to the writer, if they are still there."""
        for block_hash, slot in self._spilled.popleft():
            if self._num_waiting_bytes >= MOST_WAITING_BYTES:
                return
            if block_hash not in self._files and self._cache.pool.host.hash_at(slot) == block_hash:
                self._hand_over(block_hash, self._kv.read_host(slot))

    def add_stats(self, stats: EngineStats) -> EngineStats:
        return msgspec.structs.replace(
            stats,
            num_disk_blocks=len(self._files),
            num_disk_bytes=self._files.num_bytes,
            num_blocks_to_disk=self._files.num_written,
            num_blocks_from_disk=self._files.num_read,
        )

    def close(self) -> None:
        """Write the cached blocks of the device, for a few seconds, and end the threads."""
        self._readers.shutdown(cancel_futures=True)
        ends_s = time.monotonic() + CLOSING_S
        if self._cache.num_host_blocks:
            for block_hash, block in reversed(list(self._cache.pool.index.items())):
                if time.monotonic() > ends_s:
                    break
                if block_hash not in self._files:
                    self._kv.copy_to_host([block.block_id], [0])  # host memory is no longer in use
                    self._hand_over(block_hash, self._kv.read_host(0))
                while self._num_waiting_bytes > MOST_WAITING_BYTES and time.monotonic() < ends_s:
                    time.sleep(0.01)
        self._to_write.put(None)
        self._writer.join(CLOSING_S)

    def _worth_reading(self, request: Request) -> list[BlockHash]:
        """Return the next blocks of a request's prefix that are on disk and on no other tier, if reading them is
        predicted to be quicker than computing them."""
        if not len(self._files) or request.images or request.pooling is not None:
            return []
        if request.sampling.prompt_logprobs is not None:
            return []
        hashes = self._hashes(request)
        num_here, start = self._cache.match(hashes), self._cache.match_on_device(hashes)
        end = start  # an import has no gaps: blocks in host memory are read from disk too
        while end < len(hashes) and hashes[end] in self._files:
            end += 1
        size, num_new = self._cache.block_size, end - num_here
        if num_new < FEWEST_BLOCKS:
            return []
        if (end - start) * self._block_s > self._scheduler.prefill_s(num_here * size, num_new * size):
            return []
        return hashes[start:end]

    def _hashes(self, request: Request) -> list[BlockHash]:
        tokens = request.prompt_token_ids[:-1]  # the last token is always computed
        return chain_hashes(root_hash(request.prefix_salt), tokens, self._cache.block_size)

    def _read_all(self, read: _Read) -> None:
        """Read the blocks of a prefix one after the other; in a thread."""
        for block_hash in read.hashes:
            began_s = time.monotonic()
            contents = self._files.read(block_hash)
            self._block_s += _GAIN * (time.monotonic() - began_s - self._block_s)
            read.blocks.put(contents)
            self._progress.set()
            if contents is None:
                return
        read.blocks.put(None)
        self._progress.set()

    def _bring_in(self, read: _Read, budget: int, now: float) -> int:
        """Copy blocks that have been read into the cache, at most `budget`. Returns how many."""
        if read.begun is None and not self._begin(read, now):
            return 0
        count = 0
        while count < budget and read.begun is not None:
            try:
                contents = read.blocks.get_nowait()
            except queue.Empty:
                break
            # Blocks that came to the device meanwhile are skipped.
            at = read.num_filled - (len(read.hashes) - len(read.begun.hashes))
            if contents is None or at >= len(read.begun.block_ids):
                self._finish(read)
                break
            if at >= 0:
                self._kv.write_block(read.begun.block_ids[at], contents)
                count += 1
            read.num_filled += 1
        return count

    def _begin(self, read: _Read, now: float) -> bool:
        """Find room in the cache once the first block is read. If there is no room for too long, the request computes
        the blocks."""
        if read.blocks.empty():
            return False
        if read.room_sought_s is None:
            read.room_sought_s = now
        read.begun = self._exchange.begin_import(read.truncated)
        if read.begun is None:
            waited_s = now - read.room_sought_s
            read.is_over = waited_s > PATIENCE_S or not self._exchange.num_missing(read.truncated)
        elif len(read.begun.hashes) > len(read.hashes):  # blocks left the device meanwhile
            self._finish(read)
        return read.begun is not None

    def _finish(self, read: _Read) -> None:
        if read.begun is not None:
            skipped = len(read.hashes) - len(read.begun.hashes)
            self._exchange.finish_import(read.begun, max(0, read.num_filled - skipped))
            read.begun = None
        read.is_over = True

    def _hand_over(self, block_hash: BlockHash, contents: bytes) -> None:
        with self._lock:
            self._num_waiting_bytes += len(contents)
        self._to_write.put((block_hash, contents))

    def _write_all(self) -> None:
        while (item := self._to_write.get()) is not None:
            self._files.write(*item)
            with self._lock:
                self._num_waiting_bytes -= len(item[1])
