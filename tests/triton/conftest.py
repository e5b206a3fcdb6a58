from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each kind of device


@pytest.fixture(scope="session", autouse=True)
def _quicker_interpreter() -> None:
    """Spare Triton's interpreter work that has no effect: most of its time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    pytest.importorskip("triton", reason="needs Triton")
    from triton.runtime import interpreter  # before Triton 3.9 it may have other names, and stays as it is

    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        # Without `debug`, nothing looks at the sums and products in 64 bits.
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = looking_up_once(interpreter._get_np_dtype)
    if hasattr(interpreter.tl.core, "validate_block_shape"):
        share_shapes(interpreter.tl.core)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = patching_once(interpreter, interpreter._patch_lang)
    if hasattr(getattr(interpreter, "ScanOps", None), "generic_scan"):
        interpreter.ScanOps.generic_scan = scan_by_slices


def looking_up_once(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter makes a table of all types whenever it asks for the type of an array."""
    found: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    return look_up


def share_shapes(core: Any) -> None:
    """Every tensor and every type of a tensor makes a shape of its own, and checks it."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_tensors: dict[Any, dict[str, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
        self.__dict__.update(of_types[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[key] = {name: getattr(self, name) for name in ("shape", "numel")}
        self.__dict__.update(of_tensors[key], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def scan_by_slices(scan: Any, inputs: Any) -> list[Any]:
    """Scan along an axis by whole slices. The interpreter itself goes number by number."""
    types = [each.dtype for each in inputs]
    slices = [np.moveaxis(each.handle.data, scan.axis, 0) for each in inputs]
    made = [np.empty_like(each) for each in slices]
    for place in range(len(slices[0])):
        found = tuple(scan.to_tensor(each[place], kind) for each, kind in zip(slices, types, strict=True))
        if place:
            before = (scan.to_tensor(each[place - 1], kind) for each, kind in zip(made, types, strict=True))
            found = scan.combine_fn.fn(*before, *found)
            found = found if isinstance(found, tuple) else (found,)
        for each, value in zip(made, found, strict=True):
            each[place] = value.handle.data
    back = (np.ascontiguousarray(np.moveaxis(each, 0, scan.axis)) for each in made)
    return [scan.to_tensor(each, kind) for each, kind in zip(back, types, strict=True)]


def patching_once(interpreter: Any, patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter replaces the functions of the language at each launch, and again whenever the kernel calls a
    function. The latter is needed only where the function sees other modules of the language than the kernel."""
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[str] = set()

    @cache
    def seen_by(module: str) -> set[str]:
        names = vars(sys.modules[module]).values()
        return {each.__name__ for each in names if any(each is one for one in languages)}

    def patch_once(function: Any) -> Any:
        seen = seen_by(function.__module__)
        if seen <= patched:
            return interpreter._LangPatchScope()
        is_launch = not patched
        scope = patch(function)
        patched.update(seen)
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    return patch_once
