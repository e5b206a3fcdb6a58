#!/usr/bin/env python3
"""Trees of drafts against chains on a GPU, as they are served: the same requests without drafts, with chains, with
trees, and with what the drafter chooses.

    python -m bench.gpu_trees MODEL --heads FOLDER [--requests 1,2,4,8] [--prompts 16] [--tokens 256]
        [--temperature 0.7]
    python -m bench.gpu_trees FOLDER --shares 0.55,0.67,0.72,0.76,0.78,0.8,0.81,0.82 [--requests 1,2,4,8]

The first form answers prompts that `penstock draft train` holds out, with a head of that command; the answers must be
the same in every column, but for rounding. The second takes the shape of a model of which FOLDER needs nothing but a
config.json, with random weights and an EAGLE head of its sizes, and draws by lot on the GPU which guess of the head
is accepted: `--shares` say how often a token is among the head's first 1, 2, … guesses, as `python -m bench.trees`
prints it. The head then ranks its guesses by these shares, so that trees have one shape at every place.

`GPU ms` is the median time of a step. `trees` in the last columns is the share of drafted steps with trees where the
drafter chooses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.gpu_speculation import write_head
from bench.trees import numbers
from penstock.bench.gpu import begin_decoding
from penstock.cli.bench_gpu import read_vocabulary
from penstock.cli.draft import encoded
from penstock.core.clock import SystemClock
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.request import Request, SamplingParams
from penstock.engine.batch import DEVICE_DRAFTS, Samples
from penstock.engine.build import Engine, build_engine
from penstock.engine.drafters.choice import DraftChoice
from penstock.engine.drafters.combination import Drafters
from penstock.engine.drafters.model import MAX_TOKENS, ModelDrafter
from penstock.engine.drafters.trees import TREE_DEPTH, TREE_WIDTH
from penstock.engine.executor import ModelExecutor
from penstock.engine.learning.texts import built_in_prompts, held_out
from penstock.models.hub import ModelHub
from penstock.serve.environment import cache_dir

MODES = ("chains", "trees", "chosen")
MOST_SAMPLES = 16  # of a request
WARM_UP_TOKENS = 400  # of each request, before a measurement: graphs are recorded, and both kinds are tried
TIMED_TOKENS = 400  # of each request of a model with random weights
CHOOSING_RUNS = 4  # before the one that counts: a trial of trees takes some hundred steps


@triton.jit
def _draw_lots(
    sampled, firsts, counts, places, tokens, ancestors, lows, highs, vocab_size, seed, SHARES: tl.constexpr,
    IS_TREE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Replace the samples of one request: at each node, by the n-th of its guesses with that guess's chance, else by
    a token that was not guessed."""
    request = tl.program_id(0)
    first, count = tl.load(firsts + request), tl.load(counts + request)
    node = tl.arange(0, SIZE)  # 0 is the newest token
    # The token of a chain behind those that were taken would have been right as often.
    most = count if IS_TREE else count + 1
    is_node = (node > 0) & (node <= most)
    at = tl.load(places + request) + node - 1
    token = tl.load(tokens + at, mask=is_node, other=-1).to(tl.int64)
    parent = node - 1
    if IS_TREE:
        bits = tl.load(ancestors + at, mask=is_node, other=0)
        for back in tl.static_range(SIZE - 1, 0, -1):
            parent = tl.where(((bits >> back) & 1 != 0) & (back <= node), node - back, parent)
    before = (parent[:, None] == parent[None, :]) & (node[None, :] < node[:, None]) & (node[None, :] > 0)
    rank = tl.minimum(tl.sum(before.to(tl.int32), axis=1), SHARES - 1)
    lot = tl.rand(seed, request * SIZE + parent)
    wins = is_node & (lot >= tl.load(lows + rank)) & (lot < tl.load(highs + rank))
    is_child = (parent[None, :] == node[:, None]) & is_node[None, :]
    won = tl.max(tl.where(is_child & wins[None, :], token[None, :], -1), axis=1)
    highest = tl.max(tl.where(is_child, token[None, :], -1), axis=1)
    own = tl.load(sampled + first + node, mask=node <= count, other=0)
    other = tl.where(highest >= 0, (highest + 1) % vocab_size, own)
    tl.store(sampled + first + node, tl.where(won >= 0, won, other), mask=node <= count)


class Lottery:
    """Draws by lot which of the head's guesses is accepted."""

    def __init__(self, executor: ModelExecutor, drafter: ModelDrafter, shares: Sequence[float]) -> None:
        self._sample, self._rows, self._staging = executor._sampler.sample, executor._rows, executor._staging
        device = self._staging.device
        self._highs = torch.tensor(shares, device=device)
        self._lows = torch.cat([self._highs.new_zeros(1), self._highs[:-1]])
        self._num_draws = 0
        executor._sampler.sample = self.sample  # type: ignore[method-assign]
        executor._sampler.needs_only_argmax = lambda samples: False  # type: ignore[method-assign]
        chances = (self._highs - self._lows).clamp(min=1e-6).log()
        guesser: Any = drafter._guesser
        top: Callable[[Tensor, int], tuple[Tensor, Tensor]] = guesser.top

        def ranked(hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
            made, tokens = top(hidden, count)
            return 0 * made.nan_to_num() + chances[:count], tokens

        guesser.top = ranked

    def sample(
        self, logits: Tensor, samples: Samples, masks: Any = None, num_taken_back: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        sampled, logprobs = self._sample(logits, samples, masks, num_taken_back)
        counts = np.array(
            [len(samples.drafts.get(index, ())) for index in range(len(samples.request_ids))], dtype=np.int32
        )
        firsts, places = np.array(samples.firsts(), dtype=np.int32), samples.request_rows * DEVICE_DRAFTS
        if counts.size:
            self._num_draws += 1
            _draw_lots[len(counts),](
                sampled,
                *self._staging.all_to_device(firsts, counts, places.astype(np.int32)),
                self._rows.draft_tokens,
                self._rows.draft_ancestors,
                self._lows,
                self._highs,
                logits.shape[1],
                self._num_draws,
                SHARES=len(self._highs),
                IS_TREE=samples.nodes is not None,
                SIZE=MOST_SAMPLES,
            )
        return sampled, logprobs


class ModeChoice(DraftChoice):
    """Drafts chains or trees only, or chooses, and counts how often it asked for trees."""

    def __init__(self, mode: str) -> None:
        super().__init__(SystemClock(), MAX_TOKENS, TREE_DEPTH)
        self._mode, self.num_asked, self.num_trees = mode, 0, 0

    def _next(self, num_requests: int, was_tree: bool | None) -> bool:
        chosen = super()._next(num_requests, was_tree)
        is_tree = chosen if self._mode == "chosen" else self._mode == "trees"
        self.num_asked, self.num_trees = self.num_asked + 1, self.num_trees + is_tree
        return is_tree


@dataclass(frozen=True, slots=True)
class Measured:
    tokens_per_s: float
    tokens_per_step: float  # of each request
    gpu_ms: float
    texts: list[list[int]]


def build(path: Path, heads: str | None, load_format: Any) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(path), load_format=load_format, max_model_len=2048),
            cache=CacheConfig(kv_cache_memory="16GiB"),
            scheduler=SchedulerConfig(max_num_batched_tokens=8192, itl_target_ms=None),
            speculate=f"heads={heads}" if heads else "off",
        ),
        path,
    )


def drafter_of(engine: Engine) -> ModelDrafter:
    drafters = engine.loop.drafter
    assert isinstance(drafters, Drafters)
    found = drafters._drafters[-1]
    assert isinstance(found, ModelDrafter)
    if found._trees is None:
        raise SystemExit("This engine drafts no trees: they need a GPU, an EAGLE head and full attention.")
    return found


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], streams: int, sampling: SamplingParams
) -> Measured:
    """Answer prompts, `streams` at a time. Steps with prompts count in the tokens per second only."""
    loop, clock = engine.loop, SystemClock()
    waiting = [
        Request(id=f"{id(prompts)}-{number}", prompt_token_ids=tuple(prompt), sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]
    texts: dict[str, list[int]] = {each.id: [] for each in waiting}
    running, gpu_ms, num_events = 0, list[float](), 0
    began_s = clock.now()
    while waiting or loop.has_work:
        while waiting and running < streams:
            loop.add(waiting.pop(0))
            running += 1
        for event in loop.step():
            texts[event.request_id] += event.token_ids
            num_events += bool(event.token_ids)
            running -= event.finish_reason is not None
        gpu_ms.append(loop.step_s * 1000)
    elapsed_s = clock.now() - began_s
    num_tokens = sum(map(len, texts.values()))
    return Measured(
        num_tokens / elapsed_s, num_tokens / num_events, statistics.median(gpu_ms), list(texts.values())
    )


def decode(engine: Engine, streams: int, folder: Path, seed: int, num_tokens: int) -> Measured:
    """Decode behind random prompts until each request has so many more tokens on average."""
    loop, clock = engine.loop, SystemClock()
    requests = begin_decoding(loop, streams, read_vocabulary(folder), seed, 3 * num_tokens)
    found, gpu_ms = 0, list[float]()
    began_s = clock.now()
    while found < streams * num_tokens:
        found += sum(len(event.token_ids) for event in loop.step())
        gpu_ms.append(loop.step_s * 1000)
    elapsed_s = clock.now() - began_s
    for request in requests:
        loop.abort(request.id)
    while loop.has_work:
        loop.step()
    return Measured(found / elapsed_s, found / streams / len(gpu_ms), statistics.median(gpu_ms), [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a known name, a folder or a .gguf file")
    parser.add_argument("--heads", type=Path, help="folder of `penstock draft train`")
    parser.add_argument("--shares", type=lambda text: [float(each) for each in text.split(",")])
    parser.add_argument("--draft-vocab", type=int, default=32_768, help="tokens that a random head can draft")
    parser.add_argument("--requests", type=numbers, default=[1, 2, 4, 8], help="requests that decode at once")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    if (arguments.heads is None) == (arguments.shares is None):
        parser.error("give either --heads or --shares")
    if arguments.shares is not None and len(arguments.shares) < TREE_WIDTH:
        parser.error(f"--shares must be those of {TREE_WIDTH} guesses")
    path = ModelHub(cache_dir()).resolve(arguments.model)
    load_format = "auto" if arguments.heads else "random"
    with tempfile.TemporaryDirectory() as place:
        heads = arguments.heads
        if heads is None:
            fields = json.loads((path / "config.json").read_text())
            heads = write_head(Path(place) / "head", fields, arguments.draft_vocab)
        engine = build(path, heads, load_format)
    plain, drafter = build(path, None, load_format), drafter_of(engine)
    if arguments.shares:
        assert isinstance(engine.loop.executor, ModelExecutor)
        Lottery(engine.loop.executor, drafter, arguments.shares)
    prompts = encoded(engine.card, held_out(built_in_prompts())) if arguments.heads else []
    sampling = SamplingParams(max_tokens=arguments.tokens, temperature=arguments.temperature, seed=1)
    warming = SamplingParams(
        max_tokens=WARM_UP_TOKENS, temperature=arguments.temperature, seed=2, ignore_eos=True
    )
    table = Table("requests", "tokens/s without", "GPU ms", title=arguments.model)
    for mode in MODES:
        table.add_column(f"{mode}: tokens/s")
        for heading in ("tokens/step", "GPU ms"):
            table.add_column(heading)
    for heading in ("trees to chains", "chosen to chains", "trees chosen", "same answers"):
        table.add_column(heading)
    for streams in arguments.requests:

        def measure(which: Engine, streams: int = streams) -> Measured:
            if not arguments.heads:
                decode(which, streams, path, 1000 + streams, WARM_UP_TOKENS)
                return decode(which, streams, path, streams, TIMED_TOKENS)
            answer(which, prompts[-streams:], streams, warming)
            return answer(which, prompts[: arguments.prompts], streams, sampling)

        without, found, share = measure(plain), dict[str, Measured](), 0.0
        for mode in MODES:
            choice = drafter._choice = ModeChoice(mode)
            # Graphs of all sizes that these drafts lead to are recorded, and the choice has tried both.
            for _ in range(CHOOSING_RUNS if mode == "chosen" else 1):
                measure(engine)
            choice.num_asked = choice.num_trees = 0
            found[mode] = measure(engine)
            share = choice.num_trees / max(choice.num_asked, 1)
        same = [
            sum(a == b for a, b in zip(each.texts, without.texts, strict=True)) for each in found.values()
        ]
        rates = {mode: each.tokens_per_s for mode, each in found.items()}
        table.add_row(
            str(streams), f"{without.tokens_per_s:,.0f}", f"{without.gpu_ms:.2f}",
            *(
                text
                for each in found.values()
                for text in (f"{each.tokens_per_s:,.0f}", f"{each.tokens_per_step:.2f}", f"{each.gpu_ms:.2f}")
            ),
            f"{rates['trees'] / rates['chains']:.3f}", f"{rates['chosen'] / rates['chains']:.3f}", f"{share:.0%}",
            ", ".join(f"{count} of {len(without.texts)}" for count in same) if without.texts else "",
        )  # fmt: skip
    Console(width=200).print(table)
    for each in (engine, plain):
        each.close()


if __name__ == "__main__":
    main()
