"""The scheduler and what it is simulated with can be compiled: `PENSTOCK_COMPILE=1 python setup.py build_ext
--inplace`."""

from __future__ import annotations

import ast
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


def test_most_of_the_scheduler_can_be_compiled() -> None:
    names = {path.stem for path in _MODULES}
    assert {"scheduler", "counted", "pool", "router", "dispatcher", "driver", "fleet"} <= names
