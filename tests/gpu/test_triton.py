"""The Triton kernels against the torch functions that define them, on a CUDA device. The cases are those of
`tests/triton`, at the sizes of real models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.core.engine_config import Quantization
from penstock.kernels.interface import (
    Activation,
    DenseWeight,
    ExpertGroups,
    ExpertWeights,
    GroupQuantWeight,
    Routing,
    WeightData,
)
from penstock.models.rounding import quantize

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.kernels.triton import int4_tiles, int8_rows
from penstock.kernels.triton.flashinfer_attention import FlashInferAttention
from penstock.kernels.triton.ops import TritonOps, attention
from tests.triton.cases import (
    BLOCK_SIZE,
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
    share_of_close_tokens,
    share_of_same_tokens,
)
from tests.triton.state_cases import States, state_errors

DEVICE = torch.device("cuda")
NARROW = Bench(DEVICE, torch.bfloat16)
WIDE = Bench(DEVICE, torch.float32)


@pytest.mark.parametrize("bench", [WIDE, NARROW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "softcap"),
    [(32, 8, 128, None, None), (9, 3, 64, None, None), (4, 4, 80, 70, None), (8, 1, 256, 40, 30.0)],
)
@pytest.mark.parametrize(
    "lengths",
    [
        [(700, 1), (3, 1), (16, 1), (2000, 1)],
        [(0, 1)],
        [(0, 333), (64, 100), (50, 1)],
        [(33, 1), (900, 1), (500, 77), (0, 130)],
    ],
)
def test_attend(
    bench: Bench,
    norms: bool,
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    softcap: float | None,
    lengths: Lengths,
) -> None:
    error = attention_error(bench, Heads(heads, kv_heads, size, window, softcap, norms), lengths)
    assert error < (1e-2 if bench is NARROW else 1e-5)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(32, 8, 128),
        Heads(9, 3, 64),
        Heads(14, 2, 64, softcap=30.0),
        Heads(64, 1, 128),
        Heads(8, 8, 96, sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths", [[(700, 16)], [(33, 1), (900, 16), (0, 7), (5000, 32)], [(30, 16)] * 40], ids=str
)
def test_nodes_of_trees(heads: Heads, lengths: Lengths, kv_dtype: torch.dtype | None) -> None:
    bench = Bench(DEVICE, torch.bfloat16, kv_dtype=kv_dtype)
    assert attention_error(bench, heads, lengths, trees=True) < 2e-2
    assert attention_error(bench, heads, lengths, drafts=True) < 2e-2


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_tokens_of_paths_move(kv_dtype: torch.dtype | None) -> None:
    check_moves(Bench(DEVICE, torch.bfloat16, kv_dtype=kv_dtype).ops)


@pytest.mark.parametrize("bench", [NARROW, Bench(DEVICE, torch.float16)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(32, 8, 128),
        Heads(14, 2, 64),
        Heads(8, 8, 96, window=200),
        Heads(4, 2, 256, window=333, softcap=30.0),
        Heads(64, 8, 64, sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1000)],
        [(1500, 700), (7, 64)],
        [(33, 1), (900, 1), *[(0, 130 + n) for n in range(9)], (1999, 129), (0, 2)],
        [(5000, 70)],
    ],
    ids=str,
)
def test_long_prompts(bench: Bench, heads: Heads, lengths: Lengths) -> None:
    """Those that `hopper_attention` computes, on such a GPU."""
    assert attention_error(bench, heads, lengths) < 1e-2


@pytest.mark.parametrize("count", [1, 15, 16, 17, 300])
def test_what_unused_slots_hold_reaches_no_result(count: int) -> None:
    """Blocks are reused: the slots after a context may hold anything."""
    layer = Heads(8, 2, 128).layer(NARROW, 1)
    batch = NARROW.batch([(400, count), (0, 70)], 60)
    q = NARROW.normal(count + 70, 8, 128)
    results = []
    for filler in (0.0, float("nan")):
        torch.manual_seed(0)
        store = NARROW.ops.allocate_kv(1, 60, BLOCK_SIZE, 2, 128)
        for tensor in store.tensors:
            tensor.fill_(filler)
            for request, length in enumerate(batch.context_lens.tolist()):
                blocks = batch.block_tables[request]
                for begin in range(0, length, BLOCK_SIZE):
                    used = tensor[0, blocks[begin // BLOCK_SIZE], :, : min(BLOCK_SIZE, length - begin)]
                    used.copy_(torch.randn(used.shape))
        results.append(attention(q, store.layer(0), layer, batch))
    assert torch.equal(*results)


@pytest.mark.parametrize("bench", [WIDE, NARROW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [Heads(64, 8, 64, sinks=True), Heads(64, 8, 64, 128, sinks=True)], ids=str)
@pytest.mark.parametrize(
    "lengths", [[(700, 1), (3, 1)], [(9000, 1)], [(33, 1), (500, 77), (0, 130)], [(9000, 9)]], ids=str
)
def test_attention_sinks(bench: Bench, heads: Heads, lengths: Lengths) -> None:
    """Contexts of 9,000 tokens are split, and merged with the sink."""
    assert attention_error(bench, heads, lengths) < (1e-2 if bench is NARROW else 2e-3)


@pytest.mark.parametrize(
    "bench",
    [
        WIDE,
        NARROW,
        Bench(DEVICE, torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
        Bench(DEVICE, torch.bfloat16, kv_dtype=torch.int8),
    ],
    ids=["float32", "bfloat16", "float8", "int8"],
)
@pytest.mark.parametrize(
    "latents", [Latents(16, 512, 64, 128, 128), Latents(128, 512, 64, 128, 128)], ids=["V2-Lite", "V3"]
)
@pytest.mark.parametrize(
    "lengths", [[(700, 1), (3, 1)], [(9000, 1)], [(33, 1), (500, 77), (0, 130)], [(5000, 9)]], ids=str
)
def test_attention_over_latents(bench: Bench, latents: Latents, lengths: Lengths) -> None:
    bound = 2e-3 if bench is WIDE else 1e-2 if bench is NARROW else 3e-2
    assert latent_error(bench, latents, lengths) < bound


@pytest.mark.parametrize("lengths", [[(500, 1), (1, 1), (77, 1)], [(0, 70), (130, 33), (16, 200)]])
def test_a_cache_in_float8(lengths: Lengths) -> None:
    bench = Bench(DEVICE, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert attention_error(bench, Heads(8, 2, 128), lengths) < 2e-2


@pytest.mark.parametrize("lengths", [[(500, 1), (1, 1), (77, 1)], [(0, 70), (130, 33), (16, 200)]])
@pytest.mark.parametrize("heads", [Heads(8, 2, 128), Heads(9, 3, 64), Heads(8, 1, 256, 40, 30.0)], ids=str)
def test_a_cache_in_int8(heads: Heads, lengths: Lengths) -> None:
    bench = Bench(DEVICE, torch.bfloat16, kv_dtype=torch.int8)
    assert attention_error(bench, heads, lengths) < 1e-2


@pytest.mark.parametrize("bench", [WIDE, NARROW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (7, 4096), (300, 1000)])
def test_elementwise(bench: Bench, rows: int, width: int) -> None:
    assert_elementwise(bench, rows, width)


@pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 32, 33, 100])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (576, 1536), (4096, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_block_is_its_parts(rows: int, hidden: int, inner: int, bias: bool) -> None:
    assert block_error(NARROW, rows, Heads(8, 2, 64), hidden, inner, bias) < 0.02


@pytest.mark.parametrize("tokens", [1, 3, 40, 256, 3000])
@pytest.mark.parametrize(
    ("experts", "top_k", "inner"), [(128, 8, 768), (8, 2, 512), (6, 3, 96), (64, 6, 1408)]
)
@pytest.mark.parametrize("normalizes", [False, True])
def test_experts(tokens: int, experts: int, top_k: int, inner: int, normalizes: bool) -> None:
    routing = Routing(experts, top_k, normalizes)
    assert share_of_close_tokens(NARROW, tokens, experts, routing, hidden=256, inner=inner) > 0.98


@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_experts_of_other_families(tokens: int) -> None:
    deepseek = Routing(
        64,
        6,
        True,
        scoring="sigmoid",
        selection_bias=torch.randn(64, device=DEVICE),
        groups=ExpertGroups(8, 4, 2),
        scale=2.5,
    )
    assert share_of_close_tokens(NARROW, tokens, 64, deepseek, hidden=256, inner=512) > 0.98
    gpt_oss = Routing(32, 4, True)
    assert share_of_close_tokens(NARROW, tokens, 32, gpt_oss, 256, 512, "clamped_swiglu", bias=True) > 0.98
    llama4 = Routing(16, 1, False, scoring="sigmoid", weighs_input=True)
    assert share_of_close_tokens(NARROW, tokens, 16, llama4, 256, 512) > 0.98


@pytest.mark.parametrize("form", EXPERT_FORMATS)
def test_packed_experts(form: str) -> None:
    matrix, bits = EXPERT_FORMATS[form]
    for tokens in (1, 3, 40, 300, 1000):
        activation: Activation = "clamped_swiglu" if tokens == 40 else "silu"
        result = packed_experts(
            NARROW, matrix, tokens, 8, hidden=256, inner=384, activation=activation, bias=tokens == 40
        )
        # Inputs of several rows meet float8 in float8.
        assert result.error < (0.05 if form.startswith("fp8") and tokens > 1 else 0.01)
        assert result.bits == bits
    assert packed_experts(WIDE, matrix, 5, hidden=256, inner=384).error < 2e-6


@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (70, 3), (500, 32)])
def test_rows_that_were_routed_before(rows: int, experts: int) -> None:
    assert placed_expert_error(NARROW, rows, experts, hidden=256, inner=512) < 0.02


@pytest.mark.parametrize("method", ["fp8", "int4", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 17, 32, 33, 64, 65, 100, 129, 700])
@pytest.mark.parametrize("bias", [False, True])
def test_rounded_weights(method: Quantization, rows: int, bias: bool) -> None:
    """Against the values that the rounded weights stand for."""
    hidden, inner = 512, 1024
    gate_up, down = (
        quantize(DenseWeight(torch.randn(outputs, width, device=DEVICE) / width**0.5), method)
        for outputs, width in ((2 * inner, hidden), (hidden, inner))
    )
    errors = product_errors(NARROW, [gate_up], [down], rows, bias)
    # Many rows are themselves rounded to float8.
    assert max(errors.values()) < (0.06 if method == "fp8" else 0.02), errors


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 300, 2048])
@pytest.mark.parametrize(("outputs", "width"), [(6144, 4096), (1000, 576), (4096, 14336)])
def test_int8_inputs_and_weights(rows: int, outputs: int, width: int) -> None:
    codes = torch.randint(-127, 128, (outputs, width), dtype=torch.int8, device=DEVICE)
    scales = (torch.rand(outputs, 1, device=DEVICE) + 0.5) / 1e3
    weight = GroupQuantWeight(codes, scales, None, width, 8, rounds_inputs=True)
    x = NARROW.normal(rows, width)
    expected = int8_rows.rounded_product(x, codes, scales.flatten())
    got = NARROW.ops.logits(x, NARROW.ops.pack_linear([weight]))
    assert float((got - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("name", quantized_formats(2, 128))
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64, 65, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_formats_of_checkpoints(name: str, rows: int, bias: bool) -> None:
    gate_up, down = quantized_formats(2048, 512)[name], quantized_formats(512, 1024)[name]
    errors = product_errors(NARROW, gate_up, down, rows, bias)
    # Several rows are themselves rounded to float8.
    assert max(errors.values()) < (0.06 if name == "float8 in blocks" else 0.02), errors


@pytest.mark.parametrize("rows", [1, 9, 33, 64, 65, 100, 301])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_square_blocks_of_float8(rows: int, dtype: torch.dtype) -> None:
    """As DeepSeek publishes them: from some rows on, cuBLAS takes them."""
    gate_up, down = (random_float8(*shape, 128) for shape in ((2048, 512), (512, 1024)))
    square = [
        replace(part, scales=part.scales[::128].repeat_interleave(128, dim=0)) for part in (gate_up, down)
    ]
    errors = product_errors(Bench(DEVICE, dtype), [square[0]], [square[1]], rows, bias=rows == 9)
    assert max(errors.values()) < 0.06, errors


@pytest.mark.parametrize(
    ("hidden", "inner", "group"), [(576, 1536, 32), (1120, 96, 32), (896, 4864, 64), (1152, 6912, 128)]
)
@pytest.mark.parametrize("rows", [3, 16, 48, 64, 128, 200, 300, 512, 1030])
def test_four_bits_of_any_shape(hidden: int, inner: int, group: int, rows: int) -> None:
    gate_up, down = (
        random_quantized(*shape, group, 4, offsets=True) for shape in ((2 * inner, hidden), (hidden, inner))
    )
    errors = product_errors(NARROW, [gate_up], [down], rows, bias=False)
    assert max(errors.values()) < 0.02, errors


@pytest.mark.parametrize(
    ("hidden", "inner"), [(128, 72), (384, 1000), (4096, 14336), (2944, 96), (2880, 2080)]
)
@pytest.mark.parametrize("rows", [1, 2, 15, 32, 64])
@pytest.mark.parametrize("method", [None, "fp8"])
def test_few_rows_of_any_shape(hidden: int, inner: int, rows: int, method: Quantization | None) -> None:
    """The outputs need not fill a tile. `down` has a width that does not fit every kernel."""
    gate_up, down = (
        DenseWeight(torch.randn(outputs, width, device=DEVICE) / width**0.5)
        for outputs, width in ((2 * inner, hidden), (hidden, inner))
    )
    weights = [[quantize(each, method)] if method else [each] for each in (gate_up, down)]
    for dtype in (torch.bfloat16, torch.float16):
        errors = product_errors(Bench(DEVICE, dtype), weights[0], weights[1], rows, bias=inner == 1000)
        assert max(errors.values()) < (0.06 if method else 0.02), errors


def test_few_rows_of_a_head_and_of_inputs_that_are_not_aligned() -> None:
    head = torch.randn(70_001, 256, device=DEVICE, dtype=torch.bfloat16) / 16
    packed = NARROW.ops.pack_linear([DenseWeight(head)])
    many = NARROW.normal(9 * 256 + 1)
    for x in (NARROW.normal(9, 256), many[1:].view(9, 256), NARROW.normal(9, 512)[:, :256].contiguous()):
        got = NARROW.ops.logits(x, packed)
        expected = x.float() @ head.float().t()
        assert got.dtype == torch.float32
        assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("form", ["int4", "fp8", "bfloat16"])
@pytest.mark.parametrize("rows", [5, 30, 60, 128, 256, 300, 512])
def test_products_in_a_graph(form: str, rows: int) -> None:
    """Kernels overlap: none may read what the kernel in front has yet to write."""
    ops = NARROW.ops

    def matrix() -> WeightData:
        if form == "int4":
            return random_quantized(1024, 1024, 128, 4, offsets=True)
        dense = DenseWeight(torch.randn(1024, 1024, device=DEVICE) / 32)
        return quantize(dense, "fp8") if form == "fp8" else dense

    weights = [ops.pack_linear([matrix()]) for _ in range(8)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = ops.linear(x, weight)
        return x

    x = NARROW.normal(rows, 1024)
    expected = x
    for weight in weights:
        expected = ops.linear(expected, weight)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x)
    for _ in range(10):
        graph.replay()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", ["dense", "fp8", "MXFP4"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 8), (3, 2)])
def test_experts_in_a_graph(form: str, tokens: int, top_k: int) -> None:
    """The kernel for down reads weights beside the kernel for gate and up."""
    ops, layers = NARROW.ops, []
    matrix = NARROW.matrix if form == "dense" else EXPERT_FORMATS[form][0]
    for _ in range(4):
        kinds = [ExpertWeights(matrix(768, 2048), matrix(768, 2048), matrix(2048, 768)) for _ in range(4)]
        packed = ops.pack_experts(kinds[index % 4] for index in range(64))
        layers.append((ops.pack_linear([NARROW.matrix(64, 2048)]), packed))
    norm = torch.rand(2048, device=DEVICE, dtype=NARROW.dtype) + 0.5
    routing = Routing(64, top_k, True)
    given = NARROW.normal(tokens, 2048)
    residual = given.clone()

    def run(wait: bool) -> None:
        for router, packed in layers:
            ops.moe_block(residual, norm, 1e-5, router, packed, routing, "silu")
            if wait:
                torch.cuda.synchronize()

    run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(wait=False)
    for _ in range(20):
        given = NARROW.normal(tokens, 2048)
        residual.copy_(given)
        run(wait=True)
        expected = residual.clone()
        residual.copy_(given)
        graph.replay()
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("each", int4_tiles.EVEN_TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_even_tiles_of_four_bits(
    group: int, each: int4_tiles.EvenTile, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever tile is chosen, also where programs have parts of several tiles, and tiles several programs."""
    bench, rows = Bench(DEVICE, dtype), 200

    def even(num_rows: int, made: int, width: int, *_: object) -> int4_tiles.Choice:
        tiles = -(-num_rows // each.rows) * -(-made // 128)
        programs = tiles * each.tile.shares
        if each.tile.shares == 1:
            programs = min(60, tiles * -(-width // (2 * each.tile.width)))
        return int4_tiles.Choice(each.rows, each.tile, programs)

    monkeypatch.setattr("penstock.kernels.triton.int4_hopper.choose_tile", even)
    for outputs, width in ((1000, 1152), (2048, 4096), (512, 8192)):
        weight = random_quantized(outputs, width, group, 4, offsets=True)
        x, bias = bench.normal(rows, width), bench.normal(outputs)
        got = bench.ops.linear(x, bench.ops.pack_linear([weight], bias))
        expected = x.float() @ weight.dequantize().to(DEVICE).T + bias.float()
        assert float((got.float() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [2, 3, 33, 64, 200, 256, 300, 512])
def test_four_bits_pass_from_one_product_to_the_next(group: int, rows: int) -> None:
    """The gated product of an MLP leaves its outputs in the order that the next product wants."""
    ops = NARROW.ops
    for hidden, inner in ((1024, 3072), (4096, 14_336)):
        gate_up = ops.pack_linear([random_quantized(2 * inner, hidden, group, 4, offsets=True)])
        down = ops.pack_linear([random_quantized(hidden, inner, group, 4, offsets=True)])
        norm, residual = NARROW.normal(hidden), NARROW.normal(rows, hidden)
        expected = residual.clone()
        ops.add_linear(ops.normed_gated(residual, norm, 1e-5, gate_up, "silu"), down, expected)
        ops.mlp_block(residual, norm, 1e-5, gate_up, down, "silu")
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("name", [*quantized_formats(2, 128), "float8"])
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 65, 129])
def test_float32_is_never_narrowed(name: str, rows: int) -> None:
    """Whatever the form of the weights, inputs and products stay in float32."""
    formats = [quantized_formats(outputs, width) for outputs, width in ((2048, 512), (512, 1024))]
    for each in formats:
        whole = each["float8 in blocks"][0].dequantize()
        each["float8"] = [quantize(DenseWeight(whole), "fp8")]
    errors = product_errors(WIDE, formats[0][name], formats[1][name], rows, bias=False)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_experts_in_float32(tokens: int) -> None:
    assert placed_expert_error(WIDE, tokens, 8, hidden=256, inner=512) < 1e-5


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_a_cache_in_eight_bits_beside_float32(kv_dtype: torch.dtype) -> None:
    bench = Bench(DEVICE, torch.float32, kv_dtype=kv_dtype)
    for lengths in ([(500, 1), (1, 1), (77, 1)], [(0, 70), (130, 33), (16, 200)]):
        assert attention_error(bench, Heads(8, 2, 128), lengths) < 1e-4


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q6_K", "Q5_K"])
def test_packed_embeddings(name: str) -> None:
    (weight,) = quantized_formats(500, 512)[name]
    ids = torch.tensor([0, 499, 7, 7], dtype=torch.int32, device=DEVICE)
    ops = NARROW.ops
    got = ops.embed(ids, ops.pack_embedding(weight, ops.pack_linear([weight])))
    expected = weight.dequantize().to(DEVICE)[ids.long()]
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("vocabulary", [333, 50_000, 151_936])
def test_sampling(vocabulary: int) -> None:
    assert share_of_same_tokens(WIDE, 64, vocabulary, temperature=0.0) == 1.0
    assert share_of_same_tokens(WIDE, 64, vocabulary, temperature=0.8) > 0.95


@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(8, 1, 256, 40, 30.0)], ids=str)
def test_flashinfer_agrees(heads: Heads) -> None:
    pytest.importorskip("flashinfer")
    flashinfer = FlashInferAttention(DEVICE)
    lengths: Lengths = [(33, 1), (900, 1), (500, 77), (0, 130)]
    batch, layer = NARROW.batch(lengths, 200), heads.layer(NARROW, 1100)
    qkv = NARROW.normal(len(batch.positions), (heads.count + 2 * heads.kv_count) * heads.size)
    made = []
    for ops in (NARROW.ops, TritonOps(DEVICE, torch.bfloat16, flashinfer=flashinfer)):
        store = ops.allocate_kv(1, 200, 16, heads.kv_count, heads.size)
        torch.manual_seed(0)
        store.keys.normal_()
        store.values.normal_()
        made.append(ops.attend(qkv, layer, store.layer(0), batch).float())
    assert float((made[1] - made[0]).norm() / made[0].norm()) < 1e-2


@pytest.mark.parametrize("bench", [WIDE, NARROW], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (States(24, 128, 1, 256), [1] * 9),
        (States(32, 128, 16, 128), [*[1] * 70, 300, 2, 129]),
        (States(80, 64, 1, 128), [1, 1000, 17]),
    ],
    ids=["decodes", "mixed", "prompts"],
)
def test_states(bench: Bench, shape: States, lengths: list[int]) -> None:
    errors = state_errors(bench, shape, lengths)
    assert max(errors.values()) < (2e-5 if bench is WIDE else 1e-2), errors
