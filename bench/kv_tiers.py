"""Measures the time to the first token of a long prefix: computed, from the device, from host memory and from disk.

    python -m bench.kv_tiers [--model smollm2-135m] [--prefix 4096] [--device auto] [--load-format auto] [--rounds 3]

Files are taken out of the system's page cache before they are read. The device holds one prefix and host memory about
one more, so prefixes that were used before the latest two are on disk.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from penstock.cli.console import fetch_model
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.request import Request, SamplingParams
from penstock.engine.build import Engine, build_engine


def first_token_s(engine: Engine, name: str, tokens: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and how many tokens of the prompt were cached."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    began_s = time.perf_counter()
    engine.loop.add(Request(id=name, prompt_token_ids=tuple(tokens), sampling=sampling))
    while engine.loop.has_work:
        for event in engine.loop.step():
            if event.token_ids:
                return time.perf_counter() - began_s, event.num_cached_tokens or 0
    raise RuntimeError("the request ended without a token")


def drop_page_cache(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*.kv"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def settle(engine: Engine) -> None:
    """Wait until the writer has nothing to do."""
    before, since_s = -1, time.monotonic()
    while (now := engine.loop.stats().num_blocks_to_disk) != before or time.monotonic() - since_s < 0.5:
        if now != before:
            before, since_s = now, time.monotonic()
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    path = fetch_model(arguments.model)
    blocks = arguments.prefix // 16
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=ModelConfig(
                model=arguments.model,
                device=arguments.device,
                dtype=arguments.dtype,
                load_format=arguments.load_format,
                max_model_len=arguments.prefix + 256,
            ),
            # By default, host memory holds as many blocks as the device, up to 4GiB.
            cache=CacheConfig(num_kv_blocks=blocks + 32, kv_disk_cache=folder, kv_disk_cache_size="100GiB"),
            scheduler=SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=8),
            speculate="off",
        )
        engine = build_engine(config, path)
        rng = random.Random(1)
        vocabulary = engine.ready.model.vocab_size
        prefixes = [
            [rng.randrange(10, vocabulary - 10) for _ in range(arguments.prefix)]
            for _ in range(arguments.rounds + 3)
        ]
        print(f"{arguments.prefix} tokens, {blocks} blocks", flush=True)
        first_token_s(engine, "warm-up", prefixes[-1][: arguments.prefix // 2])
        times: dict[str, list[float]] = {}

        def measure(tier: str, number: int) -> None:
            measure.count += 1  # type: ignore[attr-defined]
            seconds, cached = first_token_s(engine, f"{tier} {measure.count}", [*prefixes[number], 5, 6, 7])  # type: ignore[attr-defined]
            times.setdefault(tier, []).append(seconds)
            print(f"  {tier:9} {seconds * 1000:9.1f} ms, {cached} tokens cached", flush=True)

        measure.count = 0  # type: ignore[attr-defined]
        for number in range(arguments.rounds):
            measure("computed", number)
            measure("device", number)
        for number in range(arguments.rounds):
            other = arguments.rounds + number % 2
            first_token_s(engine, f"a {number}", [*prefixes[number], 9])
            first_token_s(engine, f"b {number}", [*prefixes[other], 9])  # sends the first to host memory
            measure("host", number)
        for number in range(arguments.rounds):
            for other in (arguments.rounds, arguments.rounds + 1, arguments.rounds + 2):
                first_token_s(engine, f"c {number} {other}", [*prefixes[other], 9])
                settle(engine)
            drop_page_cache(Path(folder))
            measure("disk", number)
        print()
        for tier, seconds in times.items():
            print(f"{tier:9} {statistics.median(seconds) * 1000:9.1f} ms")
        stats = engine.loop.stats()
        print(
            f"blocks to and from host memory {stats.num_blocks_to_host}, {stats.num_blocks_from_host}; ",
            end="",
        )
        print(f"disk {stats.num_blocks_to_disk}, {stats.num_blocks_from_disk}")
        engine.close()


if __name__ == "__main__":
    main()
