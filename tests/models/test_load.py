"""Loading from folders: shards, random weights, int8, and all that can be wrong with a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.interface import DenseWeight, GroupQuantWeight, Ops
from penstock.kernels.reference import TorchOps
from penstock.models.config import Fields
from penstock.models.load import load_model
from penstock.models.rounding import quantize_int8
from penstock.models.vision_load import load_vision
from tests.models.checkpoints import Reference, make_reference
from tests.models.conftest import random_prompt
from tests.models.paged import PagedRunner
from tests.models.tiny_families import save_tiny

PROMPT = random_prompt(30, seed=8)


def logits_of(folder: Path, **settings: Any) -> torch.Tensor:
    ops = TorchOps()
    return PagedRunner(load_model(folder, ops, **settings), ops).prompt_logits(PROMPT)


@pytest.fixture
def folder(llama: Reference, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(llama.folder, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", ["qwen3-moe", "nemotron_h-experts"])
def test_the_text_model_of_a_folder_with_speech(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of Qwen 3 Omni, whose other model's layers have the same names, and of Nemotron 3 Omni as published."""
    if name == "qwen3-moe":
        reference, prefix = make_reference(name, tmp_path), "thinker."
    else:
        reference, prefix = save_tiny(name, tmp_path), "language_model."
    expected = reference.logits(PROMPT)
    tensors = load_file(tmp_path / "model.safetensors")
    speech = {f"talker.{key}": torch.zeros(1) for key in tensors} if prefix == "thinker." else {}
    save_file(
        {f"{prefix}{key}": tensor for key, tensor in tensors.items()} | speech, tmp_path / "model.safetensors"
    )
    text = json.loads((tmp_path / "config.json").read_text())
    outer: dict[str, Any] = {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
        "llm_config": text,
    }
    if name == "qwen3-moe":
        text |= {"model_type": "qwen3_omni_moe_text", "num_experts": 8}
        text["rope_parameters"]["mrope_section"] = [2, 3, 3]
        outer = {
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "model_type": "qwen3_omni_moe",
            "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "text_config": text},
        }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=3e-4, rtol=3e-4)
    fields = Fields(outer, "config.json")
    assert load_vision(tmp_path, fields, b"{}", TorchOps()) is None
    assert "takes text only" in caplog.text


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


@pytest.mark.parametrize("is_split", [False, True])
def test_pickles_are_read_when_asked_for(
    is_split: bool, llama: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(llama.folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((llama.folder / "config.json").read_bytes())
    if not is_split:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        shards = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(tensors)}
        for file in set(shards.values()):
            torch.save({name: tensors[name] for name in tensors if shards[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors") as caught:
        load_model(tmp_path, TorchOps())
    assert "--load-format pt" in str(caught.value.hint)
    got = logits_of(tmp_path, load_format="pt")
    torch.testing.assert_close(got, logits_of(llama.folder))
    for file in tmp_path.glob("*.bin"):
        torch.save({"model.norm.weight": _Evil()}, file)
    with pytest.raises(ModelLoadError, match="cannot be unpickled safely"):
        load_model(tmp_path, TorchOps(), load_format="pt")
    assert "code ran" not in capsys.readouterr().out


def test_shards(tmp_path: Path) -> None:
    reference = make_reference("llama", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits_of(tmp_path), reference.logits(PROMPT), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("names", [["consolidated"], ["my-tune"], ["model-1-of-2", "model-2-of-2"]])
def test_weights_of_any_name(names: list[str], llama: Reference, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for index, name in enumerate(names):
        part = {each: tensors[each] for each in sorted(tensors)[index :: len(names)]}
        save_file(part, folder / f"{name}.safetensors")
    save_file({"lora": torch.zeros(1)}, folder / "adapter_model.safetensors")
    torch.testing.assert_close(logits_of(folder), logits_of(llama.folder))
    if names != ["consolidated"]:  # the same weights in another form
        save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
        torch.testing.assert_close(logits_of(folder), logits_of(llama.folder))
    save_file(tensors, folder / "other.safetensors")
    if names != ["consolidated"]:
        with pytest.raises(ModelLoadError, match=r"in both .* and other\.safetensors"):
            logits_of(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_reference("llama", tmp_path, max_shard_size="60KB")
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelLoadError, match=f"lacks {missing.name}"):
        logits_of(tmp_path)


def test_an_index_that_is_no_index(tmp_path: Path) -> None:
    make_reference("llama", tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ModelLoadError, match="not a valid index"):
        logits_of(tmp_path)


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    reference = make_reference("gemma3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        save_file(renamed, tmp_path / "model.safetensors")
        torch.testing.assert_close(logits_of(tmp_path), reference.logits(PROMPT), atol=2e-4, rtol=2e-4)


def test_random_weights_need_nothing_but_settings(llama: Reference, tmp_path: Path, ops: Ops) -> None:
    shutil.copy(llama.folder / "config.json", tmp_path)
    first = logits_of(tmp_path, load_format="random", seed=1)
    assert torch.isfinite(first).all()
    assert first.std() > 0
    torch.testing.assert_close(first, logits_of(tmp_path, load_format="random", seed=1))
    assert not torch.allclose(first, logits_of(tmp_path, load_format="random", seed=2))
    model = load_model(tmp_path, ops, load_format="random")
    assert model.num_parameters == llama.model.num_parameters()


def test_random_norms_are_neutral_where_files_store_them_less_one(tmp_path: Path) -> None:
    make_reference("gemma3", tmp_path)
    assert logits_of(tmp_path, load_format="random").abs().max() < 10


def test_int8_stays_close_and_leaves_embeddings(llama: Reference, ops: Ops) -> None:
    quantized = PagedRunner(load_model(llama.folder, ops, quantization="int8"), ops).prompt_logits(PROMPT)
    expected = llama.logits(PROMPT)
    assert torch.nn.functional.cosine_similarity(quantized, expected, dim=1).min() > 0.995
    assert not torch.allclose(quantized, expected, atol=1e-4)


def test_int8_rounds_to_nearest() -> None:
    values = torch.randn(6, 96) * torch.logspace(-3, 3, 6).unsqueeze(1)
    values[2, 32:64] = 0
    weight = quantize_int8(DenseWeight(values))
    assert isinstance(weight, GroupQuantWeight)
    assert (weight.group, weight.bits) == (32, 8)
    error = (weight.dequantize() - values).abs().view(6, 3, 32)
    assert (error <= weight.scales.unsqueeze(2) * 0.5001).all()
    assert (weight.dequantize()[2, 32:64] == 0).all()


@pytest.mark.parametrize(("columns", "group"), [(48, 16), (40, None)])
def test_int8_with_odd_rows(columns: int, group: int | None) -> None:
    weight = quantize_int8(DenseWeight(torch.randn(4, columns)))
    assert getattr(weight, "group", None) == group


def test_a_shorter_context(llama: Reference, ops: Ops) -> None:
    assert load_model(llama.folder, ops, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="more than the 256 positions"):
        load_model(llama.folder, ops, max_model_len=257)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        logits_of(folder)


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    change_config(folder, intermediate_size=80)
    with pytest.raises(
        ModelLoadError, match=r"mlp\.gate_proj\.weight of shape \[96, 64\] .* asks for \[80, 64\]"
    ):
        logits_of(folder)


def test_a_tensor_of_an_unreadable_type(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.int32) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=r"torch\.int32"):
        logits_of(folder)


def test_a_damaged_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        logits_of(folder)


def test_folders_that_hold_no_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="There is no model at"):
        logits_of(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        logits_of(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        logits_of(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        logits_of(folder)


def test_a_context_too_long_to_tabulate(folder: Path) -> None:
    change_config(folder, max_position_embeddings=1 << 24, head_dim=32)
    with pytest.raises(ModelLoadError, match="16,777,216 positions") as caught:
        logits_of(folder)
    assert "--max-model-len" in str(caught.value.hint)
