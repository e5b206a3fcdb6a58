"""Which steps are replayed. What replaying computes, only a GPU can tell: `tests/gpu/test_prompt_graphs.py`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.graphs import FEWEST, MOST, DecodeGraphs, PromptGraphs, padded_sizes


@pytest.mark.parametrize("num_parameters", [0, 10**6, 600 * 10**6, 8 * 10**9, 70 * 10**9, 10**12])
def test_sizes_grow_by_little(num_parameters: int) -> None:
    sizes = padded_sizes(num_parameters)
    assert FEWEST <= sizes[-1] <= MOST
    for smaller, larger in itertools.pairwise(sizes):
        assert smaller < larger <= max(smaller + 16, 1.5 * smaller)


def test_larger_models_fill_the_gpu_with_fewer_tokens() -> None:
    largest = [padded_sizes(billions * 10**9)[-1] for billions in (1, 8, 70)]
    assert largest == [2048, 640, 128]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PromptGraphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    model: Any = SimpleNamespace(num_parameters=70 * 10**9, config=SimpleNamespace(num_heads=2), head_dim=16)
    ops: Any = SimpleNamespace(dtype=torch.float32)
    kv: Any = SimpleNamespace(num_blocks=4, block_size=16)
    rows: Any = SimpleNamespace(last_tokens=torch.zeros(1), attention_batch=lambda step: None, windows=None)
    monkeypatch.setattr(PromptGraphs, "_fill", lambda self, step, count, size: None)
    return PromptGraphs(model, ops, kv, rows, staging=None)  # type: ignore[arg-type]


def _step(num_tokens: int) -> Any:
    return SimpleNamespace(token_ids=[0] * num_tokens)


def test_a_size_is_recorded_when_it_is_met_again(
    graphs: PromptGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []

    def record(size: int, *, adapted: bool) -> Any:
        assert not adapted
        recorded.append(size)
        return SimpleNamespace(replay=lambda batch: None, hidden=torch.ones(size, 4))

    monkeypatch.setattr(graphs, "_record", record)
    assert graphs.hidden(_step(20)) is None
    assert graphs.hidden(_step(50)) is None
    replayed = graphs.hidden(_step(30))  # padded to 32, as the first was
    assert replayed is not None
    assert replayed.shape == (30, 4)
    assert graphs.hidden(_step(20)) is not None
    assert recorded == [32]
    for _ in range(3):
        assert graphs.hidden(_step(FEWEST + 1)) is None


def test_steps_with_drafts_are_recorded_when_they_are_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without drafts are recorded at once: all their sizes return."""
    recorded: list[tuple[int, bool]] = []

    def capture(self: DecodeGraphs, step: Any, size: int, context: int, *, adapted: bool) -> Any:
        assert not adapted
        recorded.append((size, step.neighbours is not None))
        logits = torch.zeros(size, 4)
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), logits=logits, hidden=logits)

    def step(count: int, *, drafts: bool) -> Any:
        return SimpleNamespace(
            rows=[0] * count, max_context_len=9, neighbours=() if drafts else None, has_trees=False
        )

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    monkeypatch.setattr(DecodeGraphs, "_fill", lambda self, step, count, size, context: None)
    kv: Any = SimpleNamespace(num_blocks=4, block_size=16)
    rows: Any = SimpleNamespace(
        max_rows=64,
        block_size=16,
        num_device_tokens=8,
        last_tokens=torch.zeros(1),
        states=None,
        windows=None,
        keep_tokens_in=lambda buffer: None,
    )
    graphs = DecodeGraphs(None, kv, rows, None, max_model_len=64)  # type: ignore[arg-type]
    assert graphs.logits(step(3, drafts=True)) is None
    assert graphs.take_capture_s() == 0.0
    assert graphs.logits(step(4, drafts=False)) is not None
    replayed = graphs.logits(step(4, drafts=True))  # padded as the first was
    assert replayed is not None
    assert replayed.shape == (4, 4)
    assert recorded == [(4, False), (4, True)]
    assert graphs.take_capture_s() > 0.0


def test_without_memory_no_more_sizes_are_recorded(
    graphs: PromptGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def record(size: int, *, adapted: bool) -> Any:
        tried.append(size)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(graphs, "_record", record)
    for _ in range(4):
        assert graphs.hidden(_step(20)) is None
        assert graphs.hidden(_step(60)) is None
    assert tried == [32]
    assert "no memory to record steps of 32 tokens" in caplog.text
