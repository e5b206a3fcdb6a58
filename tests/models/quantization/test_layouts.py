"""Rounding, and that what is written reads back to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.kernels.interface import Float8Weight, GroupQuantWeight
from penstock.models.config import Fields
from penstock.models.quantization.layouts import METHODS, round_to_groups
from penstock.models.quantized_source import QuantizedSource
from penstock.models.safetensors_source import SafetensorsSource
from penstock.models.stored_quantization import stored_quantization


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    group=st.sampled_from([16, 32, 128]),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    seed=st.integers(0, 10_000),
    size=st.floats(1e-2, 100),
)
def test_no_value_moves_by_more_than_half_a_step(
    rows: int, groups: int, group: int, bits: int, symmetric: bool, seed: int, size: float
) -> None:
    weight = torch.randn(rows, groups * group, generator=torch.Generator().manual_seed(seed)) * size
    weight[0, :group] = 0
    rounded = round_to_groups(weight, group, bits, symmetric=symmetric)
    steps = rounded.scales.float().repeat_interleave(group, dim=1)
    error = (rounded.dequantize() - weight).abs()
    # The zero point is rounded too, and the scale to float16, which the last code feels most.
    assert (error <= steps * (1.01 if not symmetric else 0.51) + steps * 2 ** (bits - 11)).all()
    assert (rounded.dequantize()[0, :group] == 0).all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("rows", "columns", "group"), [(40, 64, 32), (24, 96, 16), (13, 64, 32)])
def test_what_is_written_is_read_back(name: str, rows: int, columns: int, group: int, tmp_path: Path) -> None:
    method = METHODS[name]
    weight = torch.randn(rows, columns)
    tensors = method.encode(weight, group)
    save_file({f"a.{end}": tensor for end, tensor in tensors.items()}, tmp_path / "model.safetensors")
    kind = stored_quantization(Fields({"quantization_config": method.settings(group, ["lm_head"])}, "here"))
    assert kind is not None
    read = QuantizedSource(SafetensorsSource(tmp_path), kind).matrix("a.weight", rows, columns)
    if name == "fp8":
        assert isinstance(read, Float8Weight)
        expected = tensors["weight"].float() * tensors["weight_scale"]
    elif name == "w8a8":
        assert isinstance(read, GroupQuantWeight)
        assert (read.bits, read.group, read.rounds_inputs) == (8, columns, True)
        expected = tensors["weight"].float() * tensors["weight_scale"]
    else:
        assert isinstance(read, GroupQuantWeight)
        bits = 8 if name == "int8" else 4
        assert (read.bits, read.group) == (bits, group)
        expected = round_to_groups(weight, group, bits, symmetric=bits == 8).dequantize()
    torch.testing.assert_close(read.dequantize(), expected, rtol=1e-5, atol=1e-6)
    assert (read.dequantize() - weight).abs().max() < 0.4
