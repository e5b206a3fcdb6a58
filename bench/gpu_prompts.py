#!/usr/bin/env python3
"""One prompt alone on a GPU: ms until its token, with steps launched piece by piece and replayed from graphs.

    python -m bench.gpu_prompts FOLDER

FOLDER needs nothing but a config.json: weights are random. Sizes are recorded up to the largest for any model, also
where an engine would not. The two take turns; each figure is the median of 14 prompts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch

from penstock.core.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.request import SamplingParams
from penstock.engine import graphs
from penstock.engine.graphs import PromptGraphs, padded_sizes
from penstock.engine.offline import OfflineEngine

NUM_TOKENS = (16, 64, 128, 200, 256, 384, 512, 600, 768, 1024, 1400, 2048)
TURNS, PROMPTS_PER_TURN = 2, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here to launch anything on.")
    all_sizes = padded_sizes(1)
    graphs.padded_sizes = lambda num_parameters: all_sizes
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cuda", load_format="random", max_model_len=4096),
        scheduler=SchedulerConfig(itl_target_ms=None),
    )
    engine = OfflineEngine(config, folder)
    rng = random.Random(0)
    most = min(30_000, engine.card.vocab_size)
    replay = PromptGraphs.hidden

    def first_token_ms(num_tokens: int) -> float:
        prompt = [rng.randrange(3, most) for _ in range(num_tokens)]
        started = time.perf_counter()
        engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        return 1000 * (time.perf_counter() - started)

    print("tokens  launched  replayed")
    for num_tokens in NUM_TOKENS:
        for _ in range(2):  # the second records
            first_token_ms(num_tokens)
        taken: dict[bool, list[float]] = {False: [], True: []}
        for replays in (False, True) * TURNS:
            PromptGraphs.hidden = replay if replays else lambda self, step, slots=None: None  # type: ignore[method-assign]
            taken[replays] += [first_token_ms(num_tokens) for _ in range(PROMPTS_PER_TURN)]
        PromptGraphs.hidden = replay  # type: ignore[method-assign]
        launched, replayed = (statistics.median(taken[replays]) for replays in (False, True))
        print(f"{num_tokens:6d}  {launched:8.2f}  {replayed:8.2f}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
