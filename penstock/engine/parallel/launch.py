"""Loads a model on several ranks: starts the processes of the other ranks. Imports torch late."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.clock import Clock
from penstock.core.engine_config import EngineConfig
from penstock.engine.loaded import Loaded, Progress
from penstock.engine.parallel.processes import RankProcesses, rank_config

if TYPE_CHECKING:
    from penstock.engine.parallel.local_rank import LocalRank


def load_ranks(config: EngineConfig, model_path: Path, clock: Clock, on_progress: Progress | None) -> Loaded:
    """This process is the first rank, and starts the others."""
    config = rank_config(config)
    with ExitStack() as on_failure:
        others = RankProcesses(config, model_path)
        on_failure.callback(others.kill)
        # All ranks import torch at the same time.
        from penstock.engine.decoder import load_decoder
        from penstock.engine.parallel.executor import PipelineExecutor, TensorParallelExecutor
        from penstock.engine.parallel.setup import check, join

        check(config, model_path)
        with others.explaining():
            others.wait_until_present()
            setup = join(config, model_path, 0, others.meeting_place)
            on_failure.callback(setup.mesh.close)
            loaded = load_decoder(config, model_path, clock, on_progress, setup)
        on_failure.pop_all()
    assert loaded.rank is not None
    if config.parallel.pipeline_parallel_size == 1:
        whole = TensorParallelExecutor(loaded.rank, others)
        return replace(loaded, executor=whole, ranks=whole)
    staged = PipelineExecutor(loaded.rank, others, clock)
    # A part of the next step enters the first stage while the last one is busy with this step.
    return replace(loaded, executor=staged, ranks=staged, default_steps_in_flight=2)


def build_rank(
    config: EngineConfig, model_path: Path, rank: int, meeting_place: Path, clock: Clock
) -> LocalRank:
    """One of the others; waits at the meeting place for all of them."""
    from penstock.engine.decoder import load_decoder
    from penstock.engine.parallel.setup import join

    setup = join(config, model_path, rank, meeting_place)
    loaded = load_decoder(config, model_path, clock, None, setup)
    assert loaded.rank is not None
    return loaded.rank
