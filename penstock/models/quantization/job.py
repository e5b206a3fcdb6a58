"""Makes a quantized checkpoint from a model, and reports what was lost: `penstock quantize`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.select import preferred_cpu_dtype, select_ops
from penstock.models.load import Checkpoint, load_model, load_tokenizer, open_checkpoint
from penstock.models.quantization import activations, folder
from penstock.models.quantization.activations import Inventory, load_listed
from penstock.models.quantization.evaluation import (
    WINDOW_TOKENS,
    Difference,
    Predictions,
    compare,
    predict,
    windows,
)
from penstock.models.quantization.layouts import METHODS, Method
from penstock.models.weights import WeightSource

OnStage = Callable[[str, float], None]  # what is being done, and how much of it is


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeJob:
    model: Path
    out: Path
    method: str  # a name of METHODS
    group: int
    calibration_text: str
    evaluation_text: str
    calibration_tokens: int
    evaluation_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    group: int | None
    before: Predictions
    after: Predictions
    difference: Difference
    bytes_before: int
    bytes_after: int


def quantize_model(job: QuantizeJob, on_stage: OnStage) -> Report:
    checkpoint = open_checkpoint(job.model)
    _require_possible(checkpoint, job.out)
    pieces = text_pieces(checkpoint, job.evaluation_text, job.evaluation_tokens)
    ops = select_ops("cpu", preferred_cpu_dtype())
    num_positions = _window_tokens(checkpoint)

    listed = load_listed(
        checkpoint, ops, num_positions, lambda _, done: on_stage("Loading the original", done)
    )
    before = predict(listed.model, ops, pieces, _counter(on_stage, "Measuring the original", len(pieces)))
    inventory, bytes_before = listed.inventory, listed.model.weight_bytes
    del listed

    method = METHODS[job.method]
    group = _fitting_group(inventory, job.group) if method.has_groups else 0
    source = checkpoint.source()
    if job.method in ("int4-awq", "w8a8"):
        source = _scaled(job, checkpoint, inventory, group, source, on_stage)
    bytes_written = _write(job.out, checkpoint, source, inventory, method, group, on_stage)

    rounds_inputs = job.method == "w8a8"
    if rounds_inputs:  # as on a GPU: measured on a backend that keeps weights in full precision
        ops = activations.RoundedInputsOps(preferred_cpu_dtype())
    result = load_model(
        job.out,
        ops,
        max_model_len=num_positions,
        on_progress=lambda _, done: on_stage("Loading the result", done),
    )
    after = predict(result, ops, pieces, _counter(on_stage, "Measuring the result", len(pieces)))
    bytes_after = bytes_written if rounds_inputs else result.weight_bytes
    return Report(group or None, before, after, compare(before, after), bytes_before, bytes_after)


def _require_possible(checkpoint: Checkpoint, out: Path) -> None:
    if checkpoint.quantization is not None:
        raise ModelLoadError(
            f"{checkpoint.path} is quantized already.", hint="Give the checkpoint that it was made from."
        )
    folder.require_writable(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder.", hint="Name a folder to be made.")


def _window_tokens(checkpoint: Checkpoint) -> int:
    return min(WINDOW_TOKENS, checkpoint.config.max_positions)


def text_pieces(checkpoint: Checkpoint, text: str, num_tokens: int) -> list[list[int]]:
    files = load_tokenizer(checkpoint.path)
    if files is None:
        raise ModelLoadError(f"{checkpoint.path} has no tokenizer, so no text can be measured.")
    cut = text[: num_tokens * 16]  # more than enough, without encoding a very long text
    token_ids = Tokenizer.from_buffer(files.tokenizer_json).encode(cut, add_special_tokens=False).ids
    bos = files.bos_token_id if files.add_bos_token else None
    return windows(token_ids, num_tokens, _window_tokens(checkpoint), bos)


def _scaled(
    job: QuantizeJob,
    checkpoint: Checkpoint,
    inventory: Inventory,
    group: int,
    source: WeightSource,
    on_stage: OnStage,
) -> WeightSource:
    pieces = text_pieces(checkpoint, job.calibration_text, job.calibration_tokens)
    count = _counter(on_stage, "Looking at activations", len(pieces))
    inputs = activations.record_inputs(
        checkpoint, preferred_cpu_dtype(), pieces, _window_tokens(checkpoint), count
    )

    def searching(done: float) -> None:
        on_stage("Searching for scales", done)

    best_factors = (
        activations.factors_for_int8
        if job.method == "w8a8"
        else partial(activations.factors_for_int4, group=group)
    )
    scaling = activations.search_scaling(source, checkpoint, inventory, inputs, best_factors, searching)
    return activations.ScaledSource(source, scaling, checkpoint.config.norm_offset)


def _write(
    out: Path,
    checkpoint: Checkpoint,
    source: WeightSource,
    inventory: Inventory,
    method: Method,
    group: int,
    on_stage: OnStage,
) -> int:
    """Write the folder, and return the bytes of its weights. The folder appears under its name only when it is
    complete."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        quantized = set(inventory.quantizable())
        writer = folder.ShardWriter(partial)
        stored_name = checkpoint.architecture.layout(checkpoint.config).stored_name
        for name, size in inventory.vectors.items():
            writer.add(stored_name(name), source.vector(name, size))
        for index, (name, shape) in enumerate(inventory.matrices.items()):
            values = activations.dense_values(source.matrix(name, *shape))
            if name in quantized:
                stem = name.removesuffix(".weight")
                for end, tensor in method.encode(values, group).items():
                    writer.add(stored_name(f"{stem}.{end}"), tensor)
            else:
                writer.add(stored_name(name), values.to(torch.bfloat16))
            on_stage("Rounding weights", (index + 1) / len(inventory.matrices))
        writer.finish()
        plain = [
            stored_name(name.removesuffix(".weight")) for name in inventory.matrices if name not in quantized
        ]
        folder.write_settings(checkpoint, partial, method.settings(group, plain))
        if out.exists():
            out.rmdir()
        partial.rename(out)
        return writer.num_bytes
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _fitting_group(inventory: Inventory, wanted: int) -> int:
    """Return the largest power of two, at most the wanted group, that divides every row."""
    group = wanted
    for name in inventory.quantizable():
        columns = inventory.matrices[name][1]
        group = min(group, columns & -columns)
    if group < 16:
        raise ModelLoadError(f"The model has rows that no group of 16 or more divides, but one of {group}.")
    return group


def _counter(on_stage: OnStage, title: str, total: int) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        on_stage(title, done / total)

    return count
