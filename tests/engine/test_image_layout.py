"""The gateway's rules for image tokens agree with transformers' image processors, at sizes as published."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from PIL import Image
from transformers import (
    Glm4vImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
)

from penstock.core.errors import InvalidRequest
from penstock.core.image_layout import VisionCard, image_layout
from tests.models.vision_tiles import onevision_counter

SIZES = [(1, 1), (64, 64), (100, 37), (333, 500), (640, 480), (481, 700), (900, 60)]


def card(family: str, **numbers: int) -> VisionCard:
    return VisionCard(
        family=family, template_token="<i>", image_token="<i>", image_token_id=1, numbers=numbers
    )


def process(processor: Any, size: tuple[int, int], **options: Any) -> Any:
    return processor(images=[Image.new("RGB", size, (90, 20, 10))], return_tensors="pt", **options)


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
