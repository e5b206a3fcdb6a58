"""Every Triton kernel in Triton's interpreter, on the CPU, on small shapes. (`tests/gpu` compiles them.)

In float16 and float32: the interpreter cannot multiply matrices of bfloat16.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from penstock.kernels.interface import (
    DenseWeight,
    ExpertGroups,
    ExpertWeights,
    Float8Weight,
    GroupQuantWeight,
    Routing,
)

pytest.importorskip(
    "triton", "3.9", reason="needs triton 3.9 or later, whose interpreter knows today's numpy"
)
# tests/conftest.py chooses the interpreter, before anything can have imported triton.
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled on this machine; tests/gpu runs them", allow_module_level=True)

from penstock.kernels.triton import (
    decode_attention,
    float8,
    float8_blocks,
    int4,
    int4_few,
    int8,
    int8_rows,
    latent_attention,
    packing,
    prefill_attention,
    skinny,
    targets,
)
from penstock.kernels.triton.expert_weights import unpacked
from penstock.models.rounding import quantize
from tests.kernels.expert_copy import copy_expert
from tests.triton.cases import (
    EXPERT_FORMATS,
    Bench,
    Heads,
    Latents,
    Lengths,
    assert_elementwise,
    attention_error,
    block_error,
    check_moves,
    latent_error,
    packed_experts,
    placed_expert_error,
    product_errors,
    quantized_formats,
    random_float8,
    random_quantized,
    sampling_batch,
    share_of_close_tokens,
    share_of_same_tokens,
)

HALF = Bench(torch.device("cpu"), torch.float16)
WHOLE = Bench(torch.device("cpu"), torch.float32)


DECODES, PREFILLS = [(40, 1), (0, 1), (170, 1)], [(0, 17), (16, 9), (5, 1)]
MIXED, LONG = [(33, 1), (64, 18)], [(300, 40)]


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        *((Heads(4, 2, 16), lengths) for lengths in (DECODES, PREFILLS, MIXED, LONG)),
        *((Heads(3, 1, 40, norms=True), lengths) for lengths in (DECODES, MIXED)),
        *((Heads(2, 2, 16, window=21), lengths) for lengths in (DECODES, PREFILLS, MIXED)),
        *((Heads(4, 1, 32, window=150, softcap=3.0), lengths) for lengths in (DECODES, LONG)),
        *((Heads(4, 2, 16, window=37, sinks=True), lengths) for lengths in (DECODES, MIXED)),
        *((Heads(4, 2, 16, chunk=32), lengths) for lengths in (DECODES, MIXED, LONG)),
    ],
    ids=str,
)
def test_attend(heads: Heads, lengths: Lengths) -> None:
    assert attention_error(WHOLE, heads, lengths) < 1e-5
    if heads.norms and lengths == MIXED:
        assert attention_error(HALF, heads, lengths) < 2e-3


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        (Heads(4, 2, 16), [(20, 18), (0, 3), (40, 1)]),  # more than one program computes
        (Heads(2, 1, 16), [(126, 5), (3, 2)]),  # on both sides of a split's end
        (Heads(14, 2, 16, softcap=3.0), [(20, 5), (5, 1)]),  # 7 heads of a token, of 8 places
        (Heads(2, 2, 40, window=21, sinks=True), [(30, 5), (0, 3)]),
        (Heads(64, 1, 16), [(3, 2)]),  # one token fills a program
        (Heads(2, 1, 16, chunk=32), [(30, 4)]),
    ],
    ids=str,
)
def test_tokens_that_verify_drafts_read_keys_together(
    heads: Heads, lengths: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "num_processors", lambda index: 100)
    assert attention_error(WHOLE, heads, lengths, drafts=True) < 1e-5


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_tokens_of_paths_move(kv_dtype: torch.dtype | None) -> None:
    bench = Bench(torch.device("cpu"), torch.float32, kv_dtype=kv_dtype)
    check_moves(bench.ops)
    check_moves(bench.definition)


@pytest.mark.parametrize(
    ("heads", "lengths", "kv_dtype"),
    [
        (Heads(4, 2, 16), [(100, 32), (0, 7), (40, 1)], None),  # across the end of a split
        (Heads(2, 1, 16), [(126, 16), (30, 4)], torch.int8),
        (Heads(14, 2, 16, softcap=3.0), [(20, 6)], None),
        (Heads(2, 2, 40, sinks=True), [(70, 9), (3, 2)], None),
        (Heads(64, 1, 16), [(5, 4)], None),
    ],
    ids=str,
)
def test_a_node_of_a_tree_sees_its_ancestors(
    heads: Heads, lengths: Lengths, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "num_processors", lambda index: 100)
    bench = Bench(torch.device("cpu"), torch.float32, kv_dtype=kv_dtype)
    assert attention_error(bench, heads, lengths, trees=True) < 1e-5


@pytest.mark.parametrize("lengths", [[(40, 1), (0, 1)], [(170, 1), (16, 9), (0, 17)]], ids=str)
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 1, 40, window=21, softcap=3.0)], ids=str)
def test_a_cache_in_int8(heads: Heads, lengths: Lengths) -> None:
    bench = Bench(torch.device("cpu"), torch.float32, kv_dtype=torch.int8)
    assert attention_error(bench, heads, lengths) < 1e-5


@pytest.mark.parametrize(
    "heads", [Heads(2, 1, 16), Heads(2, 1, 16, window=300), Heads(2, 1, 16, sinks=True)], ids=str
)
def test_a_long_context_is_split_and_merged(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "num_processors", lambda index: 100)
    assert decode_attention.split_length(2, 900, 100) == decode_attention.SHORTEST_SPLIT
    assert attention_error(WHOLE, heads, [(900, 1), (10, 1)]) < 1e-5


@pytest.mark.parametrize("shared", [227 << 10, 99 << 10, 64 << 10])
def test_tiles_of_large_heads_fit_into_shared_memory(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 has heads of 512 numbers."""
    family = replace(targets.HOPPER, shared_bytes=shared)
    for module in (decode_attention, prefill_attention, targets):
        monkeypatch.setattr(module, "current", lambda: family)
    tile = decode_attention._tile(512, 4, is_small=False)
    assert tile.keys * 512 * 4 <= shared
    for row_bytes in (512 * 2, 512 * 4):
        rows, keys = prefill_attention.fitting_tile(64, 32, row_bytes)
        assert rows == keys == 16 or (rows + 2 * keys) * row_bytes <= shared
    assert prefill_attention.fitting_tile(128, 64, 128 * 2) == (128, 64)
    if shared == 64 << 10:
        assert attention_error(WHOLE, Heads(2, 1, 512), [(20, 1), (5, 19)]) < 1e-5


def test_longer_contexts_are_cut_into_longer_splits() -> None:
    """Each has to be merged, one after the other."""
    lengths = [decode_attention.split_length(8, span, 132) for span in (512, 4096, 16384, 131072)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[1] < lengths[3]


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        (Heads(4, 2, 16), [(2100, 9), (3, 2)]),
        (Heads(3, 1, 40, softcap=3.0, sinks=True), [(5, 1), (1990, 30)]),
    ],
    ids=str,
)
def test_few_queries_over_a_long_context_are_split_and_merged(
    heads: Heads, lengths: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_attention, "num_processors", lambda index: 100)
    shape = prefill_attention.tile_shape(WHOLE.batch(lengths, 200), heads.layer(WHOLE, 1), torch.float32, 100)
    assert shape.splits >= 3
    assert attention_error(WHOLE, heads, lengths) < 1e-5


@pytest.mark.parametrize(
    "latents",
    [Latents(4, 32, 16, 24, 20), Latents(20, 48, 8, 8, 16), Latents(4, 32, 8, 8, 16, indexed=12)],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths", [[(40, 1), (0, 1), (90, 1)], [(33, 1), (0, 9), (16, 5)], [(100, 12)]], ids=str
)
def test_attention_over_latents(latents: Latents, lengths: Lengths) -> None:
    assert latent_error(WHOLE, latents, lengths) < 1e-5


def test_attention_over_latents_in_few_bits() -> None:
    assert latent_error(HALF, Latents(4, 32, 16, 24, 20), [(40, 1), (0, 5)]) < 2e-3
    bench = Bench(torch.device("cpu"), torch.float32, kv_dtype=torch.int8)
    assert latent_error(bench, Latents(4, 32, 16, 24, 20), [(40, 1), (0, 5)]) < 1e-5


@pytest.mark.parametrize("lengths", [[(900, 1), (10, 1)], [(400, 5), (3, 2)]], ids=str)
def test_long_contexts_of_latents_are_split_and_merged(
    lengths: Lengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_attention, "num_processors", lambda index: 100)
    assert latent_error(WHOLE, Latents(4, 32, 16, 16, 16), lengths) < 1e-5


@pytest.mark.parametrize("bench", [HALF, WHOLE], ids=["float16", "float32"])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 100)])
def test_norms_and_gates(bench: Bench, rows: int, width: int) -> None:
    assert_elementwise(bench, rows, width)


@pytest.fixture
def few_is_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that five rows are many, and go the way of many."""
    for kernels in (skinny, int4_few, int8):
        monkeypatch.setattr(kernels, "MAX_ROWS", 4)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("few_is_four")
def test_a_block_is_its_parts(rows: int, bias: bool) -> None:
    assert block_error(HALF, rows, Heads(4, 2, 32), hidden=128, inner=128, bias=bias) < 4e-3


@pytest.mark.parametrize("bias", [False, True])
def test_a_row_whose_width_is_no_multiple_of_a_tile(bias: bool) -> None:
    assert block_error(HALF, 1, Heads(3, 1, 48), hidden=144, inner=80, bias=bias) < 4e-3


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(("experts", "top_k", "normalizes"), [(8, 2, False), (6, 3, True)])
def test_experts(tokens: int, experts: int, top_k: int, normalizes: bool) -> None:
    routing = Routing(experts, top_k, normalizes)
    assert share_of_close_tokens(HALF, tokens, experts, routing, hidden=64, inner=96) > 0.9


def test_experts_of_one_token_that_are_wider_than_what_is_read_ahead() -> None:
    assert share_of_close_tokens(HALF, 1, 4, Routing(4, 3, True), hidden=48, inner=600) == 1


def test_experts_of_many_tokens() -> None:
    """Their tiles are the largest."""
    routing = Routing(2, 2, True)
    assert share_of_close_tokens(HALF, 140, 2, routing, hidden=64, inner=160) > 0.9


@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_chosen_by_more_than_a_softmax(tokens: int) -> None:
    routing = Routing(
        8, 3, True, scoring="sigmoid", selection_bias=torch.randn(8), groups=ExpertGroups(4, 2, 2), scale=2.5
    )
    assert share_of_close_tokens(HALF, tokens, 8, routing, hidden=64, inner=96) > 0.9


def test_experts_with_biases_and_a_clamped_gate() -> None:
    routing = Routing(6, 2, True)
    assert share_of_close_tokens(HALF, 9, 6, routing, 64, 96, "clamped_swiglu", bias=True) > 0.9


def test_experts_whose_input_is_weighted() -> None:
    routing = Routing(6, 2, False, scoring="sigmoid", weighs_input=True)
    assert share_of_close_tokens(HALF, 9, 6, routing, 64, 96) > 0.9


def test_experts_of_odd_widths() -> None:
    """A product in a kernel has 16 columns or more, which need not divide the width."""
    assert share_of_close_tokens(HALF, 9, 6, Routing(6, 2, True), hidden=24, inner=40) > 0.9


@pytest.mark.parametrize("form", EXPERT_FORMATS)
def test_packed_experts(form: str) -> None:
    """A single token, some tokens, and float32; with biases and a clamped gate."""
    matrix, bits = EXPERT_FORMATS[form]
    # Inputs of several rows meet float8 in float8, and the interpreter truncates where GPUs round.
    rounded = 0.12 if form.startswith("fp8") else 2e-3
    alone = packed_experts(HALF, matrix, 1, experts=16, activation="clamped_swiglu", bias=True)
    assert alone.error < 2e-3
    several = packed_experts(HALF, matrix, 5, activation="gelu_tanh")
    assert several.error < rounded
    exact = packed_experts(WHOLE, matrix, 3, bias=True)
    assert exact.error < 2e-6
    assert alone.bits == several.bits == bits


@pytest.mark.parametrize("form", EXPERT_FORMATS)
def test_the_bytes_of_an_expert_are_all_of_it(form: str) -> None:
    matrix, _ = EXPERT_FORMATS[form]
    torch.manual_seed(0)
    packed = HALF.ops.pack_experts(
        ExpertWeights(matrix(96, 64), matrix(96, 64), matrix(64, 96), torch.randn(2 * 96), torch.randn(64))
        for _ in range(3)
    )
    copy_expert(packed, 0, 2)
    for stack in (packed.gate_up, packed.down):
        first, second, last = unpacked(stack)
        assert torch.equal(last, first)
        assert not torch.equal(second, first)
    for bias in (packed.gate_up_bias, packed.down_bias):
        assert bias is not None
        assert torch.equal(bias[2], bias[0])
        assert not torch.equal(bias[1], bias[0])


def test_experts_of_different_kinds_become_dense() -> None:
    kinds = [EXPERT_FORMATS[form][0] for form in ("MXFP4", "Q8_0")]
    calls = iter(range(100))
    result = packed_experts(HALF, lambda rows, width: kinds[next(calls) % 2](rows, width), 3)
    assert result.error < 2e-3
    assert result.bits == 16


@pytest.mark.parametrize("experts", [1, 3])
def test_rows_that_were_routed_before(experts: int) -> None:
    assert placed_expert_error(HALF, 5, experts, hidden=64, inner=96) < 0.02


@pytest.mark.parametrize("name", [None, *quantized_formats(2, 128)])
def test_rows_that_lie_apart(name: str | None) -> None:
    """Such as the last row of each request."""
    weights = quantized_formats(32, 128)[name] if name else [DenseWeight(torch.randn(32, 128))]
    weight, rows = HALF.ops.pack_linear(weights), HALF.normal(3, 5, 128)[:, -1]
    expected = HALF.ops.logits(rows.clone(), weight)
    assert torch.equal(HALF.ops.logits(rows, weight), expected)
    assert torch.equal(HALF.ops.linear(rows, weight), HALF.ops.linear(rows.clone(), weight))


@pytest.mark.parametrize("name", quantized_formats(2, 128))
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.usefixtures("few_is_four")
def test_quantized_weights(name: str, rows: int) -> None:
    gate_up = quantized_formats(32, 128)[name]
    down = (
        random_quantized(128, 16, 16, 8, offsets=True)
        if name == "Q5_K"
        else DenseWeight(torch.randn(128, 16))
    )
    errors = product_errors(HALF, gate_up, [down], rows, bias=rows == 5)
    # Several rows are themselves rounded to float8, which the interpreter does badly.
    assert max(errors.values()) < (0.2 if name == "float8 in blocks" and rows > 1 else 4e-3), errors


@pytest.mark.parametrize("processors", [1, 3])
def test_float8_blocks_multiply_rounded_rows(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three processors, the width is cut into shares that are added up."""

    def rounded(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.float().view(x.shape[0], -1, group)
        scales = blocks.abs().amax(dim=2) / 448
        return (blocks / scales.unsqueeze(2)).flatten(1).to(torch.float8_e4m3fn), scales

    monkeypatch.setattr(float8_blocks, "rounded", rounded)
    monkeypatch.setattr(float8_blocks, "SHORTEST_SHARE", 1)
    monkeypatch.setattr(float8_blocks, "num_processors", lambda index: processors)
    weight = random_float8(20, 384, 128)
    x, residual, bias = torch.randn(3, 384).half(), torch.randn(3, 20).half(), torch.randn(20)
    taken = Float8Weight(*rounded(x, 128), 128).dequantize()
    expected = residual + taken @ weight.dequantize().T + bias.half()
    HALF.ops.add_linear(x, HALF.ops.pack_linear([weight], bias), residual)
    assert (residual - expected).abs().max() < 4e-3 * expected.abs().max()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("has_norm", [False, True])
def test_inputs_come_in_the_order_of_four_bit_words(group: int, has_norm: bool) -> None:
    """The Hopper kernel makes 32 weights of 8 words: the lowest codes of all eight, then the next ones."""
    from penstock.kernels.triton import int4_operand

    weight = random_quantized(6, 384, group, 4, offsets=False)
    words = (
        int4.pack([weight], None, torch.float32, torch.device("cpu"))
        .codes.view(torch.int16)
        .view(6, -1, 1, 8)
    )
    codes = (words.to(torch.int32) >> torch.arange(0, 16, 4).view(1, 1, 4, 1)) & 15
    x = torch.randn(3, 384)
    norm = torch.rand(384) if has_norm else None
    expected = WHOLE.definition.rms_norm(x, norm, 1e-5) if norm is not None else x
    flags = torch.ones(8, dtype=torch.int32)
    got = int4_operand.arranged(x, group, skinny.RowProduct(norm, 1e-5), flags)
    assert not flags.any()  # programs of the product that follows count on that
    made = got.double() @ codes.reshape(6, 384).double().T
    torch.testing.assert_close(made, expected.double() @ weight.codes.double().T, rtol=1e-4, atol=1e-4)


def test_quantized_weights_stay_packed() -> None:
    formats = quantized_formats(64, 256)
    dense_bytes = 64 * 256 * 2
    for name in ("Q4_K", "Q8_0", "Q6_K", "float8 in blocks", "Q4_K with Q6_K", "act-order"):
        packed = packing.pack(formats[name], None, torch.float16, torch.device("cpu"))
        assert packed.num_bytes < 0.65 * dense_bytes, name
        assert (packed.out_features, packed.in_features) == (64, 256)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q6_K", "Q5_K"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_are_rows_of_the_packed_table(name: str, is_tied: bool) -> None:
    (weight,) = quantized_formats(50, 128)[name]
    ops = HALF.ops
    table = ops.pack_embedding(weight, ops.pack_linear([weight]) if is_tied else None)
    ids = torch.tensor([0, 49, 7, 7], dtype=torch.int32)
    torch.testing.assert_close(
        ops.embed(ids, table), weight.dequantize(torch.float16)[ids.long()], rtol=2e-3, atol=1e-4
    )
    assert (table.num_bytes == 0) == is_tied


@pytest.mark.parametrize("width", [128, 576, 1120])
def test_one_row_of_int4_keeps_small_inputs_beside_large_ones(width: int) -> None:
    """They are multiplied in fixed point; a few inputs of a real model are thousands of times the others."""
    weight = random_quantized(24, width, 32, 4, offsets=True)
    values = weight.dequantize()
    x = torch.randn(1, width) * torch.logspace(-4, 0, width)
    x[0, 32:64] = 0.0  # what shares a unit with the large one
    magnitude = (x.abs() @ values.abs().T).max()
    x[0, 40] = 5000.0
    exact = (x.double() @ values.double().T).float()
    assert (WHOLE.ops.linear(x, WHOLE.ops.pack_linear([weight])) - exact).abs().max() < 1e-3 * magnitude


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_row_of_int4_does_not_hide_what_is_no_number(value: float) -> None:
    weight = random_quantized(8, 128, 32, 4, offsets=True)
    x = torch.randn(1, 128)
    x[0, 77] = value
    assert not WHOLE.ops.linear(x, WHOLE.ops.pack_linear([weight])).isfinite().any()


def test_int8_unpacks_to_what_it_stands_for() -> None:
    weight = random_quantized(6, 96, 32, 8, offsets=True)
    packed = int8.pack([weight], None, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(int8.unpack(packed, torch.float32), weight.dequantize())


@pytest.mark.parametrize("max_cublas_rows", [0, 200], ids=["Triton", "cuBLAS"])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_inputs_and_weights(bias: bool, max_cublas_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "MAX_ROWS", 4)
    monkeypatch.setattr(int8_rows, "MAX_CUBLAS_ROWS", max_cublas_rows)
    codes = torch.randint(-127, 128, (152, 96), dtype=torch.int8)
    scales = torch.rand(152, 1) / 100
    weight = GroupQuantWeight(codes, scales, None, 96, 8, rounds_inputs=True)
    offsets = torch.randn(152) if bias else None
    packed = HALF.ops.pack_linear([weight], offsets)
    added = 0.0 if offsets is None else offsets.to(HALF.dtype).float()
    x = (torch.randn(140, 96) * torch.logspace(-3, 3, 140).unsqueeze(1)).to(HALF.dtype)
    expected = int8_rows.rounded_product(x, codes, scales.flatten()) + added
    torch.testing.assert_close(HALF.ops.logits(x, packed), expected)
    torch.testing.assert_close(HALF.ops.linear(x, packed), expected.to(HALF.dtype))
    # Few rows are not rounded, nor are rows in float32, nor those of weights that were not made for it.
    few_rows, x = x[:3], x[:9].float()
    exact = x @ weight.dequantize().T + (0.0 if offsets is None else offsets)
    whole = WHOLE.ops.pack_linear([weight], offsets)
    torch.testing.assert_close(WHOLE.ops.linear(x, whole), exact, rtol=1e-4, atol=1e-4)
    few = HALF.ops.logits(few_rows, packed)
    torch.testing.assert_close(few, exact[:3], rtol=2e-2, atol=2e-2)
    unmarked = WHOLE.ops.pack_linear([GroupQuantWeight(codes, scales, None, 96, 8)], offsets)
    torch.testing.assert_close(WHOLE.ops.linear(x, unmarked), exact, rtol=1e-4, atol=1e-4)


def test_float8_weights_of_float32_models_round_no_inputs() -> None:
    weight = quantize(DenseWeight(torch.randn(48, 128)), "fp8")
    for rows in (1, 5, 70):
        x = torch.randn(rows, 128)
        got = WHOLE.ops.linear(x, WHOLE.ops.pack_linear([weight]))
        torch.testing.assert_close(got, x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


def gpu_of(arch: int) -> SimpleNamespace:
    """As much of Triton's driver as is asked for the family of a GPU."""
    return SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="cuda", arch=arch))


def test_float8_weights_without_float8_in_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay in eight bits, are converted by their bits, and meet inputs that are not rounded."""
    monkeypatch.setattr(targets, "driver", SimpleNamespace(active=gpu_of(80)))
    targets.current.cache_clear()
    bits = torch.arange(256, dtype=torch.uint8).view(2, 128)
    bits[:, -1] = 0  # instead of the two that are no numbers
    weight = Float8Weight(bits.view(torch.float8_e4m3fn), torch.tensor([0.5, 2.0]))
    try:
        assert not targets.current().has_float8
        packed = HALF.ops.pack_linear([weight])
        assert isinstance(packed, int8.Int8Linear)
        assert packed.readable_codes.dtype == torch.uint8
        assert torch.equal(int8.unpack(packed, torch.float32), weight.dequantize())
        for rows in (1, 5, 70):
            x = HALF.normal(rows, 128)
            expected = x.float() @ weight.dequantize().T
            torch.testing.assert_close(HALF.ops.logits(x, packed), expected, rtol=2e-2, atol=2.0)
    finally:
        targets.current.cache_clear()


@pytest.mark.parametrize("has_norm", [False, True])
def test_rounding_to_float8(has_norm: bool) -> None:
    x = torch.randn(3, 100) * torch.tensor([[1e-4], [1.0], [300.0]])
    product = float8.RowProduct(torch.rand(100), 1e-5) if has_norm else float8.RowProduct()
    rounded, scales = float8._rounded(x, product)
    if product.norm is not None:
        x = WHOLE.exact.rms_norm(x, product.norm, product.eps)
    largest = x.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(scales, largest / 448)
    expected = (x / scales).to(torch.float8_e4m3fn).float()
    # The interpreter loses the carry of a value that rounds up to a power of two.
    may_carry = torch.frexp(expected).mantissa.abs() == 0.5
    differs = rounded.float() != expected
    assert (differs & ~may_carry).float().mean() <= (0.02 if has_norm else 0.0)


def test_one_row_of_float8_weights() -> None:
    weight = quantize(DenseWeight(torch.randn(48, 128)), "fp8")
    packed, expected = HALF.ops.pack_linear([weight]), WHOLE.exact.pack_linear([weight])
    x = HALF.normal(1, 128)
    torch.testing.assert_close(
        HALF.ops.linear(x, packed).float(), WHOLE.exact.linear(x.float(), expected), rtol=2e-3, atol=2e-2
    )


@pytest.mark.parametrize("vocabulary", [333, 5000])
def test_sampling(vocabulary: int) -> None:
    assert share_of_same_tokens(WHOLE, 12, vocabulary, temperature=0.0) == 1.0
    assert share_of_same_tokens(WHOLE, 12, vocabulary, temperature=0.8) > 0.9


def test_a_row_that_cannot_be_sampled_spares_the_others() -> None:
    logits = torch.randn(3, 300)
    logits[0, 299] = float("nan")
    logits[1] = float("-inf")
    for temperature in (0.0, 1.0):
        chosen = WHOLE.ops.sample(logits, sampling_batch(WHOLE, 3, temperature)).tolist()
        assert chosen[:2] == [-1, -1]
        assert chosen[2] >= 0
