"""Sampling: what may be chosen, how often, and that a row's draw is its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.interface import Ops, SamplingBatch
from penstock.kernels.library import ISA_NAMES, Library
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps, uniform
from tests.kernels.conftest import PRESENT_ISAS


def batch_of(
    rows: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=None
) -> SamplingBatch:
    def column(value, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return SamplingBatch(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seed=column(seed, torch.int64),
        position=torch.arange(rows) if position is None else column(position, torch.int64),
        all_greedy=False,
    )


@pytest.fixture(params=["torch", *PRESENT_ISAS])
def ops(request: pytest.FixtureRequest, library: Library):
    if request.param == "torch":
        yield TorchOps()
        return
    library.set_isa(ISA_NAMES.index(request.param))
    yield NativeOps(library, torch.float32)
    library.set_isa(library.best_isa())


def test_greedy_takes_the_first_of_the_largest(ops: Ops) -> None:
    logits = torch.randn(5, 1000)
    logits[0, [3, 700]] = 50.0
    logits[1, 999] = 50.0
    chosen = ops.sample(logits, batch_of(5, temperature=0.0))
    assert chosen.tolist() == [3, 999, *logits[2:].argmax(dim=-1).tolist()]


def test_unusable_rows_give_minus_one_and_spare_the_others(ops: Ops) -> None:
    logits = torch.randn(4, 333)
    logits[0, 332] = float("nan")
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    for temperature in (0.0, 1.0):
        chosen = ops.sample(logits, batch_of(4, temperature=temperature)).tolist()
        assert chosen[:3] == [-1, -1, -1]
        assert 0 <= chosen[3] < 333


def test_a_forbidden_token_is_never_drawn(ops: Ops) -> None:
    logits = torch.full((200, 70), float("-inf"))
    logits[:, 11] = -5.0
    logits[:, 64] = -6.0
    chosen = ops.sample(logits, batch_of(200, temperature=5.0))
    assert set(chosen.tolist()) == {11, 64}


@pytest.mark.parametrize("k", [1, 2, 7, 40, 200])
def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id(ops: Ops, k: int) -> None:
    logits = torch.randint(0, 4, (1, 300)).float().expand(4000, 300).contiguous()
    ranking = logits[0].sort(descending=True, stable=True).indices
    chosen = set(ops.sample(logits, batch_of(4000, temperature=50.0, top_k=k)).tolist())
    assert chosen <= set(ranking[:k].tolist())
    if k <= 40:
        assert len(chosen) == k


def test_top_p_keeps_the_shortest_prefix_that_reaches_it(ops: Ops) -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1])
    logits = probabilities.log().expand(500, 5).contiguous()
    for top_p, kept in ((0.3, {1}), (0.5, {1, 2}), (0.8, {1, 2, 3}), (0.99, {0, 1, 2, 3, 4}), (0.0, {1})):
        assert set(ops.sample(logits, batch_of(500, top_p=top_p)).tolist()) == kept


def test_top_p_counts_what_top_k_left(ops: Ops) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(500, 4).contiguous()
    # Of 0.4 and 0.3 the first is 57 %.
    assert set(ops.sample(logits, batch_of(500, top_k=2, top_p=0.55)).tolist()) == {0}
    assert set(ops.sample(logits, batch_of(500, top_k=2, top_p=0.6)).tolist()) == {0, 1}


def test_min_p_is_relative_to_the_most_likely(ops: Ops) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(500, 4).contiguous()
    assert set(ops.sample(logits, batch_of(500, min_p=0.25)).tolist()) == {0, 1, 2}
    assert set(ops.sample(logits, batch_of(500, min_p=0.25, top_k=2)).tolist()) == {0, 1}
    assert set(ops.sample(logits, batch_of(500, min_p=1.0)).tolist()) == {0}


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 12}], ids=["plain", "top-p", "top-k"])
def test_draws_follow_the_distribution(ops: Ops, options: dict) -> None:
    draws, logits = 20000, torch.randn(20) * 1.5
    chosen = ops.sample(logits.expand(draws, 20).contiguous(), batch_of(draws, temperature=0.8, **options))
    probabilities = torch.softmax(logits / 0.8, dim=-1)
    ranked, ids = probabilities.sort(descending=True)
    kept = ranked.cumsum(0) - ranked < options.get("top_p", 1.0)
    kept &= torch.arange(20) < options.get("top_k", 20)
    expected = torch.zeros(20).scatter(0, ids[kept], ranked[kept])
    expected = expected / expected.sum() * draws
    counts = torch.bincount(chosen, minlength=20).float()
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    chi_square = ((counts - expected)[seen] ** 2 / expected[seen]).sum().item()
    assert chi_square < 45  # 19 degrees of freedom or fewer: 1 in 1,000 at 43.8


def test_a_draw_depends_on_seed_and_position_alone(ops: Ops) -> None:
    logits = torch.randn(64, 500)
    together = ops.sample(
        logits, batch_of(64, seed=torch.arange(64) * 7 - 100, position=torch.arange(64) % 5)
    )
    for row in (0, 13, 63):
        alone = ops.sample(logits[row : row + 1], batch_of(1, seed=row * 7 - 100, position=row % 5))
        assert alone.item() == together[row].item()


def test_the_random_number_is_the_same_everywhere(library: Library) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    positions = torch.tensor([0, 5, 2**40, 1, 7, 99])
    for seed, position, value in zip(seeds, positions, uniform(seeds, positions), strict=True):
        assert library.uniform_draw(seed.item(), position.item()) == value.item()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(1, 3000),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 5, 50, 1000, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_native_chooses_what_the_definition_chooses(
    library: Library,
    seed: int,
    vocabulary: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """Rounding may move a boundary past a draw, which is rare: one row in a hundred would be far too many."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(100, vocabulary, generator=generator) * spread
    batch = batch_of(100, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    expected = TorchOps().sample(logits, batch)
    found = NativeOps(library, torch.float32).sample(logits, batch)
    assert (expected != found).sum() <= 1


SAMPLE_ONE_ROW = """
#include <cmath>
#define PENSTOCK_ISA generic
#define PENSTOCK_REGISTER_BYTES 16
#include "sample_impl.h"
const penstock::Kernels& penstock::kernels() {
  static Kernels table = {};  // the other functions would take most of the compiler's time
  table.scan_logits = generic::scan_logits;
  table.weigh_logits = generic::weigh_logits;
  return table;
}
struct PenstockSampling {
  int64_t num_rows, vocabulary;
  const float* temperature; const int32_t* top_k; const float* top_p; const float* min_p;
  const int64_t *seed, *position;
};
PENSTOCK_API void penstock_sample(const PenstockSampling*, const float*, int64_t*);
int main() {
  // A grammar leaves two tokens, and top-k asks for more than that.
  const float out = -INFINITY, logits[6] = {1.0f, out, 2.0f, out, out, out};
  const float temperature = 1.0f, top_p = 0.9f, min_p = 0.0f;
  const int32_t top_k = 4;
  const int64_t zero = 0;
  int64_t token = -1;
  const PenstockSampling batch = {1, 6, &temperature, &top_k, &top_p, &min_p, &zero, &zero};
  penstock_sample(&batch, logits, &token);
  return token == 0 || token == 2 ? 0 : 1;
}
"""


def test_masked_tokens_are_sampled_without_undefined_conversions(tmp_path: Path) -> None:
    """An infinite distance times zero is no number, and no whole number either."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ and its sanitizer")
    sources = Path(__file__).parents[2] / "penstock" / "kernels" / "cpu"
    (tmp_path / "main.cpp").write_text(SAMPLE_ONE_ROW)
    files = [sources / f"{name}.cpp" for name in ("sample", "common", "pool")]
    flags = [
        "-std=c++17",
        "-O0",
        "-w",
        "-pthread",
        "-fsanitize=float-cast-overflow",
        "-fno-sanitize-recover=all",
    ]
    command = [compiler, *flags, f"-I{sources}", str(tmp_path / "main.cpp"), *map(str, files)]
    built = subprocess.run([*command, "-o", str(tmp_path / "sample")], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("needs g++ and its sanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([tmp_path / "sample"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
