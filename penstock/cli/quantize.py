"""`penstock quantize`: make a quantized checkpoint, and report the loss of quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import fetch_model, stages, stderr_console, stdout_console

if TYPE_CHECKING:
    from penstock.models.quantization.job import Report

_METHODS = ("fp8", "int8", "w8a8", "int4", "int4-awq")
_GROUPS = ("16", "32", "64", "128")


@click.command(cls=PenstockCommand, short_help="Make a quantized checkpoint of a model.")
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--method", type=click.Choice(_METHODS), required=True, help="The format of the weights.")
@click.option(
    "--group",
    type=click.Choice(_GROUPS),
    default="128",
    show_default=True,
    help="Weights that share a scale, with int8 and int4; fewer if the rows are not divisible.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Calibration text for int4-awq and w8a8. Default: half of Python's own reference.",
)
@click.option(
    "--evaluation",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Text to measure perplexity on. Default: the other half of Python's reference.",
)
@click.option(
    "--calibration-tokens", type=click.IntRange(min=512), default=4096, show_default=True,
    help="How much of the text to calibrate with.",
)  # fmt: skip
@click.option(
    "--evaluation-tokens", type=click.IntRange(min=512), default=4096, show_default=True,
    help="How much of the text to measure on.",
)  # fmt: skip
def quantize(
    model: str,
    out: Path,
    method: str,
    group: str,
    calibration: Path | None,
    evaluation: Path | None,
    calibration_tokens: int,
    evaluation_tokens: int,
) -> None:
    """Round the weights of MODEL and write them to the folder OUT, which `penstock serve OUT` then serves.

    \b
      fp8       eight bits as floats, a scale for each row
      int8      eight bits, a scale for each group
      w8a8      eight bits, a scale for each row, smoothed so that activations can be eight bits too
      int4      four bits, a scale and a zero point for each group
      int4-awq  likewise, after scaling inputs by how much they matter on a calibration text

    Embeddings and the output head stay in 16 bits. Prints perplexity before and after, and how far predictions
    moved.
    """
    path = fetch_model(model)
    with stages() as on_stage:
        from penstock.models.quantization.evaluation import default_texts, read_text
        from penstock.models.quantization.job import QuantizeJob, quantize_model

        texts = default_texts() if calibration is None or evaluation is None else ("", "")
        report = quantize_model(
            QuantizeJob(
                model=path,
                out=out,
                method=method,
                group=int(group),
                calibration_text=read_text(calibration) if calibration else texts[0],
                evaluation_text=read_text(evaluation) if evaluation else texts[1],
                calibration_tokens=calibration_tokens,
                evaluation_tokens=evaluation_tokens,
            ),
            on_stage,
        )
    _print(report, method)
    stderr_console().print(f"Serve it with: penstock serve {out}")


def _print(report: Report, method: str) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "original", method):
        table.add_column(heading, justify="right" if heading else "left")
    before, after = report.before, report.after
    table.add_row("perplexity", f"{before.perplexity:.3f}", f"{after.perplexity:.3f}")
    table.add_row("weights", f"{report.bytes_before / 1e6:,.1f} MB", f"{report.bytes_after / 1e6:,.1f} MB")
    table.add_row("logit error", "", f"{report.difference.logit_error:.2%}")
    table.add_row("divergence", "", f"{report.difference.divergence:.4f} nats")
    table.add_row("same choice", "", f"{report.difference.same_choice:.1%}")
    stdout_console().print(table)
    groups = f", groups of {report.group}" if report.group else ""
    stderr_console().print(f"Measured on {after.num_tokens:,} tokens{groups}.")
