"""CPU time of single steps on one core, Penstock and llama.cpp with the same file: for machines that are never idle.

    python -m bench.peer_steps MODEL.gguf --llama-python PATH [--rounds 5]

A prompt of 128 tokens, and a decode step behind it. Both engines run on one thread and count its CPU time, which
other programs change little. They take turns, and the table shows the fastest of the rounds. PATH is a Python that
llama-cpp-python is installed for (`make .peers/llama-python/bin/python`). `bench/peers_cpu.py` compares whole
servers, on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.kernels.interface import AttentionBatch
from penstock.kernels.select import capabilities, preferred_cpu_dtype, select_ops, set_num_threads
from penstock.models.load import load_model

BLOCK_SIZE = 16
PROMPT = list(range(1000, 1128))

# Runs in the other Python. Reads a prompt in each line; writes the seconds of the prompt and of a decode step.
LLAMA_PROGRAM = """
import json, sys, time
from llama_cpp import Llama
model = Llama(sys.argv[1], verbose=False, n_ctx=512, n_batch=512, n_threads=1)
for line in sys.stdin:
    model.reset()
    start = time.thread_time()
    model.eval(json.loads(line))
    middle = time.thread_time()
    model.eval([1000])
    print(middle - start, time.thread_time() - middle, flush=True)
"""


def penstock_turn(path: Path) -> Callable[[], tuple[float, float]]:
    """Return a function that runs the prompt and the decode step as `--dtype auto` does."""
    ops = select_ops("cpu", preferred_cpu_dtype(), integer_products=True)
    model = load_model(path, ops)
    blocks = len(PROMPT) // BLOCK_SIZE + 1
    kv = ops.allocate_kv(model.num_layers, blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)

    def step(tokens: list[int], first: int) -> float:
        places = torch.arange(first, first + len(tokens), dtype=torch.int32)
        context = first + len(tokens)
        batch = AttentionBatch(
            positions=places,
            slots=places,
            query_starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
            context_lens=torch.tensor([context], dtype=torch.int32),
            block_tables=torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
            num_requests=1,
            max_query_len=len(tokens),
            max_context_len=context,
        )
        start = time.thread_time()
        with torch.inference_mode():
            model.logits(model.forward(torch.tensor(tokens, dtype=torch.int32), batch, kv)[-1:].contiguous())
        return time.thread_time() - start

    return lambda: (step(PROMPT, 0), step([1000], len(PROMPT)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-python", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    set_num_threads(1)
    torch.set_num_threads(1)
    ours = penstock_turn(arguments.model)
    command = [arguments.llama_python, "-c", LLAMA_PROGRAM, str(arguments.model)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None
    assert peer.stdout is not None
    rounds = []
    try:
        for _ in range(arguments.rounds):
            own = ours()
            peer.stdin.write(json.dumps(PROMPT) + "\n")
            peer.stdin.flush()
            prompt_s, decode_s = map(float, peer.stdout.readline().split())
            rounds.append((*own, prompt_s, decode_s))
    finally:
        peer.stdin.close()
        peer.wait()
    prompt, decode, their_prompt, their_decode = (1e3 * min(times) for times in zip(*rounds, strict=True))
    print(f"{arguments.model.name}, {capabilities().isa}, CPU time of one core")
    print("| | Penstock, ms | llama.cpp, ms | ratio |\n|---|---|---|---|")
    print(
        f"| a prompt of {len(PROMPT)} tokens | {prompt:.0f} | {their_prompt:.0f} | {their_prompt / prompt:.1f} × |"
    )
    print(f"| a decode step | {decode:.1f} | {their_decode:.1f} | {their_decode / decode:.1f} × |")


if __name__ == "__main__":
    main()
