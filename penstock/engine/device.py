"""Chooses the device and the number format that a model runs in, from `--device` and `--dtype`."""

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

logger = logging.getLogger(__name__)

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
    dtype = _choose_dtype(config.model.dtype, device)
    ops = select_ops(
        device,
        dtype,
        _kv_dtype(config.cache.kv_cache_dtype, device),
        # An explicit --dtype is never overridden.
        integer_products=config.model.dtype == "auto",
        attention_backend=backend,
    )
    if isinstance(ops, TorchOps) and device.type == "cpu" and dtype == torch.float16:
        logger.warning(
            "float16 has no fast kernels on a CPU, so this model runs on plain torch, which is slow: use --dtype "
            "bfloat16 or --dtype float32"
        )
    elif isinstance(ops, TorchOps):
        logger.warning(
            "running on plain torch, which is slow: `penstock doctor` says which kernels are missing"
        )
    return ops


def leave_cores_to(ops: Ops) -> None:
    """Give torch a single thread, once the model is loaded. Torch does too little in a step to share it, and its
    threads would spin for milliseconds afterwards, on the cores that the threads of the CPU kernels need."""
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
    """The number format of the KV cache; None for the format that the model computes in."""
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
