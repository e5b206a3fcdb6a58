"""The benches of this room must run; what they measure is not judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_compares_policies_on_real_processes() -> None:
    command = [sys.executable, "-m", "bench.replicas", "echo", "--requests", "24"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "cached share ×" in result.stdout


@pytest.mark.slow
def test_it_kills_a_real_process_and_counts_what_came_of_it() -> None:
    command = [sys.executable, "-m", "bench.faults", "echo", "--streams", "4", "--tokens", "2000"]
    command += ["--only", "an engine is killed"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "kill -9" in result.stdout
