"""Chooses the tile of a product of four-bit weights on Hopper (`int4_hopper`), by its shape. Measured on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.kernels.triton.device import cdiv, next_power_of_2, num_processors
from penstock.kernels.triton.few_hopper import BARRIER_BYTES
from penstock.kernels.triton.targets import current


@dataclass(frozen=True, slots=True)
class HopperTile:
    """The work of a program: `parts` tiles of outputs, `width` columns at a time. The other fields are the reads in
    flight, the programs that share a processor, and the groups of warps that take turns along the width of a part.
    Even tiles (`int4_even`) are divided among all processors, or each among `shares` programs."""

    outputs: int
    width: int
    num_stages: int
    per_processor: int = 1
    parts: int = 2
    turns: int = 1
    is_even: bool = False
    shares: int = 1

    def options(self) -> dict[str, int]:
        """Registers of all groups of warps but the first and, where programs share a processor, of a thread on
        average."""
        if self.parts * self.turns == 4:
            return {"REGISTERS": 120}
        return {"REGISTERS": 240} if self.per_processor == 1 else {"REGISTERS": 112, "maxnreg": 80}


class Choice(NamedTuple):
    """The rows of a tile, the tile, and into how many parts of the width (split-K) the product is cut; of an even
    product the number of programs."""

    rows: int
    tile: HopperTile
    shares: int


class EvenTile(NamedTuple):
    """An even tile, and what a program takes on an H200 for a column of it while all processors are busy."""

    rows: int
    tile: HopperTile
    column_ns: float


# By rows of a tile. Measured on an H200 over the shapes of 8 billion parameters.
TILES = {
    16: HopperTile(outputs=64, width=128, num_stages=6, per_processor=2),
    32: HopperTile(outputs=64, width=128, num_stages=5, per_processor=2),
    64: HopperTile(outputs=64, width=128, num_stages=4, per_processor=2),
    128: HopperTile(outputs=64, width=128, num_stages=4),
    256: HopperTile(outputs=64, width=64, num_stages=5),
}
EVEN_TILES = (
    EvenTile(256, HopperTile(outputs=64, width=64, num_stages=5, is_even=True), 12.6),
    EvenTile(128, HopperTile(outputs=64, width=128, num_stages=5, is_even=True), 7.0),
    EvenTile(256, HopperTile(outputs=64, width=64, num_stages=5, is_even=True, shares=2), 12.6),
    EvenTile(128, HopperTile(outputs=64, width=128, num_stages=5, is_even=True, shares=2), 6.2),
)
FEWEST_STEPS = 4  # of a program
OUTPUTS = 64
MOST_FEW_ROWS = 64
MOST_WHOLE_ROWS = 128  # Up to here, even tiles gain too little for kernels of their own.
GROUPS = {16: 4, 32: 4, 64: 2}  # of warps, by rows of a tile that has a processor for itself
# Numbers of rows up to one of these use the same tile, so that a few steps need every kernel (`engine/warmup.py`).
MOST_ROWS = (128, 256, 384, 512, 2048)
# A program loops over this many columns in less time than the sum of a split-K product takes.
SHORT_WIDTH = 4096
MOST_STAGES = 20
# Nanoseconds of a processor: to multiply a weight with a row, to scale a group of weights, and to add up the parts of
# a split-K product.
MULTIPLY_NS, SCALE_NS, ADD_SHARES_NS = 0.00033, 0.5, 7000.0
# Beside even tiles: measured times of whole tiles are so much longer, and every product needs some time to start and
# end. If most tiles are divided, programs wait for each other's sums in the end, so long for each row of a tile.
WHOLE_TILES, REST_NS, WAITING_ROW_NS = 1.3, 4000.0, 20.0


def choose_tile(num_rows: int, num_made: int, width: int, group: int, is_gated: bool, device: int) -> Choice:
    tile_rows = min(max(TILES), max(min(TILES), next_power_of_2(num_rows)))
    processors = num_processors(device)
    if tile_rows > MOST_FEW_ROWS:
        most_rows = next((most for most in MOST_ROWS if num_rows <= most), MOST_ROWS[-1])
        choices = [
            (
                WHOLE_TILES * _predicted_ns(choice, most_rows, num_made, width, group, processors) + REST_NS,
                choice,
            )
            for choice in _large_tiles(most_rows, num_made, width, is_gated, processors)
        ]
        if num_rows > MOST_WHOLE_ROWS:
            choices += _even_tiles(most_rows, num_made, width, is_gated, processors)
        return min(choices, key=lambda timed: timed[0])[1]
    parts = 2 if is_gated else 1
    has_room = num_made <= parts * OUTPUTS * processors  # for each program on a processor of its own
    turns = GROUPS[tile_rows] // parts
    if has_room and width >= 128 * turns and (is_gated or width <= SHORT_WIDTH):
        return Choice(tile_rows, _filled(tile_rows, 128, parts, turns), 1)
    if not is_gated and num_made <= OUTPUTS * processors // 2 and width > SHORT_WIDTH:
        return Choice(tile_rows, _filled(tile_rows, 128, parts, turns), 2)
    tile = TILES[tile_rows]
    return Choice(tile_rows, tile, _shares(tile_rows, tile, num_rows, num_made, width, processors))


def _shares(
    tile_rows: int, tile: HopperTile, num_rows: int, num_made: int, width: int, processors: int
) -> int:
    """Tiles that leave the chip half empty are cut into parts of the width (split-K)."""
    programs = cdiv(num_rows, tile_rows) * cdiv(num_made, tile.parts * tile.outputs)
    most = cdiv(width, tile.width) // 2
    return max(1, min(most, tile.per_processor * processors // programs))


def _large_tiles(
    num_rows: int, num_made: int, width: int, is_gated: bool, processors: int
) -> Iterator[Choice]:
    if not is_gated and width >= 256:
        yield Choice(128, _filled(128, 128, parts=1, turns=2), 1)
    for tile_rows in (128, 256):
        tile = TILES[tile_rows]
        yield Choice(tile_rows, tile, 1)
        if (shares := _shares(tile_rows, tile, num_rows, num_made, width, processors)) > 1:
            yield Choice(tile_rows, tile, shares)


def _even_tiles(
    num_rows: int, num_made: int, width: int, is_gated: bool, processors: int
) -> Iterator[tuple[float, Choice]]:
    """Yield each even tile that fits a product, and how long the product takes."""
    for tile_rows, tile, column_ns in EVEN_TILES:
        tiles = cdiv(num_rows, tile_rows) * cdiv(num_made, tile.parts * tile.outputs)
        steps = cdiv(width, 2 * tile.width)
        programs = processors if tile.shares == 1 else tiles * tile.shares
        if programs > processors or tiles * steps < FEWEST_STEPS * programs or (is_gated and tile.shares > 1):
            continue
        columns = cdiv(tiles * steps, programs) * 2 * tile.width
        has_to_wait = tile.shares == 1 and 3 * tiles < 2 * programs
        waiting_ns = WAITING_ROW_NS * tile_rows if has_to_wait else 0.0
        yield columns * column_ns + waiting_ns + REST_NS, Choice(tile_rows, tile, programs)


def _predicted_ns(
    choice: Choice, num_rows: int, num_made: int, width: int, group: int, processors: int
) -> float:
    tile_rows, tile, shares = choice
    outputs = tile.parts * tile.outputs
    programs = shares * cdiv(num_rows, tile_rows) * cdiv(num_made, outputs)
    each = outputs * (width / shares) * (MULTIPLY_NS * tile_rows + SCALE_NS / group)
    return cdiv(programs, processors) * each + (ADD_SHARES_NS if shares > 1 else 0.0)


def _filled(tile_rows: int, width: int, parts: int, turns: int) -> HopperTile:
    """Return a tile with as many stages as shared memory holds beside the results of groups of warps."""
    results = (parts * (turns - 1) * 4 + (parts - 1) * 2) * OUTPUTS * tile_rows
    free = current().shared_bytes - BARRIER_BYTES - results
    num_stages = free // (width * (parts * OUTPUTS // 2 + 2 * tile_rows))
    return HopperTile(OUTPUTS, width, min(MOST_STAGES, num_stages), parts=parts, turns=turns)
