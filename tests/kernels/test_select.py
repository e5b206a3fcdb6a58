"""The choice of a backend, and life beside torch."""

from __future__ import annotations

import concurrent.futures

import pytest
import torch

from penstock.kernels import library as library_module
from penstock.kernels import select
from penstock.kernels.blocks import DelegatingOps
from penstock.kernels.interface import DenseWeight, GroupQuantWeight
from penstock.kernels.library import Library
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps
from tests.kernels.conftest import PRESENT_ISAS


def test_native_where_it_can_torch_elsewhere(library: Library) -> None:
    assert isinstance(select.select_ops("cpu", torch.float32), NativeOps)
    assert isinstance(select.select_ops("cpu", torch.bfloat16), NativeOps)
    assert isinstance(select.select_ops("cpu", torch.float64), TorchOps)
    assert isinstance(select.select_ops("meta", torch.float32), TorchOps)


def test_torch_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "load", lambda: None)
    assert isinstance(select.select_ops("cpu", torch.float32), TorchOps)
    assert select.capabilities().native is False


def test_a_library_of_another_version_is_refused_with_the_command_that_rebuilds_it(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One function less is another interface, even though the library has all functions that are left."""
    monkeypatch.setattr(library_module, "_FUNCTIONS", library_module._FUNCTIONS[:-1])
    library_module.load.cache_clear()
    try:
        assert library_module.load() is None
        assert "was built from other sources" in caplog.text
        assert "python setup.py build_ext --inplace" in caplog.text
        assert "python setup.py build_ext --inplace" in (select.capabilities().problem or "")
    finally:
        monkeypatch.undo()
        library_module.load.cache_clear()
    assert library_module.load() is not None
    assert select.capabilities().problem is None


def test_a_backend_says_what_it_rounds(library: Library) -> None:
    quantized = GroupQuantWeight(
        torch.randint(0, 16, (16, 32), dtype=torch.uint8), torch.ones(16, 1), None, group=32, bits=4
    )
    ops = NativeOps(library, torch.float32, integer_products=True)
    ops.pack_linear([DenseWeight(torch.randn(16, 32))])
    assert ops.rounding == ""
    ops.pack_linear([quantized])
    assert "rounded to 16 bits" in ops.rounding
    assert DelegatingOps(ops).rounding == ops.rounding
    assert NativeOps(library, torch.bfloat16).rounding == "products rounded to bfloat16"
    assert TorchOps("cpu", torch.float32).rounding == ""


def test_capabilities_name_the_best_set(library: Library) -> None:
    found = select.capabilities()
    assert found.native
    assert found.isa in library_module.ISA_NAMES
    assert found.num_threads == library.num_threads()
    assert select.preferred_cpu_dtype() == (torch.bfloat16 if found.isa == "amx" else torch.float32)


@pytest.mark.parametrize("name", library_module.ISA_NAMES)
def test_every_instruction_set_is_tested(library: Library, name: str) -> None:
    """All native tests run for each instruction set of the processor."""
    if name not in PRESENT_ISAS:
        pytest.skip(f"this processor does not have {name}, and no native test runs with it")
    assert library.set_isa(library_module.ISA_NAMES.index(name))
    library.set_isa(library.best_isa())


def test_an_instruction_set_the_processor_lacks_is_refused(library: Library) -> None:
    assert not library.set_isa(len(library_module.ISA_NAMES))
    assert not library.set_isa(-1)
    assert library.isa() == library.best_isa()


def test_torch_products_in_between_do_no_harm(library: Library) -> None:
    """Torch's own matrix products use the same tile registers, in shapes of their own."""
    ops = NativeOps(library, torch.bfloat16)
    packed = ops.pack_linear([DenseWeight(torch.randn(64, 64))])
    x, other = torch.randn(4, 64).bfloat16(), torch.randn(256, 256).bfloat16()
    expected = ops.linear(x, packed)
    for _ in range(5):
        torch.nn.functional.linear(other, other)
        assert torch.equal(ops.linear(x, packed), expected)


def test_several_threads_may_call_at_once(library: Library) -> None:
    ops = NativeOps(library, torch.bfloat16)
    packed = ops.pack_linear([DenseWeight(torch.randn(300, 128))])
    inputs = [torch.randn(rows, 128).bfloat16() for rows in range(1, 25)]
    expected = [ops.linear(x, packed) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        for _ in range(5):
            found = executor.map(lambda x: ops.linear(x, packed), inputs)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
