#!/usr/bin/env python3
"""What a model loses where `--dtype auto` multiplies its quantized weights as whole numbers, on this machine's CPU.

    python -m bench.rounding MODEL.gguf [--tokens 32768]

Perplexity on the text that `penstock quantize` measures with, and the divergence from the same weights in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from penstock.kernels.interface import Ops
from penstock.kernels.select import select_ops
from penstock.models.load import load_model, open_checkpoint
from penstock.models.quantization.evaluation import Predictions, compare, predict
from penstock.models.quantization.job import text_pieces
from penstock.models.quantization.text import default_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=32_768)
    arguments = parser.parse_args()
    pieces = text_pieces(open_checkpoint(arguments.model), default_texts()[1], arguments.tokens)
    kinds: dict[str, Ops] = {
        "float32": select_ops("cpu", torch.float32),
        "bfloat16": select_ops("cpu", torch.bfloat16),
        "whole numbers": select_ops("cpu", torch.bfloat16, integer_products=True),
    }
    exact: Predictions | None = None
    print("| | perplexity | rise | divergence, nats | same next token |\n|---|---|---|---|---|")
    for name, ops in kinds.items():
        found = predict(load_model(arguments.model, ops), ops, pieces, lambda: None)
        exact = exact or found
        difference, rise = compare(exact, found), found.perplexity / exact.perplexity - 1
        print(
            f"| {name} | {found.perplexity:.3f} | {rise:.2%} | {difference.divergence:.4f} "
            f"| {difference.same_choice:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
