#!/usr/bin/env python3
"""How many tokens a step brings with drafts by lookup, for answers that are known. No model computes anything.

    python -m bench.lookup [--model smollm2-135m]

The answers are the modules of `bench.speculation` with one name changed, the same modules with lines added, left out
and changed, and, as text that copies nothing, the modules without a prompt that has them. The other drafter is the
usual lookup: what followed the latest place of the last three tokens.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.speculation import EDITS, edit_text
from penstock.cli.console import fetch_model
from penstock.core.plan import Draft
from penstock.core.request import Request, SamplingParams
from penstock.engine.drafters.interface import Drafter
from penstock.engine.drafters.lookup import LookupDrafter
from penstock.models.load import load_tokenizer

LENGTHS = (4, 8, 12)


class LastThree:
    """Drafts what followed the latest place of the last three tokens."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def add(self, request: Request) -> None:
        self._tokens = list(request.prompt_token_ids)

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None:
        self._tokens += token_ids

    def remove(self, request_id: str) -> None: ...

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        tokens = self._tokens
        for place in range(len(tokens) - 1, 2, -1):
            if tokens[place - 3 : place] == tokens[-3:]:
                return {
                    each: Draft(tuple(tokens[place : place + most]), "n") for each, most in wanted.items()
                }
        return {}


def texts() -> dict[str, list[tuple[str, str]]]:
    """Return prompts and answers by kind."""
    rng = random.Random(0)
    kinds: dict[str, list[tuple[str, str]]] = {"one name changed": [], "lines changed": [], "no copy": []}
    for name, old, new in EDITS:
        text = edit_text(name)
        lines = text.splitlines()
        for _ in range(4):
            number = rng.randrange(len(lines))
            lines[number : number + 1] = rng.choice(
                ([], [lines[number], "    # checked above"], [lines[number].replace("=", "|=", 1)])
            )
        kinds["one name changed"].append((text, re.sub(rf"\b{old}\b", new, text)))
        kinds["lines changed"].append((text, "\n".join(lines)))
        kinds["no copy"].append(("", text))
    return kinds


def steps(
    drafter: Drafter, prompt: list[int], answer: list[int], max_tokens: int
) -> tuple[int, int, int, float]:
    """Return the number of steps, of drafted tokens and of accepted tokens, and the seconds of the drafter."""
    drafter.add(Request(id="0", prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=1 << 20)))
    done = num_steps = num_drafted = num_accepted = 0
    spent_s = 0.0
    while done < len(answer):
        began_s = time.perf_counter()
        draft = drafter.propose({"0": max_tokens}).get("0")
        spent_s += time.perf_counter() - began_s
        accepted = 0
        if draft is not None:
            num_drafted += len(draft.token_ids)
            while accepted < len(draft.token_ids) and answer[done : done + accepted + 1] == list(
                draft.token_ids[: accepted + 1]
            ):
                accepted += 1
        num_accepted += accepted
        drafter.append("0", tuple(answer[done : done + accepted + 1]))
        done += accepted + 1
        num_steps += 1
    return num_steps, num_drafted, num_accepted, spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    model = parser.parse_args().model
    loaded = load_tokenizer(Path(fetch_model(model)))
    assert loaded is not None
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json.decode())
    table = Table(
        "answers", "drafter", *(f"{each} drafted" for each in LENGTHS), "accepted", "µs", title=model
    )
    for kind, pairs in texts().items():
        encoded = [[tokenizer.encode(text, add_special_tokens=False).ids for text in pair] for pair in pairs]
        for name, make in (("lookup", LookupDrafter), ("last three tokens", LastThree)):
            rates = []
            for length in LENGTHS:
                # A drafter for each answer: it remembers no other.
                counts = [steps(make(), [1, *prompt, 2], answer, length) for prompt, answer in encoded]
                num_steps, drafted, accepted, spent_s = (sum(column) for column in zip(*counts, strict=True))
                rates.append(sum(len(answer) for _, answer in encoded) / num_steps)
            table.add_row(
                kind,
                name,
                *(f"{rate:.2f}" for rate in rates),
                f"{accepted / max(drafted, 1):.0%}",
                f"{spent_s / num_steps * 1e6:.0f}",
            )
    Console().print(
        table, "Tokens per step; accepted tokens and the drafter's time per step with 12 drafted."
    )


if __name__ == "__main__":
    main()
