from __future__ import annotations

import itertools

import pytest

from penstock.engine.prompt_graphs import FEWEST, MOST, padded_sizes


@pytest.mark.parametrize("num_parameters", [0, 10**6, 600 * 10**6, 8 * 10**9, 70 * 10**9, 10**12])
def test_sizes_grow_by_little(num_parameters: int) -> None:
    sizes = padded_sizes(num_parameters)
    assert FEWEST <= sizes[-1] <= MOST
    for smaller, larger in itertools.pairwise(sizes):
        assert smaller < larger <= max(smaller + 16, 1.5 * smaller)


def test_larger_models_fill_the_gpu_with_fewer_tokens() -> None:
    largest = [padded_sizes(billions * 10**9)[-1] for billions in (1, 8, 70)]
    assert largest == [2048, 640, 128]
