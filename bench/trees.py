#!/usr/bin/env python3
"""Trees of drafts against chains: the tokens of a step with both, and the tokens per second that they would bring.

    python -m bench.trees MODEL --heads FOLDER [--device cuda] [--prompts 16] [--tokens 128] [--temperature 0.7]
        [--nodes 2,4,8,16,32] [--widths 2,4,8] [--depth 8] [--requests 1,8] [--shape FOLDER | --step-ms 1:4.2,8:4.5]

The engine drafts chains. MODEL answers prompts that `penstock draft train` holds out; then an EAGLE head as that
command writes it guesses at every position of the answers, from MODEL's true hidden states. A tree grows as EAGLE 2
has it: of each depth the `width` most probable guesses (joint probability of the path) get `width` children each, and
the most probable `nodes` of all guesses are verified. A chain has one guess at each depth. A step brings the guesses
that the answer follows, and one token more; tokens per step are those of a walk through each answer. Samples of the
engine do not depend on drafts, so this holds for sampled answers (--temperature) too.

Times are measured with the engine's kernels, at a context of 512 tokens, each as the median of 11 turns: on a GPU as
replayed graphs, padded to the engine's sizes; on a CPU as CPU time of one thread. A step is the verification of its
rows, the head's pass over the newest tokens, and a pass for each further depth, of one row (chain) or `width` rows
(tree). A tree also pays for probabilities and the best guesses of each row instead of an argmax, for the choice of
its nodes, and for moving the KV of the accepted path. Assumed, not measured: attention over a tree, whose rows see
their own ancestors only, takes as long as attention over a chain of as many rows. `slack` is the time that it may
take more in each step before the tree is no better than the chain. The host's time is left out; it would favour what
brings more tokens in a step.
`--shape` takes the times of another model on a GPU, of which FOLDER needs nothing but a config.json, with random
weights and a head of its sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.draft_costs import NOTHING, Costs, Shape, Stopwatch, shapes
from bench.tree_head import TreeHead
from penstock.cli.draft import encoded
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.request import SamplingParams
from penstock.engine.learning.texts import built_in_prompts, held_out
from penstock.engine.learning.training import load_target
from penstock.engine.offline import OfflineEngine
from penstock.kernels.select import set_num_threads
from penstock.models.drafters.heads import EagleHead, Target, load_heads
from penstock.models.hub import ModelHub
from penstock.serve.environment import cache_dir


def steps_of(accepted: Sequence[int]) -> int:
    """Count the steps of a walk through an answer: each brings the accepted tokens and one more."""
    at = steps = 0
    while at < len(accepted):
        at, steps = at + accepted[at] + 1, steps + 1
    return steps


@dataclass(frozen=True, slots=True)
class Walks:
    """The tokens of each answer, and the steps that they take with each shape."""

    num_tokens: list[int]
    num_steps: dict[Shape, list[int]]

    def per_step(self, shape: Shape) -> float:
        return sum(self.num_tokens) / sum(self.num_steps[shape])

    def tokens_per_s(self, shape: Shape, costs: Costs, texts: slice = slice(None)) -> float:
        steps = sum(self.num_steps[shape][texts])
        return 1000 * costs.requests * sum(self.num_tokens[texts]) / (steps * costs.ms(shape))

    def best(self, shapes: Sequence[Shape], costs: Costs, texts: slice = slice(None)) -> Shape:
        return max(shapes, key=lambda shape: self.tokens_per_s(shape, costs, texts))

    def fair_tokens_per_s(self, shapes: Sequence[Shape], costs: Costs) -> list[float]:
        """Return the rates of both halves of the answers, each with the shape that is best for the other half, so
        that a choice from more shapes is no advantage."""
        halves = (slice(0, None, 2), slice(1, None, 2))
        return [
            self.tokens_per_s(self.best(shapes, costs, other), costs, own)
            for own, other in zip(halves, reversed(halves), strict=True)
        ]


def walk(head: TreeHead, texts: Sequence[tuple[int, list[int]]], candidates: Sequence[Shape]) -> Walks:
    """Walk through answers, each given as the length of its prompt and its tokens with the prompt."""
    depth = max(shape.depth for shape in candidates)
    walks = Walks(
        [len(text) - prompt_len - 1 for prompt_len, text in texts], {each: [] for each in candidates}
    )
    firsts = torch.zeros(max(each.width for each in candidates))
    for number, (prompt_len, text) in enumerate(texts, 1):
        for width in sorted({each.width for each in candidates}):
            guesses = head.guess(text, prompt_len, width, depth)
            for shape in (each for each in candidates if each.width == width):
                walks.num_steps[shape].append(steps_of(guesses.accepted(shape)))
        firsts += guesses.is_right[:, : len(firsts)].sum(dim=0).cpu()  # of the widest
        Console(stderr=True).print(f"{number} of {len(texts)} answers", end="\r")
    shares = (firsts.cumsum(0) / sum(walks.num_tokens)).tolist()
    known = ", ".join(f"{share:.0%}" for share in shares)
    print(f"The token is among the head's first 1, 2, … guesses: {known} ({sum(walks.num_tokens)} tokens)")
    return walks


def answers(
    config: EngineConfig, path: Path, num_prompts: int, max_tokens: int, temperature: float
) -> list[tuple[int, list[int]]]:
    """Let the model answer held-out prompts. Returns lengths of prompts, and tokens of prompts with answers."""
    engine = OfflineEngine(config, path)
    try:
        prompts = encoded(engine.card, held_out(built_in_prompts())[:num_prompts])
        sampling = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
            for number in range(len(prompts))
        ]
        completions = engine.generate(prompts, sampling)
    finally:
        engine.close()
    texts = [
        (len(prompt), [*prompt, *each.token_ids]) for prompt, each in zip(prompts, completions, strict=True)
    ]
    return [(prompt_len, text) for prompt_len, text in texts if len(text) > prompt_len + 2]


def show_shapes(walks: Walks, nodes: Sequence[int], costs: Costs) -> None:
    """Show the deepest chain and the best tree of each size, and the fastest of each of at most so many nodes."""
    headings = (
        "tokens/step",
        "tree",
        "tokens/step",
        "ratio",
        "fastest chain",
        "tokens/s",
        "fastest tree",
        "tokens/s",
    )
    table = Table(
        "nodes", "chain", *headings, "ratio", title=f"By verified nodes; requests: {costs.requests}"
    )
    chains = [shape for shape in walks.num_steps if shape.is_chain and shape.nodes]
    trees = [shape for shape in walks.num_steps if not shape.is_chain]
    for count in nodes:
        few_chains, few_trees = ([each for each in some if each.nodes <= count] for some in (chains, trees))
        of_size = [each for each in few_trees if each.nodes == count]
        if not of_size:
            continue
        shown = [few_chains[-1], max(of_size, key=walks.per_step)]
        fastest = [walks.best(few_chains, costs), walks.best(few_trees, costs)]
        steps = [walks.per_step(each) for each in shown]
        rates = [walks.tokens_per_s(each, costs) for each in fastest]
        table.add_row(
            str(count), str(shown[0]), f"{steps[0]:.2f}", str(shown[1]), f"{steps[1]:.2f}",
            f"{steps[1] / steps[0]:.2f}", str(fastest[0]), f"{rates[0]:,.1f}", str(fastest[1]), f"{rates[1]:,.1f}",
            f"{rates[1] / rates[0]:.3f}",
        )  # fmt: skip
    Console(width=180).print(table)


def show_costs(costs: Costs) -> None:
    table = Table("rows", "verification", "head", "argmax", "choice of a tree", title="Milliseconds")
    tables = (costs.step, costs.head, costs.argmax, costs.top)
    for rows in sorted(set().union(*tables)):
        table.add_row(str(rows), *(f"{each[rows]:.3f}" if rows in each else "" for each in tables))
    Console().print(table)
    print(f"Nodes chosen and KV moved in each step with a tree: {costs.tree:.3f} ms")


def show_verdicts(walks: Walks, all_costs: Sequence[Costs]) -> None:
    table = Table(
        "requests", "no drafts", "best chain", "tokens/s", "best tree", "tokens/s", "tree to chain", "halves"
    )
    table.add_column("slack, ms")
    table.title = "Predicted tokens/s; no shape was chosen on the answers that it is measured on"
    chains = [shape for shape in walks.num_steps if shape.is_chain]
    trees = [shape for shape in walks.num_steps if not shape.is_chain]
    for costs in all_costs:
        chain, tree = walks.best(chains, costs), walks.best(trees, costs)
        rates = [walks.fair_tokens_per_s(each, costs) for each in (chains, trees)]
        halves = [b / a for a, b in zip(*rates, strict=True)]
        means = [2 / sum(1 / rate for rate in each) for each in rates]
        even_ms = 1000 * costs.requests * walks.per_step(tree) / walks.tokens_per_s(chain, costs)
        table.add_row(
            str(costs.requests), f"{walks.tokens_per_s(NOTHING, costs):,.1f}", str(chain), f"{means[0]:,.1f}",
            str(tree), f"{means[1]:,.1f}", f"{means[1] / means[0]:.3f}",
            ", ".join(f"{each:.3f}" for each in halves), f"{even_ms - costs.ms(tree):.2f}",
        )  # fmt: skip
    Console(width=150).print(table)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def times(text: str) -> dict[int, float]:
    pairs = (each.split(":") for each in text.split(","))
    return {int(rows): float(ms) for rows, ms in pairs}


def random_model(folder: Path) -> tuple[EagleHead, Target]:
    """Load a model with random weights on the GPU, and an EAGLE head of its sizes."""
    from bench.gpu_speculation import write_head  # needs Triton

    settings = ModelConfig(model=str(folder), device="cuda", load_format="random", max_model_len=2048)
    target = load_target(EngineConfig(model=settings), folder)
    with tempfile.TemporaryDirectory() as place:
        fields = json.loads((folder / "config.json").read_text())
        head = load_heads(write_head(Path(place), fields, 32_768), target, 2048)
    assert isinstance(head, EagleHead)
    return head, target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a known name, a folder or a .gguf file")
    parser.add_argument("--heads", type=Path, required=True, help="folder of `penstock draft train`")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of the answers; guesses stay the same"
    )
    parser.add_argument("--nodes", type=numbers, default=[2, 4, 8, 16, 32], help="verified nodes of trees")
    parser.add_argument("--widths", type=numbers, default=[2, 4, 8], help="rows of each pass of the head")
    parser.add_argument("--depth", type=int, default=8, help="most passes of the head")
    parser.add_argument("--requests", type=numbers, default=[1], help="requests that decode at once")
    parser.add_argument("--shape", type=Path, help="folder of another model, for times on a GPU")
    parser.add_argument(
        "--step-ms", type=times, help="milliseconds of a verification by rows, as 1:4.2,8:4.5"
    )
    parser.add_argument("--draft-ms", type=times, help="milliseconds of a pass of the head by rows")
    arguments = parser.parse_args()
    candidates = shapes(arguments.nodes, arguments.widths, arguments.depth)
    if all(shape.is_chain for shape in candidates):
        parser.error("no tree has these --widths, --nodes and --depth")
    path = ModelHub(cache_dir()).resolve(arguments.model)
    config = EngineConfig(
        model=ModelConfig(model=str(path), device=arguments.device, max_model_len=2048),
        cache=CacheConfig(num_kv_blocks=2048),
        scheduler=SchedulerConfig(itl_target_ms=None),
        speculate="off",
    )
    num_threads = torch.get_num_threads()
    texts = answers(config, path, arguments.prompts, arguments.tokens, arguments.temperature)
    gc.collect()  # the engine's memory
    torch.cuda.empty_cache()
    target = load_target(config, path)
    torch.set_num_threads(num_threads)  # an engine leaves its kernels all cores but one
    head = TreeHead(arguments.heads, target, 2048)
    walks = walk(head, texts, candidates)
    set_num_threads(1)
    timed = random_model(arguments.shape) if arguments.shape else (head.served, target)
    all_costs = []
    for requests in arguments.requests:
        costs = Stopwatch(*timed, requests, candidates).costs()
        if arguments.step_ms:
            costs = replace(costs, step=arguments.step_ms)
        if arguments.draft_ms:
            costs = replace(costs, head=arguments.draft_ms, argmax={1: 0.0}, top={1: 0.0})
        show_costs(costs)
        show_shapes(walks, arguments.nodes, costs)
        all_costs.append(costs)
    show_verdicts(walks, all_costs)


if __name__ == "__main__":
    main()
