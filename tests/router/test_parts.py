from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.hashing import chain_hashes, root_hash
from penstock.router import hash_text, hash_tokens
from penstock.router.index import MAX_TEXT_CHUNKS
from penstock.router.load import LinearFit, number_of, score


@given(base=st.floats(1e-3, 0.1), rate=st.floats(1e-6, 1e-3))
def test_a_fit_finds_the_line_that_a_replica_follows(base: float, rate: float) -> None:
    fit = LinearFit(0.01, 5e-5, 2048)
    for number in range(300):
        tokens = 1 + 137 * number % 2048
        fit.observe(tokens, base + rate * tokens)
    assert fit.base_s + 1000 * fit.token_s == pytest.approx(base + 1000 * rate, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 4096), st.floats(0.0, 10.0)), max_size=60))
def test_a_fit_is_never_negative(pairs: list[tuple[int, float]]) -> None:
    fit = LinearFit(0.01, 5e-5, 2048)
    for tokens, seconds in pairs:
        fit.observe(tokens, seconds)
        assert fit.base_s >= 0.0
        assert fit.token_s > 0.0


def test_a_fit_follows_a_replica_that_becomes_slow() -> None:
    fit = LinearFit(0.01, 5e-5, 2048)
    for factor in (1.0, 3.0):
        for number in range(200):
            tokens = 1 + 137 * number % 2048
            fit.observe(tokens, factor * (0.01 + 5e-5 * tokens))
    assert fit.token_s == pytest.approx(1.5e-4, rel=0.1)


def test_token_hashes_are_those_of_the_replica_without_the_last_token() -> None:
    tokens = list(range(64))
    expected = chain_hashes(root_hash("tenant"), tokens, 16)
    assert hash_tokens("tenant", tokens, 16) == expected[:3]
    assert hash_tokens("tenant", [*tokens, 1], 16) == expected
    assert hash_tokens("tenant", [], 16) == []
    assert hash_tokens("other", [*tokens, 1], 16)[0] != expected[0]


def test_text_chunks_are_chained() -> None:
    text = "x" * 64 + "y" * 64 + "z" * 10
    hashes = hash_text("tenant", text)
    assert len(hashes) == 2
    assert hash_text("tenant", "x" * 64 + "other" * 20)[0] == hashes[0]
    assert hash_text("tenant", "w" + text[1:])[1] != hashes[1]
    assert hash_text("other", text)[0] != hashes[0]
    assert len(hash_text("tenant", "é" * (64 * MAX_TEXT_CHUNKS))) == MAX_TEXT_CHUNKS, (
        "a long text is hashed in part"
    )


def test_keys_are_spread_evenly_over_replicas() -> None:
    replicas = [number_of(f"replica-{number}") for number in range(8)]
    taken = [0] * 8
    for number in range(4000):
        key = number_of(f"session-{number}")
        taken[max(range(8), key=lambda index: score(key, replicas[index]))] += 1
    assert min(taken) > 400
    assert max(taken) < 600
