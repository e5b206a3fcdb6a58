"""Times the operations on a request of 1,000 blocks: `python -m tests.kvcache.speed`. Asserts nothing."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from penstock.kvcache import BlockHash, KVCache, chain_hashes, root_hash

NUM_BLOCKS = 1000
ROUNDS = 20


def main() -> None:
    tokens = range(NUM_BLOCKS * 16)
    chains = [chain_hashes(root_hash(str(number)), tokens, 16) for number in range(ROUNDS)]
    cache = KVCache(NUM_BLOCKS)
    tables: list[list[int]] = []

    def allocate(_: int) -> None:
        tables.append(cache.pool.allocate(NUM_BLOCKS) or [])

    def publish(number: int) -> None:
        parent = root_hash(str(number))
        for block_id, block_hash in zip(tables[-1], chains[number], strict=True):
            cache.publish(block_id, block_hash, parent)
            parent = block_hash

    def release(_: int) -> None:
        cache.pool.release(tables.pop())

    def match(number: int) -> None:
        cache.match(chains[number])

    def acquire(number: int) -> None:
        tables.append(cache.pool.acquire(chains[number]))

    report("hash", lambda number: hash_again(tokens, number))
    report("allocate, all free, and release", allocate, release)
    report("allocate, all evicted", allocate, publish, release, timed=1)
    report("publish", allocate, publish, release, timed=2)
    report("match", allocate, publish, release, match, timed=4)
    report("acquire what is cached", allocate, publish, release, acquire, release, timed=4)
    report("release what is indexed", allocate, publish, release, timed=3)


def hash_again(tokens: range, number: int) -> list[BlockHash]:
    return chain_hashes(root_hash(str(number)), tokens, 16)


def report(name: str, *operations: Callable[[int], object], timed: int | None = None) -> None:
    """Run the operations in order, once per round; print the best time of the one counted from 1, or of all."""
    best_s = float("inf")
    for number in range(ROUNDS):
        spent_s = []
        for operation in operations:
            start_s = perf_counter()
            operation(number)
            spent_s.append(perf_counter() - start_s)
        if number:  # the first round finds no evictable blocks yet
            best_s = min(best_s, sum(spent_s) if timed is None else spent_s[timed - 1])
    print(f"{name:<34}{best_s * 1e6:>9.0f} µs per {NUM_BLOCKS} blocks")


if __name__ == "__main__":
    main()
