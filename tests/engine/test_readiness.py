"""What an engine tells gateways when it is ready."""

from __future__ import annotations

from pathlib import Path

from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.build import build_engine


def test_an_engine_tells_how_many_requests_it_runs_and_keeps_waiting() -> None:
    scheduler = SchedulerConfig(max_num_seqs=3, max_queue_requests=4, max_queue_tokens=50)
    engine = build_engine(EngineConfig(model=ModelConfig(model="echo"), scheduler=scheduler), Path("echo"))
    assert engine.ready.max_num_seqs == 3
    assert engine.ready.max_requests == 7
    assert engine.ready.max_queue_tokens == 50
