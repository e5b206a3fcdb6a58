"""A checkpoint converted to GGUF gives the logits it gave before."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, GroupQuantWeight, Ops
from penstock.kernels.reference import TorchOps
from penstock.models.config import ArchitectureConfig
from penstock.models.gguf_config import refuse_unread_settings
from penstock.models.gguf_file import GGUFFile
from penstock.models.load import (
    architecture_for_gguf,
    load_model,
    load_tokenizer,
    open_checkpoint,
    weights_identity,
)
from penstock.models.weight_parts import Part, pick_columns
from tests.models.checkpoints import Reference, make_reference
from tests.models.conftest import random_prompt
from tests.models.family_table import Shows
from tests.models.gguf_files import SAME_LAYERS, TEXT_PARTS, write_model
from tests.models.gguf_states import CONVERSIONS, glm4_of_images, older_qwen3_next
from tests.models.paged import PagedRunner
from tests.models.ranks import run_ranks
from tests.models.tiny_families import TINY, save_tiny

TOLERANCE = {"atol": 3e-4, "rtol": 3e-4}


def with_weights(reference: Reference, values: dict[str, torch.Tensor]) -> Reference:
    model = copy.deepcopy(reference.model)
    model.load_state_dict(values, strict=False)
    return Reference(reference.name, reference.folder, model)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "llama3-rope", "llama-yarn", "qwen2", "qwen3", "gemma3-usual-scale"]
)
def test_same_logits_as_the_checkpoint_it_came_from(name: str, kind: str, tmp_path: Path, ops: Ops) -> None:
    reference = make_reference(name, tmp_path / "folder")
    path = tmp_path / "model.gguf"
    stored = write_model(path, reference, GGMLQuantizationType[kind])
    rounded = with_weights(reference, {key: torch.from_numpy(value) for key, value in stored.items()})
    prompt = random_prompt(40, seed=7)
    logits = PagedRunner(load_model(path, ops), ops).prompt_logits(prompt)
    torch.testing.assert_close(logits, rounded.logits(prompt), **TOLERANCE)


def test_a_split_model_needs_all_its_parts(tmp_path: Path, ops: Ops) -> None:
    reference = make_reference("llama", tmp_path / "folder")
    write_model(tmp_path / "one.gguf", reference, GGMLQuantizationType.Q8_0)
    write_model(tmp_path / "split.gguf", reference, GGMLQuantizationType.Q8_0, max_tensors=8)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == 3
    prompt = random_prompt(20, seed=7)
    whole, split = (
        PagedRunner(load_model(path, ops), ops).prompt_logits(prompt)
        for path in (tmp_path / "one.gguf", parts[1])
    )
    assert torch.equal(whole, split)
    assert load_tokenizer(parts[2]) is not None
    assert weights_identity(parts[0]) != weights_identity(tmp_path / "one.gguf")
    parts[1].rename(tmp_path / "kept")
    with pytest.raises(ModelLoadError, match=r"split-00002-of-00003\.gguf is missing"):
        load_model(parts[0], ops)
    shutil.copy(parts[2], parts[1])
    with pytest.raises(ModelLoadError, match="number 3, and its name says otherwise"):
        load_model(parts[0], ops)


def test_settings_from_both_formats_agree(tmp_path: Path) -> None:
    reference = make_reference("llama", tmp_path / "folder")
    write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.F32)
    folder = open_checkpoint(tmp_path / "folder").config
    gguf = open_checkpoint(tmp_path / "model.gguf").config
    for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "rope"):
        assert getattr(gguf, name) == getattr(folder, name), name
    assert gguf.norm_eps == pytest.approx(folder.norm_eps)


def test_weights_are_read_when_asked_for(tmp_path: Path, ops: Ops) -> None:
    reference = make_reference("llama", tmp_path / "folder")
    write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.Q8_0)
    seen: list[float] = []
    load_model(tmp_path / "model.gguf", ops, on_progress=lambda stage, fraction: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[0] < 0.1
    assert seen[-1] == 1.0


def test_one_expert_is_read_at_a_time(tmp_path: Path) -> None:
    reference = save_tiny("mixtral", tmp_path / "folder")
    write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.Q8_0)
    source = open_checkpoint(tmp_path / "model.gguf").source()
    assert "model.layers.1.mlp.experts.5.down_proj.weight" in source.names()
    weight = source.matrix("model.layers.1.mlp.experts.5.gate_proj.weight", 96, 64)
    assert isinstance(weight, GroupQuantWeight)
    assert source.bytes_read == 96 * 2 * 34
    part = source.matrix(
        "model.layers.1.mlp.experts.5.gate_proj.weight", 96, 64, Part(range(32, 64), range(32, 64))
    )
    assert torch.equal(part.dequantize(), weight.dequantize()[32:64, 32:64])


def test_experts_whose_gates_are_stored_with_the_other_halves(tmp_path: Path, ops: Ops) -> None:
    reference, prompt = save_tiny("qwen3_moe", tmp_path / "folder"), random_prompt(20, seed=7)
    write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.F32, fuses_experts=True)
    logits = PagedRunner(load_model(tmp_path / "model.gguf", ops), ops).prompt_logits(prompt)
    torch.testing.assert_close(logits, reference.logits(prompt), **TOLERANCE)


def test_experts_that_are_stored_one_by_one(tmp_path: Path, ops: Ops) -> None:
    reference, prompt = save_tiny("mixtral", tmp_path / "folder"), random_prompt(20, seed=7)
    write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.F32, splits_experts=True)
    logits = PagedRunner(load_model(tmp_path / "model.gguf", ops), ops).prompt_logits(prompt)
    torch.testing.assert_close(logits, reference.logits(prompt), **TOLERANCE)


@pytest.mark.parametrize(("name", "model_type"), {**TEXT_PARTS, **SAME_LAYERS}.items())
def test_other_names_for_the_same_layers(
    name: str, model_type: str, tmp_path: Path, ops: Ops, shows: Shows
) -> None:
    shows(name if name in SAME_LAYERS else model_type, "GGUF")
    folder, prompt = tmp_path / "folder", random_prompt(20, seed=7)
    reference = save_tiny(model_type, folder) if model_type in TINY else make_reference(model_type, folder)
    write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.F32, name=name)
    logits = PagedRunner(load_model(tmp_path / "model.gguf", ops), ops).prompt_logits(prompt)
    torch.testing.assert_close(logits, reference.logits(prompt), **TOLERANCE)


def test_a_mixture_without_its_settings_is_refused_by_name(tmp_path: Path) -> None:
    reference = save_tiny("mixtral", tmp_path / "folder")
    for setting, message in (
        ("expert_used_count", "has no llama.expert_used_count"),
        ("expert_gating_func", "chooses experts in a way that is not known"),
    ):
        path = tmp_path / f"{setting}.gguf"
        write_model(path, reference, GGMLQuantizationType.F32, spoil=setting)
        with pytest.raises(ModelLoadError, match=message):
            open_checkpoint(path)


def config_of(path: Path, **settings: Any) -> ArchitectureConfig:
    """Read a file's settings with other metadata; a None takes a value out."""
    file = GGUFFile(path)
    file.metadata.update({f"{file.architecture}.{key}": value for key, value in settings.items()})
    return architecture_for_gguf(file).config_from_gguf(file)


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder / "model.gguf", make_reference("llama", folder / "from"), GGMLQuantizationType.F32)
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("settings", "kind", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scale_linear": 4.0}, "linear", 4.0),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 2.0}, "linear", 2.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None, None),
        ({"rope.scaling.type": "linear"}, None, None),
        ({"rope.scaling.factor": 0.0}, None, None),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn", 4.0),
    ],
)
def test_a_factor_of_rope_with_and_without_its_kind(
    settings: dict[str, Any], kind: str | None, factor: float | None, llama_file: Path
) -> None:
    scaling = config_of(llama_file, **settings).rope.scaling
    assert (scaling and scaling.kind, scaling and scaling.factor) == (kind, factor)


def test_the_band_of_yarn(llama_file: Path) -> None:
    settings = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 512}
    scaling = config_of(llama_file, **settings).rope.scaling
    assert scaling is not None
    assert (scaling.original_max_positions, scaling.beta_fast, scaling.beta_slow) == (512, 32.0, 1.0)
    own = {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 2.0}
    scaling = config_of(llama_file, **settings, **own).rope.scaling
    assert scaling is not None
    assert (scaling.beta_fast, scaling.beta_slow) == (4.0, 2.0)


def test_the_amplitude_of_yarn(llama_file: Path) -> None:
    settings = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 1.3}
    scaling = config_of(llama_file, **settings).rope.scaling
    assert scaling is not None
    assert scaling.attention_factor == 1.3


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("rope.scaling.yarn_ext_factor", 0.5, 1.0),
        ("attention.value_scale", 0.7, 1.0),
        ("attention.compress_ratios", [4, 128], None),
        ("swiglu_clamp_exp", [0.0, 7.0], [0.0, 0.0]),
        ("attention.clamp_kqv", 8.0, 0.0),
        ("attention.scale", 0.5, 0.25),
        ("final_logit_softcapping", 30.0, None),
        ("logit_scale", 0.1, 1.0),
        ("residual_scale", "a", 0.0),
    ],
)
def test_settings_that_would_be_passed_over(key: str, value: Any, neutral: Any, llama_file: Path) -> None:
    file = GGUFFile(llama_file)
    config = architecture_for_gguf(file).config_from_gguf(file)
    refuse_unread_settings(file, config)
    file.metadata[f"llama.{key}"] = value
    with pytest.raises(ModelLoadError, match=f"has llama.{key}, which changes"):
        refuse_unread_settings(file, config)
    file.metadata[f"llama.{key}"] = neutral
    refuse_unread_settings(file, config)


def test_the_size_of_a_shared_expert_is_that_of_its_matrix(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, save_tiny("ernie4_5_moe", tmp_path / "folder"), GGMLQuantizationType.F32)
    config = config_of(path, expert_shared_feed_forward_length=48)  # as converters of ERNIE reckon it
    assert config.experts is not None
    assert config.experts.shared_intermediate_size == 32


def test_sizes_that_are_listed_for_each_layer(llama_file: Path) -> None:
    plain = config_of(llama_file)
    sizes = {
        "attention.head_count": [plain.num_heads] * 2,
        "attention.head_count_kv": [plain.num_kv_heads] * 2,
        "feed_forward_length": [plain.intermediate_size] * 2,
    }
    assert config_of(llama_file, **sizes) == plain
    for key, values in sizes.items():
        with pytest.raises(ModelLoadError, match=f"layers that differ in llama.{key}"):
            config_of(llama_file, **{key: [values[0], values[0] * 2]})


def test_groups_of_experts_that_older_files_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, save_tiny("deepseek_v3", tmp_path / "folder"), GGMLQuantizationType.F32)
    unsaid: dict[str, Any] = {"expert_group_count": None, "expert_group_used_count": None}
    for layers, count, groups in ((61, 256, (8, 4)), (60, 160, (8, 3)), (61, 384, (1, 1)), (27, 64, (1, 1))):
        config = config_of(path, **unsaid, block_count=layers, expert_count=count)
        assert config.experts is not None
        assert (config.experts.num_groups, config.experts.kept_groups) == groups


def test_factors_that_older_files_of_minicpm_leave_out(tmp_path: Path) -> None:
    path, reference = tmp_path / "model.gguf", save_tiny("granite", tmp_path / "folder")
    write_model(path, reference, GGMLQuantizationType.F32, name="minicpm")
    assert config_of(path).embedding_scale == 3.0
    config = config_of(path, embedding_scale=None, residual_scale=None, logit_scale=None)
    assert (config.embedding_scale, config.logit_scale) == (12.0, 256 / 64)
    assert config.residual_scale == pytest.approx(1.4 / 2**0.5)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("apertus", {"xielu.alpha_p": None}, "has no xielu.alpha_p"),
        ("apertus", {"xielu.alpha_n": [0.1]}, "has no xielu.alpha_p and xielu.alpha_n for each layer"),
        ("apertus", {"xielu.beta": [0.5, 0.4]}, "has another xielu.beta"),
        ("apertus", {"xielu.alpha_n": ["a", "b"]}, "not a list of finite numbers"),
        ("kimi_linear", {"kimi-linear.attention.head_count_kv": [0, 1]}, "does not list the key-value heads"),
        ("kimi_linear", {"kimi-linear.kda.head_dim": None}, "has no kimi-linear.kda.head_dim"),
        ("glm_moe_dsa", {"glm-dsa.attention.indexer.top_k": -1}, "which is not a whole number"),
        ("llama4", {"llama4.expert_count": 0}, "which is not a whole number"),
        ("ministral3", {"mistral3.expert_count": 8}, "has experts, which are not supported"),
        ("ministral3", {"mistral3.rope.scaling.yarn_log_multiplier": "a"}, "which is not a positive number"),
        ("lfm2", {"lfm2.shortconv.l_cache": None}, "has no lfm2.shortconv.l_cache"),
        ("granite-hybrid", {"granitehybrid.rope.scaling.finetuned": True}, "is a hybrid with rope"),
        (
            "granite-hybrid",
            {"granitehybrid.ssm.time_step_rank": 7},
            "7 heads with a state that do not fill 128",
        ),
        (
            "granite-hybrid",
            {"granitehybrid.attention.head_count_kv": [0, 0]},
            "head_count_kv = 0, which is not",
        ),
    ],
)
def test_settings_of_single_families(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, save_tiny(name, tmp_path / "folder"), GGMLQuantizationType.F32)
    file = GGUFFile(path)
    file.metadata.update(settings)
    with pytest.raises(ModelLoadError, match=message):
        architecture_for_gguf(file).config_from_gguf(file)


def test_a_layer_of_which_nothing_tells_the_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, save_tiny("nemotron_h", tmp_path / "folder"), GGMLQuantizationType.F32)
    file = GGUFFile(path)
    file.tensors.pop("blk.1.ffn_up.weight")
    with pytest.raises(ModelLoadError, match="no tensor of layer 1 that tells its kind"):
        architecture_for_gguf(file).config_from_gguf(file)


def test_flags_of_shared_indexers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, save_tiny("glm_moe_dsa", tmp_path / "folder"), GGMLQuantizationType.F32)
    file = GGUFFile(path)
    for flags, shared in ((None, {1, 3}), ([1, 0, 0, 1], {1, 2})):
        file.metadata["glm-dsa.attention.indexer.types"] = flags
        latent = architecture_for_gguf(file).config_from_gguf(file).latent
        assert latent is not None
        assert latent.index is not None
        assert latent.index.shared_layers == shared


def test_older_files_of_qwen3_next(tmp_path: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the projection into delta nets for one key head after the other."""
    monkeypatch.setitem(CONVERSIONS, "qwen3_next", older_qwen3_next)
    reference, prompt = save_tiny("qwen3_next", tmp_path / "folder"), random_prompt(20, seed=7)
    write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.F32)
    logits = PagedRunner(load_model(tmp_path / "model.gguf", ops), ops).prompt_logits(prompt)
    torch.testing.assert_close(logits, reference.logits(prompt), **TOLERANCE)


@pytest.mark.parametrize("sections", [[4, 2, 2], [8, 0, 0]])
def test_glm4_files_with_sections_have_other_rows(
    sections: list[int], tmp_path: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converters reorder queries and keys of GLM 4.1V, which has positions in three dimensions, and of no other."""
    reference, prompt = save_tiny("glm4", tmp_path / "folder"), random_prompt(20, seed=7)
    expected = reference.logits(prompt)
    reference.model.config.rope_parameters["mrope_section"] = sections
    if sections[1]:
        monkeypatch.setitem(CONVERSIONS, "glm4", glm4_of_images)
    write_model(tmp_path / "model.gguf", reference, GGMLQuantizationType.F32)
    logits = PagedRunner(load_model(tmp_path / "model.gguf", ops), ops).prompt_logits(prompt)
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_heads_of_qwen3_5_on_two_ranks(tmp_path: Path) -> None:
    """Files hold value heads in another order than ranks share them out."""
    reference, path = save_tiny("qwen3_5", tmp_path / "folder"), tmp_path / "model.gguf"
    write_model(path, reference, GGMLQuantizationType.F32)
    prompt = random_prompt(20, seed=7)
    logits = run_ranks(path, TorchOps(), 2, lambda runner: runner.prompt_logits(prompt))
    torch.testing.assert_close(logits, reference.logits(prompt), **TOLERANCE)


def test_columns_in_another_order() -> None:
    """Whole groups keep their scales; a matrix whose groups would be divided becomes dense."""
    torch.manual_seed(0)
    codes, scales, offsets = (
        torch.randint(0, 16, (3, 96), dtype=torch.uint8),
        torch.rand(3, 3),
        torch.rand(3, 3),
    )
    weight = GroupQuantWeight(codes=codes, scales=scales, offsets=offsets, group=32, bits=4)
    for order, kind in (
        (torch.arange(96).view(3, 32)[[2, 0, 1]].flatten(), GroupQuantWeight),
        (torch.arange(96).view(2, 48)[[1, 0]].flatten(), DenseWeight),
        (torch.arange(16, 48), DenseWeight),
    ):
        picked = pick_columns(weight, order)
        assert isinstance(picked, kind)
        values = picked.values if isinstance(picked, DenseWeight) else picked.dequantize()
        assert torch.equal(values, weight.dequantize()[:, order])
    assert torch.equal(pick_columns(DenseWeight(scales), torch.tensor([2, 0])).values, scales[:, [2, 0]])
