"""A failed load leaves neither ranks nor a process group. In a file of its own: no other engine is open then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.core.engine_config import EngineConfig, ModelConfig, ParallelConfig
from penstock.core.errors import ModelLoadError
from penstock.engine.build import build_engine
from tests.engine.parallel.test_engine import model  # noqa: F401  a fixture


def test_a_model_that_cannot_be_loaded_is_reported_and_leaves_no_rank(model: Path) -> None:  # noqa: F811
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32"),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        build_engine(config, model)
    assert not torch.distributed.is_initialized(), "another engine can be built"
