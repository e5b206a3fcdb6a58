#!/usr/bin/env python3
"""How often each drafter's tokens are accepted, by their position in a draft.

    python -m bench.acceptance [--model smollm2-135m] [--heads FOLDER] [--draft MODEL] [--own-layers 20]
        [--own-quantization int4] [--prompts 12] [--edits 2] [--tokens 4]

Answers are greedy, to one request at a time. Every draft is verified whole, whether that pays or not, so that all
positions are counted. Drafters: lookup; `--heads`, a head; `--draft`, another model with the same vocabulary;
`--own-layers` and `--own-quantization`, the served model itself with its first layers only, or rounded, in place of a
draft model where none exists. Texts: questions without repetition, and files to be returned with one name changed
(`bench/edits`). A share counts the tokens whose predecessors in the draft were accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.speculation import CHAT, edit_prompts
from penstock.cli.draft import encoded
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.plan import Draft
from penstock.core.request import Request, SamplingParams
from penstock.engine.build import Engine, build_engine
from penstock.engine.drafters import loading
from penstock.engine.drafters.length import DraftLength
from penstock.models.hub import ModelHub
from penstock.serve.environment import cache_dir


@dataclass(frozen=True, slots=True)
class Shares:
    """Counts of one drafter on one kind of text."""

    drafter: str
    text: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    num_tokens: int
    num_steps: int

    @property
    def shares(self) -> list[float]:
        """The chance of each position, those in front of it being accepted."""
        tried = (*self.drafted[:1], *self.accepted)
        return [
            each / min(before, own)
            for each, before, own in zip(self.accepted, tried, self.drafted, strict=False)
            if min(before, own)
        ]


def takes_all_drafts(engine: Engine, num_tokens: int) -> Engine:
    """Let the engine verify all drafts of up to so many tokens, whether that pays or not."""
    speculation = engine.loop.scheduler._speculation

    def take_all(offers: list[tuple[Any, Draft]], load: object, max_tokens: int) -> list[int]:
        return [min(len(offer.draft.token_ids), num_tokens) for offer in offers]

    speculation._best_lengths = take_all  # type: ignore[method-assign]
    speculation._plain_steps.is_due = lambda num_decodes: False  # type: ignore[method-assign]
    return engine


def measure(engine: Engine, drafter: str, text: str, prompts: Sequence[list[int]], max_tokens: int) -> Shares:
    loop, num_tokens = engine.loop, 0
    before, num_steps = {each.drafter: each for each in loop.stats().drafters}, loop.stats().num_steps
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        loop.add(
            Request(
                id=f"{text}-{number}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                tenant=f"{text}-{number}",
            )
        )
        while loop.has_work:
            num_tokens += sum(len(event.token_ids) for event in loop.step())
    drafted, accepted = [0] * 64, [0] * 64
    for each in loop.stats().drafters:
        old = before.get(each.drafter)
        for position in range(len(each.drafted)):
            known = old is not None and position < len(old.drafted)
            drafted[position] += each.drafted[position] - (old.drafted[position] if known and old else 0)
            accepted[position] += each.accepted[position] - (old.accepted[position] if known and old else 0)
    length = max((position + 1 for position, count in enumerate(drafted) if count), default=0)
    return Shares(
        drafter,
        text,
        tuple(drafted[:length]),
        tuple(accepted[:length]),
        num_tokens,
        loop.stats().num_steps - num_steps - len(prompts),
    )


def own_model(path: Path, layers: int | None, quantization: str | None) -> None:
    """Let `--speculate draft=` load the served model with fewer layers, or rounded."""
    load = loading.load_model

    def load_less(folder: Path, ops: Any, **settings: Any) -> Any:
        model = load(folder, ops, **{**settings, "quantization": quantization or settings["quantization"]})
        if layers is not None:
            model._layers, model.num_layers = model._layers[:layers], layers  # type: ignore[attr-defined]
        return model

    loading.load_model = load_less  # type: ignore[assignment]


def table(found: Sequence[Shares], title: str) -> Table:
    length = max(len(each.shares) for each in found)
    result = Table("drafter", "text", *map(str, range(1, length + 1)), "tokens/step", title=title)
    for each in found:
        shares = [f"{share:.0%}" for share in each.shares] + ["–"] * (length - len(each.shares))
        result.add_row(each.drafter, each.text, *shares, f"{each.num_tokens / max(each.num_steps, 1):.2f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m", help="a known name, a folder or a .gguf file")
    parser.add_argument("--heads", help="folder of a head")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--own-layers", type=int, help="draft with so many layers of the model itself")
    parser.add_argument("--own-quantization", help="draft with the model itself, rounded: int8 or int4")
    parser.add_argument("--no-lookup", action="store_true")
    parser.add_argument("--prompts", type=int, default=len(CHAT))
    parser.add_argument("--edits", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96, help="of answers to questions")
    parser.add_argument("--edit-tokens", type=int, default=256, help="of files that are returned")
    parser.add_argument("--tokens", type=int, default=4, help="of each draft")
    arguments = parser.parse_args()
    path = ModelHub(cache_dir()).resolve(arguments.model)
    settings = [] if arguments.no_lookup else [("lookup", "lookup")]
    if arguments.heads:
        settings.append(("head", f"heads={arguments.heads}"))
    if arguments.draft:
        settings.append((f"draft model {Path(arguments.draft).name}", f"draft={arguments.draft}"))
    if arguments.own_layers or arguments.own_quantization:
        what = f"first {arguments.own_layers} layers" if arguments.own_layers else "the model"
        name = f"{what} {arguments.own_quantization or ''}".strip()
        settings.append((name, f"draft={path}"))
        own_model(path, arguments.own_layers, arguments.own_quantization)
    DraftLength.begin = lambda self, *_: arguments.tokens  # type: ignore[method-assign]
    found = []
    for name, speculate in settings:
        config = EngineConfig(
            model=ModelConfig(model=str(path)),
            cache=CacheConfig(num_kv_blocks=1024),
            scheduler=SchedulerConfig(itl_target_ms=None, max_num_seqs=2, max_draft_tokens=arguments.tokens),
            speculate=speculate,
        )
        engine = takes_all_drafts(build_engine(config, path), arguments.tokens)
        texts = {
            "chat": (CHAT[: arguments.prompts], arguments.max_tokens),
            "edits": (edit_prompts(arguments.edits), arguments.edit_tokens),
        }
        for text, (prompts, max_tokens) in texts.items():
            if prompts:
                tokens = encoded(engine.ready.model, [(("user", prompt),) for prompt in prompts])
                found.append(measure(engine, name, text, tokens, max_tokens))
                Console(stderr=True).print(found[-1])
        engine.close()
    Console().print(table(found, f"{Path(arguments.model).name}: accepted by position"))


if __name__ == "__main__":
    main()
