"""The gateway's rules for image tokens agree with transformers' image processors, at sizes as published."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from transformers import (
    Gemma4ImageProcessorPil,
    Glm4vImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    MiniCPMV4_6ImageProcessorPil,
    PaddleOCRVLImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
    Siglip2ImageProcessorPil,
)

from penstock.core.errors import InvalidRequest
from penstock.core.image_layout import VisionCard, image_layout
from penstock.models.vision_processors import Cohere2VisionProcessor, Lfm2VlProcessor, Llama4Processor
from tests.models.tiny_vision import picture
from tests.models.vision_tiles import onevision_counter

SIZES = [(1, 1), (64, 64), (100, 37), (333, 500), (640, 480), (481, 700), (900, 60)]


def card(family: str, **numbers: int) -> VisionCard:
    return VisionCard(
        family=family, template_token="<i>", image_token="<i>", image_token_id=1, numbers=numbers
    )


def process(processor: Any, size: tuple[int, int], **options: Any) -> Any:
    return process_picture(processor, Image.new("RGB", size, (90, 20, 10)), **options)


def process_picture(processor: Any, image: Image.Image, **options: Any) -> Any:
    return processor(images=[image], return_tensors="pt", **options)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_of_idefics3(size: tuple[int, int]) -> None:
    tile, longest = 64, 4 * 64  # a sixth of the published sizes, in the same relation
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": tile}
    )
    made = process(processor, size, return_row_col_info=True)
    numbers = {"tile_size": tile, "longest_edge": longest, "splits": 1, "tile_tokens": 9, "tile_patches": 16}
    layout = image_layout(card("idefics3", **numbers), *size)
    assert layout.num_tiles == made["pixel_values"].shape[1]
    rows, columns = made["rows"][0][0], made["cols"][0][0]
    assert layout.text.count("\n") == (rows + 1 if rows else 0)
    assert layout.runs == (9,) * (rows * columns + 1)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_grids_of_qwen(size: tuple[int, int]) -> None:
    bounds = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 200}
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": bounds["min_pixels"], "longest_edge": bounds["max_pixels"]}
    )
    _, height, width = process(processor, size)["image_grid_thw"][0].tolist()
    layout = image_layout(card("qwen_vl", patch_size=14, merge_size=2, **bounds), *size)
    assert (layout.grid, layout.tile_patches) == ((height // 2, width // 2), height * width)
    with pytest.raises(InvalidRequest, match="too narrow"):
        image_layout(card("qwen_vl", patch_size=14, merge_size=2, **bounds), 201, 1)


@pytest.mark.parametrize("size", [*SIZES, (27, 4000), (2000, 1500)], ids=str)
def test_grids_of_glm(size: tuple[int, int]) -> None:
    processor = Glm4vImageProcessorPil(size={"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 400})
    _, height, width = process(processor, size)["image_grid_thw"][0].tolist()
    numbers = {"min_pixels": 56 * 112, "max_pixels": 28 * 28 * 200, "patch_size": 14, "merge_size": 2}
    layout = image_layout(card("glm_v", **numbers), *size)
    assert (layout.grid, layout.tile_patches) == ((height // 2, width // 2), height * width)
    with pytest.raises(InvalidRequest, match="too narrow"):
        image_layout(card("glm_v", **numbers), 201, 1)


@pytest.mark.parametrize("size", [*SIZES, (27, 4000), (2000, 15), (20, 10)], ids=str)
def test_grids_of_paddleocr(size: tuple[int, int]) -> None:
    bounds = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 200}
    processor = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": bounds["min_pixels"], "longest_edge": bounds["max_pixels"]}
    )
    _, height, width = process(processor, size)["image_grid_thw"][0].tolist()
    layout = image_layout(card("paddleocr_vl", patch_size=14, merge_size=2, **bounds), *size)
    assert (layout.grid, layout.tile_patches) == ((height // 2, width // 2), height * width)


@pytest.mark.parametrize("size", [*SIZES, (1, 4000), (4000, 3)], ids=str)
def test_grids_of_gemma4(size: tuple[int, int]) -> None:
    made = process(Gemma4ImageProcessorPil(max_soft_tokens=70), size)
    numbers = {"square": 48, "square_patches": 9, "max_tokens": 70}
    layout = image_layout(card("gemma4", **numbers), *size)
    assert layout.runs == (int(made["num_soft_tokens_per_image"][0]),)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_of_pixtral(size: tuple[int, int]) -> None:
    processor = PixtralImageProcessorPil(size={"longest_edge": 256})
    made = process(processor, size, patch_size={"height": 32, "width": 32})
    height, width = (int(side) for side in made["image_sizes"][0])
    layout = image_layout(card("pixtral", patch_size=16, merge_size=2, longest_edge=256), *size)
    assert layout.runs == (width // 32,) * (height // 32)
    for narrow in ((1, 300), (300, 1)):
        with pytest.raises(ValueError, match=r"\b0\b|greater than"):
            process(processor, narrow, patch_size={"height": 32, "width": 32})
        with pytest.raises(InvalidRequest, match="too narrow"):
            image_layout(card("pixtral", patch_size=16, merge_size=2, longest_edge=256), *narrow)


@pytest.mark.parametrize("size", [*SIZES, (1, 4000), (4000, 1), (335, 337), (5, 5)], ids=str)
def test_lines_of_llava_next(size: tuple[int, int]) -> None:
    width, height = size
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    )
    counter = object.__new__(LlavaNextProcessor)  # without a tokenizer
    counter.image_processor, counter.patch_size, counter.num_additional_image_tokens = processor, 14, 1
    shapes = tuple((tall, wide) for tall, wide in processor.image_grid_pinpoints)
    numbers = {"tile_size": 336, "tile_side_patches": 24}
    layout = image_layout(
        msgspec.structs.replace(card("llava_next", **numbers), shapes=shapes), width, height
    )
    assert layout.runs == (counter._get_number_of_features(height, width, 336, 336) - 1,)
    made = processor(images=[Image.new("RGB", size)], return_tensors="pt")
    assert layout.tile_patches == 24 * 24 * made["pixel_values"].shape[1]


@pytest.mark.parametrize("size", [*SIZES, (1, 4000), (2000, 1900), (1200, 1100)], ids=str)
def test_lines_of_llava_onevision(size: tuple[int, int]) -> None:
    width, height = size
    processor = LlavaOnevisionImageProcessorPil()
    counter = onevision_counter(processor, num_image_tokens=27 * 27, vision_aspect_ratio="anyres_max_9")
    shapes = tuple((tall, wide) for tall, wide in processor.image_grid_pinpoints)
    numbers = {"tile_size": 384, "tile_side_patches": 27, "max_area_tiles": 9}
    layout = image_layout(
        msgspec.structs.replace(card("llava_next", **numbers), shapes=shapes), width, height
    )
    assert layout.runs == (counter._get_number_of_features(height, width, 384, 384),)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_of_internvl(size: tuple[int, int]) -> None:
    processor = GotOcr2ImageProcessorPil(
        size={"height": 64, "width": 64}, crop_to_patches=True, min_patches=1, max_patches=12
    )
    made = process(processor, size, crop_to_patches=True)
    numbers = {"tile_size": 64, "splits": 1, "min_tiles": 1, "max_tiles": 12, "tile_tokens": 4}
    layout = image_layout(card("internvl", tile_patches=16, **numbers), *size)
    assert layout.num_tiles == len(made["pixel_values"])
    named = image_layout(card("aya_vision", tile_patches=16, **numbers), *size)
    assert (named.num_tiles, named.runs) == (layout.num_tiles, (4,) * layout.num_tiles)


# The runs of LFM2-VL and the tiles of Command A Vision as the processors of transformers 5.23 make them, which need
# torchvision.
RECORDED = [
    ((1, 1), (64,), 1),
    ((100, 37), (70,), 1),
    ((640, 480), (234,), 3),
    ((900, 60), (93,), 3),
    ((1250, 1000), (256,) * 9 + (238,), 7),
    ((2000, 1500), (256,) * 6 + (234,), 13),
    ((551, 2332), (256,) * 4 + (224,), 11),
    ((40, 5000), (156,), 11),
]


@pytest.mark.parametrize(("size", "runs", "num_tiles"), RECORDED, ids=str)
def test_tiles_of_processors_of_our_own(size: tuple[int, int], runs: tuple[int, ...], num_tiles: int) -> None:
    lfm2, cohere = Lfm2VlProcessor({}), Cohere2VisionProcessor({})
    assert image_layout(card("lfm2_vl", **lfm2.numbers), *size).runs == runs
    numbers = cohere.numbers | {"tile_tokens": 256, "tile_patches": 1024}
    layout = image_layout(card("cohere2_vision", **numbers), *size)
    assert (layout.num_tiles, layout.runs) == (num_tiles, (256,) * num_tiles)


def test_tensors_of_processors_of_our_own() -> None:
    """Transformers' processors for other models make the same tensors of images that all cut alike."""
    size, image = {"height": 32, "width": 32}, picture(64, 32)
    tiles = process_picture(GotOcr2ImageProcessorPil(size=size, crop_to_patches=True), image)
    made = Cohere2VisionProcessor({"size": size})([image])
    assert (made["num_patches"], tiles["num_patches"].tolist()) == ([3], [3])
    assert torch.allclose(made["pixel_values"], tiles["pixel_values"], atol=1e-5)
    settings = {"min_image_tokens": 1, "max_image_tokens": 4, "tile_size": 64}
    rows = Lfm2VlProcessor(settings)([image])
    assert rows["spatial_shapes"].tolist() == [[2, 4]]
    exact = process_picture(
        Siglip2ImageProcessorPil(patch_size=16, max_num_patches=16, do_resize=False), image
    )
    assert torch.allclose(rows["pixel_values"], exact["pixel_values"], atol=1e-5)
    assert rows["pixel_attention_mask"].tolist() == exact["pixel_attention_mask"].tolist()


def test_an_lfm2_image_is_not_split_where_the_settings_say_so() -> None:
    whole = Lfm2VlProcessor({"do_image_splitting": False})
    assert len(image_layout(card("lfm2_vl", **whole.numbers), 2000, 1500).runs) == 1
    tiles = Lfm2VlProcessor({"use_thumbnail": False})
    layout = image_layout(card("lfm2_vl", **tiles.numbers), 2000, 1500)
    assert layout.runs == (256,) * 6
    assert "thumbnail" not in layout.text
    assert len(tiles([picture(2000, 1500)])["pixel_values"]) == 6


@pytest.mark.parametrize("size", [*SIZES, (27, 4000), (2000, 1500)], ids=str)
@pytest.mark.parametrize("mode", ["4x", "16x"])
def test_slices_of_minicpm(size: tuple[int, int], mode: str) -> None:
    processor = MiniCPMV4_6ImageProcessorPil(scale_resolution=112, patch_size=14, downsample_mode=mode)
    made = process(processor, size)
    merge = 2 if mode == "4x" else 4
    numbers = {"tile_size": 112, "max_tiles": 9, "patch_size": 14, "merge_size": merge, "splits": 1}
    layout = image_layout(card("minicpm_v", **numbers, counts_images=0), *size)
    assert layout.runs == tuple((made["target_sizes"] // merge).prod(dim=1).tolist())
    rows, columns = made["grids"][0]
    assert (layout.text.count("<slice>"), layout.text.count("\n")) == (rows * columns, max(0, rows - 1))


def test_tiles_of_llama4() -> None:
    """Of transformers' examples, and an image smaller than a tile, which grows to the size of a tile only."""
    numbers = {"tile_size": 224, "max_tiles": 4, "splits": 1, "tile_tokens": 9, "tile_patches": 36}
    layout = image_layout(card("llama4", **numbers), 300, 200)
    image = "<i><|tile_x_separator|><i><|tile_y_separator|>"
    assert layout.text == f"<|image_start|>{image}<|image|><i><|image_end|>"
    assert image_layout(card("llama4", **numbers), 100, 90).text == "<|image_start|><|image|><i><|image_end|>"
    processor = Llama4Processor({"size": {"height": 224, "width": 224}, "max_patches": 4})
    assert processor._inner((300, 200), (448, 224)) == (300, 200)
    assert processor._inner((100, 90), (224, 224)) == (224, 201)
    processor.numbers["enlarges"] = 1
    assert processor._inner((800, 600), (448, 448)) == (448, 336)
    assert image_layout(card("llama4", **numbers, enlarges=1), 100, 90).num_tiles == 5
    tiles = processor([Image.new("RGB", (800, 600), (255, 0, 127))])["pixel_values"]
    assert tiles.shape == (5, 3, 224, 224)
    assert tiles[2, 0, 111, 0] == 1
    assert tiles[2, 0, 112, 0] == -1
