"""Files of vision parts that cannot be used: a sentence, never a crash. Answers are compared in
tests/engine/test_mmproj.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from penstock.core.errors import ModelLoadError
from penstock.kernels.reference import TorchOps
from penstock.models.gguf_file import GGUFFile
from penstock.models.load import load_vision_part, open_checkpoint
from penstock.models.mmproj import PROJECTORS, mmproj_path
from tests.models.gguf_files import Vocabulary, finish
from tests.models.mmproj_files import WRITTEN, write_mmproj, write_pair
from tests.models.tiny_vision import TinyVision
from tests.models.vision_checkpoints import make_vision

TOKENS = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]


def text_model(path: Path, width: int = 64, tokens: list[str] = TOKENS) -> Path:
    """Write the head of a text model, of which images need the hidden size and the vocabulary."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_embedding_length(width)
    types = [1, 1, 1, *([3] * len(tokens))]
    Vocabulary(tokens=["a", "b", "ab", *tokens], types=types).write(writer)
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    return finish(writer, path)


def vision_file(path: Path, tensors: dict[str, tuple[int, ...]] | None = None, **settings: Any) -> Path:
    """Write a file with settings by the names of the writer's calls, and tensors of ones."""
    writer = GGUFWriter(path, "clip")
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    for name, shape in (tensors or {"v.patch_embd.weight": (2, 3, 4, 4)}).items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    return finish(writer, path)


def load(model: Path, mmproj: Path | str) -> Any:
    return load_vision_part(model, TorchOps(), mmproj=str(mmproj))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return make_vision("gemma3", tmp_path_factory.mktemp("mmproj"))


def test_every_projector_is_compared_with_transformers() -> None:
    assert {how.projector for how in WRITTEN.values()} == set(PROJECTORS)


def test_a_file_beside_the_model_is_found(gemma: TinyVision, tmp_path: Path) -> None:
    model = text_model(tmp_path / "g-Q4_0.gguf")
    assert load(model, "auto") is None
    write_mmproj(tmp_path / "mmproj-g-F16.gguf", gemma, WRITTEN["gemma3"])
    vision = load(model, "auto")
    assert vision.card.template_token == "<start_of_image>"
    assert vision.card.numbers["image_tokens"] == 16
    assert load(model, "none") is None


def test_a_vocabulary_without_the_token_of_images_uses_one_that_no_text_has(
    gemma: TinyVision, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "g.gguf", "gemma3")
    writer.add_embedding_length(64)
    tokens = ["a", "b", "ab", "<unk>", "<start_of_image>", "<end_of_image>"]
    Vocabulary(tokens=tokens, types=[1, 1, 1, 2, 3, 3], settings={"add_unk_token_id": 3}).write(writer)
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    model = finish(writer, tmp_path / "g.gguf")
    vision = load(model, write_mmproj(tmp_path / "mmproj.gguf", gemma, WRITTEN["gemma3"]))
    assert (vision.card.image_token, vision.card.image_token_id) == ("<unk>", 3)


def test_the_file_of_another_model_is_refused(
    gemma: TinyVision, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", gemma, WRITTEN["gemma3"])
    wide = text_model(tmp_path / "wide.gguf", width=96)
    with pytest.raises(
        ModelLoadError, match=r"belongs to another model: .*\[32, 64\], and the hidden size .* 96"
    ):
        load(wide, mmproj)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert load(wide, "auto") is None
    assert "wide.gguf takes text only: mmproj.gguf belongs to another model" in caplog.text
    other = text_model(tmp_path / "other.gguf", tokens=["<image_soft_token>"])
    with pytest.raises(ModelLoadError, match="has no token <start_of_image>"):
        load(other, mmproj)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"clip_projector_type": "resampler"},
            r"of the type 'resampler'; known are gemma3, .*qwen2\.5vl_merger",
        ),
        ({"clip_has_audio_encoder": True, "clip_has_vision_encoder": False}, "is for audio only"),
        ({"clip_projector_type": "gemma3"}, r"has no tensor mm\.input_projection\.weight"),
        ({}, "has no clip.vision.projector_type"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    mmproj = vision_file(tmp_path / "mmproj.gguf", **settings)
    with pytest.raises(ModelLoadError, match=sentence):
        load(text_model(tmp_path / "g.gguf"), mmproj)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vision_block_count": 3}, r"has no tensor v\.blk\.2\."),
        (
            {"vision_patch_size": 4},
            r"v\.patch_embd\.weight of shape \[32, 3, 8, 8\] where its metadata asks for",
        ),
        ({"vision_block_count": 1 << 20}, r"has no tensor v\.blk\.1048575\."),
        ({"vision_head_count": 5}, "do not fit together"),
        ({"vision_patch_size": 64}, "do not fit together|asks for"),
        ({"vision_embedding_length": 0}, "embedding_length = 0"),
        ({"vision_image_std": [0.0, 0.5, 0.5]}, "image_std"),
    ],
)
def test_settings_that_contradict_the_tensors_are_refused(
    gemma: TinyVision, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", gemma, WRITTEN["gemma3"], **changes)
    with pytest.raises(ModelLoadError, match=sentence):
        load(text_model(tmp_path / "g.gguf"), mmproj)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen2.5-vl", "image_min_pixels"),
        ("qwen2.5-vl", "window_size"),
        ("internvl", "preproc_max_tiles"),
        ("llava", "image_grid_pinpoints"),
        ("llava", "feature_layer"),
        ("qwen3-vl", "is_deepstack_layers"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    text, mmproj = write_pair(tmp_path, make_vision(name, tmp_path / "folder"), name)
    opened = GGUFFile(mmproj)
    opened.metadata[f"clip.vision.{key}"] = [1 << 22] * 2 if key == "image_grid_pinpoints" else 1 << 22
    monkeypatch.setattr("penstock.models.mmproj_file.GGUFFile", lambda path: opened)
    with pytest.raises(ModelLoadError, match=f"{key}.*(is more than|not up to|not a list)"):
        load(text, mmproj)


def test_matrices_of_a_tower_may_be_quantized(gemma: TinyVision, tmp_path: Path) -> None:
    model, how = text_model(tmp_path / "g.gguf"), WRITTEN["gemma3"]
    kinds = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0)
    made = [load(model, write_mmproj(tmp_path / f"{kind}.gguf", gemma, how, kind)) for kind in kinds]
    pixels = made[0].largest(64)
    exact, half, eighth = (vision.encode(pixels, 0, 1)[0] for vision in made)
    scale = float(exact.std())
    assert 0 < float((half - exact).std()) < 0.01 * scale
    assert 0 < float((eighth - exact).std()) < 0.1 * scale


def test_a_damaged_file_is_refused(gemma: TinyVision, tmp_path: Path) -> None:
    whole = write_mmproj(tmp_path / "whole.gguf", gemma, WRITTEN["gemma3"]).read_bytes()
    model, mmproj = text_model(tmp_path / "g.gguf"), tmp_path / "mmproj.gguf"
    for size in (0, 3, 200, len(whole) // 2, len(whole) - 32):
        mmproj.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"mmproj\.gguf"):
            load(model, mmproj)
        assert load(model, "auto") is None


def test_a_text_model_and_a_missing_file_are_no_vision_parts(tmp_path: Path) -> None:
    model = text_model(tmp_path / "g.gguf")
    with pytest.raises(ModelLoadError, match="is no vision part of a model: its architecture is 'gemma3'"):
        load(model, model)
    with pytest.raises(ModelLoadError, match=r"mmproj\.gguf is the vision part of a model"):
        open_checkpoint(vision_file(tmp_path / "mmproj.gguf"))
    with pytest.raises(ModelLoadError, match=r"--mmproj names .*no\.gguf, and there is no such file"):
        load(model, tmp_path / "no.gguf")
    with pytest.raises(ModelLoadError, match="--mmproj is for GGUF models"):
        mmproj_path(tmp_path, str(model))


def test_a_model_in_a_folder_of_its_type_finds_the_file_above(tmp_path: Path) -> None:
    (tmp_path / "Q4_K_M").mkdir()
    model = text_model(tmp_path / "Q4_K_M" / "m-00001-of-00001.gguf")
    assert mmproj_path(model, "auto") is None
    vision_file(tmp_path / "mmproj-F16.gguf")
    assert mmproj_path(model, "auto") == tmp_path / "mmproj-F16.gguf"


def test_older_files_have_swapped_names_in_mlps(gemma: TinyVision, tmp_path: Path) -> None:
    """The names are told by the shapes."""
    how = WRITTEN["gemma3"]
    new, old = tmp_path / "new.gguf", tmp_path / "old.gguf"
    write_mmproj(new, gemma, how)
    swapped = {"mlp.fc1": "mlp.other", "mlp.fc2": "mlp.fc1", "mlp.other": "mlp.fc2"}
    write_mmproj(old, gemma, type(how)(how.projector, {**how.renamed, **swapped}, how.changed, how.settings))
    model = text_model(tmp_path / "g.gguf")
    made = [load(model, path) for path in (new, old)]
    pixels = made[0].largest(64)
    one, other = (vision.encode(pixels, 0, 1)[0] for vision in made)
    assert one.equal(other)
