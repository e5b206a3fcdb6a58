"""Attention over latents: the same as attention with the keys and values that the latents stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import latent as latent_kernels
from penstock.kernels.interface import IndexLayer, LatentLayer
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps
from tests.kernels.attention_case import BLOCK_SIZE, make_batch, make_layer

HEADS, LATENT, ROTATED, PLAIN, VALUE = 4, 32, 16, 24, 20
LENGTHS = [70, 17, 1]


def make_latent_layer(dtype: torch.dtype) -> LatentLayer:
    return LatentLayer(
        num_heads=HEADS,
        latent_dim=LATENT,
        rope_dim=ROTATED,
        scale=0.2,
        rope=make_layer(head_dim=ROTATED).rope,
        norm=torch.rand(LATENT) + 0.5,
        norm_eps=1e-6,
        key_up=torch.randn(HEADS, PLAIN, LATENT).to(dtype),
        value_up=torch.randn(HEADS, LATENT, VALUE).to(dtype),
    )


def attention_with_keys(
    query: Tensor, latent: Tensor, layer: LatentLayer, hidden: Tensor | None = None
) -> Tensor:
    """One request from its beginning, with the key and the value of each head written out. `hidden` are the pairs of
    tokens that do not see each other, where that is not decided by their order."""
    count = len(query)
    by_head = query.float().view(count, HEADS, PLAIN + ROTATED)
    content, shared_key = latent.float().split([LATENT, ROTATED], dim=1)
    content = F.rms_norm(content, (LATENT,), layer.norm, layer.norm_eps)
    angles = torch.view_as_complex(torch.stack(layer.rope[:count].chunk(2, dim=1), dim=2))

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, dim=2), dim=3).contiguous())
        made = torch.view_as_real(pairs * angles.unsqueeze(1))
        return torch.cat([made[..., 0], made[..., 1]], dim=2)

    keys = torch.einsum("tc,hnc->thn", content, layer.key_up.float())
    keys = torch.cat([keys, turned(shared_key.unsqueeze(1)).expand(-1, HEADS, -1)], dim=2)
    queries = torch.cat([by_head[..., :PLAIN], turned(by_head[..., PLAIN:])], dim=2)
    values = torch.einsum("tc,hcv->thv", content, layer.value_up.float())
    made = F.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in (queries, keys, values)),
        attn_mask=None if hidden is None else ~hidden,
        is_causal=hidden is None,
        scale=layer.scale,
    )
    return made.transpose(0, 1).flatten(1)


def run(
    ops: NativeOps | TorchOps, layer: LatentLayer, chunk: int, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Several requests in chunks, through one cache: what came out, and what should have."""
    torch.manual_seed(seed)
    store = ops.allocate_latents(2, 12, BLOCK_SIZE, LATENT + ROTATED)
    blocks = torch.randperm(12).tolist()
    tables = [[blocks.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in LENGTHS]
    inputs = [
        (
            torch.randn(n, HEADS * (PLAIN + ROTATED)).to(ops.dtype),
            torch.randn(n, LATENT + ROTATED).to(ops.dtype),
        )
        for n in LENGTHS
    ]
    outputs: list[list[Tensor]] = [[] for _ in LENGTHS]
    for start in range(0, max(LENGTHS), chunk):
        work = [
            (index, start, min(chunk, length - start))
            for index, length in enumerate(LENGTHS)
            if length > start
        ]
        batch = make_batch([(tables[index], start, count) for index, start, count in work])
        query, latent = (
            torch.cat([inputs[index][part][start : start + count] for index, start, count in work])
            for part in range(2)
        )
        made = ops.attend_latent(query, latent, layer, store.layer(1), batch)
        for (index, _, count), at in zip(work, batch.query_starts.tolist(), strict=False):
            outputs[index].append(made[at : at + count])
    return [
        (torch.cat(parts).float(), attention_with_keys(*given, layer))
        for parts, given in zip(outputs, inputs, strict=True)
    ]


def test_the_same_as_with_keys_and_values(native: NativeOps) -> None:
    layer = make_latent_layer(native.dtype)
    bound = 1e-4 if native.dtype == torch.float32 else 0.05
    for chunk in (1, 16, 100):
        for made, expected in run(native, layer, chunk):
            assert float((made - expected).norm() / expected.norm()) < bound


def test_a_long_prompt_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_latent_layer(torch.float32)
    whole = run(TorchOps("cpu", torch.float32), layer, 100)
    monkeypatch.setattr(latent_kernels, "SCORES_AT_ONCE", HEADS * 70 * 3)
    parts = run(TorchOps("cpu", torch.float32), layer, 100)
    for (one, _), (other, _) in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_tokens_attend_to_those_that_an_indexer_chooses() -> None:
    torch.manual_seed(0)
    heads, size, top_k = 16, 20, 9  # with many heads, no two scores are 0
    ops, latents = TorchOps("cpu", torch.float32), make_latent_layer(torch.float32)
    index = IndexLayer(
        heads, size, ROTATED, top_k, LATENT + ROTATED, latents.rope, torch.rand(size), torch.randn(size)
    )
    store, length = ops.allocate_latents(1, 6, BLOCK_SIZE, LATENT + ROTATED + size), 40
    query, latent = torch.randn(length, HEADS * (PLAIN + ROTATED)), torch.randn(length, LATENT + ROTATED)
    small, key, weights = (
        torch.randn(length, heads * size),
        torch.randn(length, size),
        torch.randn(length, heads),
    )
    turned = latent_kernels._rotate_first(small.view(length, heads, size), index, torch.arange(length))
    keys = F.layer_norm(key, (size,), index.norm, index.norm_bias, 1e-6)
    keys = latent_kernels._rotate_first(keys.unsqueeze(1), index, torch.arange(length)).squeeze(1)
    scores = torch.einsum("th,thc->tc", weights, torch.einsum("thi,ci->thc", turned, keys).relu())
    made = []
    for start, count in ((0, 5), (5, 30), (35, 1), (36, 4)):
        batch = make_batch([([4, 1, 3], start, count)])
        rows = slice(start, start + count)
        inputs = small[rows], key[rows], weights[rows]
        chosen = ops.choose_tokens(*inputs, index, store.layer(0), batch)
        assert (chosen is None) == (start + count <= top_k)
        if chosen is not None:
            for row, found in zip(range(start, start + count), chosen.tolist(), strict=True):
                best = scores[row, : row + 1].topk(min(top_k, row + 1)).indices.tolist()
                assert sorted(found) == sorted(best + [-1] * (top_k - len(best)))
        made.append(ops.attend_latent(query[rows], latent[rows], latents, store.layer(0), batch, chosen))
    hidden = torch.full((length, length), True)
    for row in range(length):
        hidden[row, scores[row, : row + 1].topk(min(top_k, row + 1)).indices] = False
    expected = attention_with_keys(query, latent, latents, hidden)
    torch.testing.assert_close(torch.cat(made), expected, rtol=1e-4, atol=1e-4)


def test_int8_latents_stay_close_and_small() -> None:
    layer = make_latent_layer(torch.float32)
    for made, expected in run(TorchOps("cpu", torch.float32, torch.int8), layer, 16):
        assert float((made - expected).norm() / expected.norm()) < 0.02
    wide, narrow = (
        TorchOps("cpu", torch.float32, kv_dtype).allocate_latents(3, 5, BLOCK_SIZE, 48).block_bytes
        for kv_dtype in (None, torch.int8)
    )
    assert wide == 3 * BLOCK_SIZE * 48 * 4
    assert narrow == 3 * BLOCK_SIZE * (48 + 4)


def test_blocks_go_to_host_memory_and_back() -> None:
    store = TorchOps("cpu", torch.float32, torch.int8).allocate_latents(2, 3, BLOCK_SIZE, 48)
    for tensor in store.tensors:
        tensor.copy_(torch.randint(1, 100, tensor.shape))
    before = [tensor[:, 1].clone() for tensor in store.tensors]
    store.reserve_host(2)
    store.copy_to_host([1], [0])
    store.copy_from_host([0], [2])
    for tensor, expected in zip(store.tensors, before, strict=True):
        assert torch.equal(tensor[:, 2], expected)
    regions = store.regions(1)
    assert sum(region.block_bytes for region in regions) * 2 == store.block_bytes
