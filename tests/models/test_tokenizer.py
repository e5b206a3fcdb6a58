"""What is read about text from a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from penstock.core.errors import ModelLoadError
from penstock.models.load import load_tokenizer
from penstock.models.tokenizer import TokenizerFiles

SPECIAL = ["<s>", "</s>", "<end_of_turn>"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(
        BPE(vocab={"a": 3, "b": 4, **{token: i for i, token in enumerate(SPECIAL)}}, merges=[])
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def read(folder: Path) -> TokenizerFiles:
    files = load_tokenizer(folder)
    assert files is not None
    return files


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_a_bare_tokenizer(folder: Path) -> None:
    files = read(folder)
    assert files.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert files.chat_template is None
    assert files.special_tokens == {}
    assert files.bos_token_id is None
    assert not files.add_bos_token
    assert files.eos_token_ids == ()


def test_ends_from_every_file(folder: Path) -> None:
    write(folder, "generation_config.json", eos_token_id=[2, 1])
    write(folder, "config.json", eos_token_id=4, text_config={"eos_token_id": 2})
    write(folder, "tokenizer_config.json", eos_token={"content": "</s>"})
    assert read(folder).eos_token_ids == (2, 1, 4)
    assert read(folder).special_tokens == {"eos_token": "</s>"}


def test_the_end_that_only_the_tokenizer_names(folder: Path) -> None:
    write(folder, "config.json", eos_token_id=1)
    write(folder, "tokenizer_config.json", eos_token="<end_of_turn>")
    assert read(folder).eos_token_ids == (1, 2)


@pytest.mark.parametrize("stated", [True, False])
def test_bos_as_stated(folder: Path, stated: bool) -> None:
    write(folder, "tokenizer_config.json", bos_token="<s>", add_bos_token=stated)
    assert read(folder).bos_token_id == 0
    assert read(folder).add_bos_token is stated


def test_bos_by_what_the_tokenizer_does(folder: Path) -> None:
    write(folder, "special_tokens_map.json", bos_token="<s>")
    assert not read(folder).add_bos_token
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert read(folder).add_bos_token


def test_a_template_in_a_file_of_its_own_wins(folder: Path) -> None:
    write(folder, "tokenizer_config.json", chat_template="from settings")
    assert read(folder).chat_template == "from settings"
    (folder / "chat_template.jinja").write_text("from file")
    assert read(folder).chat_template == "from file"


def test_the_default_of_several_templates(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(folder, "tokenizer_config.json", chat_template=templates)
    assert read(folder).chat_template == "plain"


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json does not hold an object"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a valid tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json does not hold an object"):
        load_tokenizer(folder)
