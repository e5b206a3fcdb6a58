"""Every native test runs once per instruction set this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.library import ISA_NAMES, Library, load
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps


@pytest.fixture(scope="module", autouse=True)
def definitions_use_one_thread(torch_uses_one_thread: None) -> None: ...


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each kind of device


def present_isas() -> list[str]:
    """The instruction sets of this processor. `test_select.py` has a skipped test for each of the others."""
    loaded = load()
    if loaded is None:
        return ["generic"]
    present = [name for index, name in enumerate(ISA_NAMES) if loaded.set_isa(index)]
    loaded.set_isa(loaded.best_isa())
    return present


PRESENT_ISAS = present_isas()


@pytest.fixture(scope="session")
def library() -> Library:
    loaded = load()
    if loaded is None:
        pytest.skip("the native library is not built")
    return loaded


@pytest.fixture(params=PRESENT_ISAS)
def isa(request: pytest.FixtureRequest, library: Library) -> Iterator[str]:
    library.set_isa(ISA_NAMES.index(request.param))
    yield request.param
    library.set_isa(library.best_isa())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def native(library: Library, isa: str, dtype: torch.dtype) -> NativeOps:
    return NativeOps(library, dtype)


@pytest.fixture
def exact() -> TorchOps:
    """The definition, in float32."""
    return TorchOps("cpu", torch.float32)
