"""What `auto` means, and what a user hears when the fast kernels are missing."""

from __future__ import annotations

import pytest
import torch

from penstock.core.config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.errors import ConfigError
from penstock.engine.device import choose_ops
from penstock.kernels import library


def config(**model: str) -> EngineConfig:
    return EngineConfig(model=ModelConfig(device="cpu", **model))


def test_the_slow_backend_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    assert choose_ops(config()).dtype == torch.float32
    assert "penstock doctor" in caplog.text


def test_a_backend_without_half_precision_falls_back_aloud(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_ops(config(dtype="float16")).name == "torch"
    assert "penstock doctor" in caplog.text


def test_the_native_backend_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    if library.load() is None:
        pytest.skip("needs the native kernels")
    choose_ops(config(dtype="float32"))
    assert not caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_ops(EngineConfig(model=ModelConfig(device="cuda")))


def test_a_float8_cache_needs_cuda() -> None:
    config = EngineConfig(model=ModelConfig(device="cpu"), cache=CacheConfig(kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="CUDA"):
        choose_ops(config)
