"""Prompt caching at breakpoints: which retained prefixes a request reads, and which it asks for. Knows no budget.

A breakpoint is a position in the prompt. Its prefix, cut to whole blocks, is kept from the plan in which its last
block is computed: from then on any request of the same tenant can read it. Requests without breakpoints never come
here. All times to live run from the arrival of the request that writes or reads.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.plan import CacheUse
from penstock.core.request import CacheBreakpoint
from penstock.kvcache.cache import KVCache
from penstock.scheduler.sequence import Sequence


class Marks:
    """The breakpoints of one request, in blocks; 0 for one that is too short to be kept."""

    __slots__ = (
        "breakpoints",
        "ends",
        "num_kept",
        "num_kept_before",
        "num_read_blocks",
        "written_tokens",
    )

    def __init__(self, breakpoints: tuple[CacheBreakpoint, ...], ends: tuple[int, ...]) -> None:
        self.breakpoints = breakpoints
        self.ends = ends
        self.num_kept_before = 0  # blocks of the kept prefix that was found
        self.num_read_blocks = 0  # of those, the ones that were reused
        self.num_kept = 0  # breakpoints dealt with so far; they come in ascending order
        self.written_tokens = [0] * len(ends)

    @property
    def are_kept(self) -> bool:
        return self.num_kept == len(self.ends)


class Breakpoints:
    def __init__(self, cache: KVCache, min_tokens: int) -> None:
        self._cache = cache
        self._retention = cache.retention
        self._min_tokens = min_tokens

        # Counters since construction.
        self.read_tokens = 0
        self.written_tokens = 0

    def arrive(self, sequence: Sequence, now: float) -> None:
        """Take down a request's breakpoints. What it could read is kept for it from now on, however long it waits
        in the queue."""
        breakpoints = sequence.request.cache_breakpoints
        if not self._cache.enable_prefix_caching:
            return
        ends = tuple(self._num_blocks(sequence, breakpoint.num_tokens) for breakpoint in breakpoints)
        sequence.marks = Marks(breakpoints, ends)
        self._refresh(sequence, self._readable(sequence, now), now)

    def start(self, sequence: Sequence, now: float) -> None:
        """A request runs for the first time: settle what it reads, which is the longest kept prefix of those that
        end at one of its positions, as far as it was really reused."""
        marks = sequence.marks
        assert marks is not None
        num_reused = sequence.blocks.num_reused_blocks
        # The last token of a prompt is always computed, and its block with it.
        limit = (
            num_reused + 1 if (num_reused + 1) * self._cache.block_size == sequence.num_prompt else num_reused
        )
        readable = [end for end in self._readable(sequence, now) if end <= limit]
        marks.num_kept_before = max(readable, default=0)
        marks.num_read_blocks = min(marks.num_kept_before, num_reused)
        self.read_tokens += marks.num_read_blocks * self._cache.block_size
        self._refresh(sequence, readable, now)

    def keep(self, sequence: Sequence, now: float) -> None:
        """Blocks of a request were published: keep the prefixes that are complete by that."""
        marks = sequence.marks
        assert marks is not None
        block_size = self._cache.block_size
        while not marks.are_kept and marks.ends[marks.num_kept] <= sequence.num_published:
            index = marks.num_kept
            marks.num_kept += 1
            end = marks.ends[index]
            if end:
                num_kept_blocks = self._retention.retain_entry(
                    sequence.hashes[:end], marks.breakpoints[index].ttl_s, sequence.arrival_s, now
                )
                known = max((marks.num_kept_before, *marks.ends[:index]))
                marks.written_tokens[index] = max(0, num_kept_blocks - known) * block_size
                self.written_tokens += marks.written_tokens[index]

    def use(self, sequence: Sequence) -> CacheUse | None:
        """What a request's first event says; None without breakpoints."""
        if not sequence.request.cache_breakpoints:
            return None
        marks = sequence.marks
        if marks is None:
            return CacheUse(0, (0,) * len(sequence.request.cache_breakpoints))
        return CacheUse(marks.num_read_blocks * self._cache.block_size, tuple(marks.written_tokens))

    def _num_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        asked = sequence.request.min_cacheable_tokens
        min_tokens = self._min_tokens if asked is None else asked
        if not min_tokens <= num_tokens <= sequence.num_prompt:
            return 0
        return num_tokens // self._cache.block_size

    def _readable(self, sequence: Sequence, now: float) -> list[int]:
        """Where, in blocks, kept prefixes end that this request's breakpoints may read."""
        positions = {
            self._num_blocks(sequence, num_tokens)
            for breakpoint in sequence.request.cache_breakpoints
            for num_tokens in (breakpoint.num_tokens, *breakpoint.earlier)
        } - {0}
        if not positions:
            return []
        hashes = sequence.hash_blocks(max(positions), self._cache.block_size)
        return sorted(
            end for end in positions if self._retention.entry_ttl_s(hashes[end - 1], now) is not None
        )

    def _refresh(self, sequence: Sequence, ends: Iterable[int], now: float) -> None:
        """Being read prolongs a kept prefix by its own time to live."""
        for end in ends:
            ttl_s = self._retention.entry_ttl_s(sequence.hashes[end - 1], now)
            if ttl_s is not None:
                self._retention.retain(sequence.hashes[:end], sequence.arrival_s + ttl_s, now)
