"""What a shared fleet costs against one server: `python -m bench.shared_speed [--rounds 400] [--requests 400]`.

Starts `penstock serve echo --replicas 2` (one gateway, engines at socket files), and beside it two `penstock gateway`
and two `penstock engine`, over TCP with CURVE and a registry in Redis. All of them are asked in turns, so that they
see the same machine:

1. the time of a request with one token, by one client;
2. the share of cached prompt tokens, with more tenants' prefixes than one engine can keep, by eight clients.

Echo computes nothing, so the time to the first token of the second workload comes from the simulator: the same router
and scheduler, two replicas of an 8B model in virtual time, one gateway and two.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from penstock.core.machine import free_port
from penstock.simulator.cost import LLAMA_8B_ON_L40S
from penstock.simulator.simulation import ReplicaConfig, SimulationConfig, simulate
from penstock.simulator.workload import shared_prefix_workload
from tests.gateway.ratelimits.redis_server import running_redis

HOST = "127.0.0.1"
START_LIMIT_S = 180.0
TENANTS = 8
PREFIX_TOKENS = 2_000
SUFFIX_TOKENS = 120
KV_BLOCKS = 700  # of 16 tokens, in each engine: five prefixes of eight
CLIENTS = 8


class Client:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=60.0)

    def ask(self, prompt: str) -> tuple[float, int, int]:
        """Return the seconds that an answer with one token took, the tokens of its prompt, and the cached ones."""
        body = json.dumps({"model": "echo", "prompt": prompt, "max_tokens": 1})
        began_s = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        took_s = time.perf_counter() - began_s
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text[:300]!r}")
        usage = json.loads(text)["usage"]
        return took_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def is_ready(self) -> bool:
        try:
            self._connection.request("GET", "/ready")
            answer = self._connection.getresponse()
            answer.read()
            return answer.status == 200
        except OSError:
            self._connection.close()
            return False


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[int, list[int]]]:
    """Yields the ports of the server, and of the two gateways."""
    with running_redis() as redis, contextlib.ExitStack() as stack:
        shared = {
            **os.environ,
            "PENSTOCK_REGISTRY": redis.url,
            "PENSTOCK_JOIN_TOKEN": "a token for this run on loopback",
        }

        def start(name: str, environment: dict[str, str], *command: str) -> None:
            environment = {**environment, "PENSTOCK_DATA_DIR": str(folder / name)}
            with (folder / f"{name}.log").open("wb") as log:
                arguments = [sys.executable, "-m", "penstock.main", *command]
                process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)

        alone, *gateways = ports = [free_port(HOST) for _ in range(3)]
        blocks = ("--num-kv-blocks", str(KV_BLOCKS))
        start("server", dict(os.environ), "serve", "echo", "--replicas", "2", "--port", str(alone), *blocks)
        for number, port in enumerate(gateways):
            start(f"engine-{number}", shared, "engine", "echo", *blocks)
            start(f"gateway-{number}", shared, "gateway", "--port", str(port))
        end_s = time.monotonic() + START_LIMIT_S
        for port in ports:
            while not Client(port).is_ready():
                if time.monotonic() > end_s:
                    raise RuntimeError(f"a server did not start: see {folder}")
                time.sleep(0.1)
        time.sleep(2.0)  # until every gateway knows both engines
        yield alone, gateways


def latencies(alone: int, gateways: list[int], rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of requests, one process and shared, asked in turns."""
    server, shared = Client(alone), itertools.cycle([Client(port) for port in gateways])
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 20):
        prompt = f"question {number} of the same length as all others"
        pair = server.ask(prompt)[0], next(shared).ask(prompt)[0]
        if number >= 20:  # connections are open, code is warm
            for known, taken_s in zip(times, pair, strict=True):
                known.append(taken_s)
    return times


def cached_share(ports: list[int], requests: int, seed: int) -> float:
    """Return the cached share of the prompts of eight tenants, sent by clients that keep to one gateway each."""
    rng = random.Random(seed)

    def text(length: int) -> str:
        return "".join(rng.choices("abcdefghijklmnop ", k=length))

    prefixes = [text(PREFIX_TOKENS) for _ in range(TENANTS)]
    prompts = [rng.choice(prefixes) + text(SUFFIX_TOKENS) for _ in range(requests)]

    def ask(number: int) -> list[tuple[int, int]]:
        client = Client(ports[number % len(ports)])
        return [client.ask(prompt)[1:] for prompt in prompts[number::CLIENTS]]

    with ThreadPoolExecutor(CLIENTS) as threads:
        counts = [count for counts in threads.map(ask, range(CLIENTS)) for count in counts]
    return sum(cached for _, cached in counts) / sum(total for total, _ in counts)


def simulated(num_gateways: int) -> tuple[float, float, float]:
    """Return the median and the 90th percentile of the time to the first token, and the cached share."""
    workload = shared_prefix_workload(4_000, 8.0)
    replica = ReplicaConfig(num_blocks=12_000, cost=LLAMA_8B_ON_L40S)
    usual = SimulationConfig(workload=workload, num_replicas=2, replica=replica)
    report = simulate(replace(usual, num_gateways=num_gateways))
    return report.latency.ttft_s.p50, report.latency.ttft_s.p90, report.cached_share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=400, help="of requests in turns")
    parser.add_argument("--requests", type=int, default=400, help="with shared prefixes, in each turn")
    parser.add_argument("--turns", type=int, default=3, help="of the workload with shared prefixes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as (alone, gateways):
        one, two = latencies(alone, gateways, options.rounds)
        p50s = [statistics.median(times) * 1e3 for times in (one, two)]
        p90s = [statistics.quantiles(times, n=10)[-1] * 1e3 for times in (one, two)]
        added_ms = statistics.median(b - a for a, b in zip(one, two, strict=True)) * 1e3
        print(f"one token, one client      one process p50 {p50s[0]:.2f} ms, p90 {p90s[0]:.2f} ms")
        print(f"                           shared      p50 {p50s[1]:.2f} ms, p90 {p90s[1]:.2f} ms")
        print(
            f"                           added p50 {p50s[1] - p50s[0]:+.2f} ms; of pairs {added_ms:+.2f} ms"
        )
        shares: tuple[list[float], list[float]] = ([], [])
        for seed in range(options.turns):
            for known, ports in zip(shares, ([alone], gateways), strict=True):
                known.append(cached_share(ports, options.requests, seed))
        means = [statistics.mean(known) for known in shares]
        print(f"cached, eight clients      one gateway {means[0]:.1%}, two gateways {means[1]:.1%}")
    (p50, p90, share), (p50_2, p90_2, share_2) = simulated(1), simulated(2)
    print(f"simulated, one gateway     p50 {p50 * 1e3:.1f} ms, p90 {p90 * 1e3:.1f} ms, cached {share:.1%}")
    growth = f"p50 {p50_2 / p50 - 1:+.1%}, p90 {p90_2 / p90 - 1:+.1%}"
    print(f"simulated, two gateways    {growth}, cached {share_2:.1%}")


if __name__ == "__main__":
    main()
