"""The commands as a user meets them: help, errors and exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Never

import click
import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from penstock import __version__
from penstock.cli.commands import MODULES, PenstockCommand, penstock
from penstock.cli.console import sigterm_unwinds
from penstock.cli.serve import describe_vectors, describe_weights
from penstock.cluster.replica import ReplicaSpec
from penstock.core.config import ServeConfig
from penstock.core.errors import ConfigError, ModelLoadError, UsageError
from penstock.core.messages import PoolerCard
from penstock.core.request import Pooling
from penstock.models.hub import ModelHub, OnProgress, PullProgress
from penstock.serve import server
from tests.gateway.fake_engine import model_card


@click.command(cls=PenstockCommand)
@click.argument("kind")
def fail(kind: str) -> None:
    errors: dict[str, BaseException] = {
        "usage": UsageError("It is broken.", hint="Mend it."),
        "load": ModelLoadError("It is no model."),
        "config": ConfigError("It is set wrongly."),
        "bug": ValueError("seven"),
        "permission": PermissionError(13, "Permission denied", "/root/model.gguf"),
        "disk": OSError(28, "No space left on device"),
        "interrupt": KeyboardInterrupt(),
    }
    if kind == "cleanup":
        try:
            raise KeyboardInterrupt
        finally:
            [].pop()  # as a progress bar that was interrupted half started fails when it is stopped
    raise errors[kind]


def _press_ctrl_c(_: object) -> Never:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "exit_code", "text"),
    [
        ("usage", 1, "Error: It is broken.\nHint: Mend it.\n"),
        ("load", 1, "Error: It is no model.\n"),
        ("config", 2, "Error: It is set wrongly.\n"),
        ("permission", 1, "Error: /root/model.gguf: Permission denied.\n"),
        ("disk", 1, "Error: No space left on device.\n"),
        ("interrupt", 130, "Interrupted.\n"),
        ("cleanup", 130, "Interrupted.\n"),
    ],
)
def test_an_error_is_a_sentence_a_hint_and_an_exit_code(kind: str, exit_code: int, text: str) -> None:
    result = CliRunner().invoke(fail, [kind])
    assert (result.exit_code, result.stderr, result.stdout) == (exit_code, text, "")


def test_ctrl_c_before_a_subcommand_runs_ends_with_the_same_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.cli.commands.import_module", _press_ctrl_c)
    result = CliRunner().invoke(penstock, ["version"])
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")


@pytest.mark.parametrize("on_ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_cancels_a_running_event_loop_as_ctrl_c_does(on_ctrl_c: Any) -> None:
    previous = signal.signal(signal.SIGINT, on_ctrl_c)
    steps: list[str] = []

    async def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        steps.append("the step was not torn")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("the task cleaned up")

    try:
        with pytest.raises(SystemExit) as ended, sigterm_unwinds():
            asyncio.run(work())
        assert signal.getsignal(signal.SIGINT) is on_ctrl_c
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ended.value.code == 143
    assert steps == ["the step was not torn", "the task cleaned up"]


def test_a_pull_whose_progress_bar_is_half_started_ends_with_the_exit_code_of_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull(_: ModelHub, name: str, on_progress: OnProgress) -> Path:
        on_progress(PullProgress("downloading", 0, 1))
        return tmp_path / name

    monkeypatch.setattr(ModelHub, "ensure", pull)
    monkeypatch.setattr(Console, "push_render_hook", lambda *_: signal.raise_signal(signal.SIGTERM))
    result = CliRunner(env={"PENSTOCK_CACHE": str(tmp_path)}).invoke(penstock, ["pull", "smollm2-135m"])
    assert result.exit_code == 143, result.stderr
    assert "Error" not in result.stderr


def test_a_bug_is_a_sentence_unless_debugging() -> None:
    result = CliRunner().invoke(fail, ["bug"])
    assert result.exit_code == 1
    assert "ValueError: seven" in result.stderr
    assert "--debug" in result.stderr
    assert isinstance(CliRunner().invoke(fail, ["bug", "--debug"]).exception, ValueError)
    assert isinstance(CliRunner(env={"PENSTOCK_DEBUG": "1"}).invoke(fail, ["bug"]).exception, ValueError)


def test_every_command_has_help_and_every_option_is_described() -> None:
    def walk(command: click.Command, path: tuple[str, ...]) -> None:
        result = CliRunner().invoke(penstock, [*path, "--help"])
        assert result.exit_code == 0
        assert command.help
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{' '.join(path)} {parameter.opts}"
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                walk(child, (*path, name))

    walk(penstock, ())
    assert {"serve", "pull", "chat", "generate", "keys", "bench", "doctor", "version"} <= set(MODULES)


def test_an_unknown_command_names_the_nearest() -> None:
    result = CliRunner().invoke(penstock, ["serv"])
    assert result.exit_code == 2
    assert "There is no command 'serv'. Did you mean 'serve'?" in result.stderr


def test_the_version_is_printed_both_ways() -> None:
    assert CliRunner().invoke(penstock, ["version"]).stdout == f"{__version__}\n"
    assert CliRunner().invoke(penstock, ["--version"]).stdout == f"penstock {__version__}\n"


def test_the_commands_import_nothing_heavy() -> None:
    heavy = (
        "{'torch', 'transformers', 'numpy', 'rich', 'uvicorn', 'httpx', 'matplotlib', 'sqlalchemy', 'jwt'}"
    )
    modules = ", ".join(f"penstock.cli.{module}" for module in sorted(set(MODULES.values())))
    script = f"import sys, {modules}; print(*({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_a_command_imports_no_other() -> None:
    script = """
import sys
from penstock.cli.commands import MODULES, penstock
penstock(["version"], standalone_mode=False)
print(*sorted({f"penstock.cli.{module}" for module in MODULES.values()} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [__version__, "penstock.cli.commands"]


def test_the_entry_point_runs_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "./no-such.gguf"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: There is no model, file or folder called './no-such.gguf'.\nHint: ")


def test_serve_hands_over_the_config_and_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    handed_over: list[tuple[ServeConfig, list[ReplicaSpec]]] = []
    monkeypatch.setattr(server, "run", lambda config, specs, **_: handed_over.append((config, specs)))
    (tmp_path / "m.gguf").touch()
    result = CliRunner().invoke(penstock, ["serve", str(tmp_path / "m.gguf"), "--port", "9"])
    assert result.exit_code == 0, result.output
    ((config, [spec]),) = handed_over
    assert (config.server.port, spec.model_path) == (9, str(tmp_path / "m.gguf"))
    assert config.engine.model.model == str(tmp_path / "m.gguf")


def test_pull_lists_the_catalog(tmp_path: Path) -> None:
    runner = CliRunner(env={"PENSTOCK_CACHE": str(tmp_path), "COLUMNS": "120"})
    text = runner.invoke(penstock, ["pull", "--list"]).stdout
    assert "smollm2-135m" in text
    assert "qwen2.5-coder-1.5b" in text


def test_pull_of_an_unknown_name_is_a_sentence(tmp_path: Path) -> None:
    result = CliRunner(env={"PENSTOCK_CACHE": str(tmp_path)}).invoke(penstock, ["pull", "smollm2-135"])
    assert result.exit_code == 1
    assert "Did you mean smollm2-135m?" in result.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PENSTOCK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"PENSTOCK_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/penstock"),
        ({"PENSTOCK_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/penstock"),
    ],
)
def test_where_the_cache_is(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.serve.environment import cache_dir

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_generate_streams_to_standard_output() -> None:
    result = CliRunner().invoke(penstock, ["generate", "abc", "--model", "echo", "--max-tokens", "7"])
    assert (result.exit_code, result.stdout) == (0, "abcabca\n"), result.output
    piped = CliRunner().invoke(
        penstock, ["generate", "-", "--model", "echo", "--max-tokens", "2"], input="xy"
    )
    assert piped.stdout == "xy\n"
    assert CliRunner().invoke(penstock, ["generate", ""]).exit_code == 1


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


@pytest.mark.parametrize(
    ("config", "has_tokenizer", "expected"),
    [(LLAMA, False, "has no tokenizer"), (BERT, True, "is an embedding model and writes no text")],
    ids=["no tokenizer", "embedding model"],
)
def test_generate_refuses_a_model_that_writes_no_text(
    tmp_path: Path, config: dict[str, object], has_tokenizer: bool, expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if has_tokenizer:
        words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "hello": 4}
        Tokenizer(WordLevel(words, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    command = ["generate", "hello", "--model", str(tmp_path), "--load-format", "random", "--device", "cpu"]
    result = CliRunner().invoke(penstock, command)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert expected in result.stderr


@pytest.mark.parametrize(
    ("num_parameters", "weight_bytes", "dtype", "quantization", "expected"),
    [
        (134_515_008, 84_000_000, "float32", None, "135 M parameters, 5.0 bits per weight, computed in float32"),
        (134_515_008, 538_060_032, "float32", None, "135 M parameters, float32"),
        (8_030_261_248, 16_060_522_496, "bfloat16", None, "8.0 B parameters, bfloat16"),
        (8_000_000_000, 8_000_000_000, "bfloat16", "fp8", "8.0 B parameters, fp8, "
         "8.0 bits per weight, computed in bfloat16"),
        (21_000, 84_000, "float32", None, "21 K parameters, float32"),
        (96, 384, "float32", None, "96 parameters, float32"),
        (0, 0, "float32", None, "none"),
    ],
)  # fmt: skip
def test_the_banner_says_how_weights_are_kept(
    num_parameters: int, weight_bytes: int, dtype: str, quantization: str | None, expected: str
) -> None:
    card = model_card(
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        dtype=dtype,
        quantization=quantization,
    )
    assert describe_weights(card) == expected
    rounded = msgspec.structs.replace(card, rounding="products rounded to bfloat16")
    assert describe_weights(rounded) == (f"{expected}; {rounded.rounding}" if num_parameters else expected)


@pytest.mark.parametrize(
    ("pooling", "pooler", "expected"),
    [
        ("last", PoolerCard(), "8 dimensions; pooling 'last', by default"),
        ("mean", PoolerCard(source="a.json", normalizes=False), "8 dimensions, not normalized; "
         "pooling 'mean', from a.json"),
        ("first", PoolerCard(source="b", labels=("x", "y")), "2 labels; pooling 'first', from b"),
        ("last", PoolerCard(source="b", labels=("x",), scores_pairs=True), "a score for each pair of texts; "
         "pooling 'last', from b"),
    ],
    ids=["default", "file", "labels", "pairs"],
)  # fmt: skip
def test_the_banner_says_which_pooling_is_used(pooling: Pooling, pooler: PoolerCard, expected: str) -> None:
    card = model_card(embedding_size=8, pooling=pooling, pooler=pooler)
    assert describe_vectors(card) == expected
