"""`penstock quantize` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.commands import penstock
from penstock.models.load import open_checkpoint
from penstock.models.quantization.evaluation import default_texts, paragraphs
from penstock.models.quantization.layouts import METHODS
from penstock.models.stored_quantization import AWQ
from tests.models.checkpoints import make_reference
from tests.models.quantization.test_job import TEXT, add_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_reference("llama", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "model"


def quantize(model: Path, *arguments: str) -> tuple[int, str, str]:
    text = str(model.parent / "text.txt")
    command = ["quantize", str(model), str(model.parent / "out"), "--calibration", text, "--evaluation", text]
    result = CliRunner().invoke(penstock, [*command, *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_report_and_a_folder_that_loads(model: Path) -> None:
    exit_code, stdout, stderr = quantize(model, "--method", "int4-awq", "--group", "32")
    assert exit_code == 0, stderr
    for heading in ("perplexity", "weights", "logit error", "divergence", "same choice", "int4-awq"):
        assert heading in stdout
    assert f"penstock serve {model.parent / 'out'}" in stderr.replace("\n", "")
    assert open_checkpoint(model.parent / "out").quantization == AWQ(32)


def test_every_method_can_be_asked_for() -> None:
    for name in METHODS:
        assert name in CliRunner().invoke(penstock, ["quantize", "--help"]).stdout


def test_wrong_flags(model: Path) -> None:
    assert quantize(model)[0] == 2
    exit_code, _, stderr = quantize(model, "--method", "int3")
    assert exit_code == 2
    assert "int3" in stderr
    (model.parent / "out").mkdir()
    (model.parent / "out" / "precious").touch()
    exit_code, _, stderr = quantize(model, "--method", "int8")
    assert exit_code == 2
    assert "is not an empty folder" in stderr


def test_the_default_texts_have_no_paragraph_in_common() -> None:
    calibration, evaluation = default_texts()
    assert min(len(calibration), len(evaluation)) > 50_000
    assert not set(paragraphs(calibration)) & set(paragraphs(evaluation))
