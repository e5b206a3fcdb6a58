"""What it costs to compute a prompt in another process: time to first token with and without a transfer of KV.

    python -m bench.disaggregation [MODEL] [--tokens 2000] [--repeats 7] [--threads N] [--json FILE]

Two engines of a real model, one that prefills and one that decodes. New prompts are sent in turn
to the first, which answers by itself, and to the second, which gets the KV from the first while that still computes
it. The same engine computes both kinds, so the difference is the transfer and the way to the first token after it. A
third kind is cached at the first engine and fetched by the second, which shows the bare transfer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from penstock.cli.console import fetch_model
from penstock.cluster.local import LocalLauncher
from penstock.cluster.replica import ReplicaSpec, RunningReplica
from penstock.cluster.transport import ZmqEngineClient
from penstock.core.engine_config import EngineConfig, ModelConfig
from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.plan import TokenEvent
from penstock.core.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Result:
    prompt_tokens: int
    kv_megabytes: float
    alone_ttft_s: float  # medians
    borrowed_ttft_s: float
    added_share: float
    added_ms: float
    fetched_ttft_s: float
    transfer_gb_per_s: float  # of cached KV, as the router learns it from heartbeats
    same_answers: bool


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    token_ids: tuple[int, ...]


class Rig:
    """One engine process and a connection to it."""

    def __init__(self, running: RunningReplica) -> None:
        self.running = running
        self.client = ZmqEngineClient(running.endpoint)
        self._num_asked = 0

    async def ask(self, prompt: tuple[int, ...], source: KVSource | None = None) -> Answer:
        self._num_asked += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tokens: list[int] = []
        began_s = time.perf_counter()
        first_s = began_s

        def on_event(event: TokenEvent) -> None:
            nonlocal first_s
            if event.token_ids and not tokens:
                first_s = time.perf_counter()
            tokens.extend(event.token_ids)
            if event.finish_reason is not None:
                done.set_result(None)

        def on_error(error: PenstockError) -> None:
            done.set_exception(error)

        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        request = Request(id=f"r{self._num_asked}", prompt_token_ids=prompt, sampling=sampling)
        self.client.add(request, timeout_s=None, on_event=on_event, on_error=on_error, kv_source=source)
        await done
        return Answer(first_s - began_s, tuple(tokens))

    async def leave(self) -> None:
        self.client.shut_down_engine()
        await self.running.stop()
        self.client.close()


async def start(model: str, path: Path, threads: int) -> tuple[Rig, Rig]:
    engine = EngineConfig(
        model=ModelConfig(model=model, dtype="bfloat16"), num_threads=threads, kv_transfer=True
    )
    spec = ReplicaSpec(model=model, engine=engine, model_path=str(path))
    launcher = LocalLauncher(log_level="WARNING")
    rigs = [Rig(await launcher.launch(spec, name)) for name in ("prefill", "decode")]
    for rig in rigs:
        rig.client.start()
    for rig in rigs:
        await rig.client.wait_ready()
    return rigs[0], rigs[1]


async def measure(model: str, num_tokens: int, repeats: int, threads: int) -> Result:
    prefill, decode = await start(model, fetch_model(model), threads)
    ready = prefill.client.ready
    assert ready is not None
    rng = random.Random(0)

    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(100, ready.model.vocab_size) for _ in range(num_tokens))

    computed, cached = KVSource(ready.kv_endpoint), KVSource(ready.kv_endpoint, computes=False)
    for source in (None, computed):  # connections, caches of the CPU, pages of memory
        await (prefill if source is None else decode).ask(prompt(), source)
    alone, borrowed, fetched = [], [], []
    same = True
    for _ in range(repeats):
        known = prompt()
        alone.append(await prefill.ask(known))
        fetched.append(await decode.ask(known, cached))
        borrowed.append(await decode.ask(prompt(), computed))
        same = same and alone[-1].token_ids == fetched[-1].token_ids
    stats = decode.client.stats
    assert stats.kv_fetches_failed == 0
    await decode.leave()
    await prefill.leave()
    alone_s, borrowed_s, fetched_s = (
        statistics.median(answer.ttft_s for answer in answers) for answers in (alone, borrowed, fetched)
    )
    return Result(
        prompt_tokens=num_tokens,
        kv_megabytes=num_tokens * ready.kv_bytes_per_token / 1e6,
        alone_ttft_s=alone_s,
        borrowed_ttft_s=borrowed_s,
        added_share=borrowed_s / alone_s - 1.0,
        added_ms=(borrowed_s - alone_s) * 1e3,
        fetched_ttft_s=fetched_s,
        transfer_gb_per_s=stats.kv_read_bytes / stats.kv_read_s / 1e9 if stats.kv_read_s else 0.0,
        same_answers=same,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = uvloop.run(measure(arguments.model, arguments.tokens, arguments.repeats, arguments.threads))
    print(
        f"{result.prompt_tokens} tokens, {result.kv_megabytes:.1f} MB of KV; medians of {arguments.repeats}"
    )
    print(f"  computed where it is served       {result.alone_ttft_s * 1e3:8.1f} ms to the first token")
    print(f"  computed by another engine        {result.borrowed_ttft_s * 1e3:8.1f} ms")
    print(f"  cached at another engine          {result.fetched_ttft_s * 1e3:8.1f} ms")
    print(f"  the transfer adds {result.added_ms:.1f} ms, {result.added_share:+.1%}")
    print(f"  cached KV moves at {result.transfer_gb_per_s:.2f} GB/s, as the receiver measured it")
    print(f"  answers are the same: {'yes' if result.same_answers else 'NO'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=2))


if __name__ == "__main__":
    main()
