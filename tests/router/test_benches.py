"""The benches must run; what they measure is not judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("router.py", "--replicas 4 --blocks 1000 --decisions 20", "bytes per entry"),
        (
            "router.py",
            "--replicas 4 --holders 4 --decisions 20 --blocks 800 --idle --policies prefix-aware",
            "median",
        ),
        ("routing.py", "--replicas 2 --requests 40 --processes 2", "prefix-aware"),
        pytest.param("fleet_faults.py", "--replicas 4 --requests 40", "KV events", marks=pytest.mark.slow),
    ],
)
def test_it_prints_its_table(script: str, arguments: str, expected: str) -> None:
    command = [sys.executable, str(ROOT / "bench" / script), *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
