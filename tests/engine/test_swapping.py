"""A real engine that swaps instead of computing again says the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from penstock.engine import cache_memory
from tests.engine.tiny import (
    VOCAB_SIZE,
    request,
    run,
    teach_short_answers,
    tiny_engine,
    tokens,
    write_tiny_model,
)

rng = random.Random(8)
PROMPTS = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (40, 90, 20, 70)]


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}], ids=["float32", "int8"])
def test_swapped_requests_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(cache_memory, "block_copy_s", lambda *_: 0.0)
    requests = [request(f"{n}", prompt, 60) for n, prompt in enumerate(PROMPTS)]
    expected = {each.id: tokens(run(tiny_engine(model, **settings), [each])[each.id]) for each in requests}
    engine = tiny_engine(model, num_kv_blocks=18, **settings)
    teach_short_answers(engine)
    events = run(engine, requests)
    stats = engine.loop.stats()
    assert stats.num_swapped > 0
    assert stats.num_blocks_from_host > 0
    assert {name: tokens(answer) for name, answer in events.items()} == expected


def test_copies_are_timed(tmp_path: Path) -> None:
    engine = tiny_engine(write_tiny_model(tmp_path / "tiny"), record_plans=str(tmp_path / "plans"))
    engine.close()
    header = json.loads((tmp_path / "plans").read_bytes().splitlines()[0])
    assert header["block_copy_s"] > 0.0
