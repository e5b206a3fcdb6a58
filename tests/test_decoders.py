"""Decoders of msgspec structs are built at import.

msgspec describes a class when a decoder of the class is built, or when the class is first decoded; two threads that
do so at the same time can crash the process.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import penstock

PACKAGE = Path(penstock.__file__).parent


def names_a_class(annotation: ast.expr) -> bool:
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    return any(name.lstrip("_")[:1].isupper() and name != "Any" for name in names)


def late_decodes(source: str) -> list[int]:
    """The lines that decode a class by calling msgspec's function instead of a decoder."""
    if not (re.search(r"\bdecode\b", source) and re.search(r"\btype\b", source)):
        return []  # as in nearly all files, without the time of parsing them
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode"
        for keyword in node.keywords
        if keyword.arg == "type" and names_a_class(keyword.value)
    ]


def test_no_module_decodes_a_class_that_was_not_described_at_import() -> None:
    late = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := late_decodes(path.read_text("utf-8")))
    }
    assert not late


def test_the_search_finds_what_it_looks_for() -> None:
    assert late_decodes("x = 1\nmsgspec.json.decode(body, type=list[_Model])") == [2]
    assert late_decodes("msgspec.json . decode(\n    body,\n    type = Model)") == [1]
    assert not late_decodes("msgspec.json.decode(body, type=dict[str, Any])")
