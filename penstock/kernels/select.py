"""Selects the backend for a device and a dtype, and detects the features of this machine's CPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.kernels import library
from penstock.kernels.interface import Ops
from penstock.kernels.native import DTYPE_CODES, NativeOps
from penstock.kernels.reference import TorchOps

AttentionBackend = Literal["auto", "triton", "flashinfer"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features that the CPU backend uses on this machine. `isa` is None where there is no native library."""

    native: bool
    isa: str | None
    num_threads: int
    problem: str | None = None  # why a library that is there is not used


def select_ops(
    device: torch.device | str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    integer_products: bool = False,
    attention_backend: AttentionBackend = "auto",
) -> Ops:
    """Return the backend for a device and a type of activations.

    With `integer_products`, a CPU that multiplies bytes fast multiplies quantized weights with 16-bit
    activations. `kv_dtype` is the type of the KV cache, unless that is `dtype`. `attention_backend` chooses
    the kernels of attention over prompts on CUDA."""
    device = torch.device(device)
    native = library.load()
    if (
        device.type == "cpu"
        and dtype in DTYPE_CODES
        and native is not None
        and kv_dtype in (None, torch.int8)
    ):
        in_integers = integer_products and bool(native.fast_integers())
        return NativeOps(native, dtype, kv_dtype, integer_products=in_integers)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        # These import triton, which only CUDA machines have.
        from penstock.kernels.triton.flashinfer_attention import FlashInferAttention
        from penstock.kernels.triton.ops import TritonOps

        flashinfer = FlashInferAttention(device) if attention_backend == "flashinfer" else None
        return TritonOps(device, dtype, kv_dtype, flashinfer=flashinfer)
    return TorchOps(device, dtype, kv_dtype)


def capabilities() -> Capabilities:
    native = library.load()
    if native is None:
        stale = library.find_stale()
        problem = None if stale is None else library.stale_sentence(stale)
        return Capabilities(False, None, torch.get_num_threads(), problem)
    return Capabilities(native=True, isa=library.ISA_NAMES[native.isa()], num_threads=native.num_threads())


def preferred_cpu_dtype() -> torch.dtype:
    """Return the type that `--dtype auto` computes in on this CPU: bfloat16 with AMX, float32 on all others."""
    return torch.bfloat16 if capabilities().isa == "amx" else torch.float32


def set_num_threads(count: int) -> None:
    """Set how many threads the CPU kernels use, the calling thread included."""
    torch.set_num_threads(count)
    native = library.load()
    if native is not None:
        native.set_num_threads(count)
