"""Flags and TOML keys come from core/config.py, and wrong ones are explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from penstock.cli.commands import PenstockCommand
from penstock.cli.options import config_options, model_argument
from penstock.cli.other_flags import ANSWERS
from penstock.core.config import ServeConfig
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.serve.config import read_config_file, resolve, settings


@click.command(cls=PenstockCommand)
@config_options(ServeConfig)
def show(config: ServeConfig) -> None:
    click.echo(msgspec.json.encode(config))


@click.command(cls=PenstockCommand)
@config_options(EngineConfig)
def show_engine(config: EngineConfig) -> None:
    click.echo(msgspec.json.encode(config))


def run(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner(env=environment).invoke(show, list(arguments))


def config_of(*arguments: str, environment: dict[str, str] | None = None) -> ServeConfig:
    result = run(*arguments, environment=environment)
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=ServeConfig)


def test_without_flags_the_config_is_the_default() -> None:
    assert config_of() == ServeConfig()


def test_the_names_known_from_vllm() -> None:
    config = config_of(
        *("--max-model-len", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
        *("--gpu-memory-utilization", "0.5", "--quantization", "int8", "--served-model-name", "m"),
        *("--api-key", "k", "--port", "9000", "--no-enable-prefix-caching", "--allow-open"),
    )
    assert config.engine.model.max_model_len == 4096
    assert config.engine.model.quantization == "int8"
    assert config.engine.model.served_model_name == "m"
    assert config.engine.scheduler.max_num_seqs == 8
    assert config.engine.scheduler.max_num_batched_tokens == 512
    assert config.engine.cache.gpu_memory_utilization == 0.5
    assert config.engine.cache.enable_prefix_caching is False
    assert (config.server.api_key, config.server.port, config.server.allow_open) == ("k", 9000, True)


def test_every_setting_has_a_flag_with_a_description() -> None:
    text = CliRunner().invoke(show, ["--help"], terminal_width=200).output
    for setting in settings().values():
        assert setting.flag in text
        assert setting.description
        assert setting.description.split()[0] in text
    assert "[default: 8000]" in text
    assert text.index("KV cache:") < text.index("--num-kv-blocks") < text.index("Scheduler:")


def test_an_engine_command_takes_no_server_flags() -> None:
    result = CliRunner().invoke(show_engine, ["--num-threads", "2", "--max-num-seqs", "4"])
    config = msgspec.json.decode(result.stdout, type=EngineConfig)
    assert (config.num_threads, config.scheduler.max_num_seqs) == (2, 4)
    assert CliRunner().invoke(show_engine, ["--port", "1"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--port", "70000"), "--port must be a whole number from 0 to 65,535, not '70000'."),
        (("--port", "x"), "--port must be a whole number from 0 to 65,535, not 'x'."),
        (("--port", "80.5"), "--port must be a whole number from 0 to 65,535, not '80.5'."),
        (("--max-num-seqs", "0"), "--max-num-seqs must be a whole number of at least 1, not '0'."),
        (("--aging-s", "0"), "--aging-s must be a number above 0, not '0'."),
        (
            ("--gpu-memory-utilization", "1.5"),
            "--gpu-memory-utilization must be a number above 0 and at most 1, not '1.5'.",
        ),
        (("--device", "tpu"), "--device must be one of auto, cpu, cuda, not 'tpu'."),
        (("--quantization", "int3"), "--quantization must be one of fp8, int4, int8, not 'int3'."),
    ],
)
def test_a_wrong_value_is_one_sentence_and_the_meaning_of_the_flag(
    arguments: tuple[str, ...], sentence: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert lines[0] == f"Error: {sentence}"
    assert lines[1].startswith("Hint: ")
    assert len(lines) == 2


@pytest.mark.parametrize(("flag", "nearest"), [("--prot", "--port"), ("--max-num-seq", "--max-num-seqs")])
def test_an_unknown_flag_names_the_nearest(flag: str, nearest: str) -> None:
    result = run(flag, "1")
    assert result.exit_code == 2
    assert f"No such option '{flag}'" in result.stderr
    assert nearest in result.stderr


def test_flags_of_other_servers_are_named_at_once_with_what_to_do() -> None:
    result = run("--port", "1", "--swap-space=2", "--enforce-eager", "--no-enable-log-requests")
    assert result.exit_code == 2
    first, *hints = result.stderr.strip().splitlines()
    assert first == "Error: Penstock has no --swap-space, --enforce-eager and --no-enable-log-requests."
    assert [line.split(": ")[-1].split(";")[0] for line in hints] == [
        "Use --kv-host-memory.",
        "CUDA graphs are used wherever they work",
        "Use --access-log, and --log-prompts for the text of prompts.",
    ]


def test_short_flags_of_llama_cpp_are_answered() -> None:
    result = run("-c", "4096", "-ngl", "99", "--jinja")
    assert result.exit_code == 2
    assert [line.split(": ")[-1] for line in result.stderr.strip().splitlines()] == [
        "Penstock has no -c, -ngl and --jinja.",
        "Use --max-model-len.",
        "The whole model runs on --device.",
        "It is always on; leave the flag out.",
    ]


def test_what_replaces_a_flag_exists_and_the_flag_itself_does_not() -> None:
    flags = {option for parameter in show.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for flag, answer in ANSWERS.items():
        assert flag not in flags
        for named in re.findall(r"--[a-z0-9-]+", answer):
            assert named in flags, flag


def test_a_command_without_settings_answers_for_no_other_flag() -> None:
    @click.command(cls=PenstockCommand)
    def plain() -> None: ...

    assert "No such option" in CliRunner().invoke(plain, ["--enforce-eager"]).stderr


@pytest.mark.parametrize("arguments", [("a", "b"), ("--served-model-name", "a", "b")])
def test_a_second_value_of_a_flag_is_explained(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "repeat the flag for more" in result.stderr


def test_a_chat_template_comes_from_a_file_or_the_command_line(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    for given in (str(file), template):
        assert config_of("--chat-template", given).engine.model.chat_template == template
    written = write(tmp_path, f"[model]\nchat_template = '{file}'\n")
    assert config_of("--config", written).engine.model.chat_template == template


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe{", "is not a text in UTF-8"),
        (b"x" * (1 << 20) + b"x", "is larger than any chat template"),
    ],
)
def test_a_chat_template_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    result = run("--chat-template", str(file))
    assert (result.exit_code, sentence in result.stderr) == (2, True)
    assert "--chat-template" in result.stderr


@pytest.mark.parametrize(
    ("given", "expected"), [(("a", "a"), "a"), (("a",), "a"), ((), None), (("a", "b"), ConfigError)]
)
def test_one_api_key_is_taken_from_the_command_line(given: tuple[str, ...], expected: Any) -> None:
    result = run(*(part for key in given for part in ("--api-key", key)))
    if expected is ConfigError:
        assert (result.exit_code, "--api-key takes one key" in result.stderr) == (2, True)
    else:
        assert msgspec.json.decode(result.stdout, type=ServeConfig).server.api_key == expected


def test_an_api_key_of_the_environment_is_taken_whole() -> None:
    assert config_of(environment={"PENSTOCK_API_KEY": "a b"}).server.api_key == "a b"


def write(folder: Path, text: str) -> str:
    path = folder / "penstock.toml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'max_num_seqs = 7\nmodel = "m.gguf"\n'
        '[server]\nport = 1234\napi_key = "file"\nhost = "::1"\n[engine]\nnum_threads = 3\n',
    )
    config = config_of("--config", path, "--port", "99", environment={"PENSTOCK_API_KEY": "environment"})
    assert config.server.port == 99
    assert config.server.api_key == "environment"
    assert config.server.host == "::1"
    assert config.engine.scheduler.max_num_seqs == 7
    assert config.engine.model.model == "m.gguf"
    assert config.engine.num_threads == 3
    assert config.server.drain_timeout == ServeConfig().server.drain_timeout


def test_a_file_may_begin_with_a_byte_order_mark_and_end_lines_as_windows_does(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_bytes(b"\xef\xbb\xbfmax_num_seqs = 7\r\n[server]\r\nport = 1234\r\n")
    config = config_of("--config", str(path))
    assert (config.engine.scheduler.max_num_seqs, config.server.port) == (7, 1234)


def test_the_file_may_come_from_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 1234\n")
    assert config_of(environment={"PENSTOCK_CONFIG": path}).server.port == 1234


def test_a_switch_in_the_file_can_be_turned_off_by_a_flag(tmp_path: Path) -> None:
    path = write(tmp_path, "allow_open = true\n")
    assert config_of("--config", path).server.allow_open is True
    assert config_of("--config", path, "--no-allow-open").server.allow_open is False


def test_every_setting_can_be_written_in_a_file_both_ways(tmp_path: Path) -> None:
    of_type = {"IntType": 2, "FloatType": 2.0, "BoolType": True}
    samples = {
        name: of_type.get(type(setting.value_type).__name__, "int8")
        if setting.default is None
        else setting.default
        for name, setting in settings().items()
    } | {"tier_shares": "8,3,1", "chat_template": "{{ messages }}"}
    flat = "".join(f"{name} = {toml(value)}\n" for name, value in samples.items())
    tables = "".join(
        f"{setting.section.table}.{name} = {toml(samples[name])}\n" for name, setting in settings().items()
    )
    assert read_config_file(Path(write(tmp_path, flat))) == samples
    assert read_config_file(Path(write(tmp_path, tables))) == samples
    resolve(samples, {})


def toml(value: object) -> str:
    if isinstance(value, tuple):
        return str([*value])
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("max_num_seq = 3", "There is no setting 'max_num_seq'", "Did you mean 'max_num_seqs'?"),
        ("max-num-seqs = 3", "There is no setting 'max-num-seqs'", "Did you mean 'max_num_seqs'?"),
        ("[servr]\nport = 3", "There is no setting 'servr'", "Did you mean 'server'?"),
        ("[server]\nprot = 3", "There is no setting 'prot'", "Did you mean 'port'?"),
        ("[cache]\nport = 3", "'port' does not belong in [cache]", "Move it to [server]"),
        ("[server]\nport = 70000", "port in", "Port to listen on"),
        ('port = "80"', "port in", "Port to listen on"),
        ("port = 3\n[server]\nport = 3", "twice", ""),
        ("port = ", "is not valid TOML", ""),
    ],
)
def test_a_wrong_file_is_a_sentence(tmp_path: Path, text: str, sentence: str, hint: str) -> None:
    result = run("--config", write(tmp_path, text))
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert hint in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in run("--config", str(tmp_path / "none.toml")).stderr


@click.command(cls=PenstockCommand)
@model_argument
@config_options(EngineConfig)
def show_model(config: EngineConfig) -> None:
    click.echo(config.model.model)


def test_a_model_is_an_argument_or_a_flag_and_either_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'model = "file.gguf"')
    for arguments, expected in (
        ([], "file.gguf"),
        (["a.gguf"], "a.gguf"),
        (["--model", "a.gguf"], "a.gguf"),
        (["a.gguf", "--model", "a.gguf"], "a.gguf"),
    ):
        result = CliRunner().invoke(show_model, ["--config", path, *arguments])
        assert result.stdout.strip() == expected
    result = CliRunner().invoke(show_model, ["a.gguf", "--model", "b.gguf"])
    assert result.exit_code == 2
    assert "Two models were given" in result.stderr


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for setting in settings().values():
        default = setting.default
        shown = (
            "–"
            if not setting.has_default
            else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        row = f"| `{setting.name}` | `{setting.flag}` | {shown} | {setting.description} |"
        assert row in page, row


def test_a_table_that_only_a_file_can_hold(tmp_path: Path) -> None:
    text = """
        [oidc]
        issuer = "https://id.example.org"
        audience = "penstock"
        algorithms = ["ES256"]
        scopes = { "llm.use" = "inference", "llm.admin" = "admin" }
        tiers = { gold = "priority" }
    """
    oidc = config_of("--config", write(tmp_path, text)).tenants.oidc
    assert oidc is not None
    assert oidc.issuer == "https://id.example.org"
    assert oidc.scopes == {"llm.use": "inference", "llm.admin": "admin"}
    assert oidc.tiers == {"gold": "priority"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('oidc.issuer = "https://x"', "missing required field `audience`"),
        ('oidc = "https://x"', "Expected `object`"),
        ('[oidc]\nissuer = "i"\naudience = "a"\nalgorithms = ["HS256"]', "Invalid enum value 'HS256'"),
        ('[oidc]\nissuer = "i"\naudience = "a"\naudiences = "b"', "unknown field `audiences`"),
        ('[odic]\nissuer = "i"', "There is no setting 'odic'"),
    ],
)
def test_a_wrong_table_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    result = run("--config", write(tmp_path, text))
    assert result.exit_code == 2
    assert sentence in result.stderr
