"""Builds the optional CPU kernel library, and the gateway's decisions on limits. Everything else about the package is
in pyproject.toml.

The libraries have a plain C interface and are loaded with ctypes, so they depend on neither the Python nor the torch
ABI. They are optional: where no C++ compiler is found the install goes on, Penstock falls back to plain torch and
plain Python, and `penstock doctor` says so of the kernels.

With PENSTOCK_COMPILE=1, the scheduler, the block cache, the router, the dispatcher and the simulator are compiled
too, from the same source, by mypyc (it comes with mypy, which pip fetches for the build). Python takes the compiled
modules where they are built, and the source elsewhere.
"""

import importlib.util
import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None

SOURCES = sorted(str(path) for path in Path("penstock/kernels/cpu").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("penstock/kernels/cpu").glob("*.h"))

# Baseline code only: faster instruction sets are compiled per function and chosen at run time, so that a wheel
# built on one machine runs on another.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-pthread",
    "-g0",
]
# Noise from the compilers' own vector headers.
FLAGS += ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]

LIBRARY = "penstock/kernels/library.py"
DECISIONS = "penstock/gateway/ratelimits/decisions"


def decisions_interface() -> int:
    """The number that `decisions.py` expects the compiled decisions on limits to return."""
    source = Path(f"{DECISIONS}.py").read_text(encoding="utf-8")
    return int(re.search(r"^INTERFACE = (\d+)", source, re.MULTILINE)[1])


def interface_stamp() -> int:
    """The number that `library.py`, which needs the standard library only, expects the library to return."""
    spec = importlib.util.spec_from_file_location("library", LIBRARY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.interface_stamp()


class ParallelBuild(build_ext):
    """Compiles the sources of an extension side by side: the compiler takes them one after the other. Takes the
    library that is there if nothing has changed since: the Makefile compiles while pip fetches packages, and pip then
    builds as well."""

    def run(self):
        Path("build").mkdir(exist_ok=True)
        with open("build/lock", "w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()

    def build_extension(self, extension):
        there = Path(self.get_ext_filename(extension.name))  # below this folder, as with --inplace
        made = Path(self.get_ext_fullpath(extension.name))
        sources = [*extension.sources, *extension.depends, "setup.py"]
        changed_s = max(Path(each).stat().st_mtime for each in sources)
        if not self.force and there.exists() and there.stat().st_mtime > changed_s:
            made.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(there), str(made))
        else:
            super().build_extension(extension)

    def build_extensions(self):
        compile_sources = self.compiler.compile

        def compile_side_by_side(sources, *arguments, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_sources([source], *arguments, **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()


extensions = []
if SOURCES and platform.system() in ("Linux", "Darwin"):
    extensions.append(
        Extension(
            "penstock.kernels._cpu",
            SOURCES,
            depends=[*HEADERS, LIBRARY],
            define_macros=[("PENSTOCK_INTERFACE_STAMP", f"{interface_stamp():#x}ULL")],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
            language="c++",
        )
    )
    extensions.append(
        Extension(
            "penstock.gateway.ratelimits._decisions",
            [f"{DECISIONS}.cpp"],
            depends=[f"{DECISIONS}.py"],
            define_macros=[("PENSTOCK_LIMITS_INTERFACE", str(decisions_interface()))],
            extra_compile_args=FLAGS,
            optional=True,
            language="c++",
        )
    )


def compiled_modules():
    """The scheduler and what it is simulated with, as extensions."""
    from mypyc.build import mypycify

    # msgspec's structs lose their settings when they are compiled, such as `frozen`: files that define any stay as
    # they are.
    rooms = ("kvcache", "scheduler", "router", "dispatch", "simulator")
    paths = [path for room in rooms for path in sorted(Path("penstock", room).glob("*.py"))]
    paths += [Path("penstock/core", name) for name in ("clock.py", "hashing.py", "shares.py")]
    modules = [
        str(path)
        for path in paths
        if path.stem != "__init__" and "msgspec.Struct" not in path.read_text(encoding="utf-8")
    ]
    return mypycify(modules, opt_level="2", debug_level="0", multi_file=True, group_name="penstock")


COMPILER = ["mypy>=1.14", "msgspec>=0.19"]  # the modules import msgspec, whose types mypyc reads
needed = []
if os.environ.get("PENSTOCK_COMPILE") == "1":
    if {"egg_info", "dist_info"} & {
        *sys.argv
    }:  # pip first asks what the build needs, installs that, and then builds
        needed = COMPILER
    else:
        extensions += compiled_modules()

setup(ext_modules=extensions, cmdclass={"build_ext": ParallelBuild}, setup_requires=needed)
