"""Two ranks that share a CUDA device, with gloo between them: what they compute together is what one computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.core.engine_config import ParallelConfig
from penstock.kernels.select import select_ops
from penstock.models.load import load_model
from tests.engine.parallel.rank_pool import RankPool
from tests.engine.parallel.scenario import logits_of_rank, scenario
from tests.models.checkpoints import make_reference
from tests.models.paged import PagedRunner


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("has_own_tokens", [False, True])
@pytest.mark.parametrize("experts", ["sliced", "placed", "balanced"])
def test_two_ranks_give_what_one_gives(
    pool: RankPool, experts: str, has_own_tokens: bool, tmp_path: Path
) -> None:
    if has_own_tokens and experts == "sliced":
        pytest.skip("ranks with tokens of their own place experts whole")
    names = ("llama", "gemma3", "mixtral", "qwen2-moe") if experts == "sliced" else ("mixtral",)
    models = {name: make_reference(name, tmp_path / name).folder for name in names}
    parallel = ParallelConfig(
        tensor_parallel_size=1 if has_own_tokens else 2,
        data_parallel_size=2 if has_own_tokens else 1,
        enable_expert_parallel=experts != "sliced",
        enable_eplb=experts == "balanced",
        num_redundant_experts=2 if experts == "balanced" else 0,
    )
    together, _ = pool.run(2, logits_of_rank, parallel, tmp_path / "store", models, "cuda", torch.bfloat16)
    ops = select_ops("cuda", torch.bfloat16)
    for name, folder in models.items():
        alone = scenario(PagedRunner(load_model(folder, ops), ops))
        for made in (name, f"{name}, moved") if experts == "balanced" else (name,):
            similarities = [
                torch.nn.functional.cosine_similarity(torch.from_numpy(several), one.cpu())
                for several, one in zip(together[made], alone, strict=True)
            ]
            # A token near a tie between experts may take the other one.
            assert (torch.cat(similarities) > 0.99).float().mean() >= 0.9, made
