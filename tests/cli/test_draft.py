"""`penstock draft` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.commands import penstock
from penstock.cli.console import fetch_drafter
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import UsageError
from tests.engine.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """The tokenizer of a model without one reads numbers."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"{5 + n} {70 + n} 9" for n in range(24)))
    return path


def draft(command: str, model: Path, *arguments: str) -> tuple[int, str, str]:
    settings = ["--device", "cpu", "--dtype", "float32", "--load-format", "random", "--num-kv-blocks", "512"]
    result = CliRunner().invoke(penstock, ["draft", command, str(model), *arguments, *settings])
    return result.exit_code, result.stdout, result.stderr


def test_a_head_is_trained_and_evaluated(model: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "head"
    arguments = ["--output", str(output), "--prompts", str(prompts), "--tokens", "1000"]
    exit_code, stdout, stderr = draft("train", model, *arguments, "--epochs", "2", "--vocabulary", "128")
    assert exit_code == 0, stderr
    assert "accepted" in stdout
    # A log has lines in place of the bars.
    assert re.findall(r"Training: (\d+) %", stderr)[-1] == "100"
    assert f"--speculate heads={output}" in stderr
    assert (output / "curve.png").stat().st_size > 1000
    assert draft("train", model, *arguments)[0] == 2
    exit_code, stdout, stderr = draft(
        "evaluate", model, "--heads", str(output), "--prompts", str(prompts), "--requests", "3",
        "--max-tokens", "24", "--json",
    )  # fmt: skip
    assert exit_code == 0, stderr
    figures = json.loads(stdout)
    assert figures["same_answers"] == figures["requests"] == 3
    assert [each["drafter"] if isinstance(each, dict) else each[0] for each in figures["drafters"]] == [
        "heads"
    ]


def test_wrong_input_is_refused_by_a_sentence(model: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("only one\n")
    exit_code, _, stderr = draft("train", model, "--output", str(tmp_path / "x"), "--prompts", str(few))
    assert exit_code == 2
    assert "too few to learn from" in stderr
    exit_code, _, stderr = draft("evaluate", model, "--heads", str(tmp_path))
    assert exit_code != 0
    assert "holds no heads" in stderr


def test_a_draft_model_is_fetched_and_heads_get_a_whole_path(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    for given, resolved in (
        ("auto", "auto"),
        (f"draft={model}", f"draft={model}"),
        ("heads=my-head", f"heads={model.parent / 'my-head'}"),
    ):
        assert fetch_drafter(EngineConfig(speculate=given)).speculate == resolved
    with pytest.raises(UsageError):
        fetch_drafter(EngineConfig(speculate="draft=no-such-model"))
