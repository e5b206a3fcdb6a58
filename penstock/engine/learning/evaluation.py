"""Measures a drafter as it is served: acceptance by position, and tokens per second of one stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.core.clock import SystemClock
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.messages import DrafterStats, ModelCard
from penstock.core.request import SamplingParams
from penstock.engine.offline import OfflineEngine


@dataclass(frozen=True, slots=True)
class DraftFigures:
    answers: list[list[int]]
    tokens_per_s: float
    drafters: tuple[DrafterStats, ...]


def measure(
    config: EngineConfig,
    model_path: Path,
    prompts: Callable[[ModelCard], Sequence[Sequence[int]]],
    max_tokens: int,
) -> DraftFigures:
    """Answer prompts one after the other. The first one is answered twice, and measured the second time."""
    clock = SystemClock()
    engine = OfflineEngine(config, model_path)
    try:
        room = engine.card.max_model_len - max_tokens
        fitting = [prompt for prompt in prompts(engine.card) if 0 < len(prompt) <= room]
        if not fitting:
            raise ConfigError(f"No prompt leaves room for {max_tokens} tokens in the model's context.")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        engine.generate(fitting[:1], sampling)
        began_s = clock.now()
        answers = [engine.generate([prompt], sampling)[0].token_ids for prompt in fitting]
        elapsed_s = clock.now() - began_s
        return DraftFigures(answers, sum(map(len, answers)) / elapsed_s, engine.stats().drafters)
    finally:
        engine.close()
