"""The vision part of a vision-language model: image processor, vision tower and projector.

They are transformers' own code, an optional dependency; the text model is one of our decoders. Every family has a
class here, in `vision_tiles` or in `vision_grids`, with the sizes that `core.image_layout` needs and the form of the
tower's input. `vision_load` reads them from a checkpoint.
"""

from __future__ import annotations

import io
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from penstock.core.errors import InvalidRequest, ModelLoadError
from penstock.core.image_layout import VisionCard
from penstock.kernels.interface import Ops
from penstock.models.config import Fields

_LARGE_SIDE = 2048  # pixels, which all towers with a fixed size scale down
_PATCHES_AT_ONCE = 16384  # bound the memory of one call of the tower

warnings.filterwarnings("ignore", module=r"PIL\.")  # as in gateway.images


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as the tower takes it, on the host. The tensors of `tiled` have one entry for each tile."""

    tiled: Mapping[str, Tensor]
    other: Mapping[str, Tensor]
    num_tiles: int
    num_rows: int  # of the encoder's output

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.tiled.values(), *self.other.values()))


class VisionModel(Protocol):
    card: VisionCard
    chat_template: ClassVar[str | None]  # of folders without one
    bytes_per_token: int  # of the encoder's output
    tiles_at_once: int

    def prepare(self, data: bytes) -> Pixels:
        """Decode and scale an image, on any thread. Raises InvalidRequest."""
        ...

    def encode(self, pixels: Pixels, first_tile: int, num_tiles: int) -> list[Tensor]:
        """Return the rows of each of these tiles: [rows, width]."""
        ...

    def largest(self, max_tokens: int) -> Pixels:
        """Return the pixels of a plain image, as large as the model sees images of at most this many tokens."""
        ...


class TransformersVision(ABC):
    """The image processor and tower of a checkpoint, run by transformers."""

    rule: ClassVar[str]  # a key of `core.image_layout.RULES`
    sees_both_ways: ClassVar[bool] = False
    prompt_sees_both_ways: ClassVar[bool] = False
    has_axes: ClassVar[bool] = True  # where the settings of the text model have sections of positions
    chat_template: ClassVar[str | None] = None  # of folders without one
    processor_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self, config: Any, processor: Any, tower: Any, ops: Ops, spellings: Mapping[int, str]
    ) -> None:
        self.config = config
        self._processor = processor
        self._tower = tower
        self._device, self._dtype = ops.device, ops.dtype
        width = self._trial_width()
        self.bytes_per_token = width * torch.empty(0, dtype=ops.dtype).element_size()
        token_id = int(config.image_token_id)
        if token_id not in spellings:
            raise ModelLoadError(f"The tokenizer has no token {token_id}, which stands for images.")
        self.card = VisionCard(
            family=self.rule,
            template_token=self.template_token(spellings),
            image_token=spellings[token_id],
            image_token_id=token_id,
            numbers=self.numbers(),
            around=self.around(spellings),
            shapes=self.shapes(),
            sees_both_ways=self.image_sees_itself(),
            prompt_sees_both_ways=self.prompt_sees_both_ways,
        )
        self.tiles_at_once = max(
            1, _PATCHES_AT_ONCE // self.card.numbers.get("tile_patches", _PATCHES_AT_ONCE)
        )

    @classmethod
    def load_processor(cls, path: Path) -> Any:
        """Load the image processor of a checkpoint."""
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(path, backend="pil")

    def prepare(self, data: bytes) -> Pixels:
        return self._pixels(open_image(data))

    def _pixels(self, image: Any) -> Pixels:
        try:
            made = self._processor(images=[image], return_tensors="pt", **self.options())
        except ValueError as error:  # a shape that the processor cannot scale
            raise InvalidRequest(f"The model cannot see an image of {image.size}: {error}") from error
        return self.pixels(made)

    def options(self) -> Mapping[str, Any]:
        """Return options of the image processor."""
        return self.processor_options

    def encode(self, pixels: Pixels, first_tile: int, num_tiles: int) -> list[Tensor]:
        part = slice(first_tile, first_tile + num_tiles)
        tensors = {name: tensor[part] for name, tensor in pixels.tiled.items()} | dict(pixels.other)
        placed = {
            name: tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        with torch.inference_mode():
            return self.features(placed)

    def largest(self, max_tokens: int) -> Pixels:
        from PIL import Image

        numbers = self.card.numbers
        side = numbers.get("longest_edge", _LARGE_SIDE)
        if "patch_size" in numbers:  # an image of any shape: its tokens are squares of patches
            square = numbers["patch_size"] * numbers["merge_size"]
            limit = min(numbers.get("max_pixels", side**2), max_tokens * square**2)
            side = max(square, math.isqrt(limit) // square * square)
        shape = side, side
        if "max_tiles" in numbers:  # in one row, of an image that no family takes for a small one
            side = 2 * numbers["tile_size"]
            shape = numbers["max_tiles"] * side, side
        return self._pixels(Image.new("RGB", shape, (90, 120, 150)))

    def _trial_width(self) -> int:
        """Encode a small gray image, which also shows how many rows a tile has."""
        from PIL import Image

        pixels = self._pixels(Image.new("RGB", (64, 64), (90, 120, 150)))
        first = self.encode(pixels, 0, 1)[0]
        self.rows_per_tile = first.shape[0]
        return first.shape[1]

    def template_token(self, spellings: Mapping[int, str]) -> str:
        """Return what the chat template writes for an image."""
        return spellings[int(self.config.image_token_id)]

    def around(self, spellings: Mapping[int, str]) -> tuple[str, str]:
        """Return what the prompt has before and after an image, for families whose rule does not say so."""
        return "", ""

    def image_sees_itself(self) -> bool:
        """Return whether the tokens of an image attend to each other."""
        return self.sees_both_ways

    @classmethod
    def refusal(cls, fields: Fields) -> str | None:
        """Return why images are not seen with these settings; None if they are."""
        return None

    @property
    def _vision(self) -> Any:
        return self.config.vision_config

    @abstractmethod
    def numbers(self) -> dict[str, int]: ...

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Return the heights and widths that tiles may fill together, for families that list them."""
        return ()

    @abstractmethod
    def pixels(self, made: Any) -> Pixels: ...

    @abstractmethod
    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the rows of each tile."""
        ...


class LlavaVision(TransformersVision):
    """LLaVA: a CLIP or SigLIP tower and an MLP; every image is scaled to one size."""

    rule = "llava"

    def numbers(self) -> dict[str, int]:
        patches = (int(self._vision.image_size) // int(self._vision.patch_size)) ** 2
        return {"image_tokens": self.rows_per_tile, "tile_patches": patches}

    def pixels(self, made: Any) -> Pixels:
        return Pixels({"pixel_values": made["pixel_values"]}, {}, 1, getattr(self, "rows_per_tile", 0))

    def features(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return list(self._tower.get_image_features(**tensors).pooler_output)


class Gemma3Vision(LlavaVision):
    """Gemma 3: a SigLIP tower and average pooling. Images are not cut into crops (no pan and scan)."""

    rule = "gemma3"
    sees_both_ways = True
    processor_options: ClassVar[Mapping[str, Any]] = {"do_pan_and_scan": False}

    def template_token(self, spellings: Mapping[int, str]) -> str:
        return spellings[int(self.config.boi_token_index)]


class PaliGemmaVision(LlavaVision):
    """PaliGemma 1 and 2: a SigLIP tower and one matrix. All tokens of a prompt attend to each other."""

    sees_both_ways = True
    prompt_sees_both_ways = True
    # As transformers' processor writes prompts.
    chat_template = (
        "{% set turn = messages[0] %}{% if messages | length > 1 or turn.role != 'user' %}"
        "{{ raise_exception('This model takes one message of the user, with an image and a text.') }}{% endif %}"
        "{% for part in turn.content if part.type == 'image' %}<image>{% endfor %}{{ bos_token }}"
        "{% for part in turn.content if part.type == 'text' %}{{ part.text }}{% endfor %}{{ '\n' }}"
    )


class GotOcrVision(LlavaVision):
    """GOT-OCR 2: a SAM tower and convolutions; every image is scaled to one size."""

    processor_options: ClassVar[Mapping[str, Any]] = {"crop_to_patches": False}
    # As transformers' processor writes prompts. A text is `OCR`, or `OCR with format`.
    chat_template = (
        "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in detail."
        "<|im_end|>{% for turn in messages %}<|im_start|>{{ turn.role }}\n{% if turn.content is string %}"
        "{{ turn.content }}{% else %}{% set found = turn.content | selectattr('type', 'equalto', 'image') | list %}"
        "{% if found %}<img>{% for part in found %}<imgpad>{% endfor %}</img>{{ '\\n ' }}{% endif %}"
        "{% for part in turn.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
        "{% if found %}: {% endif %}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def numbers(self) -> dict[str, int]:
        size, patch = self._vision.image_size, self._vision.patch_size
        side, patch = (int(each if isinstance(each, int) else each[0]) for each in (size, patch))
        return {"image_tokens": self.rows_per_tile, "tile_patches": (side // patch) ** 2}


def open_image(data: bytes) -> Any:
    """Decode an image as processors take it: upright, in RGB, the first frame. Raises InvalidRequest."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"An image is damaged: {error}.", param="messages") from error
