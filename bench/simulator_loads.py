"""The loads of `simulator_validation.py`: those that are compared, and those that step times are fitted to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from statistics import mean

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.simulator import LogNormal, Uniform, Workload, generate
from penstock.simulator.cost import StepCost, StepWork
from penstock.simulator.workload import Arrival

VOCABULARY = 4096
MOST_BLOCKS = 1200
WHOLE_PROMPTS = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256, itl_target_ms=None)


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    workload: Workload
    busy: float  # the share of the engine's time that the rate is chosen for; 0: all requests come at once
    num_blocks: int = MOST_BLOCKS
    scheduler: SchedulerConfig = WHOLE_PROMPTS


def workload(num_requests: int, prompt: object, output: object, **settings: object) -> Workload:
    return Workload(
        num_requests=num_requests,
        requests_per_s=1.0,  # set by `timed`
        prompt_tokens=prompt,  # type: ignore[arg-type]
        output_tokens=output,  # type: ignore[arg-type]
        **settings,  # type: ignore[arg-type]
    )


SMALL_STEPS = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, itl_target_ms=None)
LOADS = (
    Load("light chat", workload(250, LogNormal(60, 0.6, 300), LogNormal(24, 0.6, 80)), 0.3),
    Load("busy chat", workload(300, LogNormal(60, 0.6, 300), LogNormal(24, 0.6, 80)), 0.6),
    Load("long prompts in chunks", workload(180, Uniform(200, 600), Uniform(8, 32)), 0.5, scheduler=SMALL_STEPS),
    Load("long answers", workload(150, Uniform(10, 60), Uniform(60, 160)), 0.5),
    Load(
        "shared prefixes",
        workload(300, Uniform(10, 60), Uniform(8, 40), prefix_tokens=Uniform(100, 300), prefixes_per_tenant=12,
                 zipf_exponent=1.0),
        0.5,
    ),
    Load("bursts", workload(300, Uniform(20, 120), Uniform(8, 40), burst_share=0.1, burst_size=8), 0.4),
    Load("little KV memory", workload(120, Uniform(30, 120), Uniform(40, 120)), 0.0, num_blocks=60),
    Load("all at once", workload(150, LogNormal(60, 0.6, 300), LogNormal(24, 0.6, 80)), 0.0),
)  # fmt: skip
# Together they have every number of requests at once that the compared loads may have.
FITTED = (
    Load("fit: answers", workload(8, Uniform(5, 100), Uniform(10, 100)), 0.4),
    Load("fit: prompts", workload(8, Uniform(30, 500), Uniform(2, 30)), 0.4),
    Load("fit: busy", workload(24, Uniform(10, 200), Uniform(10, 50)), 0.8),
    Load("fit: full batches", workload(48, Uniform(10, 150), Uniform(10, 60)), 0.0),
    Load("fit: chunks", workload(6, Uniform(50, 500), Uniform(4, 40)), 0.5, scheduler=SMALL_STEPS),
)


def arrivals_of(load: Load, seed: int, mean_s: float) -> list[Arrival]:
    """Return the requests of a load, with tokens that the model has. `mean_s`: seconds of the engine's time that a
    request takes, alone in its batch."""
    rate = load.busy / mean_s if load.busy else 1e6
    made = []
    for arrival in generate(replace(load.workload, requests_per_s=rate), Random(seed)):
        tokens = tuple(3 + token % (VOCABULARY - 3) for token in arrival.request.prompt_token_ids)
        sampling = msgspec.structs.replace(arrival.request.sampling, ignore_eos=True, temperature=0.0)
        request = msgspec.structs.replace(arrival.request, prompt_token_ids=tokens, sampling=sampling)
        made.append(
            arrival._replace(request=request, block_hashes=(), time_s=arrival.time_s if load.busy else 0.0)
        )
    return made


def mean_s(lengths: Workload, cost: StepCost) -> float:
    """Return the engine's seconds for a request in a batch of eight."""
    rng = Random(0)
    prefix = 0 if lengths.prefix_tokens is None else 20
    prompt = mean(lengths.prompt_tokens.draw(rng) for _ in range(500)) + prefix
    output = mean(lengths.output_tokens.draw(rng) for _ in range(500))
    batch = 8
    decode_s = cost.step_s(StepWork.decodes(batch, int(batch * prompt))) / batch
    prompt_s = cost.step_s(StepWork.prompt(int(prompt)))
    return output * decode_s + prompt_s
