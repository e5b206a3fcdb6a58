"""Paged attention of requests with one query token each. The context is cut into splits that run side by side and
are merged by a second, small kernel.

Tokens that verify the drafts of one request are decodes side by side, over the same blocks. One program computes
several of them, so that keys and values are read once for all. The nodes of a tree of drafts are such tokens
too: each sees the keys of its ancestors only, and not those of all nodes before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import operands
from penstock.kernels.interface import AttentionBatch, AttentionLayer
from penstock.kernels.triton.attention_parts import Partials, absorb, finish, load_tile
from penstock.kernels.triton.device import cdiv, next_power_of_2, num_processors
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.paged_kv import PagedLayer
from penstock.kernels.triton.targets import attention_tiles, current, stages

LARGEST_TILE = 128  # keys of a tile: a window may reach into one more
SMALLEST_TILE = 16
# Many programs, several of which share a processor, do better with small tiles.
MANY_PROGRAMS_PER_PROCESSOR = 6
FEW_SPLITS, MAX_SPLITS = 16, 128  # Merging takes its time: more than few only of very long contexts.
SHORTEST_SPLIT = 128
LONGEST_SPLIT = 4096
PROGRAMS_PER_PROCESSOR = 1.5
# Query rows of a program that computes several tokens of a request. With more, steps over short contexts take longer.
MOST_ROWS = 32
TREE_PLACES = tl.constexpr(operands.TREE_PLACES)


# Numbers that change from step to step are not specialized, nor is where its small arrays lie: each new kind would
# compile the kernel again.
@triton.jit(
    do_not_specialize=["table_stride", "window", "split_keys", "splits"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "neighbours", "ancestors"],
)
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    sinks,
    out,
    partial_out,
    partial_max,
    partial_sum,
    block_tables,
    context_lens,
    neighbours,
    ancestors,
    table_stride,
    scale,
    softcap,
    window,
    split_keys,
    splits,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_TREE: tl.constexpr,
):
    """A program computes the query heads of one KV head, in one split, for up to TOKENS neighbours."""
    first = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0)  # Programs side by side read memory side by side: the KV heads of a block.
    split = tl.program_id(2)
    per_group: tl.constexpr = H // G
    let_next_start()
    length = tl.load(context_lens + first)  # of the first token; each of its neighbours sees one key more
    count = 1
    if TOKENS > 1:
        if tl.load(neighbours + first) % TOKENS != 0:
            return  # The program of a token before this one computes it.
        count = tl.minimum(tl.load(neighbours + tl.num_programs(1) + first), TOKENS)
    wait_for_previous()
    skipped = split * split_keys  # Positions count from where the split begins.
    if HAS_WINDOW:
        skipped += tl.maximum(length - window, 0) // KEYS * KEYS
    end = tl.minimum(length + count - 1 - skipped, split_keys)
    row = tl.arange(0, ROWS)
    token = row // per_group
    row_inside = token < count
    head = (first + token) * H + group * per_group + row % per_group
    seen = length + token - skipped  # keys, from the beginning of the split, that each row sees
    whole = length  # keys that all rows see
    bits = token
    if IS_TREE:
        bits = tl.load(ancestors + first + token, mask=row_inside, other=0)
        whole = length - TREE_PLACES
    if IS_SPLIT:  # noqa: SIM102 (decided when compiled, unlike what follows)
        if end <= 0:
            tl.store(partial_max + head * splits + split, float("-inf"), mask=row_inside)
            return

    dims = tl.arange(0, D_PAD)
    inside = row_inside[:, None] & (dims < D)[None, :]
    queries = tl.load(q + head[:, None] * D + dims[None, :], mask=inside, other=0.0)
    table = block_tables + first * table_stride + skipped // BLOCK_SIZE
    cache = (k_cache, v_cache, k_scales, v_scales)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, D_PAD), tl.float32)
    num_whole = 0  # tiles in which every key is present and seen by all rows
    if not HAS_WINDOW:
        num_whole = tl.maximum(tl.minimum(whole - skipped, split_keys), 0) // KEYS
        for index in tl.range(0, num_whole, num_stages=STAGES):
            at = index * KEYS + tl.arange(0, KEYS)
            present = at < end
            tile = load_tile(cache, table, at, present, group, G, D, D_PAD, BLOCK_SIZE, False, HAS_SCALES)
            highest, total, weighted = absorb(
                highest, total, weighted, queries, tile, present, scale, softcap, False, HAS_CAP, HAS_SCALES
            )
    for index in tl.range(num_whole, tl.cdiv(end, KEYS), num_stages=STAGES if HAS_WINDOW else 1):
        at = index * KEYS + tl.arange(0, KEYS)
        present = at < end
        if HAS_WINDOW:
            present = present & (at >= length - window - skipped)
        tile = load_tile(cache, table, at, present, group, G, D, D_PAD, BLOCK_SIZE, True, HAS_SCALES)
        visible = present[None, :]
        if TOKENS > 1:
            visible = visible & (at[None, :] < seen[:, None])
            if HAS_WINDOW:
                visible = visible & (at[None, :] >= seen[:, None] - window)
        if IS_TREE:
            distance = tl.maximum(tl.minimum(seen[:, None] - 1 - at[None, :], TREE_PLACES - 1), 0)
            visible = visible & (((bits[:, None] >> distance) & 1) != 0)
        highest, total, weighted = absorb(
            highest, total, weighted, queries, tile, visible, scale, softcap, True, HAS_CAP, HAS_SCALES
        )

    part = head * splits + split
    partials = (partial_out, partial_max, partial_sum)
    finish(highest, total, weighted, head, row_inside, part, out, partials, sinks, H, D, IS_SPLIT, HAS_SINKS)


def decode_attention(
    q: Tensor, cache: PagedLayer, out: Tensor, layer: AttentionLayer, batch: AttentionBatch
) -> None:
    """Writes the first `batch.num_decodes` rows of `out`."""
    is_tree = batch.ancestors is not None
    assert not (is_tree and layer.window), "trees are for layers that see everything"
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
    count = batch.num_decodes
    tokens = 1 if batch.neighbours is None else tokens_together(heads // kv_heads)
    span = batch.max_context_len if layer.window is None else min(batch.max_context_len, layer.window)
    processors = num_processors(q.device.index or 0)
    programs = cdiv(count, tokens) * kv_heads  # at least
    split_keys = split_length(programs, span, processors)
    # A window need not begin where a tile does, so it may reach into one more; later tokens see further keys.
    reach = LARGEST_TILE + tokens - 1 if layer.window else 0
    splits = cdiv(span + reach, split_keys)
    is_crowded = programs * splits >= MANY_PROGRAMS_PER_PROCESSOR * processors
    padded_size = max(16, next_power_of_2(size))
    tile = _tile(padded_size, 2 * cache.keys.element_size(), is_small=splits == 1 and is_crowded)
    partials = Partials.for_rows(out, count * heads, splits, size)
    _decode_kernel[(kv_heads, count, splits)](
        q,
        cache.keys,
        cache.values,
        *cache.scale_pointers,
        out if layer.sinks is None else layer.sinks,
        out,
        partials.out,
        partials.highest,
        partials.total,
        batch.block_tables,
        batch.context_lens,
        batch.context_lens if batch.neighbours is None else batch.neighbours,
        batch.context_lens if batch.ancestors is None else batch.ancestors,
        batch.block_tables.stride(0),
        layer.scale,
        layer.softcap or 1.0,
        layer.window or 0,
        split_keys,
        splits,
        H=heads,
        G=kv_heads,
        D=size,
        D_PAD=padded_size,
        BLOCK_SIZE=cache.block_size,
        TOKENS=tokens,
        ROWS=max(16, next_power_of_2(tokens * heads // kv_heads)),
        KEYS=tile.keys,
        STAGES=tile.stages,
        IS_SPLIT=splits > 1,
        HAS_CAP=layer.softcap is not None,
        HAS_WINDOW=layer.window is not None,
        HAS_SCALES=cache.key_scales is not None,
        HAS_SINKS=layer.sinks is not None,
        IS_TREE=is_tree,
        num_warps=tile.num_warps,
        **launch_options(),
    )
    partials.merge_into(out, count * heads, heads, size, layer.sinks)


def tokens_together(heads_per_group: int) -> int:
    """Return the most tokens of a request that one program computes."""
    return max(1, MOST_ROWS // next_power_of_2(heads_per_group))


@dataclass(frozen=True, slots=True)
class KeyTile:
    keys: int
    stages: int
    num_warps: int = 4


def _tile(head_size: int, bytes_each: int, *, is_small: bool) -> KeyTile:
    """Return the number of keys of a tile, and how many tiles are read ahead. A key and its value take `bytes_each`
    for each of `head_size` numbers."""
    choice = attention_tiles()
    num_warps = 4
    if head_size <= 128 and not is_small:
        keys, most = choice.decode_keys, choice.decode_stages
    else:
        keys, most = choice.crowded_keys, choice.crowded_stages
        if head_size <= 128 and bytes_each == 4:
            num_warps = choice.crowded_warps
    while keys > SMALLEST_TILE and keys * head_size * bytes_each > current().shared_bytes:
        keys //= 2
    return KeyTile(keys, stages(most, keys * head_size * bytes_each), num_warps)


def split_length(
    programs: int,
    span: int,
    processors: int,
    shortest_split: int = SHORTEST_SPLIT,
    few_splits: int = FEW_SPLITS,
) -> int:
    """Return the number of keys for one program, so that the programs fill the chip evenly whatever the lengths of
    contexts. `programs` is their number without splitting."""
    # Where contexts may be long, most are likely short: no request should wait for one program that loops over
    # thousands of keys.
    keys = LONGEST_SPLIT if span <= LONGEST_SPLIT else LONGEST_SPLIT // 4
    shortest = max(next_power_of_2(span // few_splits), shortest_split)
    while keys > shortest and programs * -(-span // keys) < PROGRAMS_PER_PROCESSOR * processors:
        keys //= 2
    return max(keys, next_power_of_2(-(-span // MAX_SPLITS)))
