"""Which backend serves a device and a type, and what this machine's CPU can do."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from penstock.kernels import library
from penstock.kernels.interface import Ops
from penstock.kernels.native import DTYPE_CODES, NativeOps
from penstock.kernels.reference import TorchOps


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the CPU backend found. `isa` is None where there is no native library."""

    native: bool
    isa: str | None
    num_threads: int


def select_ops(device: torch.device | str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Ops:
    """`kv_dtype` is that of the KV cache, where it is not `dtype`; the native CPU kernels know no other."""
    device = torch.device(device)
    native = library.load()
    if device.type == "cpu" and dtype in DTYPE_CODES and native is not None:
        return NativeOps(native, dtype)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from penstock.kernels.triton.ops import TritonOps  # imports triton, which only CUDA machines have

        return TritonOps(device, dtype, kv_dtype)
    return TorchOps(device, dtype, kv_dtype)


def capabilities() -> Capabilities:
    native = library.load()
    if native is None:
        return Capabilities(native=False, isa=None, num_threads=torch.get_num_threads())
    return Capabilities(
        native=True, isa=library.ISA_NAMES[native.best_isa()], num_threads=native.num_threads()
    )


def preferred_cpu_dtype() -> torch.dtype:
    """bfloat16 where the native kernels multiply it in hardware, else float32."""
    return torch.bfloat16 if capabilities().isa in ("avx512_bf16", "amx") else torch.float32


def set_num_threads(count: int) -> None:
    """How many threads the CPU kernels use, the calling one included."""
    torch.set_num_threads(count)
    native = library.load()
    if native is not None:
        native.set_num_threads(count)
