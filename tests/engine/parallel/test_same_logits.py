"""Several ranks give the logits that one gives, for every architecture and every way to cut it up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from penstock.core.engine_config import ParallelConfig
from penstock.kernels.select import select_ops
from penstock.models.load import load_model
from tests.engine.parallel.rank_pool import RankPool
from tests.engine.parallel.scenario import logits_of_rank, scenario
from tests.models.checkpoints import MODELS, SMALL, make_reference, save_random
from tests.models.gguf_files import write_model
from tests.models.paged import PagedRunner

TOPOLOGIES = {
    "two tensor ranks": ParallelConfig(tensor_parallel_size=2),
    "four tensor ranks": ParallelConfig(tensor_parallel_size=4),
    "two stages": ParallelConfig(pipeline_parallel_size=2),
    "two stages of two ranks": ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
    "experts on two ranks": ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True),
    "experts on four ranks": ParallelConfig(tensor_parallel_size=4, enable_expert_parallel=True),
    "balanced experts on two ranks": ParallelConfig(
        tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=2
    ),
    "own tokens on two ranks": ParallelConfig(data_parallel_size=2, enable_expert_parallel=True),
    "own tokens and balanced experts on two ranks": ParallelConfig(
        data_parallel_size=2, enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=2
    ),
}
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-dense-layers")
UNEVEN = "llama, uneven"
QUANTIZED = "llama, Q4_0"
# These differ from others in their ropes alone, of which every rank has all.
SAME_WEIGHTS = ("llama3-rope", "llama-yarn", "qwen2-windowed", "gemma3-usual-scale")
ARCHITECTURES = (*(name for name in MODELS if name not in SAME_WEIGHTS), UNEVEN, QUANTIZED)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = {name: make_reference(name, folder / name).folder for name in ARCHITECTURES if name in MODELS}
    # Nothing divides by two: heads, key-value heads, the vocabulary.
    uneven = {
        **SMALL,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 321,
    }
    paths[UNEVEN] = save_random(UNEVEN, _llama(uneven), folder / "uneven").folder
    # Wide enough for a block of 32 inputs on each of four ranks.
    wide = {**SMALL, "hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    paths[QUANTIZED] = folder / "quantized.gguf"
    reference = save_random(QUANTIZED, _llama(wide), folder / "wide")
    write_model(paths[QUANTIZED], reference, GGMLQuantizationType.Q4_0)
    return paths


def _llama(settings: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**settings))


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, list[Tensor]]:
    ops = select_ops("cpu", torch.float32)
    return {name: scenario(PagedRunner(load_model(path, ops), ops)) for name, path in models.items()}


@pytest.fixture(scope="module")
def together(
    pool: RankPool, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, list[Any]]]:
    """The logits of all models under a topology, which run one after the other in the same ranks."""

    @functools.cache
    def run(topology: str) -> dict[str, list[Any]]:
        parallel = TOPOLOGIES[topology]
        wanted = {name: path for name, path in models.items() if _can_run(name, parallel)}
        store_access = tmp_path_factory.mktemp("mesh") / "store"
        made = pool.run(parallel.num_ranks, logits_of_rank, parallel, store_access, wanted)
        (reported,) = [each for each in made if each is not None]
        return reported

    return run


def _can_run(name: str, parallel: ParallelConfig) -> bool:
    return not parallel.enable_expert_parallel or name in MIXTURES


CASES = [(how, name) for how in TOPOLOGIES for name in ARCHITECTURES if _can_run(name, TOPOLOGIES[how])]


@pytest.mark.parametrize(("topology", "name"), CASES)
def test_several_ranks_give_what_one_gives(
    topology: str,
    name: str,
    together: Callable[[str], dict[str, list[Any]]],
    alone: dict[str, list[Tensor]],
) -> None:
    made = together(topology)
    moved = [made[f"{name}, moved"]] if TOPOLOGIES[topology].enable_eplb else []
    for logits in (made[name], *moved):
        for several, one in zip(logits, alone[name], strict=True):
            torch.testing.assert_close(torch.from_numpy(several), one, atol=2e-4, rtol=2e-4)
            assert torch.equal(torch.from_numpy(several).argmax(dim=1), one.argmax(dim=1))
