"""Image processors of families whose processors in transformers need torchvision, which Penstock does not install.

They are called as those of transformers, and make the same tensors. Pillow scales the images: a pixel may differ from
torchvision's by two of 255 levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.image_layout import fitting_grid, lfm2_shape

_BILINEAR, _BICUBIC = 2, 3  # as Pillow numbers its filters
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


def processor_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the image processor in a folder, as transformers finds them."""
    from transformers import BaseImageProcessor

    settings: dict[str, Any] = BaseImageProcessor.get_image_processor_dict(path)[0]
    return settings


class _Scaler:
    """Scales an image, and turns it into numbers around zero."""

    def __init__(self, settings: Mapping[str, Any], **defaults: Any) -> None:
        found = defaults | {name: value for name, value in settings.items() if value is not None}
        self._resample = int(found["resample"])
        self._factor = float(found.get("rescale_factor", 1 / 255))
        self._mean, self._deviation = (
            torch.tensor(found[name]).view(3, 1, 1) for name in ("image_mean", "image_std")
        )

    def __call__(self, image: Any, width: int, height: int) -> Tensor:
        """Return [3, height, width]."""
        from PIL import Image

        scaled = image.resize((width, height), Image.Resampling(self._resample))
        levels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1)
        return (levels * self._factor - self._mean) / self._deviation

    def tiles(self, image: Any, columns: int, rows: int, tile: int) -> list[Tensor]:
        """Return the tiles of an image that fills all of them, row by row."""
        whole = self(image, columns * tile, rows * tile)
        return [part for line in whole.split(tile, dim=1) for part in line.split(tile, dim=2)]


class Cohere2VisionProcessor:
    """Cuts an image into tiles, and adds the whole image as the last one."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.size = settings.get("size") or {"height": 512, "width": 512}
        self.min_patches = 1
        self.max_patches = int(settings.get("max_patches", 12))
        self._splits = bool(settings.get("crop_to_patches", True))
        self._scale = _Scaler(settings, resample=_BICUBIC, image_mean=_CLIP_MEAN, image_std=_CLIP_DEVIATION)

    def __call__(self, images: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
        made = [self._tiles(image) for image in images]
        return {
            "pixel_values": torch.stack([tile for tiles in made for tile in tiles]),
            "num_patches": [len(tiles) for tiles in made],
        }

    @property
    def numbers(self) -> dict[str, int]:
        tile = int(self.size["height"])
        return {"tile_size": tile, "splits": int(self._splits), "max_tiles": self.max_patches}

    def _tiles(self, image: Any) -> list[Tensor]:
        tile = int(self.size["height"])
        columns, rows = fitting_grid(self.numbers, *image.size)
        tiles = self._scale.tiles(image, columns, rows, tile)
        return tiles if len(tiles) == 1 else [*tiles, self._scale(image, tile, tile)]


class Lfm2VlProcessor:
    """Cuts a large image into tiles, and adds the image in its own shape; all as rows of patches, which are padded to
    one number."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        def number(name: str, default: float) -> float:
            value = settings.get(name)
            return default if value is None else float(value)

        patch = int(number("encoder_patch_size", 16))
        square = patch * int(number("downsample_factor", 2))
        most, tile = int(number("max_image_tokens", 256)) * square**2, int(number("tile_size", 512))
        splits, max_tiles = settings.get("do_image_splitting", True), int(number("max_tiles", 10))
        self.numbers = {
            "encoder_patch": patch,
            "square": square,
            "tile_size": tile,
            "min_tiles": int(number("min_tiles", 2)),
            "max_tiles": max_tiles,
            "splits": int(bool(splits) and max_tiles > 1),
            "shows_whole": int(bool(settings.get("use_thumbnail", True))),
            "min_pixels": int(number("min_image_tokens", 64)) * square**2,
            "max_pixels": most,
            "split_pixels": int(most * number("max_pixels_tolerance", 2.0)),
            "tile_patches": max(most, tile**2 if splits else 0) // patch**2,
        }
        self._scale = _Scaler(settings, resample=_BILINEAR, image_mean=_HALF, image_std=_HALF)

    def __call__(self, images: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
        tiles = [tile for image in images for tile in self._tiles(image)]
        patch, most = self.numbers["encoder_patch"], self.numbers["tile_patches"]
        shapes = torch.tensor([[side // patch for side in tile.shape[1:]] for tile in tiles])
        # [3, height, width] → [patches, patch × patch × 3]
        patches = [
            tile.unfold(1, patch, patch)
            .unfold(2, patch, patch)
            .permute(1, 2, 3, 4, 0)
            .flatten(2)
            .flatten(0, 1)
            for tile in tiles
        ]
        return {
            "pixel_values": torch.stack([F.pad(rows, (0, 0, 0, most - len(rows))) for rows in patches]),
            "pixel_attention_mask": (torch.arange(most) < shapes.prod(dim=1, keepdim=True)).int(),
            "spatial_shapes": shapes,
        }

    def _tiles(self, image: Any) -> list[Tensor]:
        columns, rows, wide, tall = lfm2_shape(self.numbers, *image.size)
        if columns * rows == 1:
            return [self._scale(image, wide, tall)]
        tiles = self._scale.tiles(image, columns, rows, self.numbers["tile_size"])
        return [*tiles, self._scale(image, wide, tall)] if self.numbers["shows_whole"] else tiles
