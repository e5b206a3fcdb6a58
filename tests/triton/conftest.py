from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
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
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = patching_once(interpreter, interpreter._patch_lang)
    if hasattr(getattr(interpreter, "ScanOps", None), "generic_scan"):
        interpreter.ScanOps.generic_scan = scan_by_slices


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

    def patch_once(function: Any) -> Any:
        seen = {
            each.__name__ for each in function.__globals__.values() if any(each is one for one in languages)
        }
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
