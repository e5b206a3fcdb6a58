"""Every native test runs once per instruction set this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.library import ISA_NAMES, Library, load
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def library() -> Library:
    loaded = load()
    if loaded is None:
        pytest.skip("the native library is not built")
    return loaded


@pytest.fixture(params=range(len(ISA_NAMES)), ids=ISA_NAMES)
def isa(request: pytest.FixtureRequest, library: Library) -> Iterator[str]:
    if not library.set_isa(request.param):
        pytest.skip(f"this processor does not have {ISA_NAMES[request.param]}")
    yield ISA_NAMES[request.param]
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
