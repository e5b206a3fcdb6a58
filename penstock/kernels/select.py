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


def select_ops(
    device: torch.device | str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    integer_products: bool = False,
    use_flashinfer: bool = False,
) -> Ops:
    """With `integer_products`, weights that come quantized may be multiplied as whole numbers where a CPU does that
    faster. `kv_dtype` is that of the KV cache, where it is not `dtype`; the native CPU kernels know no other, and
    leave it to plain torch. `use_flashinfer` is for CUDA, and needs that package."""
    device = torch.device(device)
    native = library.load()
    if device.type == "cpu" and dtype in DTYPE_CODES and native is not None and kv_dtype is None:
        return NativeOps(native, dtype, integer_products=integer_products and bool(native.fast_integers()))
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        # These import triton, which only CUDA machines have.
        from penstock.kernels.triton.flashinfer_attention import FlashInferAttention
        from penstock.kernels.triton.ops import TritonOps

        flashinfer = FlashInferAttention(device) if use_flashinfer else None
        return TritonOps(device, dtype, kv_dtype, flashinfer=flashinfer)
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
