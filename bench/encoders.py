#!/usr/bin/env python3
"""Which encoders and classifiers of the transformers library give the same vectors and labels here, in one table.

    python -m bench.encoders [--only bert,llama] [--jobs 2] [--markdown FILE]

Every model type that `AutoModelForSequenceClassification` knows is made small, filled with random weights, saved, and
served in float32; its logits for three texts must be those of transformers. Every model type that
`AutoModelForMaskedLM` knows is an encoder: the mean of its last states must point where transformers' does.
Results are:

    equal       the same numbers, up to rounding
    refused     an error sentence before anything is served
    no model    transformers itself cannot make or run a small model of this type
    WRONG       other numbers, or an exception that is not a sentence
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.architectures import VOCAB_SIZE, Result, randomize, serve, sweep
from bench.tiny_configs import tiny_config
from penstock.core.errors import PenstockError
from penstock.core.request import Request, SamplingParams
from penstock.engine.build import Engine

NUM_LABELS = 3
TOLERANCE = 1e-3  # of the largest number
SETTINGS = {"num_labels": NUM_LABELS, "is_decoder": False, "is_encoder_decoder": False}


def texts() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE, (count,), generator=drawn).tolist() for count in (5, 40, 1)]


def served_vectors(engine: Engine) -> list[Tensor]:
    found: dict[str, bytes] = {}
    for number, text in enumerate(texts()):
        engine.loop.add(
            Request(
                id=str(number),
                prompt_token_ids=tuple(text),
                sampling=SamplingParams(max_tokens=1),
                pooling=engine.ready.model.pooling,
            )
        )
    while engine.loop.has_work:
        for event in engine.loop.step():
            assert event.embedding is not None, event
            found[event.request_id] = event.embedding
    return [
        torch.frombuffer(bytearray(found[str(number)]), dtype=torch.float32) for number in range(len(found))
    ]


def expected_vectors(model: Any, has_labels: bool) -> list[Tensor]:
    made = []
    with torch.inference_mode():
        for text in texts():
            ids = torch.tensor([text])
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            if has_labels:
                made.append(out.logits[0].float())
            else:
                mean = out.last_hidden_state[0].float().mean(dim=0)
                made.append(mean / mean.norm())
    return made


def compare(model_type: str, name: str, count: int, folder: Path) -> Result:
    """`count` is 1 for a classifier, and 0 for an encoder."""
    import transformers

    def result(outcome: str, remark: str = "", path: str = "–") -> Result:
        return Result(model_type, name, path, outcome, " ".join(remark.split()))

    try:
        config = tiny_config(model_type, VOCAB_SIZE)
        for key, value in SETTINGS.items():
            setattr(config, key, value)
        kind = transformers.AutoModelForSequenceClassification if count else transformers.AutoModel
        model = kind.from_config(config, attn_implementation="eager").float().eval()
        randomize(model)
        want = expected_vectors(model, bool(count))
        model.save_pretrained(folder)
    except Exception as error:
        return result("no model", f"{type(error).__name__}: {str(error)[:300]}")
    try:
        engine = serve(folder)
        path = engine.ready.model.implementation
        have = served_vectors(engine)
    except PenstockError as error:
        return result("refused", f"{error.message} {error.hint or ''}")
    except Exception:
        return result("WRONG", traceback.format_exc(limit=-3))
    for number, (ours, theirs) in enumerate(zip(have, want, strict=True)):
        if ours.shape != theirs.shape:
            return result(
                "WRONG", f"text {number}: {list(ours.shape)} numbers, not {list(theirs.shape)}", path
            )
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        if not error < TOLERANCE:
            return result("WRONG", f"text {number}: off by {error:.3f}", path)
    return result("equal", path=path)


def main() -> None:
    from transformers.models.auto import modeling_auto

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="model types, with commas between them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="write the table to a file")
    arguments = parser.parse_args()
    labels = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    bare = modeling_auto.MODEL_MAPPING_NAMES
    wanted = [(kind, str(name), 1) for kind, name in labels.items()]
    wanted += [(kind, str(bare[kind]), 0) for kind in masked if kind in bare]
    if arguments.only:
        wanted = [each for each in wanted if each[0] in arguments.only.split(",")]
    sweep(wanted, arguments.jobs, compare, arguments.markdown)


if __name__ == "__main__":
    main()
