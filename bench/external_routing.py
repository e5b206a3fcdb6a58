#!/usr/bin/env python3
"""What routing before external servers is worth: the cached share of prompts under Penstock and other gateways.

    python -m bench.external_routing [--router-python PATH] [--requests 512] [--rounds 3] [--tenants 8] [--json FILE]

Two `penstock serve echo` processes are the servers: real engines with the real block cache, without a model. Each
tenant's prompts begin with its own system prompt of 1,000 tokens, and come in random order, a few at a time. A server
has room for its half of the system prompts and a little more, not for all of them. Every round starts fresh servers
and the same requests for each gateway. The share is what the servers count: prompt tokens found in their caches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.echo_server import PENSTOCK, started
from bench.external import ROUTER, version_of
from bench.sockets import HOST
from penstock.core.machine import free_port

SYSTEM_CHARS = 1_000  # a byte is a token of the echo model
QUESTION_CHARS = 24
ANSWER_TOKENS = 16
BLOCK_SIZE = 16
NUM_SERVERS = 2
NUM_CLIENTS = 8
GATEWAY = "Penstock"
_COUNTER = r"^vllm:prefix_cache_{}(?:_total)?(?:{{[^}}]*}})? (\S+)$"


@contextlib.contextmanager
def echo_servers(tenants: int, spare: float) -> Iterator[list[str]]:
    blocks = -(-(SYSTEM_CHARS + QUESTION_CHARS + ANSWER_TOKENS) // BLOCK_SIZE)
    num_blocks = int(blocks * (tenants / NUM_SERVERS + spare))
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(NUM_SERVERS):
            port = free_port()
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            command = [*PENSTOCK, "serve", "echo", "--port", str(port), "--data-dir", folder]
            stack.enter_context(started([*command, "--num-kv-blocks", str(num_blocks)], port, "/ready"))
            urls.append(f"http://{HOST}:{port}")
        yield urls


@contextlib.contextmanager
def gateway(name: str, python: Path | None, urls: Sequence[str], api_workers: int) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        if name == GATEWAY:
            command = [*PENSTOCK, "serve", "--port", str(port), "--data-dir", folder]
            command += ["--api-workers", str(api_workers)]
            for url in urls:
                command += ["--external", url]
            ready = "/ready"
        else:
            command = [str(python), "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)]
            command += ["--worker-urls", *urls, "--prometheus-port", str(free_port())]
            ready = "/health"
        with started(command, port, ready):
            yield f"http://{HOST}:{port}"


def prompts(tenants: int, requests: int, seed: int) -> list[dict[str, object]]:
    chance = random.Random(seed)

    def text(length: int) -> str:
        return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=length))

    systems = [text(SYSTEM_CHARS) for _ in range(tenants)]
    bodies = []
    for _ in range(requests):
        messages = [
            {"role": "system", "content": chance.choice(systems)},
            {"role": "user", "content": text(QUESTION_CHARS)},
        ]
        bodies.append({"model": "echo", "messages": messages, "max_tokens": ANSWER_TOKENS})
    return bodies


def ask(url: str, body: dict[str, object]) -> None:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def counted(urls: Sequence[str], what: str) -> list[float]:
    """A counter of the prefix cache, of each server."""
    pattern = re.compile(_COUNTER.format(what), re.MULTILINE)
    pages = [urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode() for url in urls]
    return [sum(map(float, pattern.findall(page))) for page in pages]


def measure(name: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    with (
        echo_servers(options.tenants, options.spare) as urls,
        gateway(name, options.router_python, urls, options.api_workers) as url,
        ThreadPoolExecutor(NUM_CLIENTS) as clients,
    ):
        list(clients.map(lambda body: ask(url, body), prompts(options.tenants, options.requests, seed)))
        hits, queries = counted(urls, "hits"), counted(urls, "queries")
    return {"cached": sum(hits) / sum(queries), "busier": max(queries) / sum(queries)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router-python", type=Path, help="that sglang-router is installed for")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--spare", type=float, default=1.5, help="room for so many more prompts in each server"
    )
    parser.add_argument("--api-workers", type=int, default=1, help="processes of Penstock")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [GATEWAY] if options.router_python is None else [ROUTER, GATEWAY]
    if options.router_python is not None:
        print(version_of(options.router_python, "sglang-router"), "\n")
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            figures = measure(name, options, seed=number)
            rounds[name].append(figures)
            print(f"round {number + 1}: {name} {figures}", file=sys.stderr, flush=True)
    print("| gateway | cached share of prompts | requests at the busier server |\n| --- | ---: | ---: |")
    for name, found in rounds.items():
        cached, busier = (statistics.median(each[key] for each in found) for key in ("cached", "busier"))
        print(f"| {name} | {cached:.1%} | {busier:.1%} |")
    if options.json is not None:
        options.json.write_text(json.dumps(rounds, indent=2))


if __name__ == "__main__":
    main()
