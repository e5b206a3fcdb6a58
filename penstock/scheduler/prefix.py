"""Decides which cached blocks a request starts with, which blocks it publishes, and which prefixes are retained at
breakpoints. Knows no budget.

Blocks are published when they are *planned*, not when they are computed. Executors run steps in order and write all
KV of a step before they read any. A request planned in the same step or later may therefore share the blocks: a burst
of requests computes a common prefix once.

When the prefix does not fit one step, a sibling admitted meanwhile would compute the rest a second time. The sibling
is held instead, until the leading request has published the blocks that both share. A request is held at most once,
only behind a running request that is at least as urgent, and only until that request stops running.

A breakpoint is a position in the prompt. Its prefix, cut to whole blocks, is kept from the plan in which its last
block is computed: from then on any request of the same tenant can read it. All times to live run from the arrival of
the request that writes or reads.

If layers have a fixed state, a prefix counts as found only up to its last snapshot (see `kvcache.states`). A request
takes snapshots at the end of its prompt, at its breakpoints, at the end of blocks that were found without a snapshot,
and where the prompts of held requests depart from its own. If layers have windows, a prefix counts as found only up
to a position whose window is cached. Window blocks before the same positions are kept for longer than others.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.hashing import BlockHash
from penstock.core.plan import CacheUse
from penstock.kvcache.cache import KVCache
from penstock.scheduler.sequence import Marks, Sequence

MIN_SNAPSHOT_BLOCKS = 4  # a snapshot of fewer blocks is not worth a slot and another step of the prompt
# Hashed and looked up at a time, so that a long prompt without a hit is not hashed completely.
_LOOKUP_BLOCKS = 64


class PrefixSharing:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._enabled = cache.enable_prefix_caching
        self._states = cache.states
        self._windows = cache.windows
        self._frontiers: dict[
            BlockHash, Sequence
        ] = {}  # running prefills, by the next block they will publish

    def lookup(self, sequence: Sequence) -> int:
        """Return how many of the leading blocks that the request may reuse are in the cache."""
        if not self._enabled:
            return 0
        limit = sequence.num_reusable_tokens // self._block_size
        found = 0
        while found < limit:
            end = min(limit, found + _LOOKUP_BLOCKS)
            found += self._cache.match(sequence.hash_blocks(end, self._block_size)[found:end])
            if found < end:
                break
        return found

    def lookup_start(self, sequence: Sequence, num_found: int) -> int:
        """Return after how many of the found leading blocks a request can start: a snapshot of the state and the
        window of the next token must exist there."""
        before = None
        while num_found and num_found != before:
            before = num_found
            if self._states is not None:
                num_found = self._states.longest(sequence.hashes[:num_found])
            if self._windows is not None:
                num_found = self._windows.longest(sequence.hashes[:num_found])
            if self._states is None or self._windows is None:
                break
        return num_found

    def is_due(self, sequence: Sequence, num_blocks: int) -> bool:
        """Return whether the snapshot at the end of this many blocks exists only from the next plan on."""
        return (
            self._states is not None
            and num_blocks > 0
            and self._states.is_due(sequence.hashes[num_blocks - 1])
        )

    def hold(self, sequence: Sequence, num_found: int) -> bool:
        """Put a waiting request, of which `num_found` blocks are cached, behind a running prefill that is about to
        publish the next block. Returns False when there is no such prefill."""
        limit = (sequence.num_prompt - 1) // self._block_size
        reads_prefix = sequence.num_reusable_tokens < sequence.num_prompt - 1
        if not self._frontiers or sequence.was_held or reads_prefix or num_found >= limit:
            return False
        leader = self._frontiers.get(sequence.hash_blocks(num_found + 1, self._block_size)[num_found])
        if leader is None or leader.rank > sequence.rank:
            return False
        num_shared = self._num_shared_blocks(leader, sequence, num_found)
        if num_shared <= num_found:
            return False
        sequence.was_held = True
        sequence.leader = leader
        leader.followers[sequence.number] = (sequence, num_shared)
        ends = leader.snapshot_ends
        if ends is not None and num_shared not in ends:
            ends.append(num_shared)
            ends.sort()
        if leader.blocks.windows is not None:
            leader.blocks.windows.wanted_ends.append(num_shared)
        return True

    def stop_waiting(self, sequence: Sequence) -> None:
        """End a held request's wait for its leader."""
        assert sequence.leader is not None
        del sequence.leader.followers[sequence.number]
        sequence.leader = None

    def start(self, sequence: Sequence, num_matched: int) -> None:
        """Begin to publish a request that was admitted, with its reused blocks in front of its table. `num_matched`
        blocks were found, and reused as far as there was a snapshot."""
        if self._enabled:
            sequence.num_published = sequence.blocks.num_reused_blocks
            sequence.publish_at = (sequence.num_published + 1) * self._block_size
        if self._states is not None:
            sequence.snapshot_ends = self._likely_starts(sequence, num_matched) if self._enabled else []
        if sequence.blocks.windows is not None and self._enabled:
            sequence.blocks.windows.wanted_ends = self._likely_starts(sequence, num_matched)

    def publish(self, sequence: Sequence) -> list[Sequence]:
        """Publish the blocks that became full. Returns the followers that need not wait any longer."""
        if not self._enabled:
            return []
        block_size = self._block_size
        first = sequence.num_published
        end = min(sequence.num_known, sequence.num_computed) // block_size
        hashes = sequence.hash_blocks(end, block_size)
        parent = hashes[first - 1] if first else sequence.root_hash
        block_ids, windows = sequence.blocks.block_ids, sequence.blocks.windows
        for index in range(first, end):
            self._cache.publish(block_ids[index], hashes[index], parent)
            if windows is not None:
                windows.publish(index, hashes[index])
            parent = hashes[index]
        sequence.num_published = end
        sequence.publish_at = (end + 1) * block_size
        if sequence.snapshot_ends and sequence.snapshot_ends[0] * block_size == sequence.num_computed:
            self._keep_state(sequence, sequence.snapshot_ends.pop(0))
        if sequence.is_prefilling or sequence.frontier is not None:
            self._move_frontier(sequence)
        if not sequence.followers:
            return []
        return self._served_followers(sequence)

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """Forget a request that stops running. Returns the followers that must continue without it."""
        sequence.num_published = 0
        sequence.publish_at = None
        self._drop_frontier(sequence)
        followers = [follower for follower, _ in sequence.followers.values()]
        sequence.followers.clear()
        for follower in followers:
            follower.leader = None
        return followers

    def _likely_starts(self, sequence: Sequence, num_matched: int) -> list[int]:
        """Return the ends of prefixes, in blocks, behind which later requests are likely to start."""
        found = sequence.blocks.num_reused_blocks
        last = (sequence.num_known - 1) // self._block_size
        ends = {end for end in (num_matched, last) if end >= found + MIN_SNAPSHOT_BLOCKS}
        if sequence.marks is not None:
            ends.update(end for end in sequence.marks.ends if found < end <= last)
        return sorted(ends)

    def _keep_state(self, sequence: Sequence, end: int) -> None:
        slot = sequence.blocks.state_slot
        assert self._states is not None
        assert slot is not None
        self._states.keep(slot, sequence.hashes[end - 1])

    def _served_followers(self, sequence: Sequence) -> list[Sequence]:
        served = []
        for follower, num_shared in list(sequence.followers.values()):
            if num_shared <= sequence.num_published:
                self.stop_waiting(follower)
                if len(follower.hashes) < num_shared:  # same tenant, same tokens: the same hashes
                    follower.hashes = sequence.hashes[:num_shared]
                served.append(follower)
        return served

    def _move_frontier(self, sequence: Sequence) -> None:
        self._drop_frontier(sequence)
        next_block = sequence.num_published
        if sequence.is_prefilling and (next_block + 1) * self._block_size <= sequence.num_known:
            frontier = sequence.hash_blocks(next_block + 1, self._block_size)[next_block]
            if self._frontiers.setdefault(frontier, sequence) is sequence:
                sequence.frontier = frontier

    def _drop_frontier(self, sequence: Sequence) -> None:
        if sequence.frontier is not None:
            del self._frontiers[sequence.frontier]
            sequence.frontier = None

    def _num_shared_blocks(self, leader: Sequence, follower: Sequence, known_to_match: int) -> int:
        """Count the leading blocks that are equal in both prompts. The follower's last token does not count."""
        size = self._block_size
        ours, theirs = leader.key_token_ids, follower.key_token_ids
        limit = min(len(ours), len(theirs) - 1) // size
        low, high = known_to_match, limit
        while low < high:  # the longest equal prefix, by bisection; slices compare at C speed
            middle = (low + high + 1) // 2
            if ours[low * size : middle * size] == theirs[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low


class Breakpoints:
    def __init__(self, cache: KVCache, min_tokens: int) -> None:
        self._cache = cache
        self._retention = cache.retention
        self._min_tokens = min_tokens

        # Counters since construction.
        self.read_tokens = 0
        self.written_tokens = 0

    def arrive(self, sequence: Sequence, now: float) -> None:
        """Note a request's breakpoints. The prefixes that the request could read are kept from now on, however long
        it waits in the queue."""
        breakpoints = sequence.request.cache_breakpoints
        if not self._cache.enable_prefix_caching:
            return
        ends = tuple(self._num_blocks(sequence, breakpoint.num_tokens) for breakpoint in breakpoints)
        sequence.marks = Marks(breakpoints, ends)
        self._refresh(sequence, self._readable(sequence, now), now)

    def start(self, sequence: Sequence, now: float) -> None:
        """Decide which retained prefix a request reads, when it runs for the first time: the longest kept prefix that
        ends at one of its breakpoints, as far as the prefix was reused."""
        marks = sequence.marks
        assert marks is not None
        num_reused = sequence.blocks.num_reused_blocks
        # The last token of a prompt is always computed, so the block of that token is not reused.
        limit = (
            num_reused + 1 if (num_reused + 1) * self._cache.block_size == sequence.num_prompt else num_reused
        )
        readable = [end for end in self._readable(sequence, now) if end <= limit]
        marks.num_kept_before = max(readable, default=0)
        marks.num_read_blocks = min(marks.num_kept_before, num_reused)
        self.read_tokens += marks.num_read_blocks * self._cache.block_size
        self._refresh(sequence, readable, now)

    def keep(self, sequence: Sequence, now: float) -> None:
        """Keep the prefixes that are complete, after blocks of a request were published."""
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
        """Return the cache use that a request's first event reports; None without breakpoints."""
        if not sequence.request.cache_breakpoints:
            return None
        marks = sequence.marks
        if marks is None:
            return CacheUse(0, (0,) * len(sequence.request.cache_breakpoints))
        return CacheUse(marks.num_read_blocks * self._cache.block_size, tuple(marks.written_tokens))

    def num_kept_tokens(self, sequence: Sequence, now: float) -> int:
        """Return how many leading tokens of a request, which may be another rank's, are kept here and end at one of
        its breakpoints."""
        return max(self._readable(sequence, now), default=0) * self._cache.block_size

    def _num_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        asked = sequence.request.min_cacheable_tokens
        min_tokens = self._min_tokens if asked is None else asked
        if not min_tokens <= num_tokens <= sequence.num_prompt:
            return 0
        return num_tokens // self._cache.block_size

    def _readable(self, sequence: Sequence, now: float) -> list[int]:
        """Return the ends, in blocks, of the kept prefixes that this request's breakpoints may read."""
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
        """Prolong the kept prefixes that were read, each by its own time to live."""
        for end in ends:
            self._retention.prolong_entry(sequence.hashes[:end], sequence.arrival_s, now)
