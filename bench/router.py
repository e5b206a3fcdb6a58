"""How long a routing decision takes, and what the prefix index weighs: `python bench/router.py`. No sockets.

By default 64 replicas and 100,000 indexed blocks, each held by one or more replicas. Prompts share an indexed prefix,
so that every decision walks the index as far as the prompt goes. Hashing the prompt is measured apart: it depends on
the length of the prompt alone, and belongs to the tokenizer.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from dataclasses import dataclass

from penstock.core.messages import EngineStats, KVStored
from penstock.router import POLICIES, Replica, Router, RouterConfig, RoutingRequest, hash_tokens, policy_named
from penstock.router.index import PrefixIndex

MODEL = "model"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Setting:
    num_replicas: int
    num_blocks: int
    prefix_blocks: int
    holders: int
    num_decisions: int
    is_idle: bool


def make_chains(setting: Setting, rng: random.Random) -> list[list[bytes]]:
    count = setting.num_blocks // setting.prefix_blocks
    return [[rng.randbytes(16) for _ in range(setting.prefix_blocks)] for _ in range(count)]


def build(
    policy: str, setting: Setting, chains: list[list[bytes]], rng: random.Random
) -> tuple[Router, tuple[Replica, ...]]:
    router = Router(policy_named(policy), RouterConfig())
    replicas = tuple(
        Replica(id=f"replica-{number}", models=frozenset({MODEL}), num_kv_blocks=48_000)
        for number in range(setting.num_replicas)
    )
    router.update(replicas)
    sequences = [0] * setting.num_replicas
    for chain in chains:
        for number in rng.sample(range(setting.num_replicas), setting.holders):
            router.receive(f"replica-{number}", [KVStored(sequences[number], tuple(chain), b"root")])
            sequences[number] += 1
    for number, replica in enumerate(replicas):
        stats = EngineStats(
            num_steps=1,
            num_running=0 if setting.is_idle else number % 7,
            num_kv_blocks_used=0 if setting.is_idle else 1000 * number,
            step_tokens=900,
            step_s=rng.uniform(0.025, 0.035),
        )
        router.heartbeat(replica.id, stats)
    return router, replicas


def measure(policy: str, setting: Setting, chains: list[list[bytes]], rng: random.Random) -> list[float]:
    """Microseconds of CPU time of each `choose`, for prompts of an indexed prefix and four blocks that none holds."""
    router, replicas = build(policy, setting, chains, rng)
    durations_us = []
    for number in range(setting.num_decisions):
        hashes = rng.choice(chains) + [rng.randbytes(16) for _ in range(4)]
        request = RoutingRequest(
            id=str(number), model=MODEL, num_prompt_tokens=len(hashes) * BLOCK_SIZE + 5, block_hashes=hashes
        )
        now = number * 1e-3
        started = time.process_time()
        router.choose(request, replicas, now, rng)
        durations_us.append((time.process_time() - started) * 1e6)
        if number >= 256:
            router.first_token(str(number - 128), now)
            router.ended(str(number - 256), now)
    return durations_us


def bytes_per_entry(chains: list[list[bytes]]) -> float:
    """Of an index filled by one replica's events, the hashes included."""
    tracemalloc.start()
    index = PrefixIndex()
    bit = index.open()
    for chain in chains:
        index.store(bit, [bytes(bytearray(block_hash)) for block_hash in chain])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(index)


def hashing_us_per_block() -> float:
    tokens = tuple(range(16_001))
    started = time.perf_counter()
    hashes = hash_tokens("tenant", tokens, BLOCK_SIZE)
    return (time.perf_counter() - started) * 1e6 / len(hashes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=100_000, help="distinct blocks in the index")
    parser.add_argument("--prefix-blocks", type=int, default=100, help="indexed blocks of each prompt")
    parser.add_argument("--holders", type=int, default=3, help="replicas that hold each prefix")
    parser.add_argument("--decisions", type=int, default=5_000)
    parser.add_argument("--idle", action="store_true", help="replicas without requests of other gateways")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names, separated by commas")
    options = parser.parse_args()
    setting = Setting(
        options.replicas,
        options.blocks,
        options.prefix_blocks,
        options.holders,
        options.decisions,
        options.idle,
    )
    rng = random.Random(0)
    chains = make_chains(setting, rng)
    print(
        f"{setting.num_replicas} replicas, {setting.num_blocks} indexed blocks, "
        f"{setting.prefix_blocks} of them in each prompt"
    )
    print(f"{'policy':<20}{'median µs':>10}{'p90 µs':>10}{'p99 µs':>10}")
    for policy in options.policies.split(","):
        durations = sorted(measure(policy, setting, chains, rng))
        p90, p99 = (durations[int(len(durations) * share)] for share in (0.90, 0.99))
        print(f"{policy:<20}{statistics.median(durations):>10.1f}{p90:>10.1f}{p99:>10.1f}")
    print(f"hashing a prompt: {hashing_us_per_block():.2f} µs for each block of {BLOCK_SIZE} tokens")
    print(f"index: {bytes_per_entry(chains):.0f} bytes per entry")


if __name__ == "__main__":
    main()
