"""Edits of logits against plain definitions of what they do."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from penstock.core.errors import InvalidRequest
from penstock.engine.build import Engine
from penstock.engine.logit_edits import exclude_top, keep_typical

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


@pytest.mark.parametrize(
    ("probabilities", "threshold", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.1, {2, 3}),
        ([0.5, 0.3, 0.15, 0.05], 0.3, {1, 2, 3}),
        ([0.5, 0.3, 0.15, 0.05], 0.4, {0, 1, 2, 3}),
        ([0.5, 0.3, 0.15, 0.05], 0.6, {0, 1, 2, 3}),
        ([0.25, 0.25, 0.25, 0.25], 0.0, {3}),
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
    }.items():
        first = answer(engine, name, **options)
        assert first != plain
        assert answer(engine, f"{name} again", **options) == first


@pytest.mark.parametrize(
    "options", [{"allowed_token_ids": (5, 300)}, {"bad_words": ((5,), (6, 300))}, {"bad_words": ((-1,),)}]
)
def test_tokens_that_the_model_does_not_have_are_refused(engine: Engine, options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="no token"):
        engine.loop.add(request("wrong", [5], 4, **options))
