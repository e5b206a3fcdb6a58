"""The packed mask of allowed tokens against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.reference import forbid, forbid_reference


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 1000])
@pytest.mark.parametrize("num_words", [1, 2, 10])
def test_unpacked_on_the_host_or_shifted_on_a_device(vocab_size: int, num_words: int) -> None:
    rng = np.random.default_rng(vocab_size * 100 + num_words)
    words = rng.integers(-(2**31), 2**31, (3, num_words), dtype=np.int64).astype(np.int32)
    logits = torch.from_numpy(rng.standard_normal((6, vocab_size), dtype=np.float32))
    expected, actual = logits.clone(), logits.clone()
    rows = [4, 0, 3]
    forbid_reference(expected, rows, torch.from_numpy(words))
    forbid(actual, rows, words)
    assert torch.equal(actual, expected)
    for row in (1, 2, 5):
        assert torch.equal(actual[row], logits[row]), "a row without a mask"
    for index, row in enumerate(rows):
        for token in range(vocab_size):
            inside = token < num_words * 32
            allowed = inside and bool((int(words[index, token // 32]) >> (token % 32)) & 1)
            assert actual[row, token] == (logits[row, token] if allowed else float("-inf"))


def test_a_nan_stays_where_it_is_allowed() -> None:
    logits = torch.full((1, 32), float("nan"))
    forbid(logits, [0], np.array([[1]], dtype=np.int32))
    assert logits[0, 0].isnan()
    assert torch.isneginf(logits[0, 1:]).all()
