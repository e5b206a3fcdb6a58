"""Routing to experts: the same experts and weights as by the routers of transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from penstock.kernels.blocks import route, sigmoid
from penstock.kernels.interface import DenseWeight, ExpertGroups, ExpertWeights, Routing, WeightData
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps, gated_reference
from penstock.models.rounding import quantize
from tests.kernels.expert_copy import check_copied_expert

EXPERTS, TOP_K, TOKENS = 8, 3, 40
SETTINGS: dict[str, Any] = {
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "hidden_size": EXPERTS,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}


def _with_unit_weight(kind: Any, **settings: Any) -> Any:
    """A router whose logits are its inputs."""
    router = kind(SimpleNamespace(**{**SETTINGS, **settings}))
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
    return router


def _deepseek_v3(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    router = _with_unit_weight(DeepseekV3TopkRouter)
    router.e_score_correction_bias.copy_(bias)
    return router(logits)[1:]


def _deepseek_v2(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _with_unit_weight(DeepseekV2TopkRouter, topk_method="group_limited_greedy")(logits)[1:]


def _gpt_oss(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return _with_unit_weight(GptOssTopKRouter)(logits)[1:]


def _phi(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return sparsemixer(logits, 0.1, training=False)


CASES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], Routing]]] = {
    "deepseek_v3": (
        _deepseek_v3,
        lambda bias: Routing(
            EXPERTS,
            TOP_K,
            True,
            scoring="sigmoid",
            selection_bias=bias,
            groups=ExpertGroups(4, 2, 2),
            scale=2.5,
        ),
    ),
    "deepseek_v2": (
        _deepseek_v2,
        lambda bias: Routing(EXPERTS, TOP_K, False, groups=ExpertGroups(4, 2, 1), scale=2.5),
    ),
    "gpt_oss": (_gpt_oss, lambda bias: Routing(EXPERTS, TOP_K, True)),
    "phi": (_phi, lambda bias: Routing(EXPERTS, 2, False, scoring="sparsemixer", jitter=0.1)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_experts_and_weights(name: str) -> None:
    theirs, routing = CASES[name]
    torch.manual_seed(0)
    logits, bias = torch.randn(TOKENS, EXPERTS) * 2, torch.rand(EXPERTS)
    with torch.inference_mode():
        expected_weights, expected = theirs(logits, bias)
    weights, chosen = route(logits, routing(bias))
    dense, expected_dense = (
        torch.zeros(TOKENS, EXPERTS).scatter_(1, indices.long(), values)
        for indices, values in ((chosen, weights), (expected, expected_weights))
    )
    torch.testing.assert_close(dense, expected_dense)


def test_only_the_plain_softmax_takes_the_short_way() -> None:
    assert Routing(8, 2, True).is_plain
    assert not Routing(8, 2, True, scale=2.0).is_plain
    assert not Routing(8, 2, True, selection_bias=torch.zeros(8)).is_plain


def test_experts_with_biases_a_clamped_gate_and_weighted_inputs(native: NativeOps, exact: TorchOps) -> None:
    torch.manual_seed(0)
    hidden, inner = 32, 48

    def matrix(rows: int, columns: int) -> DenseWeight:
        return DenseWeight(torch.randn(rows, columns, dtype=native.dtype))

    experts = [
        ExpertWeights(
            matrix(inner, hidden),
            matrix(inner, hidden),
            matrix(hidden, inner),
            torch.randn(2 * inner),
            torch.randn(hidden),
        )
        for _ in range(4)
    ]
    x, logits = torch.randn(7, hidden, dtype=native.dtype), torch.randn(7, 4)
    for weighs_input in (False, True):
        routing = Routing(4, 2, True, weighs_input=weighs_input)
        found = native.moe(x, logits, native.pack_experts(experts), routing, "clamped_swiglu")
        expected = torch.zeros(7, hidden)
        weights, chosen = route(logits, routing)
        for token in range(7):
            for weight, index in zip(weights[token], chosen[token], strict=True):
                expert = experts[index]
                row = x[token].float() * (weight if weighs_input else 1.0)
                stacked = torch.cat([expert.gate.values, expert.up.values]).float()
                active = gated_reference(row @ stacked.T + expert.gate_up_bias, "clamped_swiglu")
                made = active @ expert.down.values.float().T + expert.down_bias
                expected[token] += made * (1.0 if weighs_input else weight)
        scale = float(expected.abs().max())
        bound = 1e-4 if native.dtype == torch.float32 else 0.03
        assert float((found.float() - expected).abs().max()) < bound * scale


@pytest.mark.parametrize("form", ["dense", "int8", "int4", "biased"])
def test_the_bytes_of_an_expert_are_all_of_it(form: str, native: NativeOps, exact: TorchOps) -> None:
    torch.manual_seed(0)
    hidden, inner = 64, 96

    def matrix(rows: int, columns: int) -> WeightData:
        if form.startswith("int"):
            return quantize(DenseWeight(torch.randn(rows, columns)), "int4" if form == "int4" else "int8")
        return DenseWeight(torch.randn(rows, columns))

    is_biased = form == "biased"
    experts = [
        ExpertWeights(
            matrix(inner, hidden),
            matrix(inner, hidden),
            matrix(hidden, inner),
            torch.randn(2 * inner) if is_biased else None,
            torch.randn(hidden) if is_biased else None,
        )
        for _ in range(3)
    ]
    for ops in (native, exact):
        check_copied_expert(ops, experts, hidden)


@pytest.mark.parametrize("columns", [1, 6, 8, 128])
def test_sigmoids_depend_on_no_other_row(columns: int) -> None:
    x = torch.randn(70, columns) * 4
    alone = torch.cat([sigmoid(row) for row in x.split(1)])
    torch.testing.assert_close(alone, torch.sigmoid(x))
    for rows in (3, 33, 70):
        assert torch.equal(sigmoid(x[:rows]), alone[:rows])
        assert torch.equal(sigmoid(x[-rows:]), alone[-rows:])
    assert sigmoid(torch.tensor([-200.0, 0.0, 200.0])).tolist() == [0.0, 0.5, 1.0]
