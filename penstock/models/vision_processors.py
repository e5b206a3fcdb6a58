"""Image processors of families whose processors in transformers need torchvision, which Penstock does not install.

They are called as those of transformers, and make the same tensors. Pillow scales the images: a pixel may differ from
torchvision's by two of 255 levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.image_layout import fitting_grid, kimi_size, lfm2_shape

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

    def __init__(
        self, settings: Mapping[str, Any], dtype: torch.dtype = torch.float32, **defaults: Any
    ) -> None:
        found = defaults | {name: value for name, value in settings.items() if value is not None}
        self._resample = int(found["resample"])
        self._factor = float(found.get("rescale_factor", 1 / 255))
        self._dtype = dtype
        self._mean, self._deviation = (
            torch.tensor(found[name], dtype=dtype).view(3, 1, 1) for name in ("image_mean", "image_std")
        )

    def __call__(self, image: Any, width: int, height: int, canvas: tuple[int, int] | None = None) -> Tensor:
        """Return [3, height, width], in the upper left corner of a black canvas of this width and height."""
        from PIL import Image

        scaled = image.resize((width, height), Image.Resampling(self._resample))
        levels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1).to(self._dtype)
        if canvas is not None:
            levels = F.pad(levels, (0, canvas[0] - width, 0, canvas[1] - height))
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


class Llama4Processor:
    """Scales an image into a canvas of tiles, cuts it, and adds the whole image as the last tile. Colors are rounded
    to bfloat16, as by transformers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        size = settings.get("size") or {"height": 336}
        most = settings.get("max_patches")
        self.numbers = {
            "tile_size": int(size["height"]),
            "max_tiles": int(16 if most is None else most),
            "splits": 1,
            "enlarges": int(bool(settings.get("resize_to_max_canvas"))),
        }
        self._scale = _Scaler(settings, torch.bfloat16, resample=_BILINEAR, image_mean=_HALF, image_std=_HALF)

    def __call__(self, images: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
        made = [self._tiles(image) for image in images]
        return {"pixel_values": torch.cat(made), "num_tiles": [len(tiles) for tiles in made]}

    def _tiles(self, image: Any) -> Tensor:
        tile = self.numbers["tile_size"]
        grid = fitting_grid(self.numbers, *image.size)
        canvas = grid[0] * tile, grid[1] * tile
        width, height = self._inner(image.size, canvas)
        parts = self._scale(image, width, height, canvas).unfold(1, tile, tile).unfold(2, tile, tile)
        tiles = parts.permute(1, 2, 0, 3, 4).flatten(0, 1)
        return tiles if len(tiles) == 1 else torch.cat([tiles, self._scale(image, tile, tile)[None]])

    def _inner(self, size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
        """Return the size of the image on its canvas: a small image grows to the size of a tile at most."""
        limit = canvas
        if not self.numbers["enlarges"]:
            tile = self.numbers["tile_size"]
            limit = min(max(size[0], tile), canvas[0]), min(max(size[1], tile), canvas[1])
        across, down = limit[0] / size[0], limit[1] / size[1]
        if across < down:
            return limit[0], max(1, min(math.floor(size[1] * across), limit[1]))
        return max(1, min(math.floor(size[0] * down), limit[0])), limit[1]


class KimiProcessor:
    """Puts an image on a canvas of whole squares of patches, and lists its patches."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        makers = settings.get("media_proc_cfg")
        found = {**settings, **(makers if isinstance(makers, Mapping) else {})}

        def number(names: Sequence[str], default: int) -> int:
            return next((int(found[name]) for name in names if found.get(name) is not None), default)

        patch = number(("patch_size",), 14)
        size = settings.get("size") or {}
        most = number(("in_patch_limit", "max_patches"), 16384)
        side = number(("patch_limit_on_one_side",), int(size.get("max_height", 512)))
        self.numbers = {
            "patch_size": patch,
            "merge_size": number(("merge_kernel_size", "merge_size"), 2),
            "max_patches": most,
            "max_pixels": most * patch**2,
            "longest_edge": side * patch,
        }
        self._scale = _Scaler(found, resample=_BICUBIC, image_mean=_HALF, image_std=_HALF)

    def __call__(self, images: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
        made = [self._scaled(image) for image in images]
        patch = self.numbers["patch_size"]
        patches = [image.unfold(1, patch, patch).unfold(2, patch, patch) for image in made]
        return {
            "pixel_values": torch.cat([each.permute(1, 2, 0, 3, 4).flatten(0, 1) for each in patches]),
            "image_grid_thw": torch.tensor([[1, *each.shape[1:3]] for each in patches]),
        }

    def _scaled(self, image: Any) -> Tensor:
        width, height = kimi_size(self.numbers, *image.size)
        square = self.numbers["patch_size"] * self.numbers["merge_size"]
        return self._scale(
            image, width, height, (-(-width // square) * square, -(-height // square) * square)
        )
