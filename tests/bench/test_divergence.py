"""The divergence bench: what it compares, and how it goes on after a stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.divergence import Found, Job, compare, run_or_load

JOB = Job(Path("m.gguf"), [[1, 2, 3]], [[1, 2]], 2)
FOUND = Found([torch.tensor([[0.0, 1.0], [2.0, 0.0]])], [[5, 6]])


def test_a_second_call_takes_the_runs_that_are_finished(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(name: str) -> Found:
        ran.append(name)
        if name == "stopped":
            raise KeyboardInterrupt
        return FOUND

    for _ in range(2):
        found = run_or_load("`--dtype auto`", JOB, lambda: run("auto"), tmp_path / "kept")
        assert torch.equal(found.logits[0], FOUND.logits[0])
        assert found.answers == FOUND.answers
        with pytest.raises(KeyboardInterrupt):
            run_or_load("llama.cpp", JOB, lambda: run("stopped"), tmp_path / "kept")
    run_or_load("`--dtype auto`", replace(JOB, new_tokens=3), lambda: run("other job"), tmp_path / "kept")
    run_or_load("`--dtype auto`", JOB, lambda: run("not kept"), None)
    assert ran == ["auto", "stopped", "stopped", "other job", "not kept"]


def test_equal_runs_do_not_diverge() -> None:
    assert compare(FOUND, FOUND) == (0.0, 1.0, 1, 2.0)
    other = Found([torch.tensor([[0.0, 1.0], [0.0, 2.0]])], [[5, 7]])
    divergence, same, equal, prefix = compare(FOUND, other)
    assert divergence == pytest.approx(torch.tensor([1.0, 1.0]).mean().item() * 0.7616, abs=1e-3)
    assert (same, equal, prefix) == (0.5, 0, 1.0)
