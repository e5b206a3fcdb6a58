"""The scheduler and what it is simulated with can be compiled: `PENSTOCK_COMPILE=1 pip install .`."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

import penstock

_ROOT = Path(penstock.__file__).parent
_ROOMS = ("dispatch", "kvcache", "router", "scheduler", "simulator")
_FILES = sorted(path for room in _ROOMS for path in _ROOT.glob(f"{room}/*.py"))
_MODULES = [path for path in _FILES if "msgspec.Struct" not in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_class_means_something_else_when_it_is_compiled(path: Path) -> None:
    """mypyc ignores the settings of a class (`frozen=True` of a struct) without a word, refuses subclasses of most
    builtin types, and has no `__slots__` of a class to read."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            assert not node.keywords, node.name
            assert not {ast.unparse(base) for base in node.bases} & {"AssertionError", "list", "dict"}, (
                node.name
            )
        if isinstance(node, ast.Attribute):
            assert node.attr != "__slots__", node.lineno


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_is_divided_by_a_sum_without_a_start(path: Path) -> None:
    """mypyc divides whole numbers by such a sum, and raises TypeError where the sum is a float, unless a start of 0.0
    says so."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Call):
            is_sum = isinstance(node.right.func, ast.Name) and node.right.func.id == "sum"
            assert not is_sum or len(node.right.args) == 2, node.lineno


def test_most_of_the_scheduler_can_be_compiled() -> None:
    names = {path.stem for path in _MODULES}
    assert {"scheduler", "counted", "pool", "router", "dispatcher", "driver", "fleet"} <= names


@pytest.mark.parametrize("compiles", [False, True])
def test_pip_is_told_of_the_compiler_that_a_build_needs(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip builds in an environment of its own, which has what `setup` names and nothing else."""
    given: dict[str, list[str]] = {}
    monkeypatch.setattr("setuptools.setup", lambda **settings: given.update(settings))
    monkeypatch.setattr(sys, "argv", ["setup.py", "egg_info"])
    monkeypatch.setenv("PENSTOCK_COMPILE", "1" if compiles else "0")
    monkeypatch.chdir(_ROOT.parent)
    runpy.run_path("setup.py")
    assert any(each.startswith("mypy") for each in given["setup_requires"]) is compiles
