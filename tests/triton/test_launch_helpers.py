"""What the host computes for every launch takes little time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

import triton

import penstock.kernels.triton
from penstock.kernels.triton.device import cdiv, next_power_of_2

FOLDER = Path(penstock.kernels.triton.__file__).parent


def test_helpers_give_what_tritons_give() -> None:
    for number in range(1, 2050):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert [cdiv(number, by) for by in (1, 3, 64)] == [triton.cdiv(number, by) for by in (1, 3, 64)]
    assert next_power_of_2(0) == triton.next_power_of_2(0)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_hosts_do_not_call_tritons(path: Path) -> None:
    """Those are for kernels, and take microseconds each."""
    tree = ast.parse(path.read_text())
    calls = {id(node): node for node in ast.walk(tree) if _is_tritons(node)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and any(
            "jit" in ast.unparse(d) for d in function.decorator_list
        ):
            for node in ast.walk(function):
                calls.pop(id(node), None)
    assert [ast.unparse(node) for node in calls.values()] == []


def _is_tritons(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("triton.cdiv", "triton.next_power_of_2")
