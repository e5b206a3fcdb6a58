"""The tiles that kernels use on each family of GPUs (`kernels/gpus.py`), and the constants that kernels ask for.

`current()` is the family of this process's GPU. Kernels ask for instructions with `overlaps()`, `converts_float8()`
and `has_ptx()`, which are constants while a kernel is compiled. Launchers take tiles from the tables below: the tiles
were measured on an H200, and on a family with less shared memory `Tile.fitted` cuts the number of stages. To tune a
family, give its row of `TUNED` tiles of its own. `tests/triton/test_targets.py` compiles every kernel for every
family.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import triton
from triton.language.target_info import cuda_capability_geq, is_cuda
from triton.runtime import driver
from triton.runtime.jit import constexpr_function

from penstock.kernels.gpus import HOPPER, Family, family_of


@dataclass(frozen=True, slots=True)
class Tile:
    """The outputs of one program, how much of the width it reads at a time, and how many reads are in flight."""

    outputs: int
    width: int
    num_warps: int
    num_stages: int

    def fitted(self, width: int, bytes_per_column: int) -> Tile:
        """Return the tile for a matrix of this width, with as many stages as shared memory holds. A stage takes
        `bytes_per_column` for each column of the tile."""
        columns = min(self.width, width & -width)  # the largest power of two that divides the width
        while columns > SMALLEST_WIDTH and columns * bytes_per_column > current().shared_bytes:
            columns //= 2
        return replace(self, width=columns, num_stages=stages(self.num_stages, columns * bytes_per_column))


@dataclass(frozen=True, slots=True)
class RowTile:
    """The outputs of one program of a one-row kernel, and how much of the width it reads at a time."""

    outputs: int
    width: int
    num_warps: int
    ahead: bool = False  # whether weights are loaded before they are needed

    def fitted(self, width: int) -> RowTile:
        return replace(self, width=min(self.width, width & -width))


SMALLEST_WIDTH = 32
MOST_PAIRED = 8  # outputs of a program for all pairs of a token
MOST_ROUTED = 8192  # columns of a router that one program reads at once
GLUON_SINCE, GLUON_BEFORE = (3, 6), (3, 10)  # Gluon still changes: versions that compile its kernels

# Tiles by kernel and case, measured on an H200 over the shapes of 0.6 to 8 billion parameters and of Qwen3-30B-A3B.
TILES: Mapping[str, Tile] = {
    "dense, gated": Tile(outputs=64, width=128, num_warps=4, num_stages=4),
    "dense, few outputs, 16 rows": Tile(outputs=16, width=512, num_warps=4, num_stages=5),
    "dense, few outputs": Tile(outputs=32, width=512, num_warps=4, num_stages=3),
    "dense": Tile(outputs=64, width=256, num_warps=4, num_stages=4),
    "float8, many outputs": Tile(outputs=128, width=128, num_warps=8, num_stages=3),
    "float8": Tile(outputs=64, width=256, num_warps=4, num_stages=7),
    "float8, 64 rows": Tile(outputs=64, width=256, num_warps=4, num_stages=5),
    "float8 blocks": Tile(outputs=128, width=128, num_warps=4, num_stages=5),
    "int8": Tile(outputs=32, width=128, num_warps=4, num_stages=3),
    "int8, many rows": Tile(outputs=128, width=128, num_warps=8, num_stages=4),
    "int4, 16 rows": Tile(outputs=128, width=128, num_warps=4, num_stages=3),
    "int4, 32 rows": Tile(outputs=128, width=128, num_warps=4, num_stages=3),
    "int4, 64 rows": Tile(outputs=64, width=128, num_warps=4, num_stages=3),
    "experts, gated, 16 rows": Tile(outputs=64, width=128, num_warps=4, num_stages=5),
    "experts, gated, 32 rows": Tile(outputs=128, width=128, num_warps=4, num_stages=3),
    "experts, 16 rows": Tile(outputs=128, width=128, num_warps=4, num_stages=3),
    "experts, 32 rows": Tile(outputs=128, width=128, num_warps=4, num_stages=5),
    "experts, gated": Tile(outputs=64, width=64, num_warps=4, num_stages=4),
    "experts, gated, 128 rows": Tile(outputs=128, width=64, num_warps=8, num_stages=3),
    "experts": Tile(outputs=128, width=64, num_warps=4, num_stages=3),
    "float8 experts, gated, 16 rows": Tile(outputs=64, width=128, num_warps=4, num_stages=3),
    "float8 experts, gated, 32 rows": Tile(outputs=64, width=128, num_warps=4, num_stages=3),
    "float8 experts, 16 rows": Tile(outputs=64, width=128, num_warps=4, num_stages=3),
    "float8 experts, 32 rows": Tile(outputs=64, width=128, num_warps=4, num_stages=4),
    "float8 experts, gated": Tile(outputs=64, width=128, num_warps=4, num_stages=3),
    "float8 experts": Tile(outputs=128, width=128, num_warps=4, num_stages=3),
    "packed experts, gated, 16 rows": Tile(outputs=32, width=128, num_warps=2, num_stages=3),
    "packed experts, gated, 32 rows": Tile(outputs=32, width=128, num_warps=2, num_stages=3),
    "packed experts, 16 rows": Tile(outputs=32, width=128, num_warps=2, num_stages=3),
    "packed experts, 32 rows": Tile(outputs=32, width=128, num_warps=2, num_stages=3),
    "packed experts, gated": Tile(outputs=64, width=64, num_warps=4, num_stages=3),
    "packed experts": Tile(outputs=128, width=64, num_warps=4, num_stages=3),
}
# The same of products of one row, which need no shared memory. Widths of float8 are in words of four numbers.
ROW_TILES: Mapping[str, RowTile] = {
    "dense, narrow": RowTile(outputs=4, width=2048, num_warps=4, ahead=True),
    "dense, narrow, gated": RowTile(outputs=4, width=512, num_warps=4),
    "dense, gated": RowTile(outputs=1, width=512, num_warps=2),
    "dense, gated, few outputs": RowTile(outputs=8, width=512, num_warps=4),
    "dense, few outputs": RowTile(outputs=4, width=1024, num_warps=8),
    "dense, few outputs, whole": RowTile(outputs=8, width=4096, num_warps=8, ahead=True),
    "dense, some outputs": RowTile(outputs=4, width=512, num_warps=4, ahead=True),
    "dense, many outputs": RowTile(outputs=16, width=512, num_warps=8),
    "router": RowTile(outputs=1, width=MOST_ROUTED, num_warps=4),
    "experts, gated": RowTile(outputs=1, width=1024, num_warps=4),
    # For one pair. Programs for many pairs of a token have fewer outputs, and for few not more than `MOST_PAIRED`.
    "experts": RowTile(outputs=64, width=256, num_warps=4),
    # Widths are the bytes of codes that a program reads at a time.
    "packed experts, gated": RowTile(outputs=8, width=4096, num_warps=4),
    "packed experts": RowTile(outputs=4, width=16384, num_warps=8),
    "float8, gated": RowTile(outputs=8, width=128, num_warps=4),
    "float8, some outputs": RowTile(outputs=8, width=256, num_warps=4, ahead=True),
    "float8, many outputs": RowTile(outputs=8, width=128, num_warps=4, ahead=True),
}


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """The keys of a tile, and the most tiles that are read ahead. Steps with many programs are crowded."""

    decode_keys: int = 128
    crowded_keys: int = 64
    decode_stages: int = 3
    crowded_stages: int = 2
    crowded_warps: int = 2  # of a program, if heads have at most 128 numbers of 16 bits
    prefill_keys: int = 64


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tiles of one family, instead of those of TILES and ROW_TILES."""

    tiles: Mapping[str, Tile] = field(default_factory=dict)
    row_tiles: Mapping[str, RowTile] = field(default_factory=dict)
    attention: AttentionTiles = AttentionTiles()


AS_MEASURED = Tuning()
FEWER_KEYS = AttentionTiles(decode_keys=64)
# Families with tiles of their own. Half the shared memory holds half the keys in as many stages.
TUNED: Mapping[int | str, Tuning] = {
    **{arch: Tuning(attention=FEWER_KEYS) for arch in (80, 86, 87, 89, 120)},
    "gfx942": Tuning(
        tiles={"packed experts": Tile(outputs=64, width=64, num_warps=4, num_stages=2)}, attention=FEWER_KEYS
    ),
}


@functools.cache
def current() -> Family:
    """Return the family of this process's GPU; Hopper without a GPU, for the interpreter."""
    try:
        target = driver.active.get_current_target()
    except RuntimeError:
        return HOPPER
    return family_of(target.backend, target.arch)


def has_hopper_kernels() -> bool:
    """Return whether this GPU is a Hopper and Triton compiles the kernels in Gluon for it."""
    is_hopper = not triton.knobs.runtime.interpret and current().arch == HOPPER.arch
    return is_hopper and _compiles_gluon(triton.__version__)


@functools.cache
def _compiles_gluon(release: str) -> bool:
    version = tuple(int(part) for part in release.split(".")[:2])
    return GLUON_SINCE <= version < GLUON_BEFORE


def _tuning() -> Tuning:
    return TUNED.get(current().arch, AS_MEASURED)


def tile(name: str) -> Tile:
    return _tuning().tiles.get(name) or TILES[name]


def row_tile(name: str) -> RowTile:
    return _tuning().row_tiles.get(name) or ROW_TILES[name]


def attention_tiles() -> AttentionTiles:
    return _tuning().attention


def stages(most: int, bytes_each: int) -> int:
    """Return the number of stages that shared memory holds, `most` at most: the last of them is in registers."""
    return max(1, min(most, 1 + current().shared_bytes // bytes_each))


# The constants of kernels. They follow from the target alone, which is part of the key of a compiled kernel.
_IS_INTERPRETED = triton.knobs.runtime.interpret


@constexpr_function
def overlaps():
    """Return whether kernels may wait for the kernel before them (`Family.has_overlap`)."""
    return not _IS_INTERPRETED and cuda_capability_geq(9, 0)


@constexpr_function
def converts_float8():
    """Return whether the GPU converts e4m3 itself (`Family.has_float8`)."""
    return not _IS_INTERPRETED and cuda_capability_geq(8, 9)


@constexpr_function
def has_ptx():
    """Return whether kernels may contain PTX."""
    return not _IS_INTERPRETED and is_cuda()
