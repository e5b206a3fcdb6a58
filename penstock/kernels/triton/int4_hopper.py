"""Several rows times weights of four bits (`int4`) on Hopper, at any number of rows.

A warp copies tiles of codes and of the input to shared memory with the copy engine. Two or four groups of four
warps take codes apart in registers, where they become the left operand of a tensor product in the compute type, while
the product of the tile before runs. The input is put into the order in which codes arrive (`_arrange_kernel`), so
that no number moves between threads; a gated product writes its outputs in that order for the product after it. The
kernel is written in Gluon, which has no interpreter: its tests need a GPU (`tests/gpu`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.kernels.interface import Activation
from penstock.kernels.triton import int4_even
from penstock.kernels.triton.device import cdiv, empty_rows, in_whole_tiles
from penstock.kernels.triton.few_hopper import activated, copy_to_shared, described
from penstock.kernels.triton.int4 import Int4Linear
from penstock.kernels.triton.int4_few import add_shares
from penstock.kernels.triton.int4_operand import (
    arranged,
    flat_layout,
    numbers_of,
    place_of,
    step_factors,
    words_layout,
)
from penstock.kernels.triton.int4_tiles import Choice, choose_tile
from penstock.kernels.triton.overlap import launch_options
from penstock.kernels.triton.skinny import RowProduct


@gluon.jit
def _copy(
    x, codes, x_tiles, code_tiles, ready, free, row, output, second, begin, end,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Copy tiles, each as soon as its place is free. The first codes are on their way before the kernel in front has
    ended, which writes the input."""
    bytes: gl.constexpr = PARTS * OUTPUTS * WIDTH // 2 + ROWS * WIDTH * 2
    early = gl.minimum(end - begin, STAGES)
    for turn in range(early):
        mbarrier.expect(ready.index(turn), bytes)
        for part in gl.static_range(PARTS):
            at = [output + part * second, (begin + turn) * (WIDTH // 4)]
            copy_to_shared(codes, at, ready.index(turn), code_tiles.index(turn * PARTS + part))
    gdc_wait()
    for turn in range(early):
        copy_to_shared(x, [row, (begin + turn) * WIDTH], ready.index(turn), x_tiles.index(turn))
    for turn in range(STAGES, end - begin):
        stage = turn % STAGES
        mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), bytes)
        for part in gl.static_range(PARTS):
            at = [output + part * second, (begin + turn) * (WIDTH // 4)]
            copy_to_shared(codes, at, ready.index(stage), code_tiles.index(stage * PARTS + part))
        copy_to_shared(x, [row, (begin + turn) * WIDTH], ready.index(stage), x_tiles.index(stage))


@gluon.jit
def _multiply(
    shared, INDEX: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, TURNS: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """One group of warps: the products of one part of a program's outputs, for every TURNS-th tile of the width."""
    (
        pairs, bias, residual, out, x_tiles, code_tiles, ready, free, sums_tiles, sums_ready, up_tile, up_ready,
        row, output, second, share, begin, end, M, N, K,
    ) = shared  # fmt: skip
    GROUP: gl.constexpr = OPTIONS[0]
    SPLIT: gl.constexpr = OPTIONS[1]
    GATED: gl.constexpr = OPTIONS[2]
    IS_SILU: gl.constexpr = OPTIONS[3]
    ADD: gl.constexpr = OPTIONS[4]
    BIAS: gl.constexpr = OPTIONS[5]
    NEXT_GROUP: gl.constexpr = OPTIONS[6]
    PART: gl.constexpr = INDEX % PARTS
    FIRST: gl.constexpr = INDEX // PARTS
    type: gl.constexpr = x_tiles.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    groups: gl.constexpr = WIDTH // GROUP if WIDTH > GROUP else 1
    WORDS: gl.constexpr = words_layout(OUTPUTS, groups, WIDTH // 32 // groups)
    FLAT: gl.constexpr = flat_layout(OUTPUTS, WIDTH // 32)
    own = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    last_output = N * (2 if GATED else 1) - 1
    pairs_at = pairs + gl.minimum(output + PART * second + own, last_output).to(gl.int64) * (K // GROUP)
    total = gl.zeros((OUTPUTS, ROWS), gl.float32, layout=SUMS)
    factors = step_factors(pairs_at, begin + FIRST, K, GROUP, WIDTH, WORDS)
    next_factors = step_factors(pairs_at, begin + FIRST + TURNS, K, GROUP, WIDTH, WORDS)
    mbarrier.wait(ready.index(FIRST), 0)
    numbers = numbers_of(code_tiles.index(FIRST * PARTS + PART).load(FLAT), factors, type, WORDS, OPERAND)
    for turn in range(FIRST + TURNS, end - begin, TURNS):
        stage = turn % STAGES
        before = (turn - TURNS) % STAGES
        running = warpgroup_mma(numbers, x_tiles.index(before).permute((1, 0)), total, is_async=True)
        factors = next_factors
        next_factors = step_factors(pairs_at, begin + turn + TURNS, K, GROUP, WIDTH, WORDS)
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        words = code_tiles.index(stage * PARTS + PART).load(FLAT)
        next_numbers = numbers_of(words, factors, type, WORDS, OPERAND)
        total, numbers = warpgroup_mma_wait(0, deps=(running, numbers))
        mbarrier.arrive(free.index(before))
        numbers = next_numbers
    last = end - begin - 1
    stage = (last - (last - FIRST) % TURNS) % STAGES
    running = warpgroup_mma(numbers, x_tiles.index(stage).permute((1, 0)), total, is_async=True)
    total, numbers = warpgroup_mma_wait(0, deps=(running, numbers))
    if FIRST > 0:
        sums_tiles.index((FIRST - 1) * PARTS + PART).store(total)
        mbarrier.arrive(sums_ready.index(PART))
    else:
        if TURNS > 1:
            mbarrier.wait(sums_ready.index(PART), 0)
            for other in gl.static_range(TURNS - 1):
                total += sums_tiles.index(other * PARTS + PART).load(SUMS)
        if GATED and PART == 1:
            up_tile.store(total.to(type))
            mbarrier.arrive(up_ready)
        else:
            if GATED:
                mbarrier.wait(up_ready, 0)
                total = activated(total.to(type).to(gl.float32), IS_SILU) * up_tile.load(SUMS).to(gl.float32)
            outputs = output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, SUMS))
            if not GATED:
                outputs += PART * second
            rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
            inside = gl.expand_dims(outputs < N, 1) & gl.expand_dims(rows < M, 0)
            places = place_of(outputs, NEXT_GROUP) if NEXT_GROUP > 0 else outputs
            target = gl.expand_dims(rows.to(gl.int64) * N, 0) + gl.expand_dims(places, 1)
            gdc_wait()
            if SPLIT:
                target += share.to(gl.int64) * M * N
            if BIAS:
                total += gl.expand_dims(gl.load(bias + gl.minimum(outputs, N - 1)).to(gl.float32), 1)
            if ADD:
                total += gl.load(residual + target, mask=inside, other=0.0).to(gl.float32)
            gl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["M", "shares"])
def _rows_kernel(
    x, codes, pairs, bias, residual, out, M, N, K, shares,
    GROUP: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, SPLIT: gl.constexpr, GATED: gl.constexpr, IS_SILU: gl.constexpr,
    ADD: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr, TURNS: gl.constexpr, NEXT_GROUP: gl.constexpr,
):  # fmt: skip
    """A program multiplies a tile of rows with PARTS tiles of outputs, over a part of the width (split-K). With
    SPLIT, `out` has a plane for each share. With GATED, N is half the number of outputs, and the second part is of
    the second half. For each part there are TURNS groups of warps, which take turns along the width. With NEXT_GROUP,
    outputs are arranged for a product whose groups have that size."""
    row_tiles = (M + ROWS - 1) // ROWS
    tile = gl.program_id(0) // shares
    share = gl.program_id(0) - tile * shares
    row = tile % row_tiles * ROWS
    output = tile // row_tiles * (OUTPUTS if GATED else PARTS * OUTPUTS)
    second = N if GATED else OUTPUTS  # from a tile's first outputs to its second ones
    steps = (K + WIDTH - 1) // WIDTH
    begin = share * steps // shares
    end = (share + 1) * steps // shares
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, WIDTH], x.layout)
    code_tiles = gl.allocate_shared_memory(gl.int16, [STAGES * PARTS, OUTPUTS, WIDTH // 4], codes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums_ready = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    up_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    RESULTS: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
    sums_tiles = gl.allocate_shared_memory(
        gl.float32, [PARTS * (TURNS - 1), OUTPUTS, ROWS] if TURNS > 1 else [1, 1, 8], RESULTS
    )
    up_tile = gl.allocate_shared_memory(x.dtype, [OUTPUTS, ROWS] if GATED else [1, 8], RESULTS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PARTS)
    for part in gl.static_range(PARTS):
        mbarrier.init(sums_ready.index(part), count=TURNS - 1 if TURNS > 1 else 1)
    mbarrier.init(up_ready, count=1)
    fence_async_shared()
    gdc_launch_dependents()
    shared = (
        pairs, bias, residual, out, x_tiles, code_tiles, ready, free, sums_tiles, sums_ready, up_tile, up_ready,
        row, output, second, share, begin, end, M, N, K,
    )  # fmt: skip
    OPTIONS: gl.constexpr = (GROUP, SPLIT, GATED, IS_SILU, ADD, BIAS, NEXT_GROUP)
    if PARTS * TURNS == 2:
        gl.warp_specialize(
            [
                (_multiply, (shared, gl.constexpr(0), OUTPUTS, ROWS, WIDTH, STAGES, PARTS, TURNS, OPTIONS)),
                (_multiply, (shared, gl.constexpr(1), OUTPUTS, ROWS, WIDTH, STAGES, PARTS, TURNS, OPTIONS)),
                (_copy, (
                    x, codes, x_tiles, code_tiles, ready, free, row, output, second, begin, end,
                    OUTPUTS, ROWS, WIDTH, STAGES, PARTS,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (shared, gl.constexpr(0), OUTPUTS, ROWS, WIDTH, STAGES, PARTS, TURNS, OPTIONS)),
                (_multiply, (shared, gl.constexpr(1), OUTPUTS, ROWS, WIDTH, STAGES, PARTS, TURNS, OPTIONS)),
                (_multiply, (shared, gl.constexpr(2), OUTPUTS, ROWS, WIDTH, STAGES, PARTS, TURNS, OPTIONS)),
                (_multiply, (shared, gl.constexpr(3), OUTPUTS, ROWS, WIDTH, STAGES, PARTS, TURNS, OPTIONS)),
                (_copy, (
                    x, codes, x_tiles, code_tiles, ready, free, row, output, second, begin, end,
                    OUTPUTS, ROWS, WIDTH, STAGES, PARTS,
                )),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def rows(x: Tensor, weight: Int4Linear, product: RowProduct) -> Tensor:
    """Multiply any number of rows."""
    choice = _choice(x.shape[0], weight, product)
    flags = _flags(x, choice)
    return _product(arranged(x, weight.group, product, flags), weight, product, choice, flags)[0]


def add_mlp(
    residual: Tensor, norm: Tensor, eps: float, gate_up: Int4Linear, down: Int4Linear, activation: Activation
) -> None:
    """residual += linear(gated(linear(norm(residual), gate_up)), down)"""
    gated, added = RowProduct(norm, eps, gate=activation), RowProduct(residual=residual)
    num_rows = residual.shape[0]
    first, second = _choice(num_rows, gate_up, gated), _choice(num_rows, down, added)
    flags = _flags(residual, first, second)
    x = arranged(residual, gate_up.group, gated, flags)
    hidden, is_arranged = _product(x, gate_up, gated, first, flags, next_group=down.group)
    if not is_arranged:
        hidden = arranged(hidden, down.group, added)
    _product(hidden, down, added, second, None if flags is None else flags[int4_even.FLAGS :])


def _choice(num_rows: int, weight: Int4Linear, product: RowProduct) -> Choice:
    return choose_tile(
        num_rows,
        weight.out_features,
        weight.in_features,
        weight.group,
        product.gate is not None,
        weight.codes.device.index or 0,
    )


def _flags(x: Tensor, *choices: Choice) -> Tensor | None:
    """Return memory for the flags of products whose programs wait for each other. `arranged` clears the flags."""
    if not any(choice.tile.is_even for choice in choices):
        return None
    return torch.empty(len(choices) * int4_even.FLAGS, dtype=torch.int32, device=x.device)


def _product(
    x: Tensor,
    weight: Int4Linear,
    product: RowProduct,
    choice: Choice,
    flags: Tensor | None,
    next_group: int = 0,
) -> tuple[Tensor, bool]:
    """Return the product of arranged rows, and whether its outputs are arranged for groups of `next_group`, which
    they are unless the parts of a split-K product are added up."""
    num_rows, width = x.shape
    num_made = weight.out_features
    outputs = product.num_outputs(num_made)
    out = product.residual
    if out is None:
        out = empty_rows(num_rows, outputs, product.out_dtype or x.dtype, x.device)
    tile_rows, tile, shares = choice
    if tile.is_even:
        assert flags is not None
        int4_even.multiply(x, weight, product, out, flags, choice, next_group)
        return out, True
    is_whole = shares == 1
    is_gated = is_whole and product.gate is not None
    made = out
    if not is_whole:
        made = torch.empty(shares, num_rows, num_made, dtype=torch.float32, device=x.device)
    output_tiles = cdiv(num_made, tile.parts * tile.outputs)
    if is_gated:
        output_tiles = cdiv(outputs, tile.outputs)
    absent = x  # any pointer will do
    parts = (part if part is not None else absent for part in (weight.bias, product.residual))
    _rows_kernel[(shares * cdiv(num_rows, tile_rows) * output_tiles,)](
        described(in_whole_tiles(x), tile_rows, tile.width),
        described(weight.codes.view(torch.int16), tile.outputs, tile.width // 4),
        weight.pairs,
        *parts,
        made,
        num_rows,
        outputs if is_gated else num_made,
        width,
        shares,
        GROUP=weight.group,
        OUTPUTS=tile.outputs,
        ROWS=tile_rows,
        WIDTH=tile.width,
        STAGES=tile.num_stages,
        SPLIT=not is_whole,
        GATED=is_gated,
        IS_SILU=is_gated and product.gate == "silu",
        ADD=is_whole and product.residual is not None,
        BIAS=is_whole and weight.bias is not None,
        PARTS=tile.parts,
        TURNS=tile.turns,
        NEXT_GROUP=next_group if is_whole else 0,
        num_warps=4,
        **tile.options(),
        **launch_options(),
    )
    if not is_whole:
        add_shares(made, weight.bias, product, out)
    return out, is_whole
