"""Rules for the prompt tokens of an image, one for each family of vision-language models.

The gateway writes prompts by these rules from the size of an image alone. The engine runs the image processor of the
model and checks that both agree. Knows no pixels.

A chat template writes one `template_token` for an image. The prompt has `ImageLayout.text` in that place, in which
every image token stands for a run of image tokens: `ImageLayout.runs` has the lengths of the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.core.errors import InvalidRequest


class VisionCard(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a vision-language model that a gateway needs."""

    family: str  # a key of `RULES`
    template_token: str  # as the chat template writes an image
    image_token: str  # stands for one row of the encoder's output
    image_token_id: int
    numbers: dict[str, int]  # sizes that the rule of the family needs
    sees_both_ways: bool = False  # the tokens of an image attend to each other
    prompt_sees_both_ways: bool = False  # ... and so do those of the text; a prompt then has one image
    # Written before and after an image, for families whose rule has no names.
    around: tuple[str, str] = ("", "")
    shapes: tuple[tuple[int, int], ...] = ()  # heights and widths in pixels that tiles may fill together


class ImageLayout(msgspec.Struct, frozen=True):
    """The tokens of one image, and the work of encoding the image."""

    text: str
    runs: tuple[int, ...]
    num_tiles: int = 1
    tile_patches: int = 1
    grid: tuple[int, int] = (0, 0)


def image_layout(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out an image of this height and width. Raises InvalidRequest for a shape that the model cannot process."""
    return RULES[card.family](card, width, height)


def _idefics3(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out Idefics 3 and SmolVLM: rows of square tiles, and the whole image as one more tile."""
    tile, run = card.numbers["tile_size"], card.numbers["tile_tokens"]
    rows = columns = 0
    if card.numbers["splits"]:
        width, height = _idefics3_size(width, height, card.numbers["longest_edge"], tile)
        if width > tile or height > tile:
            rows, columns = height // tile, width // tile
    image, wall = card.image_token, "<fake_token_around_image>"
    lines = [
        "".join(f"{wall}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    if lines:
        lines.append("\n")
    text = f"{''.join(lines)}{wall}<global-img>{image}{wall}"
    num_tiles = rows * columns + 1
    return ImageLayout(text, (run,) * num_tiles, num_tiles, card.numbers["tile_patches"])


_IDEFICS3_MAX_SIDE = 4096


def _idefics3_size(width: int, height: int, longest: int, tile: int) -> tuple[int, int]:
    """Return the size after both of the processor's resizings, whose rounding is repeated here."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _IDEFICS3_MAX_SIDE:
        width, height = _IDEFICS3_MAX_SIDE, max(1, int(_IDEFICS3_MAX_SIDE / ratio))
    elif height > width and height > _IDEFICS3_MAX_SIDE:
        width, height = max(1, int(_IDEFICS3_MAX_SIDE * ratio)), _IDEFICS3_MAX_SIDE
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return width, height


def _fixed(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out models that scale every image to one size: LLaVA and GOT-OCR 2."""
    begin, end = card.around
    text = f"{begin}{card.image_token}{end}"
    return ImageLayout(text, (card.numbers["image_tokens"],), tile_patches=card.numbers["tile_patches"])


_LEAST_SCALE = 1.1  # by which LLaVA-OneVision scales rows down


def _llava_next(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out LLaVA-NeXT and LLaVA-OneVision: the whole image, and then lines of patches over all tiles, each with
    one more row at its end. Lines and columns of the padding are left out. OneVision scales the lines and columns of
    more than `max_area_tiles` tiles down."""
    tile, side = card.numbers["tile_size"], card.numbers["tile_side_patches"]
    tall, wide = _best_shape(card.shapes, width, height)
    rows, columns = tall // tile * side, wide // tile * side
    num_patches = side * side * (1 + (tall // tile) * (wide // tile))
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if most := card.numbers.get("max_area_tiles"):
        ratio = math.sqrt(rows * columns / (most * side**2))
        if ratio > _LEAST_SCALE:
            rows, columns = int(rows // ratio), int(columns // ratio)
    num_rows = side * side + rows * (columns + 1)
    return ImageLayout(card.image_token, (num_rows,), tile_patches=num_patches)


def _best_shape(shapes: Sequence[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """Return the shape that keeps most pixels of the image, and among equals the shape with the least padding."""

    def kept_and_padding(shape: tuple[int, int]) -> tuple[int, int]:
        scale = min(shape[1] / width, shape[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - shape[0] * shape[1]

    return max(shapes, key=kept_and_padding)


def _gemma3(card: VisionCard, width: int, height: int) -> ImageLayout:
    text = f"\n\n{card.template_token}{card.image_token}<end_of_image>\n\n"
    return ImageLayout(text, (card.numbers["image_tokens"],), tile_patches=card.numbers["tile_patches"])


_MAX_ASPECT_RATIO = 200


def _qwen_vl(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out Qwen 2, 2.5 and 3 VL: a grid of patches that follows the shape of the image."""
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequest(
            f"An image of {width} × {height} pixels is too narrow: one side may be at most {_MAX_ASPECT_RATIO} times "
            "as long as the other."
        )
    merge = card.numbers["merge_size"]
    factor = card.numbers["patch_size"] * merge
    columns, rows = (side // factor for side in _scaled(card.numbers, width, height, factor))
    return ImageLayout(
        card.image_token, (rows * columns,), tile_patches=rows * columns * merge * merge, grid=(rows, columns)
    )


def _scaled(
    numbers: Mapping[str, int], width: int, height: int, factor: int, least: int = 0
) -> tuple[int, int]:
    """Return the width and height nearest to the image's that are multiples of `factor`, with as many pixels as the
    model takes. `least` is the shortest side of an image that is neither too large nor too small."""
    wide, tall = (max(least, round(side / factor) * factor) for side in (width, height))
    if tall * wide > numbers["max_pixels"]:
        scale = math.sqrt(height * width / numbers["max_pixels"])
        wide, tall = (max(factor, math.floor(side / scale / factor) * factor) for side in (width, height))
    elif tall * wide < numbers["min_pixels"]:
        scale = math.sqrt(numbers["min_pixels"] / (height * width))
        wide, tall = (math.ceil(side * scale / factor) * factor for side in (width, height))
    return wide, tall


def _glm_v(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out GLM 4.1V to 4.6V: Qwen's grid, of images of at least one square of patches."""
    square = card.numbers["patch_size"] * card.numbers["merge_size"]
    if height < square or width < square:
        scale = max(square / height, square / width)
        height, width = int(height * scale), int(width * scale)
    return _qwen_vl(card, width, height)


def _gemma4(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out Gemma 4: the largest grid of squares of patches in the shape of the image."""
    square, most = card.numbers["square"], card.numbers["max_tokens"]
    scale = math.sqrt(most * square**2 / (height * width))
    columns, rows = (math.floor(scale * side / square) for side in (width, height))
    if rows == 0:
        columns, rows = min(width // height, most), 1
    elif columns == 0:
        columns, rows = 1, min(height // width, most)
    begin, end = card.around
    patches = rows * columns * card.numbers["square_patches"]
    return ImageLayout(f"{begin}{card.image_token}{end}", (rows * columns,), tile_patches=patches)


def _paddleocr_vl(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out PaddleOCR-VL: as GLM, with another rounding."""
    square = card.numbers["patch_size"] * card.numbers["merge_size"]
    if height < square:
        width, height = round(width * square / height), square
    if width < square:
        width, height = square, round(height * square / width)
    return _qwen_vl(card, width, height)


def _pixtral(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out Pixtral and Mistral 3: rows of patches, each with a token at its end."""
    rows, columns = _pixtral_grid(card, width, height)
    text = f"{card.image_token}[IMG_BREAK]" * (rows - 1) + f"{card.image_token}[IMG_END]"
    return ImageLayout(
        text,
        (columns,) * rows,
        tile_patches=rows * columns * card.numbers["merge_size"] ** 2,
        grid=(rows, columns),
    )


def _lighton_ocr(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out LightOnOCR: Pixtral's patches, with no tokens between rows."""
    rows, columns = _pixtral_grid(card, width, height)
    patches = rows * columns * card.numbers["merge_size"] ** 2
    return ImageLayout(card.image_token, (rows * columns,), tile_patches=patches)


def _pixtral_grid(card: VisionCard, width: int, height: int) -> tuple[int, int]:
    """Return the rows and columns of squares of patches."""
    square, longest = card.numbers["patch_size"] * card.numbers["merge_size"], card.numbers["longest_edge"]
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        scaled = math.floor(height / ratio), math.floor(width / ratio)
        if 0 in scaled:
            raise InvalidRequest(
                f"An image of {width} × {height} pixels is too narrow: nothing is left of it when its longer side "
                f"has {longest} pixels."
            )
        height, width = scaled
    return max(0, height - 1) // square + 1, max(0, width - 1) // square + 1


def _internvl(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out InternVL: the grid of tiles whose shape is nearest to the image's, and the whole image as one more."""
    num_tiles = _num_tiles(card, width, height)
    run = card.numbers["tile_tokens"] * num_tiles
    return ImageLayout(f"<img>{card.image_token}</img>", (run,), num_tiles, card.numbers["tile_patches"])


def _aya_vision(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out Aya Vision: InternVL's tiles, with a name before each."""
    num_tiles = _num_tiles(card, width, height)
    names = [f"TILE_{number}" for number in range(1, num_tiles)] + ["TILE_GLOBAL"]
    tiles = "".join(name + card.image_token for name in names)
    text = f"<|START_OF_IMG|>{tiles}<|END_OF_IMG|>"
    return ImageLayout(
        text, (card.numbers["tile_tokens"],) * num_tiles, num_tiles, card.numbers["tile_patches"]
    )


def _num_tiles(card: VisionCard, width: int, height: int) -> int:
    """Return the tiles of InternVL's image processor, the whole image among them."""
    if not card.numbers["splits"] or card.numbers["max_tiles"] <= 1:
        return 1
    tiles = math.prod(_nearest_grid(width, height, card.numbers))
    return tiles + 1 if tiles > 1 else 1


def _cohere2_vision(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out Command A Vision: tiles, the whole image as one more, and a token after each."""
    tiles = math.prod(fitting_grid(card.numbers, width, height))
    num_tiles = tiles + 1 if tiles > 1 else 1
    text = f"<|START_OF_IMG|>{f'{card.image_token}<|IMG_LINE_BREAK|>' * num_tiles}<|END_OF_IMG|>"
    return ImageLayout(
        text, (card.numbers["tile_tokens"],) * num_tiles, num_tiles, card.numbers["tile_patches"]
    )


def fitting_grid(numbers: Mapping[str, int], width: int, height: int) -> tuple[int, int]:
    """Return the columns and rows of tiles that the image fills with the least scaling, preferably up; with
    `enlarges`, as large as possible."""
    if not numbers["splits"]:
        return 1, 1
    tile = numbers["tile_size"]

    def scale(grid: tuple[int, int]) -> float:
        return min(grid[0] * tile / width, grid[1] * tile / height)

    grids = _grids(1, numbers["max_tiles"])
    enlarging = [grid for grid in grids if scale(grid) >= 1]
    if not enlarging or numbers.get("enlarges"):
        return max(grids, key=scale)
    return min(enlarging, key=scale)


def _llama4(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out Llama 4: lines of tiles with tokens between them, and the whole image as one more tile."""
    columns, rows = fitting_grid(card.numbers, width, height)
    tile = card.image_token
    line = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
    lines = line * rows if rows * columns > 1 else ""
    num_tiles = rows * columns + 1 if lines else 1
    text = f"<|image_start|>{lines}<|image|>{tile}<|image_end|>"
    return ImageLayout(
        text, (card.numbers["tile_tokens"],) * num_tiles, num_tiles, card.numbers["tile_patches"]
    )


def _kimi_k25(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out Kimi K2.5: an image that is never enlarged, on a canvas of whole squares of patches."""
    square = card.numbers["patch_size"] * card.numbers["merge_size"]
    columns, rows = (math.ceil(side / square) for side in kimi_size(card.numbers, width, height))
    patches = rows * columns * card.numbers["merge_size"] ** 2
    return ImageLayout(card.image_token, (rows * columns,), tile_patches=patches)


def kimi_size(numbers: Mapping[str, int], width: int, height: int) -> tuple[int, int]:
    """Return the width and height of the image on its canvas."""
    patch, longest = numbers["patch_size"], numbers["longest_edge"]
    patches = max(1.0, height // patch) * max(1.0, width // patch)
    scale = min(1.0, math.sqrt(numbers["max_patches"] / patches), longest / height, longest / width)
    return min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)


def _deepseek_ocr2(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out DeepSeek-OCR 2: the tiles of a large image, the image as a whole, and a row that ends them."""
    numbers = card.numbers
    tiles = 0
    if numbers["splits"] and max(width, height) > numbers["tile_size"]:
        tiles = math.prod(_nearest_grid(width, height, numbers))
    run = tiles * numbers["tile_tokens"] + numbers["image_tokens"] + 1
    patches = tiles * numbers["patches_of_tile"] + numbers["patches_of_image"]
    return ImageLayout(card.image_token, (run,), tile_patches=patches)


NUMBER = "{number}"  # in the text of a layout: the number of the image in its prompt


def _minicpm_v(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out MiniCPM-V 4.6: the image as a whole, and then the slices of a large image, line by line."""
    numbers, image = card.numbers, card.image_token
    rows, columns = _slices(numbers, width, height)
    square = numbers["patch_size"] * numbers["merge_size"]
    side = numbers["tile_size"]
    whole = _minicpm_size(width, height, side, square, enlarges=rows * columns == 0)
    sizes = [whole]
    text = f"<image>{image}</image>"
    if rows * columns:
        tall, wide = (
            max(round(size / count) * count, count) / count
            for size, count in ((height, rows), (width, columns))
        )
        sizes += [_minicpm_size(wide, tall, side, square, enlarges=True)] * (rows * columns)
        text += "\n".join([f"<slice>{image}</slice>" * columns] * rows)
    runs = tuple(wide // square * (tall // square) for wide, tall in sizes)
    if numbers["counts_images"]:
        text = f"<image_id>{NUMBER}</image_id>{text}"
    return ImageLayout(text, runs, tile_patches=sum(runs) * numbers["merge_size"] ** 2)


def _slices(numbers: Mapping[str, int], width: int, height: int) -> tuple[int, int]:
    """Return the rows and columns of slices; none for an image of one slice."""
    most = min(math.ceil(width * height / numbers["tile_size"] ** 2), numbers["max_tiles"])
    if most <= 1 or not numbers["splits"]:
        return 0, 0
    best, least, shape = (1, 1), math.inf, math.log(width / height)
    for count in (most - 1, most, most + 1):
        if count == 1 or count > numbers["max_tiles"]:
            continue
        for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
            error = abs(shape - math.log(count // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, count // rows), error
    return best


def _minicpm_size(width: float, height: float, side: int, square: int, *, enlarges: bool) -> tuple[int, int]:
    """Return the width and height in whole squares of patches, with about as many pixels as a slice."""
    if width * height > side**2 or enlarges:
        ratio = width / height
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
    return max(round(width / square) * square, square), max(round(height / square) * square, square)


def _lfm2_vl(card: VisionCard, width: int, height: int) -> ImageLayout:
    """Lay out LFM2-VL: the image in its own shape, and before it the tiles of a large image."""
    columns, rows, wide, tall = lfm2_shape(card.numbers, width, height)
    square = card.numbers["square"]
    image, whole = card.image_token, wide // square * (tall // square)
    tile_tokens = math.ceil(card.numbers["tile_size"] / square) ** 2
    runs: tuple[int, ...] = (whole,)
    text = image
    if columns * rows > 1:
        places = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
        text = "".join(f"<|img_row_{row}_col_{column}|>{image}" for row, column in places)
        runs = (tile_tokens,) * len(places)
        if card.numbers["shows_whole"]:
            text, runs = f"{text}<|img_thumbnail|>{image}", (*runs, whole)
    return ImageLayout(f"<|image_start|>{text}<|image_end|>", runs, len(runs), card.numbers["tile_patches"])


def lfm2_shape(numbers: Mapping[str, int], width: int, height: int) -> tuple[int, int, int, int]:
    """Return the columns and rows of tiles, and the width and height of the image as a whole."""
    square, patch = numbers["square"], numbers["encoder_patch"]
    wide, tall = _scaled(numbers, width, height, square, least=square)
    pixels = math.prod(max(patch, round(side / square) * square) for side in (width, height))
    if not numbers["splits"] or pixels <= numbers["split_pixels"]:
        return 1, 1, wide, tall
    columns, rows = _nearest_grid(width, height, numbers)
    return columns, rows, wide, tall


def _grids(fewest: int, most: int) -> list[tuple[int, int]]:
    """Return all columns and rows of so many tiles, those with fewer tiles first."""
    sides = range(1, most + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if fewest <= columns * rows <= most]
    return sorted(grids, key=math.prod)


def _nearest_grid(width: int, height: int, numbers: Mapping[str, int]) -> tuple[int, int]:
    best, best_difference = (1, 1), math.inf
    for columns, rows in _grids(numbers["min_tiles"], numbers["max_tiles"]):
        difference = abs(width / height - columns / rows)
        # Among equals more tiles win, unless they were more than twice the area of the image.
        is_filled = width * height > 0.5 * numbers["tile_size"] ** 2 * columns * rows
        if difference < best_difference or (difference == best_difference and is_filled):
            best, best_difference = (columns, rows), difference
    return best


RULES: dict[str, Callable[[VisionCard, int, int], ImageLayout]] = {
    "idefics3": _idefics3,
    "llava": _fixed,
    "llava_next": _llava_next,
    "gemma3": _gemma3,
    "qwen_vl": _qwen_vl,
    "glm_v": _glm_v,
    "paddleocr_vl": _paddleocr_vl,
    "gemma4": _gemma4,
    "pixtral": _pixtral,
    "lighton_ocr": _lighton_ocr,
    "internvl": _internvl,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "lfm2_vl": _lfm2_vl,
    "llama4": _llama4,
    "kimi_k25": _kimi_k25,
    "minicpm_v": _minicpm_v,
    "deepseek_ocr2": _deepseek_ocr2,
}
