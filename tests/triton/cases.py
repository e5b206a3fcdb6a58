"""The Triton kernels against the torch functions that define them. One set of cases, for any device: small shapes in
Triton's interpreter (`tests/triton`), real ones on a GPU (`tests/gpu`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import (
    TREE_PLACES,
    Activation,
    AttentionBatch,
    AttentionLayer,
    DenseWeight,
    ExpertWeights,
    Float8Weight,
    GroupQuantWeight,
    IndexLayer,
    LatentLayer,
    Routing,
    SamplingBatch,
    WeightData,
)
from penstock.kernels.reference import TorchOps
from penstock.kernels.triton.ops import TritonOps

BLOCK_SIZE = 16
Lengths = list[tuple[int, int]]  # of each request: tokens before this step, tokens of this step


@dataclass(frozen=True, slots=True)
class Bench:
    """A device and a compute type, with the backend to test and its definition on them."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None

    @property
    def ops(self) -> TritonOps:
        return TritonOps(self.device, self.dtype, self.kv_dtype)

    @property
    def definition(self) -> TorchOps:
        return TorchOps(self.device, self.dtype, self.kv_dtype)

    @property
    def exact(self) -> TorchOps:
        return TorchOps(self.device, torch.float32)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def matrix(self, outputs: int, width: int) -> DenseWeight:
        return DenseWeight(self.normal(outputs, width) / width**0.5)

    def int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def batch(self, lengths: Lengths, num_blocks: int) -> AttentionBatch:
        """Over shuffled blocks."""
        order = torch.randperm(num_blocks).tolist()
        width = max(-(-(before + count) // BLOCK_SIZE) for before, count in lengths)
        tables, positions, slots, starts = [], [], [], [0]
        for before, count in lengths:
            table = [order.pop() for _ in range(-(-(before + count) // BLOCK_SIZE))]
            tables.append(table + [0] * (width - len(table)))
            for position in range(before, before + count):
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(starts[-1] + count)
        return AttentionBatch(
            positions=self.int32(positions),
            slots=self.int32(slots),
            query_starts=self.int32(starts),
            context_lens=self.int32([before + count for before, count in lengths]),
            block_tables=self.int32(tables),
            num_requests=len(lengths),
            max_query_len=max(count for _, count in lengths),
            max_context_len=max(before + count for before, count in lengths),
            num_decodes=next((i for i, (_, count) in enumerate(lengths) if count > 1), len(lengths)),
        )


@dataclass(frozen=True, slots=True)
class Heads:
    count: int
    kv_count: int
    size: int
    window: int | None = None
    softcap: float | None = None
    norms: bool = False
    sinks: bool = False
    chunk: int | None = None

    def layer(self, bench: Bench, max_positions: int) -> AttentionLayer:
        norms = [
            torch.rand(self.size, device=bench.device).to(bench.dtype) + 0.5 if self.norms else None
            for _ in range(2)
        ]
        return AttentionLayer(
            num_heads=self.count,
            num_kv_heads=self.kv_count,
            head_dim=self.size,
            scale=self.size**-0.5,
            rope=torch.randn(max_positions, self.size, device=bench.device),
            window=self.window,
            softcap=self.softcap,
            q_norm=norms[0],
            k_norm=norms[1],
            sinks=torch.randn(self.count, device=bench.device) * 2 if self.sinks else None,
            chunk=self.chunk,
        )


def as_decodes(batch: AttentionBatch) -> AttentionBatch:
    """The same tokens as decodes side by side, as the engine lays out drafts."""
    starts, contexts = batch.query_starts.long(), batch.context_lens.long()
    counts = starts.diff()
    requests = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    before = torch.arange(len(requests), device=counts.device) - starts[requests]
    return replace(
        batch,
        query_starts=torch.arange(len(requests) + 1, dtype=torch.int32, device=counts.device),
        context_lens=(contexts[requests] - counts[requests] + before + 1).int(),
        block_tables=batch.block_tables[requests],
        num_requests=len(requests),
        max_query_len=1,
        num_decodes=len(requests),
        neighbours=torch.stack((before, counts[requests] - before)).int(),
    )


def as_trees(batch: AttentionBatch) -> AttentionBatch:
    """The same tokens as decodes, of which those of a request with 2 to 32 are a random tree: the first is its
    root."""
    made = as_decodes(batch)
    ancestors, positions = [-1] * made.num_decodes, made.positions.tolist()
    starts = batch.query_starts.tolist()
    for first, end in pairwise(starts):
        if end - first > TREE_PLACES:
            continue
        paths: list[list[int]] = [[0]]
        for node in range(1, end - first):
            parent = int(torch.randint(node, ()))
            paths.append([*paths[parent], node])
        for node, path in enumerate(paths):
            ancestors[first + node] = sum(1 << (node - each) for each in path) + (-1 << (node + 1))
            positions[first + node] = positions[first] + len(path) - 1
    to_int32 = [(each + 2**31) % 2**32 - 2**31 for each in ancestors]
    device = made.positions.device
    return replace(
        made,
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        ancestors=torch.tensor(to_int32, dtype=torch.int32, device=device),
    )


def attention_error(
    bench: Bench, heads: Heads, lengths: Lengths, *, drafts: bool = False, trees: bool = False
) -> float:
    """Relative, of the result and of what the cache holds afterwards; with the same keys and values in both backends'
    caches, each in its own layout. With `drafts`, our backend gets each token as a decode of its own; with
    `trees`, both get random trees."""
    torch.manual_seed(0)
    num_blocks = sum(-(-(before + count) // BLOCK_SIZE) for before, count in lengths) + 3
    layer = heads.layer(bench, max(before + count for before, count in lengths) + 1)
    batch = bench.batch(lengths, num_blocks)
    width = (heads.count + 2 * heads.kv_count) * heads.size
    backends = (bench.ops, bench.definition)
    stores = [ops.allocate_kv(1, num_blocks, BLOCK_SIZE, heads.kv_count, heads.size) for ops in backends]
    for ours, theirs in zip(stores[0].tensors, stores[1].tensors, strict=True):
        is_coded = theirs.dtype == torch.int8
        theirs.copy_(torch.randint(-127, 128, theirs.shape) if is_coded else torch.randn(theirs.shape))
        if theirs.dim() == 4:  # scales of such codes
            theirs.abs_().div_(50)
        ours[:, :num_blocks] = theirs.transpose(2, 3)
    qkv = bench.normal(batch.positions.shape[0], width)
    if trees:
        batch = as_trees(batch)
    batches = (as_decodes(batch) if drafts else batch, batch)
    got, wanted = (
        ops.attend(qkv, layer, store.layer(0), each).float()
        for ops, store, each in zip(backends, stores, batches, strict=True)
    )
    cached = [
        (ours[:, :num_blocks].float(), theirs.transpose(2, 3).float())
        for ours, theirs in zip(stores[0].tensors, stores[1].tensors, strict=True)
    ]
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in [(got, wanted), *cached])


def check_moves(ops: TritonOps | TorchOps) -> None:
    """Tokens of all layers move to their places, in the order of each request's pairs."""
    store = ops.allocate_kv(2, 7, BLOCK_SIZE, 2, 40)
    token_axis = 3 if isinstance(ops, TritonOps) else 2
    for tensor in store.tensors:
        is_coded = tensor.element_size() == 1
        made = torch.randint(-99, 99, tensor.shape) if is_coded else torch.randn(tensor.shape)
        tensor.copy_(made.to(tensor.device))
    sources = [[17, 19, 22, 40], [60, 61, 70, 63], [100, 104, 104, 104]]
    targets = [[17, 18, 19, 20], [60, 61, 62, 63], [100, 101, 104, 104]]
    expected = [tensor.float().movedim(token_axis, 2).clone() for tensor in store.tensors]
    for each in expected:
        by_slot = each.flatten(1, 2)
        for moved in zip(sources, targets, strict=True):
            for source, target in zip(*moved, strict=True):
                by_slot[:, target] = by_slot[:, source].clone()
        each.copy_(by_slot.view(each.shape))
    device = store.tensors[0].device
    store.move_tokens(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
    for tensor, wanted in zip(store.tensors, expected, strict=True):
        assert torch.equal(tensor.float().movedim(token_axis, 2), wanted)


@dataclass(frozen=True, slots=True)
class Latents:
    """Sizes of attention over latents."""

    heads: int
    latent: int
    rotated: int
    plain: int
    value: int
    indexed: int = 0  # numbers of an indexer's key

    def index(self, layer: LatentLayer) -> IndexLayer:
        norm = torch.ones(self.indexed, device=layer.rope.device)
        return IndexLayer(
            4, self.indexed, self.rotated, 20, self.latent + self.rotated, layer.rope, norm, norm
        )

    def layer(self, bench: Bench, max_positions: int) -> LatentLayer:
        return LatentLayer(
            num_heads=self.heads,
            latent_dim=self.latent,
            rope_dim=self.rotated,
            scale=(self.plain + self.rotated) ** -0.5,
            rope=torch.randn(max_positions, self.rotated, device=bench.device),
            norm=torch.rand(self.latent, device=bench.device) + 0.5,
            norm_eps=1e-6,
            key_up=bench.normal(self.heads, self.plain, self.latent) / self.latent**0.5,
            value_up=bench.normal(self.heads, self.latent, self.value) / self.latent**0.5,
        )


def latent_error(bench: Bench, latents: Latents, lengths: Lengths) -> float:
    """Relative, of the result and of what the cache holds afterwards."""
    torch.manual_seed(0)
    num_blocks = sum(-(-(before + count) // BLOCK_SIZE) for before, count in lengths) + 3
    layer = latents.layer(bench, max(before + count for before, count in lengths) + 1)
    batch = bench.batch(lengths, num_blocks)
    tokens, width = batch.positions.shape[0], latents.latent + latents.rotated
    backends = (bench.ops, bench.definition)
    stores = [ops.allocate_latents(1, num_blocks, BLOCK_SIZE, width + latents.indexed) for ops in backends]
    for ours, theirs in zip(stores[0].tensors, stores[1].tensors, strict=True):
        is_coded = theirs.dtype == torch.int8
        theirs.copy_(torch.randint(-127, 128, theirs.shape) if is_coded else torch.randn(theirs.shape))
        if theirs.dim() == 3:  # scales of such codes
            theirs.abs_().div_(50)
        ours[:, :num_blocks] = theirs
    query = bench.normal(tokens, latents.heads * (latents.plain + latents.rotated))
    latent = bench.normal(tokens, width)
    chosen: list[Tensor | None] = [None, None]
    if latents.indexed:
        small, weights = bench.normal(tokens, 5 * latents.indexed), torch.rand(tokens, 4, device=bench.device)
        inputs = small[:, latents.indexed :], small[:, : latents.indexed], weights
        chosen = [
            ops.choose_tokens(*inputs, latents.index(layer), store.layer(0), batch)
            for ops, store in zip(backends, stores, strict=True)
        ]
        assert all(each is not None for each in chosen)
    got, wanted = (
        ops.attend_latent(query, latent, layer, store.layer(0), batch, which).float()
        for ops, store, which in zip(backends, stores, chosen, strict=True)
    )
    pairs = [(got, wanted)]
    for ours, theirs in zip(stores[0].tensors, stores[1].tensors, strict=True):
        pairs.append((ours[:, :num_blocks].float(), theirs.float()))
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def assert_elementwise(bench: Bench, rows: int, width: int) -> None:
    ops, definition = bench.ops, bench.definition
    x, residual = bench.normal(rows, width), bench.normal(rows, width)
    weight = torch.rand(width, device=bench.device).to(bench.dtype)
    tolerance = {} if bench.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), definition.rms_norm(x, weight, 1e-5), **tolerance
    )
    ours, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(
        ops.add_rms_norm(x, ours, weight, 1e-5), definition.add_rms_norm(x, theirs, weight, 1e-5), **tolerance
    )
    torch.testing.assert_close(ours, theirs, **tolerance)
    both = torch.cat([x, residual], 1)
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_swiglu", "relu", "limited_silu")
    for activation in activations:
        torch.testing.assert_close(
            ops.gated(both, activation), definition.gated(both, activation), **tolerance
        )
    for gate in (residual, both[:, width:], residual[:, :1]):
        torch.testing.assert_close(ops.opened(x, gate), definition.opened(x, gate), **tolerance)


def block_error(bench: Bench, rows: int, heads: Heads, hidden: int, inner: int, bias: bool) -> float:
    """Of an attention half and an MLP half of a layer, against float32; relative to the largest value."""
    ops, exact = bench.ops, bench.exact

    def packed(outputs: int, width: int) -> tuple[object, object]:
        weight = bench.matrix(outputs, width)
        offsets = bench.normal(outputs) if bias else None
        wide = None if offsets is None else offsets.float()
        return ops.pack_linear([weight], offsets), exact.pack_linear([weight], wide)

    gate_up, down = packed(2 * inner, hidden), packed(hidden, inner)
    qkv = packed((heads.count + 2 * heads.kv_count) * heads.size, hidden)
    output = packed(hidden, heads.count * heads.size)
    norm = torch.rand(hidden, device=bench.device) + 0.5
    layer = heads.layer(bench, 512)
    batch = bench.batch([(7 * i % 100, 1) for i in range(rows)], num_blocks=8 * rows)
    ours = bench.normal(rows, hidden)
    theirs = ours.float()
    stores = [each.allocate_kv(1, 8 * rows, BLOCK_SIZE, heads.kv_count, heads.size) for each in (ops, exact)]
    for each, residual, store, part in ((ops, ours, stores[0], 0), (exact, theirs, stores[1], 1)):
        each.attention_block(residual, norm, 1e-5, qkv[part], output[part], layer, store.layer(0), batch)
        each.mlp_block(residual, norm, 1e-5, gate_up[part], down[part], "silu")
    return float((ours.float() - theirs).abs().max() / theirs.abs().max())


def share_of_close_tokens(
    bench: Bench,
    tokens: int,
    experts: int,
    routing: Routing,
    hidden: int,
    inner: int,
    activation: Activation = "silu",
    bias: bool = False,
) -> float:
    """Rounding lets a token near a tie take another expert, so not all can be."""

    def biases(size: int) -> Tensor | None:
        return torch.randn(size, device=bench.device) if bias else None

    parts = [
        ExpertWeights(
            bench.matrix(inner, hidden),
            bench.matrix(inner, hidden),
            bench.matrix(hidden, inner),
            biases(2 * inner),
            biases(hidden),
        )
        for _ in range(experts)
    ]
    router = bench.matrix(experts, hidden)
    norm = torch.rand(hidden, device=bench.device) + 0.5
    ours = bench.normal(tokens, hidden)
    theirs = ours.clone()
    for ops, residual in ((bench.ops, ours), (bench.definition, theirs)):
        packed = ops.pack_experts(iter(parts))
        ops.moe_block(residual, norm, 1e-5, ops.pack_linear([router]), packed, routing, activation)
    close = (ours.float() - theirs.float()).abs().amax(dim=1) < 0.03 * theirs.abs().max()
    return float(close.float().mean())


def placed_expert_error(bench: Bench, rows: int, experts: int, hidden: int, inner: int) -> float:
    """Rows that were routed before they came here, each to one expert: its logit leaves the others nothing."""
    parts = [
        ExpertWeights(bench.matrix(inner, hidden), bench.matrix(inner, hidden), bench.matrix(hidden, inner))
        for _ in range(experts)
    ]
    logits = torch.zeros(rows, experts, device=bench.device)
    logits[torch.arange(rows), torch.arange(rows) % experts] = 1e4
    x = bench.normal(rows, hidden)
    ours, theirs = (
        ops.moe(x, logits, ops.pack_experts(iter(parts)), Routing(experts, 1, True), "silu").float()
        for ops in (bench.ops, bench.definition)
    )
    return float((ours - theirs).abs().max() / theirs.abs().max())


def random_quantized(outputs: int, width: int, group: int, bits: int, *, offsets: bool) -> GroupQuantWeight:
    low, high, code_type = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    scales = (torch.rand(outputs, width // group) + 0.5) * 2.0 ** (1 - bits) / width**0.5
    codes = torch.randint(low, high, (outputs, width), dtype=code_type)
    shifts = -scales * (8 if bits == 4 else 3) if offsets else None
    return GroupQuantWeight(codes, scales, shifts, group, 4 if bits == 4 else 8)


def float4(outputs: int, width: int, group: int) -> GroupQuantWeight:
    """MXFP4 in groups of 32, else NVFP4."""
    doubles = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
    codes = doubles[torch.randint(0, 16, (outputs, width))]
    if group == 32:
        scales = torch.exp2(torch.randint(-9, -5, (outputs, width // group)).float())
    else:
        scales = (torch.rand(outputs, width // group) + 0.5) / width**0.5
    return GroupQuantWeight(codes, scales, None, group, 8, is_float4=True)


def random_float8(outputs: int, width: int, group: int | None = None) -> Float8Weight:
    shape = (outputs,) if group is None else (outputs, width // group)
    return Float8Weight(
        torch.randn(outputs, width).to(torch.float8_e4m3fn), (torch.rand(shape) + 0.5) / width**0.5, group
    )


# Of experts: a matrix, and the bits that are kept for each of its weights.
EXPERT_FORMATS: dict[str, tuple[Callable[[int, int], WeightData], float]] = {
    "fp8": (random_float8, 8),
    "fp8 in blocks": (lambda outputs, width: random_float8(outputs, width, 32), 8.5),
    "int8": (lambda outputs, width: random_quantized(outputs, width, width, 8, offsets=False), 8),
    "Q8_0": (lambda outputs, width: random_quantized(outputs, width, 32, 8, offsets=False), 8.5),
    "Q5_1": (lambda outputs, width: random_quantized(outputs, width, 32, 8, offsets=True), 9),
    "Q6_K": (lambda outputs, width: random_quantized(outputs, width, 16, 8, offsets=False), 9),
    "Q4_0": (lambda outputs, width: random_quantized(outputs, width, 32, 4, offsets=True), 4.5),
    "Q4_K": (lambda outputs, width: _uneven(random_quantized(outputs, width, 32, 4, offsets=True)), 5),
    "MXFP4": (lambda outputs, width: float4(outputs, width, 32), 4.25),
    "NVFP4": (lambda outputs, width: float4(outputs, width, 16), 5),
    "act-order": (
        lambda outputs, width: replace(
            random_quantized(outputs, width, 32, 4, offsets=True),
            input_order=torch.randperm(width, generator=torch.Generator().manual_seed(width)),
        ),
        4.5,
    ),
}


def _uneven(weight: GroupQuantWeight) -> GroupQuantWeight:
    """With offsets that no zero point gives."""
    assert weight.offsets is not None
    return replace(weight, offsets=weight.offsets * 0.9)


@dataclass(frozen=True, slots=True)
class PackedExpertsResult:
    error: float  # against the values that the weights stand for, relative
    bits: float  # that are kept for a weight, without row scales, orders and biases


def packed_experts(
    bench: Bench,
    matrix: Callable[[int, int], WeightData],
    tokens: int,
    experts: int = 4,
    hidden: int = 64,
    inner: int = 96,
    activation: Activation = "silu",
    bias: bool = False,
) -> PackedExpertsResult:
    """Experts of this form, two for each token."""
    torch.manual_seed(tokens)
    parts = [
        ExpertWeights(
            matrix(inner, hidden),
            matrix(inner, hidden),
            matrix(hidden, inner),
            torch.randn(2 * inner) if bias else None,
            torch.randn(hidden) if bias else None,
        )
        for _ in range(experts)
    ]
    x = bench.normal(tokens, hidden)
    logits = torch.randn(tokens, experts, device=bench.device)
    routing = Routing(experts, 2, True)
    packed, exact = bench.ops.pack_experts(iter(parts)), bench.exact
    got = bench.ops.moe(x, logits, packed, routing, activation).float()
    wanted = exact.moe(x.float(), logits, exact.pack_experts(iter(parts)), routing, activation)
    kept = 0
    for stack in (packed.gate_up, packed.down):
        kept += sum(table.nbytes for table in (stack.codes, stack.scales, stack.offsets) if table is not None)
    return PackedExpertsResult(
        float((got - wanted).norm() / wanted.norm()), kept * 8 / (experts * 3 * hidden * inner)
    )


def quantized_formats(outputs: int, width: int) -> dict[str, list[WeightData]]:
    """Stacks of what checkpoints hold, each of `outputs` rows in all; `width` is a multiple of 128."""
    half = outputs // 2
    order = torch.randperm(width)
    ordered = [random_quantized(half, width, 32, 4, offsets=True) for _ in range(2)]
    row = (torch.randn(outputs, width) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {
        "Q4_K": [random_quantized(outputs, width, 32, 4, offsets=True)],
        "Q8_0": [random_quantized(outputs, width, 32, 8, offsets=False)],
        "Q5_K": [random_quantized(outputs, width, 32, 8, offsets=True)],
        "Q6_K": [random_quantized(outputs, width, 16, 8, offsets=False)],
        "int4 in groups of 64": [random_quantized(outputs, width, 64, 4, offsets=True)],
        "int4 of a whole row": [random_quantized(outputs, width, width, 4, offsets=True)],
        "int8 of a whole row": [random_quantized(outputs, width, width, 8, offsets=False)],
        "float8 in blocks": [Float8Weight(row, (torch.rand(outputs, width // 128) + 1) / 1e3, 128)],
        "Q4_K with Q6_K": [
            random_quantized(half, width, 32, 4, offsets=True),
            random_quantized(half, width, 16, 8, offsets=False),
        ],
        "act-order": [
            GroupQuantWeight(part.codes, part.scales, part.offsets, 32, 4, order) for part in ordered
        ],
        "two orders": [
            GroupQuantWeight(part.codes, part.scales, part.offsets, 32, 4, each)
            for part, each in zip(ordered, (order, torch.arange(width).flip(0)), strict=True)
        ],
    }


def product_errors(
    bench: Bench, gate_up: list[WeightData], down: list[WeightData], rows: int, bias: bool
) -> dict[str, float]:
    """Of an MLP half and of logits, against the values that the weights stand for; relative to the largest."""
    ops, exact = bench.ops, bench.exact

    def packed(weights: list[WeightData]) -> tuple[object, object]:
        outputs = sum(weight.shape[0] for weight in weights)
        offsets = torch.randn(outputs, device=bench.device) if bias else None
        return ops.pack_linear(weights, offsets), exact.pack_linear(weights, offsets)

    hidden = gate_up[0].shape[1]
    pairs = packed(gate_up), packed(down)
    norm = torch.rand(hidden, device=bench.device) + 0.5
    ours = bench.normal(rows, hidden)
    theirs = ours.float()
    for each, residual, part in ((ops, ours, 0), (exact, theirs, 1)):
        each.mlp_block(residual, norm, 1e-5, pairs[0][part], pairs[1][part], "silu")
    x = bench.normal(rows, hidden)
    expected = exact.logits(x.float(), pairs[0][1])
    logits = ops.logits(x, pairs[0][0])
    return {
        "block": float((ours.float() - theirs).abs().max() / theirs.abs().max()),
        "logits": float((logits - expected).abs().max() / expected.abs().max()),
    }


def sampling_batch(bench: Bench, rows: int, temperature: float) -> SamplingBatch:
    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=bench.device)

    return SamplingBatch(
        temperature=column(temperature, torch.float32),
        top_k=column(0, torch.int32),
        top_p=column(1.0, torch.float32),
        min_p=column(0.0, torch.float32),
        seed=torch.arange(rows, device=bench.device) * 7919,
        position=torch.arange(rows, device=bench.device),
        all_greedy=temperature == 0.0,
        whole_vocabulary=True,
    )


def share_of_same_tokens(bench: Bench, rows: int, vocabulary: int, temperature: float) -> float:
    """Both draw with the same number, so they differ only where it falls on a boundary."""
    logits = torch.randn(rows, vocabulary, device=bench.device) * 3
    batch = sampling_batch(bench, rows, temperature)
    same = bench.ops.sample(logits, batch) == bench.definition.sample(logits, batch)
    return float(same.float().mean())
