"""Admission decides whether the next waiting request can start now, by a forecast of the blocks that running requests
will still need. Knows neither the token budget nor the order of the waiting requests.

For the forecast, running requests are binned by predicted remaining growth, in blocks, with edges that double. By the
time a bin's requests end, requests of longer bins have grown as much as they did, and requests of shorter bins have
given their blocks back. The worst such moment is the headroom to keep. If the forecast fails, preemption frees
blocks.

A request gets blocks for all known tokens at once: the prompt, and after a preemption the answer so far. While it
runs it needs at most one more block at a time, for its next sampled token. Its last tokens may get half a block;
admission counts that as a whole one, so that a request starts only if it could have a whole one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from collections.abc import Sequence as Prefix
from operator import add

from penstock.core.errors import ContextLengthExceeded, InvalidRequest
from penstock.core.hashing import BlockHash
from penstock.core.request import Request
from penstock.kvcache.cache import KVCache, blocks_of_context
from penstock.kvcache.windows import WindowPool
from penstock.scheduler.prefix import PrefixSharing
from penstock.scheduler.sequence import BATCH_RANK, Sequence, smallest_step

_NUM_BINS = 16
_SUMS = ("counts", "growth_blocks", "own_blocks")


class _Group:
    """Holds sums over requests, by bin."""

    __slots__ = _SUMS

    def __init__(self) -> None:
        self.counts = [0] * _NUM_BINS
        self.growth_blocks = [0] * _NUM_BINS
        self.own_blocks = [0] * _NUM_BINS  # blocks that are freed when the bin's requests end

    def add(self, growth_blocks: int, own_blocks: int, count: int = 1) -> None:
        index = _bin_of(growth_blocks)
        self.counts[index] += count
        self.growth_blocks[index] += growth_blocks * count
        self.own_blocks[index] += own_blocks * count

    def needed(self, growth_of_another: int = 0) -> int:
        """Return the number of blocks that must be free now, so that no request lacks one at the worst moment to
        come. With `growth_of_another`, one more request grows by this many blocks."""
        num_alive = sum(self.counts)
        place = -1
        if growth_of_another:
            num_alive += 1
            place = _bin_of(growth_of_another)
        worst = given_back = 0
        for index, count in enumerate(self.counts):
            growth_blocks = self.growth_blocks[index]
            if index == place:
                count += 1
                growth_blocks += growth_of_another
            if count:
                needed = -(-num_alive * growth_blocks // count) - given_back
                if needed > worst:
                    worst = needed
                num_alive -= count
                if not num_alive:
                    break
                given_back += self.own_blocks[index]
        return worst

    def plus(self, other: _Group) -> _Group:
        """Return the sums over the requests of both groups. The result may be this group."""
        if not any(other.counts):
            return self
        total = _Group()
        total.counts = list(map(add, self.counts, other.counts))
        total.growth_blocks = list(map(add, self.growth_blocks, other.growth_blocks))
        total.own_blocks = list(map(add, self.own_blocks, other.own_blocks))
        return total


def _bin_of(growth_blocks: int) -> int:
    index = (growth_blocks - 1).bit_length()
    return index if index < _NUM_BINS else _NUM_BINS - 1


class Headroom:
    """Forecasts the blocks that running requests will still need. Batch requests are counted apart, since they yield
    their blocks to more urgent requests."""

    def __init__(
        self, block_size: int, windows: WindowPool | None = None, *, counts_tokens: bool = False
    ) -> None:
        """`windows`: the pool of window blocks, which count too. `counts_tokens`: only window blocks have memory."""
        self._block_size = block_size
        self._windows = windows
        self._counts_tokens = counts_tokens
        self._urgent = _Group()
        self._batch = _Group()

    def enter(self, sequence: Sequence) -> None:
        """Count a request that starts to run, with its present table."""
        table = sequence.blocks
        num_window_blocks = 0 if table.windows is None else table.windows.num_blocks
        sequence.growth_blocks = self._growth(sequence, len(table.block_ids), num_window_blocks)
        sequence.own_blocks = num_window_blocks + (0 if self._counts_tokens else table.num_own_blocks)
        self._group(sequence).add(sequence.growth_blocks, sequence.own_blocks)

    def leave(self, sequence: Sequence) -> None:
        """Stop counting a request."""
        self._group(sequence).add(sequence.growth_blocks, sequence.own_blocks, count=-1)

    def allows(
        self, candidate: Sequence, num_blocks: int, num_spare: int, num_window_blocks: int = 0
    ) -> bool:
        """Return whether a request may start with a table of `num_blocks`, and blocks for windows, after which
        `num_spare` blocks are left."""
        others = self._urgent
        if candidate.rank == BATCH_RANK:
            others = others.plus(self._batch)
        else:
            num_spare += sum(self._batch.own_blocks)
        return num_spare >= others.needed(self._growth(candidate, num_blocks, num_window_blocks))

    def needed(self) -> int:
        """Return the number of blocks to keep free for running requests."""
        return self._urgent.plus(self._batch).needed()

    def check_integrity(self, running: Collection[Sequence]) -> None:
        for group in (self._urgent, self._batch):
            expected = _Group()
            for sequence in running:
                if self._group(sequence) is group:
                    expected.add(sequence.growth_blocks, sequence.own_blocks)
            assert all(getattr(group, name) == getattr(expected, name) for name in _SUMS)

    def _group(self, sequence: Sequence) -> _Group:
        return self._batch if sequence.rank == BATCH_RANK else self._urgent

    def _growth(self, sequence: Sequence, num_blocks: int, num_window_blocks: int) -> int:
        """Predict the growth of a table of `num_blocks`: at least one block, since the end is never certain."""
        length = sequence.predicted_length
        growth = 0 if self._counts_tokens else -(-length // self._block_size) - num_blocks
        if self._windows is not None:
            growth += max(0, self._windows.blocks_of_memory(length, 1) - num_window_blocks)
        return growth if growth > 1 else 1


_RETRY_AFTER_PLANS = 8


def check_request(request: Request, max_length: int, max_model_len: int) -> None:
    """Raise InvalidRequest for a request that could not run even alone. `max_length` is the longest sequence that the
    cache and the model allow."""
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if request.sampling.max_tokens < 0:
        raise InvalidRequest("max_tokens must be at least 0.", param="max_tokens")
    num_answer = min(1, request.sampling.max_tokens)
    if num_prompt + num_answer > max_length:
        is_cache_small = max_length < max_model_len
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt} tokens, and this server takes at most {max_length - num_answer}.",
            param="prompt",
            hint="The KV cache is smaller than the model's context." if is_cache_small else None,
        )


def check_windows(request: Request, cache: KVCache) -> None:
    """Raise InvalidRequest for a request whose images, each in one step, need more memory than windows can have."""
    num_tokens = len(request.prompt_token_ids) + 1
    needed = blocks_of_context(num_tokens, cache.block_size, cache.window_layout, smallest_step(request))
    if needed > cache.num_memory_blocks:
        raise ContextLengthExceeded(
            f"The images of this prompt of {num_tokens - 1} tokens need more KV cache than there is.",
            param="messages",
            hint="Raise --kv-cache-memory.",
        )


class Outcome(enum.Enum):
    ADMITTED = enum.auto()
    HELD = enum.auto()  # waits for a prefix that a running request is computing
    # Lacks blocks, or a state that this plan computes; no request behind it may overtake it.
    BLOCKED = enum.auto()


class Admission:
    """Gives waiting requests their tables. Remembers the last request that was turned away, so that a long prompt is
    not looked up in every plan."""

    def __init__(
        self,
        cache: KVCache,
        sharing: PrefixSharing,
        headroom: Headroom,
        worth_reading: Callable[[Prefix[BlockHash]], int],
    ) -> None:
        """`worth_reading` returns how many leading blocks of a found prefix are cheaper to reuse than to compute
        again."""
        self._cache = cache
        self._worth_reading = worth_reading
        self._sharing = sharing
        self._headroom = headroom
        self._blocked: Sequence | None = None
        self._num_turned_away = 0
        self._num_missing_blocks = 0

    def room_changed(self) -> None:
        """Forget the request that was turned away, because blocks were freed."""
        self._blocked = None

    def is_turned_away(self, sequence: Sequence) -> bool:
        """Return whether this request was the last to be turned away, and no blocks were freed since."""
        return self._blocked is sequence

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks this request lacked, if it was the last to be turned away; else 0."""
        return self._num_missing_blocks if self._blocked is sequence else 0

    def admit(self, sequence: Sequence, *, is_alone: bool) -> Outcome:
        """Give a request its table. A request that would run alone is admitted if the whole cache has room for it."""
        if self._blocked is sequence and not is_alone:
            self._num_turned_away += 1
            if self._num_turned_away % _RETRY_AFTER_PLANS:
                return Outcome.BLOCKED
        num_matched = self._sharing.lookup(sequence)
        if self._sharing.hold(sequence, num_matched):
            return Outcome.HELD
        num_found = self._worth_reading(sequence.hashes[:num_matched])
        num_found = self._sharing.lookup_start(sequence, num_found)
        if self._sharing.is_due(sequence, num_found):
            return Outcome.BLOCKED
        if not self._take_blocks(sequence, num_found, is_alone=is_alone):
            return Outcome.BLOCKED
        self._blocked = None
        self._sharing.start(sequence, num_matched)
        return Outcome.ADMITTED

    def _take_blocks(self, sequence: Sequence, num_found: int, *, is_alone: bool) -> bool:
        cache = self._cache
        # Opening the table first protects the found blocks from eviction.
        table = cache.open_table(sequence.hashes[:num_found])
        table.open_windows()
        num_missing = table.num_missing(sequence.num_known)
        num_blocks = -(-sequence.num_known // cache.block_size)
        num_window_blocks = self._window_blocks(sequence, num_found, is_alone=is_alone)
        if is_alone:
            cache.retention.give_way(num_missing, num_window_blocks)  # when nothing else can run
        num_spare = cache.num_spare(num_missing, num_window_blocks)
        if num_spare < 0 or not (
            is_alone or self._headroom.allows(sequence, num_blocks, num_spare, num_window_blocks)
        ):
            table.close()
            self._blocked = sequence
            self._num_missing_blocks = max(0, -num_spare)
            return False
        table.fill(sequence.num_known)
        table.open_state()
        sequence.table = table
        sequence.num_computed = num_found * cache.block_size
        return True

    def _window_blocks(self, sequence: Sequence, num_found: int, *, is_alone: bool) -> int:
        """Return the blocks of memory that windows need while the prompt is computed: in whole steps, or, if the
        request runs alone, in small ones."""
        windows, layout = self._cache.windows, self._cache.window_layout
        if windows is None or layout is None:
            return 0
        num_tokens = sequence.num_known - num_found * self._cache.block_size
        return windows.blocks_of_memory(
            num_tokens, sequence.smallest_step if is_alone else layout.step_tokens
        )
