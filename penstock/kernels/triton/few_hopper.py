"""Up to 64 rows times weights of 16 bits, or of float8, on Hopper, at the speed at which memory gives the weights.
And some hundred rows times weights of float8 with too few outputs to fill the chip with large tiles.

A warp copies tiles of weights and of the input to shared memory with the copy engine. It fills all of shared memory
with weights before the kernel in front has ended, so that memory is never idle between two products. Four warps
multiply. The kernel is written in Gluon, which has no interpreter: its tests need a GPU (`tests/gpu`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.triton.device import cdiv, empty_rows, in_whole_tiles, next_power_of_2, num_processors
from penstock.kernels.triton.int4_few import add_shares
from penstock.kernels.triton.overlap import launch_options
from penstock.kernels.triton.skinny import RowProduct
from penstock.kernels.triton.targets import current

copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
MAX_ROWS = 64


@gluon.jit
def _copy(
    x, weight, x_tiles, weight_tiles, ready, free, row, output, N, begin, steps,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, MATRICES: gl.constexpr,
    BESIDE: gl.constexpr,
):  # fmt: skip
    """Copy tiles, each as soon as its place is free. The first tiles of weights come before the kernel in front has
    ended, which writes x."""
    bytes: gl.constexpr = (MATRICES * OUTPUTS + ROWS) * WIDTH * (x.dtype.primitive_bitwidth // 8)
    early = gl.minimum(steps, STAGES)
    for turn in range(early):
        mbarrier.expect(ready.index(turn), bytes)
        for part in gl.static_range(MATRICES):
            at = [output + part * N, (begin + turn) * WIDTH]
            copy_to_shared(weight, at, ready.index(turn), weight_tiles.index(turn * MATRICES + part))
    if not BESIDE:
        gdc_wait()
    for turn in range(early):
        copy_to_shared(x, [row, (begin + turn) * WIDTH], ready.index(turn), x_tiles.index(turn))
    for turn in range(STAGES, steps):
        stage = turn % STAGES
        mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), bytes)
        for part in gl.static_range(MATRICES):
            at = [output + part * N, (begin + turn) * WIDTH]
            copy_to_shared(weight, at, ready.index(stage), weight_tiles.index(stage * MATRICES + part))
        copy_to_shared(x, [row, (begin + turn) * WIDTH], ready.index(stage), x_tiles.index(stage))


@gluon.jit
def _multiply(
    shared, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, IS_SILU: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, SCALED: gl.constexpr,
    SPLIT: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    (
        x_scales, scales, bias, residual, out, x_tiles, weight_tiles, ready, free, row, output, share, M, N, steps,
    ) = shared  # fmt: skip
    type: gl.constexpr = x_tiles.dtype
    MATRICES: gl.constexpr = 2 if GATED else 1
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 256 // type.primitive_bitwidth])
    outputs = output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, SUMS))
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
    own = gl.minimum(outputs, N - 1)
    inside = gl.expand_dims(outputs < N, 1) & gl.expand_dims(rows < M, 0)
    target = gl.expand_dims(rows * N, 0) + gl.expand_dims(outputs, 1)
    if SPLIT:
        target += share * M * N
    added = gl.zeros((OUTPUTS, ROWS), gl.float32, layout=SUMS)
    if BIAS:
        added += gl.expand_dims(gl.load(bias + own).to(gl.float32), 1)
    if not BESIDE:
        gdc_wait()
        if ADD:
            added += gl.load(residual + target, mask=inside, other=0.0).to(gl.float32)
    total = gl.zeros((OUTPUTS, ROWS), gl.float32, layout=SUMS)
    total_up = gl.zeros((OUTPUTS, ROWS), gl.float32, layout=SUMS)
    for turn in range(steps):
        stage = turn % STAGES
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        right = x_tiles.index(stage).permute((1, 0))
        running = warpgroup_mma(weight_tiles.index(stage * MATRICES), right, total, is_async=True)
        if GATED:
            running_up = warpgroup_mma(weight_tiles.index(stage * 2 + 1), right, total_up, is_async=True)
            total, total_up = warpgroup_mma_wait(2, deps=(running, running_up))
        else:
            total = warpgroup_mma_wait(1, deps=(running,))
        if turn > 0:
            mbarrier.arrive(free.index((turn - 1) % STAGES))
    if GATED:
        total, total_up = warpgroup_mma_wait(0, deps=(total, total_up))
    else:
        total = warpgroup_mma_wait(0, deps=(total,))
    if SCALED:
        of_rows = gl.expand_dims(gl.load(x_scales + rows, mask=rows < M, other=0.0), 0)
        total *= of_rows * gl.expand_dims(gl.load(scales + own), 1)
        if GATED:
            total_up *= of_rows * gl.expand_dims(gl.load(scales + N + own), 1)
    if GATED:
        made: gl.constexpr = out.dtype.element_ty
        total = activated(total.to(made).to(gl.float32), IS_SILU) * total_up.to(made).to(gl.float32)
    if BESIDE:
        gdc_wait()
        if ADD:
            added += gl.load(residual + target, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + target, (total + added).to(out.dtype.element_ty), mask=inside)


@gluon.jit
def activated(gate, IS_SILU: gl.constexpr):
    if IS_SILU:
        inner = gate
    else:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + gl.exp(-inner))


@gluon.jit(do_not_specialize=["M", "shares"])
def _few_rows_kernel(
    x, weight, x_scales, scales, bias, residual, out, M, N, K, shares,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    IS_SILU: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, SCALED: gl.constexpr, SPLIT: gl.constexpr,
    BESIDE: gl.constexpr,
):  # fmt: skip
    """With GATED, N is half the number of the weight's outputs, and a program has as many of the second half as of
    the first. With SCALED, rows and outputs have scales. With SPLIT, a program multiplies a share of the width
    (split-K), and `out` has a plane for each share. With BESIDE, the kernel runs beside the previous one, which has
    called `let_next_run_beside`."""
    MATRICES: gl.constexpr = 2 if GATED else 1
    row_tiles = (M + ROWS - 1) // ROWS
    tile = gl.program_id(0)
    share = 0
    steps = K // WIDTH
    begin = 0
    if SPLIT:
        share = tile % shares
        tile = tile // shares
        begin = share * steps // shares
        steps = (share + 1) * steps // shares - begin
    row = tile % row_tiles * ROWS
    output = tile // row_tiles * OUTPUTS
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, WIDTH], x.layout)
    weight_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * MATRICES, OUTPUTS, WIDTH], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    # Fmt: skip.
    shared = (
        x_scales,
        scales,
        bias,
        residual,
        out,
        x_tiles,
        weight_tiles,
        ready,
        free,
        row,
        output,
        share,
        M,
        N,
        steps,
    )
    gl.warp_specialize(
        [
            (_multiply, (shared, OUTPUTS, ROWS, WIDTH, STAGES, GATED, IS_SILU, ADD, BIAS, SCALED, SPLIT, BESIDE)),
            (_copy, (
                x, weight, x_tiles, weight_tiles, ready, free, row, output, N, begin, steps,
                OUTPUTS, ROWS, WIDTH, STAGES, MATRICES, BESIDE,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


# Outputs of a program, measured on an H200 over the shapes of models with 0.6 to 14 billion parameters. A head has
# many outputs.
OUTPUTS, MANY_OUTPUTS = 64, 128
MANY = 65_536
MOST_TILE_ROWS = 128
COLUMN_BYTES = (256, 128)  # of the width that a program reads at a time, whichever divides the width
BARRIER_BYTES = 2048  # at most
# Products of this width, of up to so many rows, are cut into two shares where the chip has room for both.
SHARED_WIDTH, MOST_SHARED_ROWS = 8192, 256


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel takes this product: the copy engine reads whole tiles, from aligned addresses."""
    return (
        1 < x.shape[0] <= MAX_ROWS
        and x.dtype.itemsize <= 2
        and weight.shape[1] * weight.element_size() % COLUMN_BYTES[-1] == 0
        and x.is_contiguous()
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def fills_once(num_rows: int, num_outputs: int, device: torch.device) -> bool:
    """Return whether each program of a product gets a processor of its own."""
    return _num_programs(num_rows, num_outputs) <= num_processors(device.index or 0)


def rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: RowProduct,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    beside: bool = False,
) -> Tensor:
    """Multiply rows, which are normed already. `scales` are those of rows and of outputs, of float8; `beside` is
    explained at `skinny.linear`."""
    num_rows, width = x.shape
    num_made = weight.shape[0]
    outputs = product.num_outputs(num_made)
    out = product.residual
    if out is None:
        out = empty_rows(num_rows, outputs, product.out_dtype or x.dtype, x.device)
    each = _tile_rows(num_rows)
    shares = _num_shares(num_rows, num_made, width, x.device)
    is_whole = shares == 1
    made = out
    if not is_whole:
        made = torch.empty(shares, num_rows, num_made, dtype=torch.float32, device=x.device)
    is_gated = is_whole and product.gate is not None
    tile_outputs = MANY_OUTPUTS if outputs >= MANY and not is_gated and each <= MAX_ROWS else OUTPUTS
    programs = shares * cdiv(num_rows, each) * cdiv(made.shape[-1], tile_outputs)
    sizes = COLUMN_BYTES if each <= MAX_ROWS else COLUMN_BYTES[-1:]
    column_bytes = next(size for size in sizes if width * x.element_size() % size == 0)
    columns = column_bytes // x.element_size()
    stage_bytes = ((2 if is_gated else 1) * tile_outputs + each) * column_bytes
    absent = x  # any pointer will do
    parts = (part if part is not None else absent for part in (bias, product.residual))
    _few_rows_kernel[(programs,)](
        described(in_whole_tiles(x), each, columns),
        described(weight, tile_outputs, columns),
        *(scales or (absent, absent)),
        *parts,
        made,
        num_rows,
        made.shape[-1],
        width,
        shares,
        OUTPUTS=tile_outputs,
        ROWS=each,
        WIDTH=columns,
        STAGES=(current().shared_bytes - BARRIER_BYTES) // stage_bytes,
        GATED=is_gated,
        IS_SILU=is_gated and product.gate == "silu",
        ADD=is_whole and product.residual is not None,
        BIAS=is_whole and bias is not None,
        SCALED=scales is not None,
        SPLIT=not is_whole,
        BESIDE=beside,
        num_warps=4,
        **launch_options(),
    )
    if not is_whole:
        add_shares(made, bias, product, out)
    return out


def _tile_rows(num_rows: int) -> int:
    return min(MOST_TILE_ROWS, max(16, next_power_of_2(num_rows)))


def _num_programs(num_rows: int, num_outputs: int) -> int:
    return cdiv(num_rows, _tile_rows(num_rows)) * cdiv(num_outputs, OUTPUTS)


def _num_shares(num_rows: int, num_made: int, width: int, device: torch.device) -> int:
    """Return into how many parts of the width (split-K) a product is cut."""
    if not MAX_ROWS < num_rows <= MOST_SHARED_ROWS:
        return 1
    programs, processors = _num_programs(num_rows, num_made), num_processors(device.index or 0)
    is_long = width >= SHARED_WIDTH or 4 * programs <= processors
    return 2 if is_long and 2 * programs <= processors else 1


def described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix to the copy engine, in tiles."""
    each = tensor.element_size()
    layout = shared_layout(min(128, columns * each), 8 * each, 2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)


@functools.cache
def shared_layout(swizzled_bytes: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    """Return a layout that is described once: a launch takes less time then."""
    return gl.NVMMASharedLayout(swizzled_bytes, bits, rank)
