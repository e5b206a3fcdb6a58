"""A record of the variants of kernels that compile, so that tests compile only what has changed. What Triton makes
of a kernel is settled by its source, the source of the functions that it calls, the types of its arguments, its
constants, the target and the release of Triton. A line of the record names the kernel and the digest of all that."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITCallable

from penstock.kernels.triton import targets


class Record:
    def __init__(self, lines: set[str]) -> None:
        self._lines = lines
        self.asked: set[str] = set()
        self.added: set[str] = set()

    @classmethod
    def read(cls, path: Path | None) -> Record:
        return cls(set() if path is None or not path.exists() else set(path.read_text().splitlines()))

    def write(self, path: Path) -> None:
        path.write_text("".join(f"{line}\n" for line in sorted(self._lines)))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Launches return None for variants in the record, and add the others."""
        forget_line_numbers()
        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = self._knows
            yield

    def _knows(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        line = describe(fn.jit_function, compile["specialization_data"])
        self.asked.add(line)
        if line in self._lines:
            return True
        self.added.add(line)
        return False


def describe(kernel: Any, specialization: str) -> str:
    asked = json.loads(specialization)
    del asked["key"]  # the rest as text
    libraries = asked["options"].get("extern_libs")  # with the folder of Triton
    asked["options"]["extern_libs"] = [Path(path).name for _, path in libraries or ()]
    parts = (triton.__version__, kernel.cache_key, asked, targets.current().shared_bytes)
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{asked['target']['arch']} {asked['name'].removeprefix('penstock.kernels.triton.')} {digest[:20]}"


def forget_line_numbers() -> None:
    """Triton's digest of a kernel has the number of its first line, which matters only to debuggers."""
    for name, module in list(sys.modules.items()):
        if name.startswith("penstock.kernels.triton"):
            for each in vars(module).values():
                if isinstance(each, JITCallable) and each.hash is None:
                    each.starting_line_number = 1
