"""Settings of image processors in the forms that makers publish: what a processor makes of an image has the rows that
the gateway's rule for the family says. No tower runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig

from penstock.core.errors import ModelLoadError
from penstock.core.image_layout import VisionCard, image_layout
from penstock.kernels.reference import TorchOps
from penstock.models.config import Fields
from penstock.models.vision import GotOcrVision, TransformersVision
from penstock.models.vision_grids import GlmVision, KimiVision, MiniCPMVision, PixtralVision, QwenVision
from penstock.models.vision_load import FAMILIES, load_vision
from penstock.models.vision_tiles import (
    Cohere2Vision,
    Idefics3Vision,
    InternVLVision,
    Lfm2VlVision,
    Llama4Vision,
)

SHAPES = ((640, 480), (31, 200), (1, 1), (700, 57))
COLORS: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS: dict[str, Any] = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
# As releases of transformers with fast processors write what a processor does not use.
NULLS = dict.fromkeys(
    ("crop_size", "data_format", "device", "do_center_crop", "input_data_format", "pad_size")
)
GRID = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **COLORS}
PIXTRAL = {
    **STEPS,
    **COLORS,
    "image_processor_type": "PixtralImageProcessorFast",
    "size": {"longest_edge": 560},
}
TILED = {
    **NULLS,
    **STEPS,
    **COLORS,
    "min_patches": 1,
    "max_patches": 6,
    "size": {"height": 112, "width": 112},
}
LFM2 = {**STEPS, **COLORS, "image_processor_type": "Lfm2VlImageProcessorFast", "tile_size": 128, "max_tiles": 4,
        "max_image_tokens": 16, "min_image_tokens": 4, "encoder_patch_size": 16, "downsample_factor": 2}  # fmt: skip
MISTRAL_CONFIG = {"vision_config": {"model_type": "pixtral", "patch_size": 14}, "spatial_merge_size": 2}

# Family, type of the model, settings of the model, file of the processor, its settings.
FOLDERS: dict[str, tuple[type[TransformersVision], str, dict[str, Any], str, dict[str, Any]]] = {
    "qwen2.5-vl": (QwenVision, "qwen2_5_vl", {}, "preprocessor_config.json",
                   {**GRID, "min_pixels": 3136, "max_pixels": 200_704,
                    "image_processor_type": "Qwen2VLImageProcessor"}),
    "qwen2-vl-sizes-twice": (QwenVision, "qwen2_vl", {}, "preprocessor_config.json",
                             {**GRID, "min_pixels": 3136, "max_pixels": 200_704, "size": {"min_pixels": 3136,
                              "max_pixels": 200_704}, "image_processor_type": "Qwen2VLImageProcessor"}),
    "qwen3-vl": (QwenVision, "qwen3_vl", {}, "preprocessor_config.json",
                 {**GRID, "patch_size": 16, "size": {"longest_edge": 262_144, "shortest_edge": 65_536},
                  "image_processor_type": "Qwen2VLImageProcessorFast"}),
    "glm4.6v": (GlmVision, "glm46v", {}, "preprocessor_config.json",
                {**GRID, "size": {"longest_edge": 602_112, "shortest_edge": 12_544},
                 "image_processor_type": "Glm46VImageProcessor"}),
    "mistral-3.1": (PixtralVision, "mistral3", MISTRAL_CONFIG, "preprocessor_config.json",
                    {**PIXTRAL, "patch_size": {"height": 14, "width": 14}}),
    "ministral-3": (PixtralVision, "mistral3", MISTRAL_CONFIG, "processor_config.json",
                    {"image_processor": {**NULLS, **PIXTRAL, "patch_size": 14},
                     "processor_class": "PixtralProcessor", "spatial_merge_size": 2, "patch_size": 14}),
    "smolvlm": (Idefics3Vision, "smolvlm", {}, "preprocessor_config.json",
                {**STEPS, **COLORS, "do_image_splitting": True, "do_pad": True,
                 "max_image_size": {"longest_edge": 128}, "size": {"longest_edge": 512},
                 "image_processor_type": "SmolVLMImageProcessor",
                 "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}}),
    "internvl3": (InternVLVision, "internvl", {}, "preprocessor_config.json",
                  {**TILED, "crop_to_patches": False, "image_processor_type": "GotOcr2ImageProcessorFast"}),
    "command-a-vision": (Cohere2Vision, "cohere2_vision", {}, "preprocessor_config.json",
                         {**TILED, "crop_to_patches": True,
                          "image_processor_type": "Cohere2VisionImageProcessorFast"}),
    "lfm2-vl": (Lfm2VlVision, "lfm2_vl", {}, "processor_config.json",
                {"image_processor": LFM2, "processor_class": "Lfm2VlProcessor"}),
    "llama4": (Llama4Vision, "llama4", {"vision_config": {"image_size": 112}}, "preprocessor_config.json",
               {**NULLS, **STEPS, **COLORS, "max_patches": 16, "resize_to_max_canvas": False, "resample": 2,
                "size": {"height": 112, "width": 112}, "image_processor_type": "Llama4ImageProcessorFast"}),
    "kimi-k2.5": (KimiVision, "kimi_k25", {}, "preprocessor_config.json",
                  {"media_proc_cfg": {**COLORS, "in_patch_limit": 400, "patch_size": 14, "merge_kernel_size": 2,
                                      "fixed_output_tokens": None, "patch_limit_on_one_side": 40}}),
    "kimi-k2.6-by-transformers": (KimiVision, "kimi_k25", {}, "preprocessor_config.json",
                                  {**COLORS, "max_patches": 400, "patch_size": 14, "merge_size": 2,
                                   "image_processor_type": "Kimi_K25ImageProcessor",
                                   "size": {"max_height": 40, "max_width": 40}}),
    "minicpm-v-4.6": (MiniCPMVision, "minicpmv4_6", {}, "preprocessor_config.json",
                      {**COLORS, "max_slice_nums": 9, "scale_resolution": 112, "patch_size": 14,
                       "image_processor_type": "MiniCPMV4_6ImageProcessor"}),
    "got-ocr2": (GotOcrVision, "got_ocr2", {}, "preprocessor_config.json",
                 {**STEPS, **COLORS, "size": {"height": 112, "width": 112},
                  "image_processor_type": "GotOcr2ImageProcessor"}),
}  # fmt: skip


def without_tower(family: type[TransformersVision], config: Any, folder: Path) -> TransformersVision:
    vision = object.__new__(family)
    vision.config, vision._processor = config, family.load_processor(folder)
    vision.rows_per_tile = 5
    return vision


@pytest.mark.parametrize("name", FOLDERS)
def test_published_settings_of_processors(name: str, tmp_path: Path) -> None:
    family, model_type, settings, file, processor = FOLDERS[name]
    config = AutoConfig.for_model(model_type, **settings)
    config.save_pretrained(tmp_path)
    (tmp_path / file).write_text(json.dumps(processor))
    vision = without_tower(family, config, tmp_path)
    card = VisionCard(
        family=family.rule,
        template_token="<image>",
        image_token="<image>",
        image_token_id=1,
        numbers=vision.numbers(),
    )
    for shape in SHAPES:
        made = vision._pixels(Image.new("RGB", shape, (9, 99, 200)))
        assert made.num_rows == sum(image_layout(card, *shape).runs), shape


@pytest.mark.parametrize(
    "written",
    [
        "{]",
        "[1]",
        json.dumps({"image_processor_type": "Unknown"}),
        json.dumps({"image_processor_type": "Idefics3ImageProcessor", "size": "large"}),
    ],
)
def test_settings_of_a_processor_that_cannot_be_used(written: str, tmp_path: Path) -> None:
    AutoConfig.for_model("idefics3").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(written)
    fields = Fields({"architectures": ["Idefics3ForConditionalGeneration"]}, "config.json")
    assert fields.raw("architectures")[0] in FAMILIES
    with pytest.raises(
        ModelLoadError, match=r"preprocessor_config.json has no settings of an image processor"
    ):
        load_vision(tmp_path, fields, b"{}", TorchOps())
