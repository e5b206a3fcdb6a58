"""The default model on a GPU: log-probabilities of whole answers against transformers, and against Penstock's own
float32 on the CPU where weights are rounded again. `reference.py` says what the answers are and makes them."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.engine_config import Quantization
from penstock.kernels.interface import AttentionBatch, DenseWeight, Ops, WeightData
from penstock.kernels.select import select_ops
from penstock.models.load import open_checkpoint
from penstock.models.model import Model
from penstock.models.weights import WeightLoader, WeightSource
from tests.gpu.reference import ANSWERS, END, MODEL

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")
BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def model_path() -> Path:
    """The default model; PENSTOCK_TEST_GGUF names its file on a machine without a network."""
    if named := os.environ.get("PENSTOCK_TEST_GGUF"):
        return Path(named)
    from penstock.cli.console import fetch_model

    return fetch_model(MODEL)


@functools.cache
def answers() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ANSWERS.read_text())
    return found


class Unpacked:
    """The weights of another source as dense matrices, which can be rounded in another way."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def matrix(self, *arguments: Any) -> WeightData:
        weight = self._source.matrix(*arguments)
        return weight if isinstance(weight, DenseWeight) else DenseWeight(weight.dequantize())


def load(ops: Ops, form: str) -> Model:
    """`form` is "packed", as in the file, or "dense", or what dense weights are rounded to."""
    checkpoint = open_checkpoint(model_path())
    source = checkpoint.source()
    quantization: Quantization | None = form if form in ("fp8", "int8", "int4") else None  # type: ignore[assignment]
    loader = WeightLoader(source if form == "packed" else Unpacked(source), ops, quantization=quantization)  # type: ignore[arg-type]
    model: Model = checkpoint.architecture(checkpoint.config, loader, 512)
    return model


class Scorer:
    """Runs answers that are known through a model. Returns of each token its log-probability, and 1 if no token is
    more probable: [answers, tokens, 2]."""

    def __init__(self, model: Model, ops: Ops, rows: list[dict[str, Any]]) -> None:
        self._model, self._ops = model, ops
        self._texts = [row["prompt"] + row["answer"] for row in rows]
        self._prompts = [len(row["prompt"]) for row in rows]
        self._blocks = -(-max(map(len, self._texts)) // BLOCK_SIZE)
        total = len(rows) * self._blocks
        self._kv = ops.allocate_kv(model.num_layers, total, BLOCK_SIZE, model.num_kv_heads, model.head_dim)

    def at_once(self) -> Tensor:
        """All answers in one step, as prompts."""
        found = self._step([(0, len(text)) for text in self._texts])
        pairs = zip(found, self._prompts, strict=True)
        return torch.stack([logprobs[prompt - 1 :] for logprobs, prompt in pairs])

    def in_steps(self) -> Tensor:
        """Prompts first, then a token of each answer at a time."""
        length = len(self._texts[0]) - self._prompts[0]
        found = [[logprobs[-1] for logprobs in self._step([(0, count) for count in self._prompts])]]
        for done in range(1, length):
            spans = [(prompt + done - 1, prompt + done) for prompt in self._prompts]
            found.append([logprobs[-1] for logprobs in self._step(spans)])
        return torch.stack([torch.stack(rows) for rows in found], dim=1)

    def _step(self, spans: list[tuple[int, int]]) -> list[Tensor]:
        """Compute these tokens of each text. Returns of each text [tokens, 2], for the tokens that follow."""

        def int32(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._ops.device)

        tables = torch.arange(len(spans) * self._blocks).view(len(spans), -1)
        places = [(row, position) for row, span in enumerate(spans) for position in range(*span)]
        slots = [int(tables[row, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE for row, at in places]
        lengths = [end - start for start, end in spans]
        batch = AttentionBatch(
            positions=int32([at for _, at in places]),
            slots=int32(slots),
            query_starts=int32([sum(lengths[:index]) for index in range(len(spans) + 1)]),
            context_lens=int32([end for _, end in spans]),
            block_tables=int32(tables.tolist()),
            num_requests=len(spans),
            max_query_len=max(lengths),
            max_context_len=max(end for _, end in spans),
            num_decodes=len(spans) if max(lengths) == 1 else 0,
        )
        with torch.inference_mode():
            hidden = self._model.forward(int32([self._texts[row][at] for row, at in places]), batch, self._kv)
            logprobs = torch.log_softmax(self._model.logits(hidden).float(), dim=-1).cpu()
        following = [self._texts[row][at + 1 : at + 2] or [0] for row, at in places]
        logprobs = logprobs.clone()  # An inference tensor stays as it is.
        logprobs[:, END] = float("-inf")  # The answers of the reference do not end.
        chosen = logprobs.gather(1, torch.tensor(following))
        parts = torch.cat([chosen, (chosen == logprobs.amax(dim=1, keepdim=True)).float()], dim=1).split(
            lengths
        )
        ends = [end == len(text) for (_, end), text in zip(spans, self._texts, strict=True)]
        return [part[:-1] if is_end else part for part, is_end in zip(parts, ends, strict=True)]


@dataclass(frozen=True)
class Errors:
    mean: float
    largest: float
    num_other_choices: int  # tokens that are not the most probable ones


def errors(ops: Ops, form: str, expected: Tensor, count: int) -> dict[str, Errors]:
    """The differences of log-probabilities, for the ways in which steps are made."""
    scorer = Scorer(load(ops, form), ops, answers()[:count])

    def compare(found: Tensor) -> Errors:
        differences = (found[:, :, 0] - expected[:count]).abs()
        return Errors(float(differences.mean()), float(differences.max()), int((found[:, :, 1] == 0).sum()))

    made = {"at once": compare(scorer.at_once()), "in steps": compare(scorer.in_steps())}
    print(form, ops.dtype, made)
    return made


def reference(dtype: str) -> Tensor:
    return torch.tensor([row[dtype] for row in answers()])


def assert_within(found: dict[str, Errors], mean: float, largest: float) -> None:
    assert all(each.mean < mean and each.largest < largest for each in found.values()), found


@pytest.mark.parametrize("count", [8, 1])
@pytest.mark.parametrize("form", ["packed", "dense"])
def test_float32_is_float32(form: str, count: int) -> None:
    """So greedy answers are those of transformers, token for token."""
    found = errors(select_ops(DEVICE, torch.float32), form, reference("float32"), count)
    assert_within(found, mean=1e-4, largest=1e-3)
    assert all(each.num_other_choices == 0 for each in found.values()), found


@pytest.mark.parametrize("count", [8, 1])
@pytest.mark.parametrize("form", ["packed", "dense"])
def test_bfloat16_is_as_close_as_that_of_transformers(form: str, count: int) -> None:
    ops = select_ops(DEVICE, torch.bfloat16)
    found = errors(ops, form, reference("float32"), count)
    theirs = (reference("bfloat16") - reference("float32"))[:count].abs()
    assert_within(found, mean=1.5 * float(theirs.mean()) + 5e-3, largest=2 * float(theirs.max()) + 5e-2)


@functools.cache
def rounded_reference(form: str) -> Tensor:
    ops = select_ops("cpu", torch.float32)
    return Scorer(load(ops, form), ops, answers()).at_once()[:, :, 0]


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_rounded_weights_in_float32(form: str) -> None:
    """Weights are rounded, inputs are not."""
    ops = select_ops(DEVICE, torch.float32)
    assert_within(errors(ops, form, rounded_reference(form), 8), mean=1e-4, largest=1e-3)


# Inputs of fp8 products are rounded to fp8 too, unless there is a single row.
@pytest.mark.parametrize(
    ("form", "mean", "largest"), [("fp8", 0.1, 1.5), ("int8", 0.03, 0.4), ("int4", 0.03, 0.4)]
)
def test_rounded_weights_in_bfloat16(form: str, mean: float, largest: float) -> None:
    ops = select_ops(DEVICE, torch.bfloat16)
    assert_within(errors(ops, form, rounded_reference(form), 8), mean, largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_dtype", "mean", "largest"),
    [(torch.int8, 0.06, 1.0), (torch.float8_e4m3fn, 0.1, 1.5)],
    ids=["int8", "fp8"],
)
def test_a_kv_cache_in_eight_bits(kv_dtype: torch.dtype, mean: float, largest: float, dtype: str) -> None:
    ops = select_ops(DEVICE, DTYPES[dtype], kv_dtype)
    assert_within(errors(ops, "packed", reference("float32"), 8), mean, largest)
