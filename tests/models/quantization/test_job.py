"""The whole way: a tiny model, quantized, read back and measured."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.interface import DenseWeight
from penstock.kernels.reference import TorchOps
from penstock.models.load import load_model, load_tokenizer, open_checkpoint
from penstock.models.quantization import activations
from penstock.models.quantization.activations import load_listed
from penstock.models.quantization.evaluation import compare, predict
from penstock.models.quantization.job import QuantizeJob, quantize_model
from penstock.models.safetensors_source import SafetensorsSource
from penstock.models.weights import WeightLoader
from tests.models.checkpoints import VOCAB_SIZE, make_reference
from tests.models.conftest import random_prompt
from tests.models.gguf_files import write_model
from tests.models.paged import PagedRunner

PROMPT = random_prompt(40, seed=3)
TEXT = " ".join(f"w{token}" for token in random_prompt(700, seed=4))


def add_tokenizer(folder: Path) -> None:
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def job_for(model: Path, out: Path, method: str = "int8", group: int = 128) -> QuantizeJob:
    return QuantizeJob(
        model=model,
        out=out,
        method=method,
        group=group,
        calibration_text=TEXT,
        evaluation_text=TEXT,
        calibration_tokens=512,
        evaluation_tokens=512,
    )


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    make_reference("llama", folder)
    add_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("method", "group", "largest_error"),
    [("fp8", 128, 0.15), ("int8", 32, 0.05), ("w8a8", 128, 0.1), ("int4", 16, 0.6), ("int4-awq", 16, 0.6)],
)
def test_every_method(
    llama_folder: Path, tmp_path: Path, method: str, group: int, largest_error: float
) -> None:
    stages: list[str] = []
    report = quantize_model(
        job_for(llama_folder, tmp_path / "out", method, group), lambda title, _: stages.append(title)
    )
    assert report.difference.logit_error < largest_error
    assert 0.5 < report.after.perplexity / report.before.perplexity < 2
    assert report.group == (None if method in ("fp8", "w8a8") else group)
    assert "Rounding weights" in stages
    ops = TorchOps()
    quantized = PagedRunner(load_model(tmp_path / "out", ops), ops).prompt_logits(PROMPT)
    original = PagedRunner(load_model(llama_folder, ops), ops).prompt_logits(PROMPT)
    assert torch.nn.functional.cosine_similarity(quantized, original, dim=1).mean() > 0.8
    assert load_tokenizer(tmp_path / "out") is not None
    assert not list(tmp_path.glob("*.partial"))


def stem(name: str) -> str:
    return name.rpartition(".")[0]


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gemma3", "llama-biased", "qwen2"])
@pytest.mark.parametrize("method", ["int8", "int4-awq"])
def test_architectures(name: str, method: str, tmp_path: Path) -> None:
    make_reference(name, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    report = quantize_model(job_for(tmp_path / "model", tmp_path / "out", method, 16), lambda *_: None)
    assert report.difference.logit_error < (0.3 if method == "int8" else 1.0)
    before, after = (set(SafetensorsSource(tmp_path / each).names()) for each in ("model", "out"))
    assert {stem(each) for each in after} == {stem(each) for each in before}, "modules keep their names"


@pytest.mark.parametrize("name", ["llama3-rope", "llama-yarn", "qwen2", "qwen3", "llama-tied"])
def test_from_a_gguf_file(name: str, tmp_path: Path) -> None:
    """Settings and the tokenizer are written anew."""
    path = tmp_path / "model.gguf"
    write_model(path, make_reference(name, tmp_path / "folder"), GGMLQuantizationType.F32)
    job = dataclasses.replace(job_for(path, tmp_path / "out", "int8", 16), evaluation_text="aab" * 300)
    quantize_model(job, lambda *_: None)
    ops = TorchOps()
    quantized, original = (
        PagedRunner(load_model(each, ops), ops).prompt_logits(PROMPT) for each in (tmp_path / "out", path)
    )
    assert torch.nn.functional.cosine_similarity(quantized, original, dim=1).min() > 0.99
    before, after = load_tokenizer(path), load_tokenizer(tmp_path / "out")
    assert before is not None
    assert after is not None
    assert after.tokenizer_json == before.tokenizer_json
    assert after.eos_token_ids == before.eos_token_ids
    config = open_checkpoint(tmp_path / "out").config
    assert config.max_positions == open_checkpoint(path).config.max_positions


def test_all_files_can_be_read_by_others_and_generation_settings_stay(
    llama_folder: Path, tmp_path: Path
) -> None:
    (llama_folder / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.6}')
    (llama_folder / "generation_config.json").chmod(0o600)
    umask = os.umask(0o022)
    try:
        quantize_model(job_for(llama_folder, tmp_path / "out"), lambda *_: None)
    finally:
        os.umask(umask)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o644}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= modes.keys()
    assert "temperature" in (tmp_path / "out" / "generation_config.json").read_text()


def test_generation_settings_beside_a_gguf_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, make_reference("qwen2", tmp_path / "folder"), GGMLQuantizationType.F32)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.6}')
    job = dataclasses.replace(job_for(path, tmp_path / "out", "int8", 16), evaluation_text="aab" * 300)
    quantize_model(job, lambda *_: None)
    assert "temperature" in (tmp_path / "out" / "generation_config.json").read_text()


def test_a_gguf_file_that_does_not_say_enough(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, make_reference("gemma3-usual-scale", tmp_path / "folder"), GGMLQuantizationType.F32)
    with pytest.raises(ModelLoadError, match="of kind gemma3, which can be quantized from safetensors only"):
        quantize_model(job_for(path, tmp_path / "out"), lambda *_: None)


def test_scaling_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """Before anything is rounded."""
    for name in ("llama-biased", "gemma3", "llama"):
        folder = tmp_path / name
        make_reference(name, folder)
        checkpoint = open_checkpoint(folder)
        ops = TorchOps()
        inventory = load_listed(checkpoint, ops, 256).inventory
        inputs = activations.record_inputs(checkpoint, torch.float32, [PROMPT], 256, lambda: None)
        source = checkpoint.source()
        best_factors = partial(activations.factors_for_int4, group=16)
        scaling = activations.search_scaling(
            source, checkpoint, inventory, inputs, best_factors, lambda _: None
        )
        assert any((factors != 1).any() for factors in scaling.columns.values())
        scaled = activations.ScaledSource(source, scaling, checkpoint.config.norm_offset)
        model = checkpoint.architecture(checkpoint.config, WeightLoader(scaled, ops), 256)
        plain = PagedRunner(load_model(folder, ops), ops).prompt_logits(PROMPT)
        torch.testing.assert_close(PagedRunner(model, ops).prompt_logits(PROMPT), plain, atol=1e-3, rtol=1e-3)


def test_scales_favour_inputs_that_are_large() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    x[:, 3] *= 50
    weight = torch.randn(32, 64)
    seen = activations.Inputs(x.abs().sum(dim=0), x.abs().amax(dim=0), 256, [x])
    factors = activations.factors_for_int4(weight, seen, group=32)
    assert factors[3] > 2 * factors.median()


def test_awq_is_nearer_than_plain_rounding(tmp_path: Path) -> None:
    """On a model whose activations have outliers, as real ones do."""
    folder = tmp_path / "model"
    make_reference("llama", folder)
    add_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[[5, 40]] *= 20
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    errors = {
        method: quantize_model(
            job_for(folder, tmp_path / method, method, 32), lambda *_: None
        ).difference.logit_error
        for method in ("int4", "int4-awq")
    }
    assert errors["int4-awq"] < 0.9 * errors["int4"]


def test_the_group_shrinks_to_what_divides_every_row(llama_folder: Path, tmp_path: Path) -> None:
    """Of 64 and 96 inputs."""
    assert quantize_model(job_for(llama_folder, tmp_path / "out"), lambda *_: None).group == 32


def test_perplexity_of_a_known_distribution(llama_folder: Path) -> None:
    """A model whose logits are all alike finds every token as likely as any other."""
    ops = TorchOps()
    model = load_model(llama_folder, ops)
    model.logits = lambda rows: torch.zeros(len(rows), VOCAB_SIZE)
    predictions = predict(model, ops, [PROMPT], lambda: None)
    assert predictions.perplexity == pytest.approx(VOCAB_SIZE)
    assert predictions.num_tokens == len(PROMPT) - 1
    same = compare(predictions, dataclasses.replace(predictions, logits=predictions.logits + 3.0))
    assert same.divergence == pytest.approx(0.0, abs=1e-6)
    assert same.same_choice == 1.0


def test_refusals(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        quantize_model(job_for(llama_folder, tmp_path / "full"), lambda *_: None)
    job = dataclasses.replace(job_for(llama_folder, tmp_path / "a"), evaluation_text="w1")
    with pytest.raises(ConfigError, match="too short"):
        quantize_model(job, lambda *_: None)
    quantize_model(job_for(llama_folder, tmp_path / "once"), lambda *_: None)
    with pytest.raises(ModelLoadError, match="quantized already"):
        quantize_model(job_for(tmp_path / "once", tmp_path / "twice"), lambda *_: None)
    (llama_folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        quantize_model(job_for(llama_folder, tmp_path / "b"), lambda *_: None)


def test_nothing_is_left_behind_by_a_failure(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("penstock.models.quantization.folder.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        quantize_model(job_for(llama_folder, tmp_path / "out"), lambda *_: None)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_shards(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.models.quantization.folder._SHARD_BYTES", 40_000)
    quantize_model(job_for(llama_folder, tmp_path / "out"), lambda *_: None)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    weight = open_checkpoint(tmp_path / "out").source().matrix("model.embed_tokens.weight", VOCAB_SIZE, 64)
    assert isinstance(weight, DenseWeight)
