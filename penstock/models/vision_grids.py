"""The vision parts of families whose towers take an image in its own shape, as a grid of patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.models.config import Fields
from penstock.models.vision import Pixels, TransformersVision
from penstock.models.vision_processors import KimiProcessor, processor_settings


class PixtralVision(TransformersVision):
    """Pixtral and Mistral 3: a tower for images of any shape, a token at the end of each row of patches."""

    rule = "pixtral"

    @property
    def _merge(self) -> int:
        return int(getattr(self.config, "spatial_merge_size", 1) or 1)

    def numbers(self) -> dict[str, int]:
        return {
            "patch_size": int(self._vision.patch_size),
            "merge_size": self._merge,
            "longest_edge": int(self._processor.size["longest_edge"]),
        }

    @property
    def _patch(self) -> int:
        return int(self._vision.patch_size) * self._merge

    def options(self) -> Mapping[str, Any]:
        return {"patch_size": {"height": self._patch, "width": self._patch}}

    def pixels(self, made: Any) -> Pixels:
        sizes = torch.as_tensor(made["image_sizes"])
        rows = int((sizes[0] // self._patch).prod())
        return Pixels({"pixel_values": made["pixel_values"], "image_sizes": sizes}, {}, 1, rows)

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        # Transformers' code for Mistral 3 fails on one row in all, so an image of one row is encoded twice.
        if tensors["pixel_values"].shape[-2:] == (self._patch, self._patch):
            tensors = {name: torch.cat([tensor, tensor]) for name, tensor in tensors.items()}
            return [self._tower.get_image_features(**tensors).pooler_output[0]]
        return list(self._tower.get_image_features(**tensors).pooler_output)


class Gemma4Vision(TransformersVision):
    """Gemma 4: a tower for images of any shape, which are scaled to nearly as many patches as the tower takes."""

    rule = "gemma4"

    @classmethod
    def refusal(cls, fields: Fields) -> str | None:
        return None if isinstance(fields.raw("vision_config"), dict) else "it has no vision tower"

    def numbers(self) -> dict[str, int]:
        pool = int(self._processor.pooling_kernel_size)
        return {
            "square": int(self._processor.patch_size) * pool,
            "square_patches": pool**2,
            "max_tokens": int(self._processor.max_soft_tokens),
        }

    def image_sees_itself(self) -> bool:
        # In layers with a window; see `ArchitectureConfig.sees_images_in_windows`.
        return bool(self.config.get_text_config().use_bidirectional_attention == "vision")

    def around(self, spellings: Mapping[int, str]) -> tuple[str, str]:
        return spellings[int(self.config.boi_token_id)], spellings[int(self.config.eoi_token_id)]

    def pixels(self, made: Any) -> Pixels:
        tensors = {name: made[name] for name in ("pixel_values", "image_position_ids")}
        return Pixels({}, tensors, 1, int(made["num_soft_tokens_per_image"][0]))

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return list(self._tower.get_image_features(**tensors).pooler_output)


class Gemma4UnifiedVision(Gemma4Vision):
    """Gemma 4 12B: squares of pixels, which a matrix turns into rows; there are no layers."""

    @classmethod
    def load_processor(cls, path: Path) -> Any:
        """Load Gemma 4's processor with squares of patches as its patches, which are what this model takes."""
        from transformers import Gemma4ImageProcessorPil

        known = ("max_soft_tokens", "resample", "do_rescale", "rescale_factor")
        settings = {name: value for name, value in processor_settings(path).items() if value is not None}
        square = int(settings.get("patch_size", 16)) * int(settings.get("pooling_kernel_size", 3))
        settings = {name: settings[name] for name in known if name in settings}
        return Gemma4ImageProcessorPil(**settings, patch_size=square, pooling_kernel_size=1)


class QwenVision(TransformersVision):
    """Qwen 2, 2.5 and 3 VL, and Qwen 3.5: a tower for images of any shape, and positions in three dimensions. Rows of
    Qwen 3 VL have further columns, which are added to the hidden states after the first layers."""

    rule = "qwen_vl"

    def numbers(self) -> dict[str, int]:
        processor = self._processor
        return {
            "patch_size": int(processor.patch_size),
            "merge_size": int(processor.merge_size),
            "min_pixels": int(processor.size["shortest_edge"]),
            "max_pixels": int(processor.size["longest_edge"]),
        }

    def pixels(self, made: Any) -> Pixels:
        grid = torch.as_tensor(made["image_grid_thw"])
        rows = int(grid[0].prod()) // int(self._processor.merge_size) ** 2
        return Pixels({}, {"pixel_values": made["pixel_values"], "image_grid_thw": grid}, 1, rows)

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        made = self._tower.get_image_features(**tensors)
        deep = [features[0] for features in getattr(made, "deepstack_features", None) or ()]
        return [torch.cat([made.pooler_output[0], *deep], dim=1)]


class GlmVision(QwenVision):
    """GLM 4.1V to 4.6V and GLM-OCR: as Qwen 2 VL, but the limits count the pixels of a frame that is doubled."""

    rule = "glm_v"

    def numbers(self) -> dict[str, int]:
        numbers = super().numbers()
        frames = int(self._processor.temporal_patch_size)
        limits = {name: numbers[name] // frames for name in ("min_pixels", "max_pixels")}
        return numbers | limits


class PaddleOCRVision(QwenVision):
    """PaddleOCR-VL: a SigLIP tower for images of any shape, and positions in three dimensions."""

    rule = "paddleocr_vl"


class LightOnOcrVision(PixtralVision):
    """LightOnOCR: as Mistral 3, with no tokens between rows."""

    rule = "lighton_ocr"


class KimiVision(QwenVision):
    """Kimi K2.5 and K2.6: a tower for images of any shape."""

    rule = "kimi_k25"

    @classmethod
    def load_processor(cls, path: Path) -> KimiProcessor:
        return KimiProcessor(processor_settings(path))

    def numbers(self) -> dict[str, int]:
        return dict(self._processor.numbers)

    def pixels(self, made: Any) -> Pixels:
        rows = int(made["image_grid_thw"].prod()) // self._processor.numbers["merge_size"] ** 2
        return Pixels({}, made, 1, rows)


class VideoLlama3Vision(QwenVision):
    """VideoLLaMA 3: a tower for images of any shape."""

    def pixels(self, made: Any) -> Pixels:
        pixels = super().pixels(made)
        return dataclasses.replace(
            pixels, other={**pixels.other, "image_merge_sizes": made["image_merge_sizes"]}
        )


class MiniCPMVision(TransformersVision):
    """MiniCPM-V 4.6: a SigLIP tower, whose rows are merged twice, over the image and its slices."""

    rule = "minicpm_v"
    has_axes = False

    def numbers(self) -> dict[str, int]:
        processor = self._processor
        return {
            "tile_size": int(processor.scale_resolution),
            "max_tiles": int(processor.max_slice_nums),
            "patch_size": int(processor.patch_size),
            "merge_size": self._merge,
            "splits": int(bool(processor.slice_mode)),
            "counts_images": int(bool(processor.use_image_id)),
        }

    @property
    def _merge(self) -> int:
        return 2 if self._processor.downsample_mode == "4x" else 4

    def pixels(self, made: Any) -> Pixels:
        sizes = torch.as_tensor(made["target_sizes"])
        rows = int((sizes // self._merge).prod(dim=1).sum())
        return Pixels({}, {"pixel_values": made["pixel_values"], "target_sizes": sizes}, 1, rows)

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        made = self._tower.get_image_features(**tensors, downsample_mode=self._processor.downsample_mode)
        return [torch.cat(list(made.pooler_output))]
