"""Several models by file and by flags: what is inherited, what names mean, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.config import ServeConfig
from penstock.core.errors import ConfigError
from penstock.serve.config import read_config_file, resolve
from penstock.serve.control import planned_replicas

TWO_MODELS = """
max_num_seqs = 32
max_model_len = 4096

[[models]]
name = "small"
path = "smollm2-135m"
replicas = 2
aliases = ["fast", "gpt-4o-mini"]
region = "eu"

[[models]]
path = "qwen2.5-coder-1.5b"
max_num_seqs = 8
quantization = "int8"
aliases = ["coder"]
adapters = { sql = "/adapters/sql" }
"""


def config_of(tmp_path: Path, text: str, **flags: object) -> ServeConfig:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return resolve(read_config_file(path), flags)


def test_the_first_table_is_the_first_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, TWO_MODELS)
    assert (config.engine.model.model, config.engine.model.served_model_name) == ("smollm2-135m", "small")
    assert (config.cluster.replicas, config.cluster.region) == (2, "eu")
    (coder,) = config.models
    assert coder.engine.model.model == coder.engine.model.served_model_name == "qwen2.5-coder-1.5b"
    assert coder.engine.model.quantization == "int8"
    assert config.gateway.names.first == "small"
    assert config.gateway.names.aliases == {
        "fast": "small",
        "gpt-4o-mini": "small",
        "coder": "qwen2.5-coder-1.5b",
    }
    assert config.gateway.names.adapters == (("sql", "/adapters/sql", "qwen2.5-coder-1.5b"),)


def test_engine_settings_are_inherited_but_for_those_of_one_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, TWO_MODELS)
    assert config.engine.scheduler.max_num_seqs == 32
    assert config.engine.model.max_model_len == 4096
    (coder,) = config.models
    assert coder.engine.scheduler.max_num_seqs == 8
    assert coder.engine.model.max_model_len is None
    assert config_of(tmp_path, TWO_MODELS, num_threads="3").models[0].engine.num_threads == 3


def test_flags_win_over_the_first_table(tmp_path: Path) -> None:
    config = config_of(tmp_path, TWO_MODELS, replicas="1", max_num_seqs="4")
    assert config.cluster.replicas == 1
    assert config.engine.scheduler.max_num_seqs == 4


def test_a_model_given_by_flag_comes_before_all_tables(tmp_path: Path) -> None:
    config = config_of(tmp_path, TWO_MODELS, model="other", also_serve=("third", "fourth=./model.gguf"))
    assert config.engine.model.model == config.gateway.names.first == "other"
    names = [model.engine.model.served_model_name for model in config.models]
    assert names == ["small", "qwen2.5-coder-1.5b", "third", "fourth"]
    assert config.models[3].engine.model.model == "./model.gguf"


def test_adapters_by_flag_are_for_the_first_model(tmp_path: Path) -> None:
    names = config_of(tmp_path, "", lora_modules=("a=/a", "b=/b=c")).gateway.names
    assert names.adapters == (("a", "/a", None), ("b", "/b=c", None))
    assert names.first == ""  # there is one model: whatever it is called


def test_every_replica_is_planned(tmp_path: Path) -> None:
    config = config_of(tmp_path, TWO_MODELS)
    specs = planned_replicas(config, Path("/small"), [Path("/coder")])
    assert [(spec.model, spec.model_path, spec.region) for spec in specs] == [
        ("small", "/small", "eu"),
        ("small", "/small", "eu"),
        ("qwen2.5-coder-1.5b", "/coder", "eu"),
    ]
    assert specs[0].revision != specs[2].revision


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("models = 3", "must be tables"),
        ("[[models]]\nname = 'a'", r"\[\[models\]\] number 1 of .* is wrong: .*`path`"),
        ("[[models]]\npath = 'a'\nreplicas = 0", "is wrong: .*>= 1"),
        ("[[models]]\npath = 'a'\nport = 3", "A model has no setting 'port'"),
        ("[[models]]\npath = 'a'\nmax_num_seqs = 0", "max_num_seqs in .* must be a whole number"),
        ("[[models]]\npath = 'a'\nmodel = 'b'", "path is called 'path' here"),
        ("[[models]]\npath = 'a'\n[[models]]\npath = 'a'", "are called 'a'"),
        ("[[models]]\npath = 'a'\naliases = ['b']\n[[models]]\npath = 'b'", "are called 'b'"),
        ("lora_modules = ['a']", "must be NAME=FOLDER, not 'a'"),
        ("lora_modules = 'a=b'", "must be a list of texts"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_of(tmp_path, text)


def test_a_misspelt_setting_of_a_model_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(tmp_path, "[[models]]\npath = 'a'\nalias = ['b']")
    assert raised.value.hint == "Did you mean 'aliases'?"


def test_a_model_may_have_several_names() -> None:
    config = resolve({}, {"served_model_name": "mine, gpt-4o,gpt-4"})
    assert config.engine.model.served_model_name == "mine"
    assert config.gateway.names.aliases == {"gpt-4o": "mine", "gpt-4": "mine"}
    for wrong in ("mine,mine", "mine,", ","):
        with pytest.raises(ConfigError):
            resolve({}, {"served_model_name": wrong})
