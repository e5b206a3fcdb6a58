"""The vision parts of families that cut an image into tiles of one size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.models.vision import LlavaVision, Pixels, TransformersVision
from penstock.models.vision_processors import (
    Cohere2VisionProcessor,
    Lfm2VlProcessor,
    Llama4Processor,
    processor_settings,
)


class Idefics3Vision(TransformersVision):
    """Idefics 3 and SmolVLM: a SigLIP tower with a pixel shuffle."""

    rule = "idefics3"

    def numbers(self) -> dict[str, int]:
        tile = int(self._processor.max_image_size["longest_edge"])
        return {
            "tile_size": tile,
            "longest_edge": int(self._processor.size["longest_edge"]),
            "splits": int(bool(self._processor.do_image_splitting)),
            "tile_tokens": self.rows_per_tile,
            "tile_patches": (tile // int(self._vision.patch_size)) ** 2,
        }

    def pixels(self, made: Any) -> Pixels:
        values = made["pixel_values"][0]
        tiled = {"pixel_values": values}
        if "pixel_attention_mask" in made:
            tiled["pixel_attention_mask"] = made["pixel_attention_mask"][0]
        count = len(values)
        return Pixels(tiled, {}, count, count * getattr(self, "rows_per_tile", 0))

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        inputs = {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}
        rows = self._tower.get_image_features(**inputs).pooler_output[0]
        return list(rows.chunk(len(tensors["pixel_values"])))


class LlavaNextVision(LlavaVision):
    """LLaVA-NeXT: the image as a whole, and tiles of the image in one of several shapes. The rows of the tiles lie
    side by side as in the image, without those of the padding, and end with a row for the end of the line."""

    rule = "llava_next"

    def numbers(self) -> dict[str, int]:
        tile, patch = int(self._vision.image_size), int(self._vision.patch_size)
        return {"tile_size": tile, "tile_side_patches": tile // patch}

    def shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((int(height), int(width)) for height, width in self.config.image_grid_pinpoints)

    def pixels(self, made: Any) -> Pixels:
        from transformers.models.llava_next.modeling_llava_next import (
            get_anyres_image_grid_shape,
            unpad_image,
        )

        tile, patch = int(self._vision.image_size), int(self._vision.patch_size)
        size = made["image_sizes"][0].tolist()
        rows, columns = get_anyres_image_grid_shape(size, self.config.image_grid_pinpoints, tile)
        side = tile // patch
        _, height, width = unpad_image(torch.empty(1, rows * side, columns * side, device="meta"), size).shape
        tensors = {"pixel_values": made["pixel_values"], "image_sizes": made["image_sizes"]}
        return Pixels({}, tensors, 1, side * side + height * (width + 1))


class LlavaOnevisionVision(LlavaNextVision):
    """LLaVA-OneVision: as LLaVA-NeXT, with a SigLIP tower. The rows of many tiles are interpolated to fewer."""

    def numbers(self) -> dict[str, int]:
        return {**super().numbers(), "max_area_tiles": int(self._aspect_ratio.removeprefix("anyres_max_"))}

    @property
    def _aspect_ratio(self) -> str:
        return str(self.config.vision_aspect_ratio)

    def pixels(self, made: Any) -> Pixels:
        tensors = {name: made[name] for name in ("pixel_values", "image_sizes")}
        side = int(self._vision.image_size) // int(self._vision.patch_size)
        tiles = torch.empty(made["pixel_values"].shape[1], side * side, 1, device="meta")
        newline = torch.empty(1, device="meta")
        packed, _ = self._tower.pack_image_features(
            [tiles], tensors["image_sizes"], newline, vision_aspect_ratio=self._aspect_ratio
        )
        return Pixels({}, tensors, 1, len(packed[0]))


class InternVLVision(TransformersVision):
    """InternVL: a ViT with a pixel shuffle, over tiles in the shape of the image."""

    rule = "internvl"
    processor_options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": True}

    def numbers(self) -> dict[str, int]:
        processor = self._processor
        tile, patch = int(processor.size["height"]), self._vision.patch_size
        patch = int(patch[0] if isinstance(patch, list | tuple) else patch)
        return {
            "tile_size": tile,
            "splits": 1,
            "min_tiles": int(processor.min_patches),
            "max_tiles": int(processor.max_patches),
            "tile_tokens": self.rows_per_tile,
            "tile_patches": (tile // patch) ** 2,
        }

    def pixels(self, made: Any) -> Pixels:
        values = made["pixel_values"]
        return Pixels(
            {"pixel_values": values}, {}, len(values), len(values) * getattr(self, "rows_per_tile", 0)
        )

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return list(self._tower.get_image_features(**tensors).pooler_output)


class AyaVision(InternVLVision):
    """Aya Vision: InternVL's tiles, each named in the prompt, before a SigLIP tower."""

    rule = "aya_vision"

    def template_token(self, spellings: Mapping[int, str]) -> str:
        return "<image>"


class Cohere2Vision(InternVLVision):
    """Command A Vision: tiles of the least scaling, before a SigLIP tower."""

    rule = "cohere2_vision"
    processor_options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def load_processor(cls, path: Path) -> Cohere2VisionProcessor:
        return Cohere2VisionProcessor(processor_settings(path))

    def numbers(self) -> dict[str, int]:
        return {**super().numbers(), **self._processor.numbers}


class Lfm2VlVision(TransformersVision):
    """LFM2-VL: a SigLIP 2 tower with a pixel shuffle, over tiles and the image in its own shape."""

    rule = "lfm2_vl"

    @classmethod
    def load_processor(cls, path: Path) -> Lfm2VlProcessor:
        return Lfm2VlProcessor(processor_settings(path))

    def numbers(self) -> dict[str, int]:
        return dict(self._processor.numbers)

    def pixels(self, made: Any) -> Pixels:
        side = int(self.config.downsample_factor)
        rows = int((made["spatial_shapes"] // side).prod(dim=1).sum())
        return Pixels(made, {}, len(made["pixel_values"]), rows)

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return list(self._tower.get_image_features(**tensors).pooler_output)


class Llama4Vision(InternVLVision):
    """Llama 4: a ViT with a pixel shuffle, over the tiles of a canvas, and one matrix."""

    rule = "llama4"
    processor_options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def load_processor(cls, path: Path) -> Llama4Processor:
        return Llama4Processor(processor_settings(path))

    def numbers(self) -> dict[str, int]:
        patches = (int(self._vision.image_size) // int(self._vision.patch_size)) ** 2
        return {**self._processor.numbers, "tile_tokens": self.rows_per_tile, "tile_patches": patches}

    def template_token(self, spellings: Mapping[int, str]) -> str:
        return "<|image|>"

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        rows = self._tower.get_image_features(**tensors).last_hidden_state
        return list(self._tower.multi_modal_projector(rows))


class QianfanVision(InternVLVision):
    """Qianfan-OCR: InternVL's tiles before a ViT of its own."""

    def template_token(self, spellings: Mapping[int, str]) -> str:
        return "<image>"


class DeepseekOcr2Vision(TransformersVision):
    """DeepSeek-OCR 2: a SAM tower, and a decoder whose last rows are learned queries, over tiles and the image."""

    rule = "deepseek_ocr2"

    def numbers(self) -> dict[str, int]:
        processor, patch = self._processor, int(self._vision.sam_config.patch_size)
        tile, side = int(processor.tile_size), int(processor.size["height"])
        return {
            "tile_size": tile,
            "splits": int(bool(processor.crop_to_patches)),
            "min_tiles": int(processor.min_patches),
            "max_tiles": int(processor.max_patches),
            "tile_tokens": self._rows_of_tile,
            "image_tokens": self._rows_of_image,
            "patches_of_tile": (tile // patch) ** 2,
            "patches_of_image": (side // patch) ** 2,
        }

    @property
    def _rows_of_tile(self) -> int:
        return int(self._tower.vision_tower.query_768_resolution.num_embeddings)

    @property
    def _rows_of_image(self) -> int:
        return int(self._tower.vision_tower.query_1024_resolution.num_embeddings)

    def pixels(self, made: Any) -> Pixels:
        tensors = {"pixel_values": made["pixel_values"]}
        count = int(made["num_local_patches"][0])
        if count:
            tensors["pixel_values_local"] = made["pixel_values_local"]
        tensors["num_local_patches"] = torch.tensor([count])
        return Pixels({}, tensors, 1, count * self._rows_of_tile + self._rows_of_image + 1)

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return list(self._tower.get_image_features(**tensors).pooler_output)
