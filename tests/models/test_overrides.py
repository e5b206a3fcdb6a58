"""`--hf-overrides`: settings in the place of those in config.json, as transformers takes them; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.core.engine_config import ModelConfig, ModelImplementation, parse_hf_overrides
from penstock.core.errors import ConfigError, PenstockError
from penstock.kernels.reference import TorchOps
from penstock.models.load import load_model, weights_identity
from penstock.models.overrides import merged, overridden
from tests.engine.tiny import request, run, tokens
from tests.models.checkpoints import Reference
from tests.models.conftest import random_prompt
from tests.models.paged import PagedRunner
from tests.models.tiny_families import family_engine

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}


def changed(folder: Path, overrides: Any, **settings: Any) -> Path:
    return overridden(folder, ModelConfig(hf_overrides=json.dumps(overrides), **settings))


@pytest.mark.parametrize(
    ("key", "implementation"), [("rope_scaling", "native"), ("rope_parameters", "transformers")]
)
def test_a_context_that_yarn_extends(llama: Reference, key: str, implementation: ModelImplementation) -> None:
    """Transformers keeps 5000.0 as the base of the angles, which the file states."""
    config = AutoConfig.from_pretrained(
        llama.folder, rope_parameters={**YARN, "rope_theta": 5000.0}, max_position_embeddings=512
    )
    expected = AutoModelForCausalLM.from_pretrained(llama.folder, config=config, attn_implementation="eager")
    overrides: dict[str, Any] = {key: YARN}
    if implementation == "transformers":
        overrides["max_position_embeddings"] = 512
    given = {"hf_overrides": json.dumps(overrides), "model_implementation": implementation}
    engine = family_engine(llama.folder, 64, given)
    assert engine.ready.model.max_model_len == 512
    prompt = random_prompt(300, seed=3)
    answer = tokens(run(engine, [request("one", prompt, 24)])["one"])
    with torch.inference_mode():
        logits = expected(torch.tensor([prompt + answer])).logits[0]
    assert answer == logits[len(prompt) - 1 : -1].argmax(dim=1).tolist()
    assert answer != llama.greedy(prompt, 24)


def test_the_folder_and_its_other_files_stay(llama: Reference, tmp_path: Path) -> None:
    before = (llama.folder / "config.json").read_text()
    folder = changed(llama.folder, {"max_position_embeddings": 128, "eos_token_id": [2, 5]})
    assert (llama.folder / "config.json").read_text() == before
    assert str(folder).endswith(str(llama.folder.resolve()))  # rerankers are known by it
    model = load_model(folder, TorchOps())
    assert (model.max_model_len, model.config.eos_token_ids) == (128, (2, 5))
    prompt = random_prompt(20, seed=4)
    made = PagedRunner(model, TorchOps()).prompt_logits(prompt)
    torch.testing.assert_close(made, llama.logits(prompt), atol=2e-4, rtol=2e-4)
    # KV that was computed with other settings is not taken from a disk.
    assert weights_identity(folder) != weights_identity(llama.folder)
    assert changed(llama.folder, {}) == llama.folder
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"settings of a config.json, and model.gguf has none"):
        changed(tmp_path / "model.gguf", {"head_dim": 16})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"max_positions": 128}, "has the setting 'max_positions', which nothing reads"),
        ({"rope_scaling": {**YARN, "facter": 4.0}}, "has the setting 'facter', which nothing reads"),
        ({"rope_scaling": {**YARN, "rope_type": "yarm"}}, "rope scaling of kind 'yarm'"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor = '4', which is not a positive number"),
        ({"rope_scaling": "yarn"}, "that is not an object"),
        ({"max_position_embeddings": "128"}, "max_position_embeddings = '128', which is not a whole number"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be divided by 3"),
    ],
)
def test_settings_that_cannot_be(llama: Reference, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(PenstockError, match=said) as refused:
        changed(llama.folder, overrides, model_implementation="native")
    assert f"{gettempdir()}/penstock-" not in refused.value.message


@pytest.mark.parametrize("text", ["{", "[]", "4", '{"a": }', "[" * 5000])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hf-overrides cannot be read"):
        parse_hf_overrides(text)


def test_settings_of_the_language_model_within(llama: Reference, tmp_path: Path) -> None:
    """A model with images has them in a part of its file."""
    text = json.loads((llama.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    )
    with pytest.raises(ConfigError, match="has head_dim, which this model has in its text_config"):
        changed(tmp_path, {"head_dim": 32})
    with pytest.raises(ConfigError, match="has the setting 'head_dimm'"):
        changed(tmp_path, {"text_config": {"head_dimm": 32}})
    folder = changed(tmp_path, {"text_config": {"head_dim": 32}})
    assert json.loads((folder / "config.json").read_text())["text_config"] == {**text, "head_dim": 32}


def test_rope_keeps_its_base_under_either_name() -> None:
    plain = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    kept = {"rope_theta": 100.0, "partial_rotary_factor": 0.5}
    assert merged({"rope_parameters": plain}, {"rope_scaling": YARN}) == {"rope_parameters": {**kept, **YARN}}
    assert merged({"rope_theta": 100.0, "rope_scaling": None}, {"rope_parameters": YARN}) == {
        "rope_theta": 100.0,
        "rope_scaling": YARN,
    }
    stretched = {"rope_theta": 100.0, "rope_scaling": YARN}
    assert merged(stretched, {"rope_scaling": None}) == {"rope_theta": 100.0, "rope_scaling": None}
    assert merged({"rope_parameters": plain}, {"rope_theta": 5.0}) == {
        "rope_parameters": {**plain, "rope_theta": 5.0}
    }
    assert merged(stretched, {"rope_theta": 5.0}) == {"rope_theta": 5.0, "rope_scaling": YARN}
    with pytest.raises(ConfigError, match="one for each kind of layer"):
        merged({"rope_parameters": {"full_attention": plain}}, {"rope_theta": 5.0})
