"""Several rows times weights of four bits (`int4`) on Hopper, at any number of rows.

A warp copies tiles of codes and of the input to shared memory with the copy engine. Two or four groups of four
warps take codes apart in registers, where they become the left operand of a tensor product in the compute type, while
the product of the tile before runs. The input is put into the order in which codes arrive (`_arrange_kernel`), so
that no number moves between threads; a gated product writes its outputs in that order for the product after it. The
kernel is written in Gluon, which has no interpreter: its tests need a GPU (`tests/gpu`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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
from triton.runtime.jit import constexpr_function

from penstock.kernels.interface import Activation
from penstock.kernels.triton.device import empty_rows, in_whole_tiles
from penstock.kernels.triton.few_hopper import activated, copy_to_shared, described
from penstock.kernels.triton.int4 import Int4Linear
from penstock.kernels.triton.int4_few import add_shares
from penstock.kernels.triton.int4_tiles import choose_tile
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.skinny import RowProduct


def _ptx(type: str, base: str, one: str, minus: str) -> str:
    """Eight codes of two words of 16 bits. The bits of `base` + code are a number, from which the base is subtracted;
    then code × scale + offset."""
    numbers = "".join(
        f"shr.u32 c, $4, {4 * index}; lop3.b32 c, c, 0x000f000f, {base}, 0xea;"
        f"fma.rn.{type} c, c, one, minus; fma.rn.{type} ${index}, c, $5, $6;"
        for index in range(4)
    )
    return f"{{ .reg .b32 c, one, minus; mov.b32 one, {one}; mov.b32 minus, {minus}; {numbers} }}"


# 0x4300 + code is 128 + code in bfloat16, and 0x6400 + code is 1024 + code in float16.
AS_BFLOAT16 = gl.constexpr(_ptx("bf16x2", "0x43004300", "0x3f803f80", "0xc300c300"))
AS_FLOAT16 = gl.constexpr(_ptx("f16x2", "0x64006400", "0x3c003c00", "0xe400e400"))


@constexpr_function
def _bits(size):
    return [1 << bit for bit in range(size.bit_length() - 1)]


@constexpr_function
def _words_layout(outputs, groups, quads):
    """Of words [outputs, groups, quads of a group, 8]: where the left operand of a product has their numbers."""
    registers = [[0, 0, 0, 1], [8, 0, 0, 0]]
    registers += [[0, 0, bit, 0] for bit in _bits(quads)] + [[0, bit, 0, 0] for bit in _bits(groups)]
    registers += [[64 * bit, 0, 0, 0] for bit in _bits(outputs // 64)]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [outputs, groups, quads, 8])


@constexpr_function
def _flat_layout(outputs, quads):
    """The same of words [outputs, 8 × quads]."""
    registers = [[0, 1], [8, 0]] + [[0, 8 * bit] for bit in _bits(quads)]
    registers += [[64 * bit, 0] for bit in _bits(outputs // 64)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [outputs, 8 * quads])


@gluon.jit
def _load_factors(pairs_at, step, K, GROUP: gl.constexpr, WIDTH: gl.constexpr, WORDS: gl.constexpr):
    """The words that hold scales and offsets of a step's groups: [outputs, groups]."""
    groups: gl.constexpr = WIDTH // GROUP if WIDTH > GROUP else 1
    group = gl.arange(0, groups, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    group = gl.minimum(step * WIDTH // GROUP + group, K // GROUP - 1)
    return gl.load(gl.expand_dims(pairs_at, 1) + gl.expand_dims(group, 0))


@gluon.jit
def _numbers(words, factors, type: gl.constexpr, WORDS: gl.constexpr, OPERAND: gl.constexpr):
    """The weights of words [outputs, 8 × quads], as the left operand [outputs, 32 × quads] of a product."""
    outputs: gl.constexpr = WORDS.shape[0]
    groups: gl.constexpr = WORDS.shape[1]
    quads: gl.constexpr = WORDS.shape[2]
    words = gl.convert_layout(words.reshape([outputs, groups, quads, 8]), WORDS)
    scale = factors.to(gl.int16).to(type, bitcast=True)
    offset = (factors >> 16).to(gl.int16).to(type, bitcast=True)
    scale, words = gl.broadcast(gl.expand_dims(gl.expand_dims(scale, 2), 3), words)
    offset, words = gl.broadcast(gl.expand_dims(gl.expand_dims(offset, 2), 3), words)
    if type == gl.bfloat16:
        a, b, c, d = gl.inline_asm_elementwise(
            AS_BFLOAT16, "=&r,=&r,=&r,=&r,r,r,r", [words, scale, offset],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            AS_FLOAT16, "=&r,=&r,=&r,=&r,r,r,r", [words, scale, offset],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    both = gl.join(gl.join(a, b), gl.join(c, d))  # [outputs, groups, quads, 8, 2, 2]
    return gl.convert_layout(
        both.permute((0, 1, 2, 5, 4, 3)).reshape([outputs, 32 * groups * quads]), OPERAND
    )


@triton.jit
def _arrange_kernel(x, norm, out, K, eps, NORM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Norm a row, and put its columns into the order in which `_numbers` makes weights: word c of a group of codes
    has columns 2 c, 2 c + GROUP / 2, 2 c + 1 and 2 c + 1 + GROUP / 2, and eight words make 32 neighbours."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < K
    plane, word = place % 32 // 8, place % GROUP // 32 * 8 + place % 8
    column = place // GROUP * GROUP + word * 2 + plane // 2 + plane % 2 * (GROUP // 2)
    weight = 1.0
    let_next_start()
    if NORM:
        weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    values = tl.load(x + row * K + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        values = values * tl.rsqrt(tl.sum(values * values, axis=0) / K + eps) * weight
    tl.store(out + row * K + place, values.to(out.dtype.element_ty), mask=inside)


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
    WORDS: gl.constexpr = _words_layout(OUTPUTS, groups, WIDTH // 32 // groups)
    FLAT: gl.constexpr = _flat_layout(OUTPUTS, WIDTH // 32)
    own = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    last_output = N * (2 if GATED else 1) - 1
    pairs_at = pairs + gl.minimum(output + PART * second + own, last_output).to(gl.int64) * (K // GROUP)
    total = gl.zeros((OUTPUTS, ROWS), gl.float32, layout=SUMS)
    factors = _load_factors(pairs_at, begin + FIRST, K, GROUP, WIDTH, WORDS)
    next_factors = _load_factors(pairs_at, begin + FIRST + TURNS, K, GROUP, WIDTH, WORDS)
    mbarrier.wait(ready.index(FIRST), 0)
    numbers = _numbers(code_tiles.index(FIRST * PARTS + PART).load(FLAT), factors, type, WORDS, OPERAND)
    for turn in range(FIRST + TURNS, end - begin, TURNS):
        stage = turn % STAGES
        before = (turn - TURNS) % STAGES
        running = warpgroup_mma(numbers, x_tiles.index(before).permute((1, 0)), total, is_async=True)
        factors = next_factors
        next_factors = _load_factors(pairs_at, begin + turn + TURNS, K, GROUP, WIDTH, WORDS)
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        words = code_tiles.index(stage * PARTS + PART).load(FLAT)
        next_numbers = _numbers(words, factors, type, WORDS, OPERAND)
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
            places = _place(outputs, NEXT_GROUP) if NEXT_GROUP > 0 else outputs
            target = gl.expand_dims(rows.to(gl.int64) * N, 0) + gl.expand_dims(places, 1)
            gdc_wait()
            if SPLIT:
                target += share.to(gl.int64) * M * N
            if BIAS:
                total += gl.expand_dims(gl.load(bias + gl.minimum(outputs, N - 1)).to(gl.float32), 1)
            if ADD:
                total += gl.load(residual + target, mask=inside, other=0.0).to(gl.float32)
            gl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _place(column, GROUP: gl.constexpr):
    """Where `_arrange_kernel` puts a column."""
    own = column % GROUP
    half, word = own // (GROUP // 2), own % (GROUP // 2) // 2
    plane = own % 2 * 2 + half
    return column - own + word // 8 * 32 + plane * 8 + word % 8


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


ARRANGED_BLOCK = 4096  # columns of a program where there is no norm


def rows(x: Tensor, weight: Int4Linear, product: RowProduct) -> Tensor:
    """Multiply any number of rows."""
    return _product(_arranged(x, weight.group, product), weight, product)[0]


def add_mlp(
    residual: Tensor, norm: Tensor, eps: float, gate_up: Int4Linear, down: Int4Linear, activation: Activation
) -> None:
    """residual += linear(gated(linear(norm(residual), gate_up)), down)"""
    gated = RowProduct(norm, eps, gate=activation)
    arranged = _arranged(residual, gate_up.group, gated)
    hidden, is_arranged = _product(arranged, gate_up, gated, next_group=down.group)
    added = RowProduct(residual=residual)
    _product(hidden if is_arranged else _arranged(hidden, down.group, added), down, added)


def _product(
    arranged: Tensor, weight: Int4Linear, product: RowProduct, next_group: int = 0
) -> tuple[Tensor, bool]:
    """Return the product of arranged rows, and whether its outputs are arranged for groups of `next_group`, which
    they are unless the parts of a split-K product are added up."""
    num_rows, width = arranged.shape
    num_made = weight.out_features
    outputs = product.num_outputs(num_made)
    out = product.residual
    if out is None:
        out = empty_rows(num_rows, outputs, product.out_dtype or arranged.dtype, arranged.device)
    tile_rows, tile, shares = choose_tile(
        num_rows, num_made, width, weight.group, product.gate is not None, arranged.device.index or 0
    )
    is_whole = shares == 1
    is_gated = is_whole and product.gate is not None
    made = out
    if not is_whole:
        made = torch.empty(shares, num_rows, num_made, dtype=torch.float32, device=arranged.device)
    output_tiles = triton.cdiv(num_made, tile.parts * tile.outputs)
    if is_gated:
        output_tiles = triton.cdiv(outputs, tile.outputs)
    absent = arranged  # any pointer will do
    parts = (part if part is not None else absent for part in (weight.bias, product.residual))
    _rows_kernel[(shares * triton.cdiv(num_rows, tile_rows) * output_tiles,)](
        described(in_whole_tiles(arranged), tile_rows, tile.width),
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


def _arranged(x: Tensor, group: int, product: RowProduct) -> Tensor:
    """Return the rows, normed if the product says so, in the order of codes in groups of this size."""
    num_rows, width = x.shape
    out = empty_rows(num_rows, width, x.dtype, x.device)
    block = triton.next_power_of_2(width)
    if product.norm is None:
        block = min(block, ARRANGED_BLOCK)
    _arrange_kernel[(num_rows, triton.cdiv(width, block))](
        x,
        product.norm if product.norm is not None else x,
        out,
        width,
        product.eps,
        NORM=product.norm is not None,
        GROUP=group,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
        **launch_options(),
    )
    return out
