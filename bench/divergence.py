#!/usr/bin/env python3
"""How far the answers of `--dtype auto` and of llama.cpp are from float32's, on this machine's CPU, in one run.

    python -m bench.divergence MODEL.gguf --llama-python PATH [--tokens 4096] [--prompts 100] [--new-tokens 64]
        [--keep FOLDER] [--threads N]

The reference is Penstock in float32 with the weights of the file, unrounded. All others read the same file. PATH is a
Python that llama-cpp-python is installed for (`make .peers/llama-python/bin/python`). For each, the script prints the
mean Kullback-Leibler divergence of the next token over a text, the share of tokens after which the most probable next
token is the same, and for how many prompts the greedy answer is the same, token by token.

With --keep, each finished run is saved in the folder, and a second call with the same settings goes on with the runs
that are missing. A run takes some gigabytes: its logits have the width of the vocabulary. On a machine that other
programs use, --threads 1 is faster than two threads of which one waits for the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.kernels.select import capabilities, preferred_cpu_dtype, select_ops, set_num_threads
from penstock.models.load import load_model, open_checkpoint
from penstock.models.model import Model
from penstock.models.quantization.evaluation import WindowRunner, default_texts
from penstock.models.quantization.job import text_pieces

BLOCK_SIZE = 16
PROMPT_TOKENS = 24

# Runs in the other Python. Reads {model, pieces, prompts, new_tokens}; writes logits and answers.
LLAMA_PROGRAM = """
import json, sys, numpy as np
from llama_cpp import Llama
job = json.load(open(sys.argv[1]))
model = Llama(job["model"], logits_all=True, verbose=False, n_ctx=1024, n_batch=512, n_threads=job["threads"])
with open(sys.argv[2], "wb") as out:
    for piece in job["pieces"]:
        model.reset()
        model.eval(piece)
        np.save(out, model.scores[: len(piece) - 1].astype(np.float32))
answers = []
for prompt in job["prompts"]:
    model.reset()
    model.eval(prompt)
    tokens = []
    for _ in range(job["new_tokens"]):
        tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(tokens[-1:])
    answers.append(tokens)
json.dump(answers, open(sys.argv[3], "w"))
"""


@dataclass(frozen=True, slots=True)
class Job:
    model: Path
    pieces: list[list[int]]
    prompts: list[list[int]]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    logits: list[Tensor]  # of each piece, float32 [tokens - 1, V]
    answers: list[list[int]]


def run_llama(job: Job, python: str) -> Found:
    settings = {
        "model": str(job.model),
        "pieces": job.pieces,
        "prompts": job.prompts,
        "new_tokens": job.new_tokens,
        "threads": capabilities().num_threads,
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, logits, answers = (Path(folder) / name for name in ("job", "logits", "answers"))
        asked.write_text(json.dumps(settings))
        subprocess.run(
            [python, "-c", LLAMA_PROGRAM, str(asked), str(logits), str(answers)],
            check=True,
        )
        with logits.open("rb") as file:
            found = [torch.from_numpy(np.load(file)) for _ in job.pieces]
        return Found(found, json.loads(answers.read_text()))


def run_penstock(job: Job, ops: Ops) -> Found:
    model = load_model(job.model, ops)
    runner = WindowRunner(model, ops)
    logits = [torch.cat([rows.clone() for rows, _ in runner.logits(piece)]) for piece in job.pieces]
    return Found(logits, greedy_answers(model, ops, job.prompts, job.new_tokens))


def greedy_answers(
    model: Model, ops: Ops, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """All prompts side by side; each has as many tokens as the others."""
    if not prompts:
        return []
    count, length = len(prompts), len(prompts[0])
    blocks = -(-(length + new_tokens) // BLOCK_SIZE)
    kv = ops.allocate_kv(model.num_layers, count * blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
    ids = torch.tensor(prompts, dtype=torch.int32)
    answers: list[list[int]] = [[] for _ in prompts]
    for context in range(length, length + new_tokens):
        positions = torch.arange(context - ids.shape[1], context)
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = AttentionBatch(
            positions=positions.repeat(count).int(),
            slots=slots.flatten().int(),
            query_starts=torch.arange(0, ids.numel() + 1, ids.shape[1], dtype=torch.int32),
            context_lens=torch.full((count,), context, dtype=torch.int32),
            block_tables=tables,
            num_requests=count,
            max_query_len=ids.shape[1],
            max_context_len=context,
        )
        with torch.inference_mode():
            hidden = model.forward(ids.flatten(), batch, kv)
            last = hidden[batch.query_starts[1:].long() - 1].contiguous()
            chosen = model.logits(last).argmax(dim=1)
        for answer, token in zip(answers, chosen.tolist(), strict=True):
            answer.append(token)
        ids = chosen.int().view(count, 1)
    return answers


def run_or_load(name: str, job: Job, run: Callable[[], Found], folder: Path | None) -> Found:
    """Return what the run found. A folder keeps it for the next call with the same job."""
    if folder is None:
        return run()
    settings = json.dumps(asdict(job), default=str).encode()
    digest = hashlib.sha256(settings).hexdigest()[:12]
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{digest}.pt"
    if path.exists():
        saved = torch.load(path)
        return Found(saved["logits"], saved["answers"])
    found = run()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    torch.save({"logits": found.logits, "answers": found.answers}, unfinished)
    unfinished.replace(path)
    return found


def compare(exact: Found, other: Found) -> tuple[float, float, int, float]:
    """Mean divergence in nats, share of equal choices, number of equal answers, mean tokens until they differ."""
    divergences, same = [], []
    for ours, theirs in zip(exact.logits, other.logits, strict=True):
        log_p, log_q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    prefixes = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(exact.answers, other.answers, strict=True)
    ]
    equal = sum(prefix == len(a) for prefix, a in zip(prefixes, exact.answers, strict=True))
    return (
        float(torch.cat(divergences).mean()),
        float(torch.cat(same).double().mean()),
        equal,
        sum(prefixes) / max(1, len(prefixes)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, for the divergence")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64, help="of each greedy answer")
    parser.add_argument("--bfloat16", action="store_true", help="measure `--dtype bfloat16` too")
    parser.add_argument("--keep", type=Path, help="folder for finished runs, with which a later call goes on")
    parser.add_argument("--threads", type=int, help="of each engine; default: one for each core")
    arguments = parser.parse_args()
    if arguments.threads:
        set_num_threads(arguments.threads)
    calibration, evaluation = default_texts()
    checkpoint = open_checkpoint(arguments.model)
    pieces = text_pieces(checkpoint, evaluation, arguments.tokens)
    cuts = text_pieces(checkpoint, calibration, 512 * max(1, arguments.prompts // 16))
    starts = [cut[at : at + PROMPT_TOKENS] for cut in cuts for at in range(0, len(cut), PROMPT_TOKENS)]
    prompts = [start for start in starts if len(start) == PROMPT_TOKENS][: arguments.prompts]
    job = Job(arguments.model, pieces, prompts, arguments.new_tokens)
    found = capabilities()
    print(f"{arguments.model.name}, {found.isa}, {sum(map(len, pieces))} tokens, {len(prompts)} prompts")
    exact = run_or_load(
        "float32", job, lambda: run_penstock(job, select_ops("cpu", torch.float32)), arguments.keep
    )
    runs: dict[str, Callable[[], Found]] = {
        "`--dtype auto`": lambda: run_penstock(
            job, select_ops("cpu", preferred_cpu_dtype(), integer_products=True)
        )
    }
    if arguments.bfloat16:
        runs["`--dtype bfloat16`"] = lambda: run_penstock(job, select_ops("cpu", torch.bfloat16))
    if arguments.llama_python:
        runs["llama.cpp"] = lambda: run_llama(job, arguments.llama_python)
    print("| | divergence, nats | same next token | equal answers | equal tokens |\n|---|---|---|---|---|")
    for name, run in runs.items():
        divergence, same, equal, prefix = compare(exact, run_or_load(name, job, run, arguments.keep))
        of = f"{equal} of {len(prompts)}"
        print(
            f"| {name} | {divergence:.6f} | {same:.2%} | {of} | {prefix:.1f} of {job.new_tokens} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
