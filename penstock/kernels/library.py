"""Finds, loads and describes the compiled CPU library. Knows its C interface; knows nothing of tensors.

The library is optional. If the library is missing, `load()` returns None and the caller uses plain torch. A library
that was built for another description of the interface than this file's is not used, and a warning says how to
rebuild the library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

logger = logging.getLogger(__name__)

# In the order of `enum class Isa` in cpu/kernels.h.
ISA_NAMES = ("generic", "neon_dot", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
# Names the set to use instead of the best one, to test and to measure the others.
ISA_VARIABLE = "PENSTOCK_CPU_ISA"


class AttentionLayerStruct(Structure):
    """`AttentionLayer` of cpu/attention.h."""

    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("rope", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("norm_eps", c_float),
    )


class AttentionBatchStruct(Structure):
    """`AttentionBatch` of cpu/attention.h."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_requests", c_int64),
        ("max_context_len", c_int64),
        ("table_stride", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("halves_blocks", c_int64),
    )


class NormStruct(Structure):
    """`Norm` of cpu/blocks.cpp."""

    _fields_ = (("weight", c_void_p), ("dtype", c_int))


class DecoderLayerStruct(Structure):
    """`DecoderLayer` of cpu/blocks.cpp."""

    _fields_ = (
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("attention", POINTER(AttentionLayerStruct)),
        ("attention_norm", NormStruct),
        ("mlp_norm", NormStruct),
    )


class SamplingStruct(Structure):
    """`PenstockSampling` of cpu/sample.cpp."""

    _fields_ = (
        ("num_rows", c_int64),
        ("vocabulary", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seed", c_void_p),
        ("position", c_void_p),
    )


# The first arguments of several functions: the layer, the batch, the codes of two types, the block size, the cache.
_ATTENTION = (
    POINTER(AttentionLayerStruct), POINTER(AttentionBatchStruct), c_int, c_int, c_int64, c_void_p,
)  # fmt: skip
_LAYERS = POINTER(DecoderLayerStruct), c_int64, POINTER(AttentionBatchStruct)
# Name, result, arguments.
_FUNCTIONS = (
    ("num_threads", c_int, ()),
    ("set_num_threads", None, (c_int,)),
    ("best_isa", c_int, ()),
    ("isa", c_int, ()),
    ("set_isa", c_int, (c_int,)),
    ("linear_create", c_void_p, (c_int64,)),
    ("linear_free", None, (c_void_p,)),
    ("linear_add", c_int64, (c_void_p, c_int, c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int)),
    ("fast_integers", c_int, ()),
    ("linear_set_bias", None, (c_void_p, c_void_p)),
    ("linear_memory", c_int64, (c_void_p, c_int64, POINTER(c_void_p), POINTER(c_int64))),
    ("linear", None, (c_void_p, c_int, c_int64, c_void_p, c_int, c_void_p)),
    ("largest", None, (c_void_p, c_int, c_int64, c_void_p, c_void_p)),
    ("embed", c_int, (c_void_p, c_int, c_int64, c_void_p, c_void_p)),
    ("rms_norm", None, (c_int, c_int64, c_int64, c_void_p, c_int, c_void_p, c_float, c_void_p)),
    ("add_rms_norm", None, (c_int, c_int64, c_int64, c_void_p, c_void_p, c_int, c_void_p, c_float, c_void_p)),
    ("gated", None, (c_int, c_int, c_int64, c_int64, c_void_p, c_void_p)),
    ("cache_block_bytes", c_int64, (c_int, c_int, c_int64, c_int64, c_int64)),
    ("copy_half", None, (c_int, c_int, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64)),
    ("allocate_pages", c_void_p, (c_int64,)),
    ("touch_pages", None, (c_void_p, c_int64)),
    ("free_pages", None, (c_void_p, c_int64)),
    ("attend", None, (*_ATTENTION, c_void_p, c_void_p)),
    ("mlp", None, (c_void_p, c_void_p, c_int, c_int, c_int64, c_void_p, c_void_p)),
    ("attention", None, (c_void_p, c_void_p, *_ATTENTION, c_void_p, c_void_p)),
    ("mlp_block", None, (c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_float, c_int64, c_void_p)),
    ("attention_block", None, (c_void_p, c_void_p, *_ATTENTION, c_int, c_void_p, c_float, c_void_p)),
    ("decoder_layers", None, (*_LAYERS, c_int, c_int, c_float, c_int, c_int64, c_void_p, c_int64, c_void_p)),
    ("sample", None, (POINTER(SamplingStruct), c_void_p, c_void_p)),
    ("uniform_draw", c_double, (c_int64, c_int64)),
)


def interface_stamp() -> int:
    """Return a number that stands for the C interface as this file describes it. setup.py compiles the number into
    the library, and `load` compares the two."""
    layouts = (AttentionLayerStruct, AttentionBatchStruct, NormStruct, DecoderLayerStruct, SamplingStruct)
    fields = [(kind.__name__, [(name, of.__name__) for name, of, *_ in kind._fields_]) for kind in layouts]
    functions = [
        (name, getattr(result, "__name__", "void"), [argument.__name__ for argument in arguments])
        for name, result, arguments in _FUNCTIONS
    ]
    description = repr((ISA_NAMES, fields, functions)).encode()
    return int.from_bytes(hashlib.sha256(description).digest()[:8], "little")


class StaleLibraryError(Exception):
    """A library that was built for another description of the C interface."""


class Library:
    """The library's functions as attributes, under their C names without the prefix."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        stamp = getattr(library, "penstock_interface_stamp", None)
        if stamp is not None:
            stamp.restype = c_uint64
        if stamp is None or stamp() != interface_stamp():
            raise StaleLibraryError(path)
        for name, result, arguments in _FUNCTIONS:
            function = getattr(library, f"penstock_{name}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._FuncPointer:
        raise AttributeError(f"the CPU library has no function {name!r}")


@functools.cache
def load() -> Library | None:
    for path in _candidates():
        try:
            library = Library(path)
        except OSError:
            continue  # built for another kind of machine
        except (StaleLibraryError, AttributeError):
            logger.warning("%s", stale_sentence(path))
            continue
        library.set_num_threads(available_cores())
        _hide_instruction_sets(library)
        return library
    return None


def stale_sentence(path: Path) -> str:
    root = path.parents[2]
    rebuild = f"cd {root} && python setup.py build_ext --inplace" if (root / "setup.py").exists() else ""
    return (
        f"{path.name} was built from other sources than this version of Penstock and is not used; plain torch does "
        "its work more slowly. "
        + (f"Rebuild it: {rebuild}" if rebuild else "Install Penstock again to rebuild it.")
    )


def find_stale() -> Path | None:
    """Return the library's file, if the library is not used because it was built from other sources."""
    if load() is not None:
        return None
    for path in _candidates():
        try:
            Library(path)
        except OSError:
            continue
        except (StaleLibraryError, AttributeError):
            return path
    return None


def _candidates() -> list[Path]:
    return sorted(Path(__file__).parent.glob("_cpu*.so"))


def _hide_instruction_sets(library: Library) -> None:
    """Use the instruction set that the environment names instead of the best one."""
    name = os.environ.get(ISA_VARIABLE)
    if name and (name not in ISA_NAMES or not library.set_isa(ISA_NAMES.index(name))):
        raise ValueError(f"{ISA_VARIABLE}={name}: this processor has no such instruction set")


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
