#!/usr/bin/env python3
"""What verified drafts bring on a GPU, with random weights and a drafter of a set acceptance.

    python -m bench.gpu_speculation FOLDER [--acceptance 0.7] [--batch 1 --batch 8 ...] [--max-draft-tokens 8]
    python -m bench.gpu_speculation FOLDER --drafter head     # an EAGLE head, which drafts on the GPU
    python -m bench.gpu_speculation FOLDER --drafter model    # a draft model: --draft-layers layers of this shape
    python -m bench.gpu_speculation FOLDER --drafter head --acceptance 0.55 --load --plot FILE.png

FOLDER needs only a config.json. Random weights make text that nothing could guess, so the script replaces one thing:
whether a draft is accepted is drawn by lot on the GPU, with the set chance for each position. Drafts, verification,
sampling, KV and scheduling are those that serve. Without --drafter, drafts are any tokens and take no time. Each
batch decodes without drafts in one engine, then with drafts in another. The last table has the GPU's time for a step
of one request that verifies so many tokens. With --load the number of streams rises to 64 and falls again; the
picture shows the mean draft length, which the scheduler chooses.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.speculation import LOAD, plot_load
from penstock.bench.gpu import begin_decoding
from penstock.bench.load import IntRange
from penstock.bench.summary import require_matplotlib
from penstock.cli.bench_gpu import read_vocabulary
from penstock.core.clock import SystemClock
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.plan import ON_DEVICE, Draft
from penstock.core.request import Request, SamplingParams
from penstock.engine.batch import DEVICE_DRAFTS, Samples
from penstock.engine.build import Engine, build_engine
from penstock.engine.drafters.combination import Drafters
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.executor import ModelExecutor
from penstock.engine.grammar_masks import StepMasks
from penstock.engine.loop import EngineLoop
from penstock.models.drafters.files import write_heads

MAX_MODEL_LEN = 4096
NO_DRAFT = -2
ON_DEVICE_TOKEN = tl.constexpr(ON_DEVICE)
SAMPLE_S = 0.25
LOAD_PROMPT_TOKENS = 64
LOAD_ANSWER_TOKENS = (100, 400)
MOST_SAMPLES = 4096  # of a step
NEW_TOKENS = 128  # of every answer on average, timed


class RandomDrafter:
    """Drafts any token, repeated as often as is wanted; at most `limit` times for each request, if one is set."""

    def __init__(self, vocabulary: IntRange) -> None:
        self._vocabulary = vocabulary
        self._rng = random.Random(0)
        self.limit: int | None = None

    def add(self, request: Request) -> None: ...
    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None: ...
    def remove(self, request_id: str) -> None: ...

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        drafts = {}
        for request_id, most in wanted.items():
            count = most if self.limit is None else min(most, self.limit)
            drafts[request_id] = Draft((self._vocabulary.draw(self._rng),) * count, "random")
        return drafts


# A new number of samples must not compile the kernel again: that takes longer than many steps.
@triton.jit(do_not_specialize=["num_samples", "seed"])
def _draw_lots(
    sampled, drafts, rows, places, is_late, on_device, num_rejected, last_tokens, num_samples, vocab_size, seed,
    acceptance, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace samples in place: by the draft with the chance `acceptance`, else by a token that is not the draft. A
    draft that continues rejected ones, or another token than the expected one, is never accepted."""
    at = tl.arange(0, BLOCK)
    is_used = at < num_samples
    own, wanted, row = (
        tl.load(sampled + at, is_used),
        tl.load(drafts + at, is_used),
        tl.load(rows + at, is_used),
    )
    late = tl.load(on_device + tl.load(places + at, is_used), is_used).to(tl.int64)
    wanted = tl.where(wanted == ON_DEVICE_TOKEN, late, wanted)
    others = tl.where(own == wanted, (own + 1) % vocab_size, own)
    before = tl.load(last_tokens + row, is_used).to(tl.int64)
    is_void = tl.load(is_late + at, is_used) & (
        (tl.load(num_rejected + row, is_used) > 0) | (before != wanted)
    )
    accepts = (tl.rand(seed, at) < acceptance) & (wanted >= 0) & (is_void == 0)
    tl.store(sampled + at, tl.where(accepts, wanted, others), is_used)


class SetAcceptance:
    """Samples for which drafts are accepted by lot: each sample becomes the draft behind it with a set chance. The
    sample of a rejected draft differs from the draft. One small kernel draws the lots, so that steps of a small model
    take no longer."""

    def __init__(self, executor: ModelExecutor, acceptance: float, *, drafts_on_device: bool) -> None:
        self._drafts_on_device = drafts_on_device
        self._sample, self._rows = executor._sampler.sample, executor._rows
        self._staging = executor._staging
        self._num_draws = 0
        self.acceptance = acceptance
        executor._sampler.sample = self.sample  # type: ignore[method-assign]
        executor._sampler.needs_only_argmax = lambda samples: False  # type: ignore[method-assign]

    def sample(
        self,
        logits: Tensor,
        samples: Samples,
        masks: StepMasks | None = None,
        num_taken_back: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        sampled, logprobs = self._sample(logits, samples, masks, num_taken_back)
        if samples.offsets is not None or self._drafts_on_device:
            offsets = np.zeros_like(samples.rows) if samples.offsets is None else samples.offsets
            # Drafts that were not taken lie on the GPU too, and would have been right as often.
            untaken = ON_DEVICE if self._drafts_on_device else NO_DRAFT
            wanted = np.full(len(samples.rows), untaken, dtype=np.int64)
            is_late = np.zeros(len(samples.rows), dtype=np.int64)
            for index, first in enumerate(samples.firsts()):
                drafts = samples.drafts.get(index, ())
                if drafts:
                    # The token after the last draft is expected to be the same again.
                    wanted[first : first + len(drafts) + 1] = (*drafts, drafts[-1])
                is_late[first : first + len(drafts) + 1] = index in samples.late
            places = samples.rows * DEVICE_DRAFTS + np.minimum(offsets, DEVICE_DRAFTS - 1)
            self._num_draws += 1
            _draw_lots[1,](
                sampled,
                *self._staging.all_to_device(wanted, samples.rows, places, is_late),
                self._rows.draft_tokens,
                self._rows.num_rejected,
                self._rows.last_tokens,
                len(wanted),
                logits.shape[1],
                self._num_draws,
                self.acceptance,
                BLOCK=MOST_SAMPLES,
            )
        return sampled, logprobs


def write_head(folder: Path, settings: dict[str, Any], draft_vocab: int) -> Path:
    """Write an EAGLE head with random weights for a model's config.json, which drafts the first `draft_vocab`
    tokens."""
    size, inner = settings["hidden_size"], settings["intermediate_size"]
    dim = settings.get("head_dim") or size // settings["num_attention_heads"]
    queries, keys = settings["num_attention_heads"] * dim, settings["num_key_value_heads"] * dim
    shapes = {"fc": (size, 2 * size), "layers.0.mlp.down_proj": (size, inner)}
    shapes |= {f"layers.0.mlp.{part}_proj": (inner, size) for part in ("gate", "up")}
    parts = {"q": (queries, size), "k": (keys, size), "v": (keys, size), "o": (size, queries)}
    shapes |= {f"layers.0.self_attn.{part}_proj": shape for part, shape in parts.items()}
    tensors = {
        f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16, device="cuda") * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(size, dtype=torch.bfloat16)
    if draft_vocab < settings["vocab_size"]:
        tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
    write_heads(folder, {**settings, "num_hidden_layers": 1}, tensors)
    return folder


@dataclass(frozen=True, slots=True)
class Measured:
    tokens_per_s: float
    tokens_per_step: float  # of each request
    step_ms: float
    gpu_ms: float  # of that on the GPU


def named_drafter(arguments: argparse.Namespace, place: Path) -> str:
    """Write what the drafter needs. Returns the engine's setting."""
    settings = json.loads((arguments.folder / "config.json").read_text())
    if arguments.drafter == "head":
        return f"heads={write_head(place, settings, arguments.draft_vocab)}"
    if arguments.drafter == "model":
        place.mkdir(parents=True, exist_ok=True)
        settings["num_hidden_layers"] = arguments.draft_layers
        (place / "config.json").write_text(json.dumps(settings))
        return f"draft={place}"
    return "lookup"


def build(
    folder: Path, max_draft_tokens: int, acceptance: float, speculate: str = "lookup"
) -> tuple[Engine, SetAcceptance]:
    config = EngineConfig(
        model=ModelConfig(model=str(folder), load_format="random", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(kv_cache_memory="24GiB"),  # two engines share the GPU
        scheduler=SchedulerConfig(
            max_num_batched_tokens=8192, itl_target_ms=None, max_draft_tokens=max_draft_tokens
        ),
        speculate=speculate if max_draft_tokens else "off",
    )
    engine = build_engine(config, folder)
    if max_draft_tokens and speculate == "lookup":
        engine.loop.drafter = RandomDrafter(read_vocabulary(folder))
    for drafter in engine.loop.drafter._drafters if isinstance(engine.loop.drafter, Drafters) else ():
        if isinstance(drafter, ModelDrafter):
            drafter._choice.trees = None  # the lots are those of chains: `bench.gpu_trees` has trees
    assert isinstance(engine.loop.executor, ModelExecutor)
    drafts_on_device = bool(max_draft_tokens) and speculate != "lookup"
    return engine, SetAcceptance(engine.loop.executor, acceptance, drafts_on_device=drafts_on_device)


def measure(loop: EngineLoop, batch: int, vocabulary: IntRange, seed: int) -> Measured:
    """Decode a batch until every request has NEW_TOKENS more tokens on average."""
    clock = SystemClock()
    requests = begin_decoding(loop, batch, vocabulary, seed, 3 * NEW_TOKENS)
    num_tokens, steps_ms, gpu_ms = 0, [], []
    began_s = before_s = clock.now()
    while num_tokens < batch * NEW_TOKENS:
        num_tokens += sum(len(event.token_ids) for event in loop.step())
        now = clock.now()
        steps_ms.append((now - before_s) * 1000)
        gpu_ms.append(loop.step_s * 1000)
        before_s = now
    elapsed_s = clock.now() - began_s
    for request in requests:
        loop.abort(request.id)
    while loop.has_work:
        loop.step()
    return Measured(
        num_tokens / elapsed_s,
        num_tokens / batch / len(steps_ms),
        statistics.median(steps_ms),
        statistics.median(gpu_ms),
    )


def follow_load(
    loop: EngineLoop, vocabulary: IntRange, seconds: float
) -> list[tuple[float, int, float, float]]:
    """Raise and lower the number of streams. Returns the time, the streams, the mean draft length and the tokens per
    second of each sample."""
    clock, rng, samples = SystemClock(), random.Random(0), []
    live: list[str] = []
    began_s, number = clock.now(), 0

    def drafted() -> tuple[int, int]:
        stats = loop.stats().drafters
        return sum(sum(each.drafted) for each in stats), sum(sum(each.accepted) for each in stats)

    for wanted in LOAD:
        for request_id in live[wanted:]:
            loop.abort(request_id)
        del live[wanted:]
        ends_s = clock.now() + seconds
        while clock.now() < ends_s:
            before, before_s, num_tokens = drafted(), clock.now(), 0
            while clock.now() < before_s + SAMPLE_S:
                while len(live) < wanted:
                    number += 1
                    prompt = tuple(vocabulary.draw(rng) for _ in range(LOAD_PROMPT_TOKENS))
                    sampling = SamplingParams(
                        max_tokens=rng.randint(*LOAD_ANSWER_TOKENS), temperature=0.6, ignore_eos=True
                    )
                    loop.add(Request(id=f"load-{number}", prompt_token_ids=prompt, sampling=sampling))
                    live.append(f"load-{number}")
                for event in loop.step():
                    num_tokens += len(event.token_ids)
                    if event.finish_reason is not None and event.request_id in live:
                        live.remove(event.request_id)
            now_s = clock.now()
            num_drafted, num_accepted = (now - then for now, then in zip(drafted(), before, strict=True))
            length = num_drafted / max(num_tokens - num_accepted, 1)
            samples.append((now_s - began_s, wanted, length, num_tokens / (now_s - before_s)))
    for request_id in live:
        loop.abort(request_id)
    while loop.has_work:
        loop.step()
    return samples


def draw_load(loop: EngineLoop, vocabulary: IntRange, arguments: argparse.Namespace) -> None:
    follow_load(loop, vocabulary, SAMPLE_S)  # captures graphs
    samples = follow_load(loop, vocabulary, arguments.seconds)
    for second, streams, length, rate in samples:
        print(
            f"{second:6.1f} s  {streams:3} streams  draft length {length:5.2f}  {rate:7.1f} tokens/s",
            flush=True,
        )
    if arguments.plot:
        title = f"{arguments.folder.name}, {torch.cuda.get_device_name()}, drafts accepted with a chance of"
        plot_load(samples, f"{title} {arguments.acceptance:g} at each position", arguments.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    parser.add_argument("--drafter", choices=("random", "head", "model"), default="random")
    parser.add_argument("--draft-vocab", type=int, default=32_768, help="tokens that a head can draft")
    parser.add_argument("--draft-layers", type=int, default=2, help="layers of the draft model")
    parser.add_argument("--load", action="store_true", help="raise and lower the number of streams")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each number of streams of --load")
    parser.add_argument("--plot", type=Path, help="write the picture of --load here")
    arguments = parser.parse_args()
    if arguments.plot:
        require_matplotlib()
    folder, batches = arguments.folder, arguments.batch or [1, 8, 32, 64, 128, 256]
    vocabulary = read_vocabulary(folder)
    if arguments.load:
        with tempfile.TemporaryDirectory() as place:
            speculate = named_drafter(arguments, Path(place) / "drafter")
            engine, _ = build(folder, arguments.max_draft_tokens, arguments.acceptance, speculate)
        draw_load(engine.loop, vocabulary, arguments)
        engine.close()
        return
    plain_engine, _ = build(folder, 0, 0.0)
    plain = {}
    for batch in batches:
        measure(plain_engine.loop, batch, vocabulary, 2 * batch)
        plain[batch] = measure(plain_engine.loop, batch, vocabulary, 2 * batch + 1)
    with tempfile.TemporaryDirectory() as place:
        speculate = named_drafter(arguments, Path(place) / "drafter")
        engine, lottery = build(folder, arguments.max_draft_tokens, arguments.acceptance, speculate)
    print(
        f"{folder.name}, drafter: {arguments.drafter}, acceptance {arguments.acceptance:g} for each position"
    )
    print("| batch | tokens/s without | with drafts | ratio | tokens per step | step, ms, without | with |")
    print("|---|---|---|---|---|---|---|")
    for batch in batches:
        for round_ in (1, 2, 3):  # captures graphs of all sizes that drafts lead to
            measure(engine.loop, batch, vocabulary, -round_ * batch)
        ours, without = measure(engine.loop, batch, vocabulary, 2 * batch + 1), plain[batch]
        print(
            f"| {batch} | {without.tokens_per_s:,.0f} | {ours.tokens_per_s:,.0f} "
            f"| {ours.tokens_per_s / without.tokens_per_s:.2f} | {ours.tokens_per_step:.2f} "
            f"| {without.step_ms:.2f} | {ours.step_ms:.2f} |",
            flush=True,
        )
    if arguments.drafter == "random":
        lottery.acceptance = 1.0  # the scheduler then takes every draft
        print_verifications(engine, vocabulary, measure(plain_engine.loop, 1, vocabulary, 0))
    for each in (plain_engine, engine):
        each.close()


def print_verifications(engine: Engine, vocabulary: IntRange, plain: Measured) -> None:
    drafter = engine.loop.drafter
    assert isinstance(drafter, RandomDrafter)
    print("\n| tokens verified | GPU ms | to a plain step |\n|---|---|---|")
    print(f"| none | {plain.gpu_ms:.2f} | 1.00 |")
    for num_tokens in (2, 4, 8):
        drafter.limit = num_tokens - 1
        for round_ in range(3):
            found = measure(engine.loop, 1, vocabulary, -1000 - 10 * num_tokens - round_)
        print(f"| {num_tokens} | {found.gpu_ms:.2f} | {found.gpu_ms / plain.gpu_ms:.2f} |")


if __name__ == "__main__":
    main()
