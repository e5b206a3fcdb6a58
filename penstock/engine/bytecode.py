"""Bytecode of torch, where it was installed without: by a tool that leaves it out, or into an image that forbids it.

Python then compiles 800 files whenever torch is imported, which takes three times as long as the rest of the import.
Where it may not keep what it compiled beside the source, it does so in a folder of ours; and for the first import,
other processes compile ahead of it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

PACKAGES = ("torch", "numpy", "triton")
# Large parts of torch that no engine imports.
LEFT_OUT = r"/torch/(testing/_internal|_inductor|_dynamo|onnx|include)/"
MIN_CORES = 8  # with fewer, compilers would be in the way of the import

# The folder is said when Python's own modules are imported, which have bytecode; and in the variable, for processes
# that do not inherit it.
_COMPILER = f"""
import compileall, os, re, sys
folder, num_processes, *packages = sys.argv[1:]
if folder:
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
for package in packages:
    compileall.compile_dir(package, quiet=2, workers=int(num_processes), rx=re.compile({LEFT_OUT!r}))
"""


def keep_bytecode(folder: Path) -> threading.Thread | None:
    """To be called before torch is imported. Returns at once; None where nothing is to be compiled."""
    specs = [spec for name in PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    if not specs or _has_bytecode(specs[0]):
        return None
    if sys.dont_write_bytecode or not os.access(Path(specs[0].origin or "").parent, os.W_OK):
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(folder)
        if _has_bytecode(specs[0]):
            return None
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if num_cores < MIN_CORES:
        return None
    packages = [str(Path(spec.origin or "").parent) for spec in specs]
    compiling = threading.Thread(target=_compile, args=(packages, num_cores // 2), daemon=True)
    compiling.start()
    return compiling


def _has_bytecode(spec: ModuleSpec) -> bool:
    return os.path.exists(importlib.util.cache_from_source(spec.origin or ""))


def _compile(packages: list[str], num_processes: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _COMPILER, sys.pycache_prefix or "", str(num_processes), *packages]
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
