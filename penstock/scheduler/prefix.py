"""Prefix reuse between requests: what is found, what is published when, and which requests wait. Knows no budget.

Blocks are published when they are *planned*, not when they are computed. Executors run steps in order and write all
KV of a step before they read any, so a request planned in the same step or later may already share them: a
burst of siblings computes its common prefix once.

When the prefix does not fit one step, a sibling admitted meanwhile would compute the rest a second time. It is held
instead, until the leading request has published what they share. That is bounded: a request is held at most once,
only behind a running request that is at least as urgent, and is let go as soon as that one stops running.
"""

from __future__ import annotations

from penstock.core.hashing import BlockHash
from penstock.kvcache.cache import KVCache
from penstock.scheduler.sequence import Sequence

_LOOKUP_BLOCKS = (
    64  # hashed and looked up at a time, so that a long prompt without a hit is not hashed in vain
)


class PrefixSharing:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._enabled = cache.enable_prefix_caching
        self._frontiers: dict[
            BlockHash, Sequence
        ] = {}  # running prefills, by the next block they will publish

    def lookup(self, sequence: Sequence) -> int:
        """How many leading blocks are in the cache. The last token never counts: its logits are needed."""
        if not self._enabled or sequence.reads_every_token:
            return 0
        limit = (sequence.num_known - 1) // self._block_size
        found = 0
        while found < limit:
            end = min(limit, found + _LOOKUP_BLOCKS)
            found += self._cache.match(sequence.hash_blocks(end, self._block_size)[found:end])
            if found < end:
                break
        return found

    def hold(self, sequence: Sequence, num_found: int) -> bool:
        """Put a waiting request, of which `num_found` blocks are cached, behind a running prefill that is about to
        publish the next one. False when there is none."""
        limit = (sequence.num_prompt - 1) // self._block_size
        if not self._frontiers or sequence.was_held or sequence.reads_every_token or num_found >= limit:
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
        return True

    def let_go(self, sequence: Sequence) -> None:
        """A held request no longer waits for its leader."""
        assert sequence.leader is not None
        del sequence.leader.followers[sequence.number]
        sequence.leader = None

    def start(self, sequence: Sequence) -> None:
        """A request was admitted, with its reused blocks in front of its table."""
        if self._enabled:
            sequence.num_published = sequence.blocks.num_reused_blocks
            sequence.publish_at = (sequence.num_published + 1) * self._block_size

    def publish(self, sequence: Sequence) -> list[Sequence]:
        """Publish the blocks that became full; returns the followers that need not wait any longer."""
        if not self._enabled:
            return []
        block_size = self._block_size
        first = sequence.num_published
        end = min(sequence.num_known, sequence.num_computed) // block_size
        hashes = sequence.hash_blocks(end, block_size)
        parent = hashes[first - 1] if first else sequence.root_hash
        block_ids = sequence.blocks.block_ids
        for index in range(first, end):
            self._cache.publish(block_ids[index], hashes[index], parent)
            parent = hashes[index]
        sequence.num_published = end
        sequence.publish_at = (end + 1) * block_size
        self._move_frontier(sequence)
        if not sequence.followers:
            return []
        return self._served_followers(sequence)

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """A request stops running; returns the followers that must do without it."""
        sequence.num_published = 0
        sequence.publish_at = None
        self._drop_frontier(sequence)
        followers = [follower for follower, _ in sequence.followers.values()]
        sequence.followers.clear()
        for follower in followers:
            follower.leader = None
        return followers

    def _served_followers(self, sequence: Sequence) -> list[Sequence]:
        served = []
        for follower, num_shared in list(sequence.followers.values()):
            if num_shared <= sequence.num_published:
                self.let_go(follower)
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
        """Leading blocks of both prompts that are equal, in which the follower's last token does not count."""
        size = self._block_size
        ours, theirs = leader.request.prompt_token_ids, follower.request.prompt_token_ids
        limit = min(len(ours), len(theirs) - 1) // size
        low, high = known_to_match, limit
        while low < high:  # the longest equal prefix, by bisection; slices compare at C speed
            middle = (low + high + 1) // 2
            if ours[low * size : middle * size] == theirs[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low
