"""Reads calls that a model writes as Python, such as `print(weather(city="Paris"))` or `[a(x=1), b(y=[2])]`.

Nothing is executed: only calls by a plain name with literal keyword arguments are understood.
"""

from __future__ import annotations

import ast

import msgspec

_MAX_CHARS = 65_536  # ast takes time and stack with the length of what it reads


class PythonCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON


def python_calls(source: str, known_names: frozenset[str]) -> list[PythonCall] | None:
    """The calls in `source`; None when it holds anything else, or calls what is not known."""
    if len(source) > _MAX_CHARS:
        return None
    try:
        statements = ast.parse(source.strip()).body
        calls: list[PythonCall] = []
        for statement in statements:
            if not isinstance(statement, ast.Expr | ast.Assign):
                return None
            calls += [_call(node, known_names) for node in _call_nodes(statement.value)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


def _call_nodes(expression: ast.expr) -> list[ast.expr]:
    """The calls that an expression consists of: itself, those in a list, or what it prints."""
    if isinstance(expression, ast.List | ast.Tuple):
        return [node for element in expression.elts for node in _call_nodes(element)]
    if (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Name)
        and expression.func.id == "print"
        and len(expression.args) == 1
    ):
        return _call_nodes(expression.args[0])
    return [expression]


def _call(node: ast.expr, known_names: frozenset[str]) -> PythonCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call by keywords")
    name = ast.unparse(node.func)
    if name not in known_names:
        raise ValueError(f"{name} is no known tool")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments must be named")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return PythonCall(name, msgspec.json.encode(arguments).decode())
