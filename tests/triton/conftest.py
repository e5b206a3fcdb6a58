"""These tests run the kernels in Triton's interpreter, on the CPU. It has to be chosen before triton is imported, which
`tests/conftest.py` does; and it cannot be where kernels are compiled for a GPU in the same process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def _reason_to_skip() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels are compiled here; tests/gpu runs them"
    try:
        import triton
    except ImportError as error:
        return f"needs triton, which this platform does not have: {error}"
    return None if triton.knobs.runtime.interpret else "triton was imported before its interpreter was chosen"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The modules here import kernels, and only where that works can they be collected."""
    if collection_path.name.startswith("test_kernels") and _reason_to_skip() is not None:
        return True
    return None


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
