"""Some hundred rows times weights of four bits (`int4`) on Hopper, with the same amount of work for each processor.

Whole tiles seldom fill the processors evenly: 224 tiles on 132 processors take as long as 264. Here the steps of all
tiles stand in one row, and each program takes an equal part of that row (stream-K). A program starts with its last
tile. If its part ends inside of this tile, the program stores the sums at once, and the next program finishes the
tile. A program ends with its first tile, whose other sums the program before stored long ago. So nobody waits.

Where there is a tile for every two processors, two neighbouring programs share each tile. Each of them stores the
sums of half of the rows, and adds up the other half.

Otherwise the kernel is like `int4_hopper`. It is written in Gluon, which has no interpreter: its tests need a GPU
(`tests/gpu`), except those of how steps are divided.
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

from penstock.kernels.triton.device import in_whole_tiles
from penstock.kernels.triton.few_hopper import activated, copy_to_shared, described
from penstock.kernels.triton.int4 import Int4Linear
from penstock.kernels.triton.int4_operand import flat_layout, numbers_of, step_factors, words_layout
from penstock.kernels.triton.int4_tiles import Choice
from penstock.kernels.triton.overlap import launch_options
from penstock.kernels.triton.skinny import RowProduct

CHUNK = gl.constexpr(32)  # rows that are written at a time
THREADS = gl.constexpr(128)  # of a group of warps
# Each thread adds one to a flag after its sums are stored, and waits for all threads of the other program.
SIGNAL = gl.constexpr("red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0;")
AWAIT = gl.constexpr(
    "{ .reg .pred missing; .reg .u32 seen; again: ld.acquire.gpu.global.u32 seen, [$1];"
    "setp.lt.u32 missing, seen, 128; @missing bra again; mov.u32 $0, seen; }"
)


@gluon.jit
def _first_step(program, all_steps, programs):
    """Where the part of a program begins."""
    each = all_steps // programs
    return each * program + min(program, all_steps - each * programs)


@gluon.jit
def _part(index, begin, end, steps):
    """The tile of a program's part, the first step along its width, and the number of steps. Parts come from the last
    tile to the first."""
    tile = (end - 1) // steps - index
    first = max(begin - tile * steps, 0)
    return tile, first, min(end - tile * steps, steps) - first


@gluon.jit
def _turn(turn, begin, end, steps):
    """The tile and the step along its width of a program's turn."""
    tile = (end - 1) // steps
    length = end - max(begin, tile * steps)
    step = end - tile * steps - length + turn
    if turn >= length:
        tile -= 1 + (turn - length) // steps
        step = max(begin - tile * steps, 0) + (turn - length) % steps
    return tile, step


@gluon.jit
def _copy(
    x, codes, x_tiles, code_tiles, ready, free, second, begin, end, steps, row_tiles,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Copy tiles, each as soon as its place is free. The first codes are on their way before the kernel in front has
    ended, which writes the input."""
    bytes: gl.constexpr = OUTPUTS * WIDTH + ROWS * WIDTH * 2
    turns = 2 * (end - begin)
    early = gl.minimum(turns, STAGES)
    for turn in range(early):
        mbarrier.expect(ready.index(turn), bytes)
        tile, step = _turn(turn // 2, begin, end, steps)
        output = _output(tile, row_tiles, OUTPUTS, GATED)
        for part in gl.static_range(2):
            at = [output + part * second, (2 * step + turn % 2) * (WIDTH // 4)]
            copy_to_shared(codes, at, ready.index(turn), code_tiles.index(turn * 2 + part))
    gdc_wait()
    for turn in range(early):
        tile, step = _turn(turn // 2, begin, end, steps)
        at = [tile % row_tiles * ROWS, (2 * step + turn % 2) * WIDTH]
        copy_to_shared(x, at, ready.index(turn), x_tiles.index(turn))
    for turn in range(STAGES, turns):
        stage = turn % STAGES
        tile, step = _turn(turn // 2, begin, end, steps)
        output = _output(tile, row_tiles, OUTPUTS, GATED)
        column = (2 * step + turn % 2) * WIDTH
        mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), bytes)
        for part in gl.static_range(2):
            at = [output + part * second, column // 4]
            copy_to_shared(codes, at, ready.index(stage), code_tiles.index(stage * 2 + part))
        copy_to_shared(x, [tile % row_tiles * ROWS, column], ready.index(stage), x_tiles.index(stage))


@gluon.jit
def _output(tile, row_tiles, OUTPUTS: gl.constexpr, GATED: gl.constexpr):
    """The first output of a tile."""
    return tile // row_tiles * (OUTPUTS if GATED else 2 * OUTPUTS)


@gluon.jit
def _sums_at(partial, program, PART: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr):
    """Where the sums of a program's part are: four of a thread side by side."""
    chunks: gl.constexpr = OUTPUTS * ROWS // (4 * THREADS)
    own: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    chunk = gl.arange(0, chunks, layout=gl.SliceLayout(1, gl.SliceLayout(2, own)))
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(0, gl.SliceLayout(2, own)))
    number = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, own)))
    base = partial + (program * 2 + PART).to(gl.int64) * (OUTPUTS * ROWS)
    place = gl.expand_dims(gl.expand_dims(chunk * (4 * THREADS), 1), 2)
    place += gl.expand_dims(gl.expand_dims(thread * 4, 0), 2)
    return base + (place + gl.expand_dims(gl.expand_dims(number, 0), 1))


@gluon.jit
def _as_stored(total, OUTPUTS: gl.constexpr, ROWS: gl.constexpr):
    """[outputs, rows] as the result of a product → [chunks, threads, 4], without moving a number between threads."""
    own: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    parts = total.reshape([OUTPUTS // 64, 4, 2, 8, ROWS // 8, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6))
    return gl.convert_layout(parts.reshape([OUTPUTS * ROWS // 512, 128, 4]), own)


@gluon.jit
def _as_made(stored, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr):
    """The reverse of `_as_stored`."""
    parts = stored.reshape([OUTPUTS // 64, ROWS // 8, 4, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(parts.reshape([OUTPUTS, ROWS]), SUMS)


@gluon.jit
def _products(
    total, even, odd, pairs_at, x_tiles, code_tiles, ready, free, done, turn, K,
    PART: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """The products of two turns, which are one step. Codes of the second turn are taken apart while the product of
    the first runs. There is no wait between the two, because ptxas would delay such work until after the wait."""
    FLAT: gl.constexpr = flat_layout(WORDS.shape[0], WIDTH // 32)
    for index in gl.static_range(2):
        stage = (done + index) % STAGES
        mbarrier.wait(ready.index(stage), ((done + index) // STAGES) & 1)
        words = code_tiles.index(stage * 2 + PART).load(FLAT)
        numbers = numbers_of(words, even if index == 0 else odd, x_tiles.dtype, WORDS, OPERAND)
        total = warpgroup_mma(numbers, x_tiles.index(stage).permute((1, 0)), total, is_async=True)
        if index == 0:
            even = step_factors(pairs_at, turn + 2, K, GROUP, WIDTH, WORDS)
        else:
            odd = step_factors(pairs_at, turn + 3, K, GROUP, WIDTH, WORDS)
    total = warpgroup_mma_wait(1, deps=(total,))
    mbarrier.arrive(free.index(done % STAGES))
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(free.index((done + 1) % STAGES))
    return total, even, odd


@gluon.jit
def _multiply(
    shared, PART: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """One group of warps: one half of the outputs of all tiles of a program."""
    (
        pairs, bias, residual, out, partial, flags, x_tiles, code_tiles, ready, free, up_tile, up_ready, up_free,
        second, begin, end, steps, row_tiles, all_steps, M, N, K,
    ) = shared  # fmt: skip
    GROUP: gl.constexpr = OPTIONS[0]
    GATED: gl.constexpr = OPTIONS[1]
    IS_SILU: gl.constexpr = OPTIONS[2]
    ADD: gl.constexpr = OPTIONS[3]
    BIAS: gl.constexpr = OPTIONS[4]
    NEXT_GROUP: gl.constexpr = OPTIONS[5]
    SHARES: gl.constexpr = OPTIONS[6]
    type: gl.constexpr = x_tiles.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    groups: gl.constexpr = WIDTH // GROUP if WIDTH > GROUP else 1
    WORDS: gl.constexpr = words_layout(OUTPUTS, groups, WIDTH // 32 // groups)
    own = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    last_output = N * (2 if GATED else 1) - 1
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    last_tile = (end - 1) // steps
    stored = gl.where(end < (last_tile + 1) * steps, 1, 0)  # whether the next program finishes the last tile
    done = 0
    for index in range(last_tile - begin // steps + 1):
        tile, first, length = _part(index, begin, end, steps)
        row = tile % row_tiles * ROWS
        output = _output(tile, row_tiles, OUTPUTS, GATED)
        pairs_at = pairs + gl.minimum(output + PART * second + own, last_output).to(gl.int64) * (K // GROUP)
        total = gl.zeros((OUTPUTS, ROWS), gl.float32, layout=SUMS)
        even = step_factors(pairs_at, 2 * first, K, GROUP, WIDTH, WORDS)
        odd = step_factors(pairs_at, 2 * first + 1, K, GROUP, WIDTH, WORDS)
        turn = 2 * first
        for _ in range(length):
            total, even, odd = _products(
                total, even, odd, pairs_at, x_tiles, code_tiles, ready, free, done, turn, K,
                PART, GROUP, WIDTH, STAGES, WORDS, OPERAND,
            )  # fmt: skip
            done += 2
            turn += 2
        gdc_wait()
        if SHARES > 1:
            share = program % SHARES
            mine = _exchange(total, partial, flags, program, share, PART, OUTPUTS, ROWS, SHARES)
            own_rows: gl.constexpr = ROWS // SHARES
            _write(
                mine, bias, residual, out, row + share * own_rows, output + PART * second, M, N,
                OUTPUTS, own_rows, ADD, BIAS, NEXT_GROUP,
            )  # fmt: skip
        elif first + length < steps:
            gl.store(_sums_at(partial, program, PART, OUTPUTS, ROWS), _as_stored(total, OUTPUTS, ROWS))
            gl.inline_asm_elementwise(
                SIGNAL, "=r,l", [flags + (program * 2 + PART)], dtype=gl.int32, is_pure=False, pack=1
            )
        else:
            other = program
            lacks = first > 0
            while lacks:
                other -= 1
                gl.inline_asm_elementwise(
                    AWAIT, "=r,l", [flags + (other * 2 + PART)], dtype=gl.int32, is_pure=False, pack=1
                )
                sums = gl.load(_sums_at(partial, other, PART, OUTPUTS, ROWS), cache_modifier=".cg")
                total += _as_made(sums, OUTPUTS, ROWS, SUMS)
                lacks = _first_step(other, all_steps, programs) > tile * steps
            if GATED and PART == 1:
                mbarrier.wait(up_free, ((index - stored) & 1) ^ 1)
                up_tile.store(total.to(type))
                mbarrier.arrive(up_ready)
            else:
                if GATED:
                    mbarrier.wait(up_ready, (index - stored) & 1)
                    up = up_tile.load(SUMS).to(gl.float32)
                    mbarrier.arrive(up_free)
                    total = activated(total.to(type).to(gl.float32), IS_SILU) * up
                own_output = output if GATED else output + PART * second
                _write(
                    total, bias, residual, out, row, own_output, M, N, OUTPUTS, ROWS, ADD, BIAS, NEXT_GROUP
                )  # fmt: skip


@gluon.jit
def _exchange(
    total, partial, flags, program, share, PART: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr,
    SHARES: gl.constexpr,
):  # fmt: skip
    """Add up a tile that SHARES neighbouring programs have multiplied. Each of them adds up some of the rows."""
    size: gl.constexpr = ROWS // SHARES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    mine = gl.convert_layout(_chunk(total, 0, size), SUMS)
    for other in gl.static_range(SHARES):
        chunk = gl.convert_layout(_chunk(total, other, size), SUMS)
        if share == other:
            mine = chunk
        else:
            at = _sums_at(partial, program * SHARES + other, PART, OUTPUTS, size)
            gl.store(at, _as_stored(chunk, OUTPUTS, size))
    gl.inline_asm_elementwise(
        SIGNAL, "=r,l", [flags + (program * 2 + PART)], dtype=gl.int32, is_pure=False, pack=1
    )
    for distance in gl.static_range(1, SHARES):
        other = program - share + (share + distance) % SHARES
        gl.inline_asm_elementwise(
            AWAIT, "=r,l", [flags + (other * 2 + PART)], dtype=gl.int32, is_pure=False, pack=1
        )
        sums = gl.load(_sums_at(partial, other * SHARES + share, PART, OUTPUTS, size), cache_modifier=".cg")
        mine += _as_made(sums, OUTPUTS, size, SUMS)
    return mine


@gluon.jit
def _write(
    total, bias, residual, out, row, output, M, N,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, NEXT_GROUP: gl.constexpr,
):  # fmt: skip
    """Write a tile [outputs, rows], some rows at a time, so that a thread has eight neighbours of the output."""
    lanes: gl.constexpr = OUTPUTS // 8
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    column = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, LINES))
    place = output + column
    if (
        NEXT_GROUP == 128
    ):  # The tile is one half of a group, whose numbers alternate with those of the other half.
        place = (
            output // 128 * 128
            + column // 16 * 32
            + (column // 8 % 2 * 2 + output // 64 % 2) * 8
            + column % 8
        )
    if BIAS:
        added = gl.expand_dims(gl.load(bias + gl.minimum(place, N - 1)).to(gl.float32), 0)
    for chunk in gl.static_range(ROWS // CHUNK):
        own = row + chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LINES))
        lines = _chunk(total, chunk, CHUNK).permute((1, 0))
        made = gl.convert_layout(_arranged(lines, OUTPUTS, NEXT_GROUP), LINES)
        target = gl.expand_dims(own.to(gl.int64) * N, 1) + gl.expand_dims(place, 0)
        inside = gl.expand_dims(own < M, 1) & gl.expand_dims(place < N, 0)
        if BIAS:
            made += added
        if ADD:
            made += gl.load(residual + target, mask=inside, other=0.0).to(gl.float32)
        gl.store(out + target, made.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _chunk(total, INDEX: gl.constexpr, SIZE: gl.constexpr):
    """Columns INDEX × SIZE to (INDEX + 1) × SIZE of a tile, which are in registers of the same threads."""
    outputs: gl.constexpr = total.shape[0]
    half: gl.constexpr = total.shape[1] // 2
    if half < SIZE:
        chunk = total
    else:
        low, high = gl.split(total.reshape([outputs, 2, half]).permute((0, 2, 1)))
        if half > INDEX * SIZE:
            chunk = _chunk(low, INDEX, SIZE)
        else:
            chunk = _chunk(high, INDEX - half // SIZE, SIZE)
    return chunk


@gluon.jit
def _arranged(made, OUTPUTS: gl.constexpr, GROUP: gl.constexpr):
    """Columns of [rows, outputs] in the order of `_arrange_kernel`."""
    if GROUP == 0:
        arranged = made
    else:
        halves: gl.constexpr = 2 if GROUP <= OUTPUTS else 1
        groups: gl.constexpr = OUTPUTS // GROUP if GROUP <= OUTPUTS else 1
        parts = made.reshape([CHUNK, groups, halves, OUTPUTS // (groups * halves * 16), 8, 2])
        arranged = parts.permute((0, 1, 3, 5, 2, 4)).reshape([CHUNK, OUTPUTS])
    return arranged


@gluon.jit(do_not_specialize=["M"])
def _even_kernel(
    x, codes, pairs, bias, residual, out, partial, flags, M, N, K,
    GROUP: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, GATED: gl.constexpr, IS_SILU: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr,
    NEXT_GROUP: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """A tile is a tile of rows with two tiles of outputs, each for a group of warps. With GATED, N is half the number
    of outputs, and the second tile is of the second half. With SHARES, so many programs share each tile. With
    NEXT_GROUP, outputs are arranged for a product whose groups have that size."""
    row_tiles = (M + ROWS - 1) // ROWS
    steps = (K + 2 * WIDTH - 1) // (2 * WIDTH)
    each: gl.constexpr = OUTPUTS if GATED else 2 * OUTPUTS
    all_steps = row_tiles * ((N + each - 1) // each) * steps
    second = N if GATED else OUTPUTS  # from a tile's first outputs to its second ones
    if SHARES > 1:
        tile = gl.program_id(0) // SHARES
        share = gl.program_id(0) - tile * SHARES
        begin = tile * steps + share * steps // SHARES
        end = tile * steps + (share + 1) * steps // SHARES
    else:
        begin = _first_step(gl.program_id(0), all_steps, gl.num_programs(0))
        end = _first_step(gl.program_id(0) + 1, all_steps, gl.num_programs(0))
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, WIDTH], x.layout)
    code_tiles = gl.allocate_shared_memory(gl.int16, [STAGES * 2, OUTPUTS, WIDTH // 4], codes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    up_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    up_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    RESULTS: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
    up_tile = gl.allocate_shared_memory(x.dtype, [OUTPUTS, ROWS] if GATED else [1, 8], RESULTS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    mbarrier.init(up_ready, count=1)
    mbarrier.init(up_free, count=1)
    fence_async_shared()
    gdc_launch_dependents()
    shared = (
        pairs, bias, residual, out, partial, flags, x_tiles, code_tiles, ready, free, up_tile, up_ready, up_free,
        second, begin, end, steps, row_tiles, all_steps, M, N, K,
    )  # fmt: skip
    OPTIONS: gl.constexpr = (GROUP, GATED, IS_SILU, ADD, BIAS, NEXT_GROUP, SHARES)
    gl.warp_specialize(
        [
            (_multiply, (shared, gl.constexpr(0), OUTPUTS, ROWS, WIDTH, STAGES, OPTIONS)),
            (_multiply, (shared, gl.constexpr(1), OUTPUTS, ROWS, WIDTH, STAGES, OPTIONS)),
            (_copy, (
                x, codes, x_tiles, code_tiles, ready, free, second, begin, end, steps, row_tiles,
                OUTPUTS, ROWS, WIDTH, STAGES, GATED,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


FLAGS = 1024  # two for each program; a power of two


def multiply(
    x: Tensor,
    weight: Int4Linear,
    product: RowProduct,
    out: Tensor,
    flags: Tensor,
    choice: Choice,
    next_group: int,
) -> None:
    """Multiply arranged rows (`int4_operand.arranged`), which has cleared the flags as well."""
    num_rows, width = x.shape
    tile_rows, tile, programs = choice
    is_gated = product.gate is not None
    sums = torch.empty(programs, tile.parts, tile.outputs, tile_rows, dtype=torch.float32, device=x.device)
    absent = x  # any pointer will do
    parts = (part if part is not None else absent for part in (weight.bias, product.residual))
    _even_kernel[(programs,)](
        described(in_whole_tiles(x), tile_rows, tile.width),
        described(weight.codes.view(torch.int16), tile.outputs, tile.width // 4),
        weight.pairs,
        *parts,
        out,
        sums,
        flags,
        num_rows,
        product.num_outputs(weight.out_features),
        width,
        GROUP=weight.group,
        OUTPUTS=tile.outputs,
        ROWS=tile_rows,
        WIDTH=tile.width,
        STAGES=tile.num_stages,
        GATED=is_gated,
        IS_SILU=product.gate == "silu",
        ADD=product.residual is not None,
        BIAS=weight.bias is not None,
        NEXT_GROUP=next_group,
        SHARES=tile.shares,
        num_warps=4,
        **tile.options(),
        **launch_options(),
    )
