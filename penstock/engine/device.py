"""Where and in which number format a model runs: the `auto` of `--device` and `--dtype` made concrete."""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.installation import install_command
from penstock.kernels.interface import Ops
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps
from penstock.kernels.select import preferred_cpu_dtype, select_ops, set_num_threads

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_ops(config: EngineConfig) -> Ops:
    device = choose_device(config.model.device)
    if device.type == "cpu":
        set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    backend = config.model.attention_backend
    if backend == "flashinfer" and device.type != "cuda":
        raise ConfigError("--attention-backend flashinfer needs a CUDA device.", hint="Leave it out.")
    if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            "--attention-backend flashinfer needs FlashInfer.", hint=f"Run: {install_command('flashinfer')}"
        )
    ops = select_ops(
        device,
        _choose_dtype(config.model.dtype, device),
        _kv_dtype(config.cache.kv_cache_dtype, device),
        # Who names a type gets it.
        integer_products=config.model.dtype == "auto",
        attention_backend=backend,
    )
    if isinstance(ops, TorchOps):
        log.warning("running on plain torch, which is slow: `penstock doctor` says which kernels are missing")
    return ops


def leave_cores_to(ops: Ops) -> None:
    """Once the model is loaded: what torch still does in a step is too little to share, but its threads would spin
    for milliseconds after it, on the cores that the CPU kernels' own threads need."""
    if isinstance(ops, NativeOps):
        torch.set_num_threads(1)


def choose_device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda was asked for, but torch finds no CUDA device.", hint="Try --device auto."
        )
    return torch.device(asked)


def _kv_dtype(asked: str, device: torch.device) -> torch.dtype | None:
    """None is the compute type."""
    if asked == "auto":
        return None
    if asked == "int8":
        return torch.int8
    if device.type != "cuda":
        raise ConfigError(
            "A KV cache in fp8 needs a CUDA device.",
            hint="Leave --kv-cache-dtype out to keep it in the compute type.",
        )
    return torch.float8_e4m3fn


def _choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked != "auto":
        return _DTYPES[asked]
    return torch.bfloat16 if device.type == "cuda" else preferred_cpu_dtype()
