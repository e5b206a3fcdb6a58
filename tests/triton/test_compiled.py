"""The record of kernels that compile knows a variant by all that settles what the compiler makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton")

from penstock.kernels.gpus import FAMILIES
from penstock.kernels.triton import targets
from tests.triton import compiled
from tests.triton.compiled import Record, describe

ASKED: dict[str, Any] = {
    "name": "penstock.kernels.triton.int8.unpack_kernel",
    "constant_vals": [64],
    "options": {"num_warps": 4, "extern_libs": [["libdevice", "/one/place/libdevice.10.bc"]]},
    "key": "text",
    "target": {"backend": "cuda", "arch": 86, "warp_size": 32},
}


@pytest.fixture(autouse=True)
def _a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "current", lambda: FAMILIES[0])


def line(asked: dict[str, Any], source: str = "source") -> str:
    return describe(SimpleNamespace(cache_key=source), json.dumps(asked))


def test_a_line_names_the_kernel_and_the_target() -> None:
    assert line(ASKED).startswith("86 int8.unpack_kernel ")


def test_whatever_changes_the_compiled_kernel_changes_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {
        line(ASKED),
        line(ASKED, "other source"),
        line(ASKED | {"constant_vals": [32]}),
        line(ASKED | {"options": ASKED["options"] | {"num_warps": 8}}),
        line(ASKED | {"target": ASKED["target"] | {"arch": 90}}),
    }
    smaller = replace(FAMILIES[0], shared_bytes=FAMILIES[0].shared_bytes - 1)
    monkeypatch.setattr(targets, "current", lambda: smaller)
    lines.add(line(ASKED))
    monkeypatch.setattr(compiled.triton, "__version__", "0.0")
    lines.add(line(ASKED))
    assert len(lines) == 7


def test_the_place_of_triton_does_not_matter() -> None:
    moved = ASKED["options"] | {"extern_libs": [["libdevice", "/other/place/libdevice.10.bc"]]}
    assert line(ASKED | {"options": moved, "key": "other text"}) == line(ASKED)


def test_only_what_a_record_lacks_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "record"
    Record({line(ASKED)}).write(path)
    record = Record.read(path)

    def is_known(source: str) -> bool:
        function = SimpleNamespace(jit_function=SimpleNamespace(cache_key=source))
        return record._knows(fn=function, compile={"specialization_data": json.dumps(ASKED)}, key="key")

    assert is_known("source")
    assert not is_known("changed source")
    assert record.added == {line(ASKED, "changed source")}
    assert record.asked == {line(ASKED), line(ASKED, "changed source")}
    assert Record.read(None).added == set()
