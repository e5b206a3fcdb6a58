"""Vision towers of quantized and damaged folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.reference import TorchOps
from penstock.models.load import load_vision_part, open_checkpoint
from tests.models.quantized_checkpoints import LAYOUTS, quantize_folder
from tests.models.tiny_vision import picture, png
from tests.models.vision_checkpoints import make_vision

QUANTIZED = ("AWQ of groups of 16", "GPTQ 8 bits", "compressed int4", "compressed float8", "ModelOpt float8",
             "compressed NVFP4", "bitsandbytes nf4, nested", "HQQ")  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision("idefics3", tmp_path_factory.mktemp("vision") / "model").folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "model")


def features(folder: Path) -> Tensor:
    vision = load_vision_part(folder, TorchOps())
    assert vision is not None
    pixels = vision.prepare(png(picture(90, 60)))
    return torch.cat(vision.encode(pixels, 0, pixels.num_tiles))


@pytest.mark.parametrize("layout", QUANTIZED)
def test_quantized_folders_need_no_package_of_their_method(original: Path, folder: Path, layout: str) -> None:
    """The projections of the tower are quantized, too."""
    dense = quantize_folder(folder, LAYOUTS[layout])
    made = features(folder)
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    expected = features(folder)
    torch.testing.assert_close(made, expected, atol=2e-3, rtol=2e-3)
    assert not torch.allclose(made, features(original), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("name", "part"), [("kimi-k2.5", "text_config"), ("qwen2.5-omni", "thinker_config")])
def test_settings_of_quantization_within_a_part(name: str, part: str, tmp_path: Path) -> None:
    """As published: experts are quantized, and the tower is not, whose names are not those of transformers."""
    folder = make_vision(name, tmp_path / "model").folder
    plain = features(folder)
    config = json.loads((folder / "config.json").read_text())
    settings = LAYOUTS["compressed int4"].settings
    if part == "text_config":
        config[part]["quantization_config"] = settings
    else:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(features(folder), plain)


def test_a_tower_that_lacks_a_tensor_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "vision" in name and "fc1.weight" in name)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(ModelLoadError, match=r"has no tensor .*fc1.weight of its vision tower"):
        load_vision_part(folder, TorchOps())
    save_file({**tensors, name: torch.ones(3, 5)}, file)
    with pytest.raises(ModelLoadError, match=r"The vision tower of .* cannot be loaded"):
        load_vision_part(folder, TorchOps())
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"The vision tower of .* cannot be loaded"):
        load_vision_part(folder, TorchOps())


@pytest.mark.parametrize("name", ["idefics3", "qwen2.5-omni"])
def test_a_folder_that_names_no_class_has_the_class_of_its_type(
    name: str, original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    if name == "idefics3":
        shutil.copytree(original, folder)
    else:
        make_vision(name, folder)
    plain, kept = features(folder), open_checkpoint(folder).config
    config = json.loads((folder / "config.json").read_text())
    config.pop("architectures")
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(features(folder), plain)
    assert open_checkpoint(folder).config == kept


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("vision_config", "hidden_size", [1]), ("text_config", "use_cache", ""), (None, "text_config", 7),
     (None, "model_type", ["idefics3"]), ("text_config", "model_type", {})],
)  # fmt: skip
def test_settings_of_unexpected_types_are_refused(
    part: str | None, key: str, value: object, folder: Path
) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    (config if part is None else config[part])[key] = value
    file.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"Transformers cannot read .*config\.json: "):
        load_vision_part(folder, TorchOps())


@pytest.mark.parametrize("size", [{"longest_edge": float("inf")}, {"longest_edge": -64}, []])
def test_sizes_of_images_that_do_not_fit_the_tower_are_refused(size: object, folder: Path) -> None:
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "max_image_size": size}))
    with pytest.raises(ModelLoadError, match="no settings of an image processor"):
        load_vision_part(folder, TorchOps())
