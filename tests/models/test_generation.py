"""What a model's makers say about its use: sampling defaults and chat templates."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from penstock.core.engine_config import ModelConfig, parse_sampling_override
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.core.request import SamplingDefaults
from penstock.models.generation import (
    folder_templates,
    gguf_templates,
    makers_defaults,
    sampling_defaults,
)


def stated(folder: Path, *, settings: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return sampling_defaults(ModelConfig(**(settings or {})), folder).stated()


def test_the_file_gives_defaults_and_flags_change_them(tmp_path: Path) -> None:
    values = {"temperature": 0.01, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    assert stated(tmp_path, **values, eos_token_id=[1, 2], max_new_tokens=99) == {
        **values,
        "max_new_tokens": 99,
    }
    assert stated(tmp_path, **values, settings={"generation_config": "none"}) == {}
    assert stated(tmp_path, **values, settings={"generation_config": "vllm"}) == {}
    changes = {"override_generation_config": '{"temperature": 0.6, "top_k": null}'}
    assert stated(tmp_path, **values, settings=changes) == {
        name: value for name, value in {**values, "temperature": 0.6}.items() if name != "top_k"
    }
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.9}')
    assert stated(tmp_path, **values, settings={"generation_config": str(other)}) == {"temperature": 0.9}


def test_a_folder_without_the_file_states_nothing_and_one_that_is_named_must_have_it(tmp_path: Path) -> None:
    assert makers_defaults(tmp_path) == SamplingDefaults()
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        sampling_defaults(ModelConfig(generation_config=str(tmp_path)), tmp_path)


def test_greedy_makers_are_obeyed_and_nonsense_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert stated(tmp_path, do_sample=False, top_k=50) == {"temperature": 0.0, "top_k": 50}
    with caplog.at_level(logging.WARNING):
        assert stated(tmp_path, temperature="hot", top_p=7, top_k=-1, min_p=0.2) == {"min_p": 0.2}
    assert {word for word in ("temperature", "top_p", "top_k") if word in caplog.text} == {
        "temperature",
        "top_p",
        "top_k",
    }


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"temperature": "x"}', '{"temprature": 1}', '{"top_p": 2}', '{"top_k": 1e9}']
)
def test_a_wrong_override_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="override-generation-config"):
        parse_sampling_override(text)


def test_gguf_metadata_gives_defaults_and_templates(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    for name, value in {"temp": 0.3, "top_p": 0.7, "penalty_repeat": 1.5}.items():
        writer.add_float32(f"general.sampling.{name}", value)
    writer.add_int32("general.sampling.top_k", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert makers_defaults(path).stated() == pytest.approx(
        {"temperature": 0.3, "top_p": 0.7, "top_k": 7, "repetition_penalty": 1.5}
    )
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b", "other": "c"}
    assert gguf_templates(metadata) == {"default": "a", "tool_use": "b"}
    assert gguf_templates({}) == {}


def test_templates_of_a_folder_by_name(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}, {"name": "c"}, 7]
    assert folder_templates(tmp_path, {"chat_template": listed}) == {"default": "a", "tool_use": "b"}
    assert folder_templates(tmp_path, {"chat_template": {"default": "a", "rag": "b"}}) == {
        "default": "a",
        "rag": "b",
    }
    assert folder_templates(tmp_path, {"chat_template": [{"name": "only", "template": "x"}]}) == {
        "default": "x"
    }
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert folder_templates(tmp_path, {}) == {"default": "json"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert folder_templates(tmp_path, {"chat_template": "entry"}) == {"default": "file", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match="UTF-8"):
        folder_templates(tmp_path, {})
