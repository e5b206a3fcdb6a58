"""What prefix-aware routing is worth: several replicas of a real model, several tenants with long system prompts.

    python -m bench.replicas [MODEL] [--replicas 2] [--tenants 8] [--requests 128] [--json FILE]

Each tenant's requests begin with its own system prompt of 1,000 tokens, and come in random order, a few at a time.
Each replica's KV cache has room for its part of the system prompts and a little more, not for all of them. The same
requests are served by fresh replicas under each policy; one line per policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.replica_rig import Answer, Rig, running, spec_for
from penstock.core.config import RoutingPolicy
from penstock.core.request import Request, SamplingParams
from penstock.dispatch import DispatchConfig

SYSTEM_TOKENS = 1_000
QUESTION_TOKENS = 24
ANSWER_TOKENS = 16
BLOCK_SIZE = 16
POLICIES: tuple[RoutingPolicy, ...] = ("prefix-aware", "round-robin")


@dataclass(frozen=True, slots=True)
class Result:
    policy: str
    cached_share: float  # of prompt tokens
    ttft_p50_s: float
    ttft_p90_s: float
    requests_per_s: float
    reasons: dict[str, int]


def make_requests(tenants: int, count: int, vocab_size: int, seed: int) -> list[Request]:
    rng = random.Random(seed)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(100, vocab_size) for _ in range(number))

    systems = [tokens(SYSTEM_TOKENS) for _ in range(tenants)]
    order = [number % tenants for number in range(count)]
    rng.shuffle(order)
    return [
        Request(
            id=f"request-{number}",
            prompt_token_ids=systems[tenant] + tokens(QUESTION_TOKENS),
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
            tenant=f"tenant-{tenant}",
        )
        for number, tenant in enumerate(order)
    ]


async def serve_all(rig: Rig, requests: Sequence[Request], concurrency: int) -> list[Answer]:
    waiting = iter(requests)
    answers: list[Answer] = []

    async def client() -> None:
        for request in waiting:
            answers.append(await rig.ask(request))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return answers


async def measure(policy: RoutingPolicy, options: argparse.Namespace) -> Result:
    prompt_blocks = -(-(SYSTEM_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE)
    each = -(-options.tenants // options.replicas)
    spec = spec_for(
        options.model, options.replicas, num_kv_blocks=int(prompt_blocks * (each + options.spare))
    )
    async with running(spec, options.replicas, DispatchConfig(routing_policy=policy)) as rig:
        ready = rig.fleet.ready
        assert ready is not None
        requests = make_requests(options.tenants, options.requests, ready.model.vocab_size, options.seed)
        answers = await serve_all(rig, requests, options.concurrency)
        reasons = dict(rig.fleet.reasons)
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors:
        raise errors[0]
    ttfts_s = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    seconds = max(answer.last_event_s for answer in answers) - min(answer.sent_s for answer in answers)
    return Result(
        policy,
        cached_share=sum(answer.cached_tokens for answer in answers)
        / sum(len(request.prompt_token_ids) for request in requests),
        ttft_p50_s=statistics.median(ttfts_s),
        ttft_p90_s=ttfts_s[int(0.9 * len(ttfts_s))],
        requests_per_s=len(answers) / seconds,
        reasons=reasons,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--spare", type=float, default=0.4, help="room beyond a replica's part, in prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    results: list[Result] = []
    print(f"{'policy':<16}{'cached':>8}{'TTFT p50':>10}{'p90 ms':>10}{'req/s':>8}  decided by")
    for policy in POLICIES:
        result = uvloop.run(measure(policy, options))
        results.append(result)
        reasons = ", ".join(f"{reason} {count}" for reason, count in result.reasons.items())
        print(
            f"{result.policy:<16}{result.cached_share:>8.1%}{result.ttft_p50_s * 1e3:>10.0f}"
            f"{result.ttft_p90_s * 1e3:>10.0f}{result.requests_per_s:>8.2f}  {reasons}",
            flush=True,
        )
    first, second = results
    if second.cached_share:
        print(f"cached share × {first.cached_share / second.cached_share:.2f}", end="; ")
    print(f"TTFT p50 × {first.ttft_p50_s / second.ttft_p50_s:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
