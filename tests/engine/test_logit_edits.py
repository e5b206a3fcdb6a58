"""Edits of logits against plain definitions of what they do."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from transformers import TypicalLogitsWarper

from penstock.core.errors import InvalidRequest
from penstock.core.plan import NO_TOKEN_LEFT
from penstock.core.request import Dry, FinishReason, Grammar
from penstock.engine.build import Engine
from penstock.engine.logit_edits import (
    LONGEST_MATCH,
    exclude_top,
    keep_near_top,
    keep_typical,
    make_penalty,
    recent_counts,
)

from .byte_model import constrained, text_of, write_byte_model
from .tiny import request, run, tiny_engine, tokens, write_tiny_model


def kept(logits: torch.Tensor) -> set[int]:
    return {index for index, value in enumerate(logits.tolist()) if value > -math.inf}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9, 1.0])
def test_typical_tokens_are_those_nearest_to_the_entropy(seed: int, share: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 3
    logits[7] = -math.inf
    probabilities = torch.softmax(logits, 0).tolist()
    entropy = -sum(p * math.log(p) for p in probabilities if p)
    order = sorted((abs(-math.log(p) - entropy), index) for index, p in enumerate(probabilities) if p)
    expected, mass = set(), 0.0
    for _, index in order:
        if expected and mass >= share:
            break
        expected.add(index)
        mass += probabilities[index]
    keep_typical(logits, share)
    assert kept(logits) == expected if share < 1 else kept(logits) >= expected


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_typical_tokens_are_those_of_transformers(share: float) -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1)) * 3
    expected = TypicalLogitsWarper(share)(torch.zeros(8, 1, dtype=torch.int64), logits.clone())
    for row, theirs in zip(logits, expected, strict=True):
        keep_typical(row, share)
        assert kept(row) == kept(theirs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_sigmas", [0.3, 1.0, 2.5])
def test_tokens_near_the_top_are_kept(seed: int, num_sigmas: float) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(seed)) * 4
    logits[[3, 30]] = -math.inf
    allowed = logits[logits > -math.inf].double().numpy()
    least = allowed.max() - num_sigmas * allowed.std()
    expected = {index for index, value in enumerate(logits.tolist()) if value >= least}
    keep_near_top(logits, num_sigmas)
    assert kept(logits) == expected


def plain_dry(context: list[int], dry: Dry, breakers: set[int]) -> dict[int, float]:
    """The penalty of each token, by trying all earlier places one by one."""
    longest: dict[int, int] = {}
    for place in range(len(context) - 1):
        following = context[place + 1]
        length = 0
        while (
            length < min(LONGEST_MATCH, place + 1)
            and context[place - length] == context[-1 - length]
            and context[-1 - length] not in breakers
        ):
            length += 1
        if following not in breakers:
            longest[following] = max(longest.get(following, 0), length)
    return {
        token_id: dry.multiplier * dry.base ** (length - dry.allowed_length)
        for token_id, length in longest.items()
        if length >= dry.allowed_length
    }


@settings(max_examples=200, deadline=None)
@given(
    some.lists(some.integers(0, 5), min_size=1, max_size=80),
    some.integers(1, 4),
    some.sets(some.integers(0, 5), max_size=2),
    some.integers(0, 10),
)
def test_repetitions_are_penalised_by_their_length(
    context: list[int], allowed_length: int, breakers: set[int], num_missing: int
) -> None:
    dry = Dry(0.5, 1.1, allowed_length, breakers=sum(1 << each for each in breakers).to_bytes(1, "little"))
    logits = torch.zeros(12)
    window = torch.tensor([-1] * num_missing + context)
    make_penalty(dry, 12, torch.device("cpu")).apply(logits, window)
    expected = plain_dry(context, dry, breakers)
    assert logits.tolist() == pytest.approx([-expected.get(token_id, 0.0) for token_id in range(12)])


def test_a_penalty_is_never_infinite() -> None:
    logits = torch.zeros(4)
    make_penalty(Dry(100.0, 100.0, 1), 4, torch.device("cpu")).apply(
        logits, torch.ones(60, dtype=torch.int64)
    )
    assert -math.inf < float(logits[1]) <= -1e4


def test_recent_tokens_are_counted() -> None:
    context = torch.tensor([-1, -1, 3, 1, 1, 2])
    assert recent_counts(context, 3, 5).tolist() == [0, 2, 1, 0, 0]
    assert recent_counts(context, 99, 5).tolist() == [0, 2, 1, 1, 0]


@pytest.mark.parametrize(
    ("probabilities", "threshold", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.1, {2, 3}),
        ([0.5, 0.3, 0.15, 0.05], 0.3, {1, 2, 3}),
        ([0.5, 0.3, 0.15, 0.05], 0.4, {0, 1, 2, 3}),
        ([0.5, 0.3, 0.15, 0.05], 0.6, {0, 1, 2, 3}),
        ([0.25, 0.25, 0.25, 0.25], 0.0, {3}),
        ([0.5, 0.5, 0.0, 0.0], 0.0, {1}),
    ],
)
def test_all_but_the_last_of_the_top_tokens_are_excluded(
    probabilities: list[float], threshold: float, expected: set[int]
) -> None:
    logits = torch.tensor(probabilities).log()
    exclude_top(logits, threshold)
    assert kept(logits) == expected


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), eos_token_id=[2, 5000])
    (folder / "generation_config.json").write_text('{"temperature": 0.01, "top_k": 20}')
    return tiny_engine(folder)


def test_the_card_tells_what_the_makers_recommend_and_no_end_that_the_model_lacks(engine: Engine) -> None:
    assert engine.ready.model.sampling_defaults.stated() == {"temperature": 0.01, "top_k": 20}
    assert engine.ready.model.eos_token_ids == (2,)


def answer(engine: Engine, name: str, **sampling: object) -> list[int]:
    asked = request(name, [5, 6, 7], 60, temperature=1.0, seed=3, ignore_eos=True, **sampling)
    return tokens(run(engine, [asked])[name])


def test_only_allowed_tokens_are_sampled_and_no_bad_sequence(engine: Engine) -> None:
    allowed = (40, 50, 60)
    assert set(answer(engine, "allowed", allowed_token_ids=allowed)) == set(allowed)
    bad = ((40, 50), (50, 50), (60, 40, 60), (41,))
    found = answer(engine, "bad", allowed_token_ids=allowed, bad_words=bad)
    assert not {(40, 50), (50, 50)} & set(pairwise(found))
    assert (60, 40, 60) not in set(zip(found, found[1:], found[2:], strict=False))
    assert set(answer(engine, "single", allowed_token_ids=allowed, bad_words=((40,), (50,)))) == {60}


def test_typical_and_excluding_samplers_change_answers_and_repeat_with_a_seed(engine: Engine) -> None:
    plain = answer(engine, "plain")
    for name, options in {
        "typical": {"typical_p": 0.2},
        "excluding": {"xtc_probability": 1.0, "xtc_threshold": 0.004},
        "near the top": {"top_n_sigma": 0.5},
    }.items():
        first = answer(engine, name, **options)
        assert first != plain
        assert answer(engine, f"{name} again", **options) == first


def test_a_request_that_forbids_everything_ends_with_the_reason(engine: Engine) -> None:
    asked = request("none", [5], 3, allowed_token_ids=(40,), bad_words=((40,),))
    (event,) = run(engine, [asked])["none"]
    assert (event.finish_reason, event.error) == (FinishReason.INVALID, NO_TOKEN_LEFT)


def test_no_sequence_comes_twice_behind_a_strong_penalty(engine: Engine) -> None:
    few = {"allowed_token_ids": tuple(range(40, 50))}
    assert len(set(pairwise(answer(engine, "free", **few)))) < 55
    found = answer(engine, "dry", dry=Dry(100.0, allowed_length=1), **few)
    assert len(set(pairwise(found))) == len(found) - 1
    prompted = request("prompted", [41, 42, 41], 1, dry=Dry(100.0, allowed_length=1), logit_bias={42: 90.0})
    assert tokens(run(engine, [prompted])["prompted"]) != [42]


def test_penalties_of_the_last_tokens_forget_the_others(engine: Engine) -> None:
    """With a window of two, a penalised token may come again behind two others."""
    few = {
        "allowed_token_ids": (40, 41, 42),
        "presence_penalty": 2.0,
        "logit_bias": {40: 3.0, 41: 2.0, 42: 1.0},
    }
    biased = request("window", [40, 41], 9, repeat_last_n=2, **(few | {"presence_penalty": 20.0}))
    assert tokens(run(engine, [biased])["window"]) == [42, 40, 41] * 3
    without = answer(engine, "none", **(few | {"presence_penalty": 0.0}))
    assert answer(engine, "off", repeat_last_n=0, **few) == without


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 0.01},
        {"top_n_sigma": 0.01},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"dry": Dry(100.0, 100.0, 1)},
    ],
)
def test_samplers_choose_among_what_a_grammar_allows(tmp_path: Path, options: dict[str, object]) -> None:
    engine = tiny_engine(write_byte_model(tmp_path))
    asked = constrained("form", Grammar("regex", "(aab|aac){8}"), 40, temperature=1.0, seed=2, **options)
    (event, *_) = events = run(engine, [asked])["form"]
    assert event.error is None
    text = text_of(events)
    assert len(text) == 24
    assert set(text) <= set("abc")


@pytest.mark.parametrize(
    "options", [{"allowed_token_ids": (5, 300)}, {"bad_words": ((5,), (6, 300))}, {"bad_words": ((-1,),)}]
)
def test_tokens_that_the_model_does_not_have_are_refused(engine: Engine, options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="no token"):
        engine.loop.add(request("wrong", [5], 4, **options))
