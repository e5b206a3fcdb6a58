"""An answer has the same tokens and the same log-probabilities, bit for bit, whatever was drafted for it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import Dry, Request
from penstock.engine.batch import Samples
from penstock.engine.logit_edits import make_edits
from penstock.engine.sampler import Sampler
from penstock.engine.staging import Staging
from penstock.kernels.select import select_ops
from tests.models.tiny_families import save_tiny

from .drafting import Answer, KnowingDrafter, answers, num_accepted, num_late, speculate
from .tiny import VOCAB_SIZE, request, teach_short_answers, tiny_engine, write_tiny_model

SPOILED = [0.0, 0.5, 1.0]
rng = random.Random(18)
SHARED = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with end": {"ignore_eos": False},
    "logprobs": {"logprobs": 3},
    "own logprob": {"logprobs": 0, "temperature": 0.7, "seed": 3},
    "drawn": {"temperature": 1.0},
    "seeded": {"temperature": 1.0, "seed": 4},
    "cut": {"temperature": 1.3, "seed": 5, "top_k": 7, "top_p": 0.8, "min_p": 0.02, "logprobs": 2},
    "penalised": {"frequency_penalty": 0.8, "presence_penalty": 0.4, "logprobs": 1},
    "repeated": {"repetition_penalty": 1.6, "temperature": 0.4, "seed": 6},
    "biased": {
        "logit_bias": {17: 4.0, 18: 4.0, 19: -9.0},
        "temperature": 0.9,
        "seed": 7,
        "presence_penalty": 1.0,
    },
    "late end": {"ignore_eos": False, "logit_bias": {2: 50.0}, "min_tokens": 9, "frequency_penalty": 0.1},
    "stop token": {"stop_token_ids": (17, 40, 80, 120, 160, 200, 240), "temperature": 1.0, "seed": 8},
    "scored": {"prompt_logprobs": 2, "temperature": 1.0, "seed": 9},
    "typical": {"typical_p": 0.4, "temperature": 1.0, "seed": 10},
    "top excluded": {"xtc_probability": 0.5, "xtc_threshold": 0.004, "temperature": 1.0, "seed": 11},
    "near the top": {"top_n_sigma": 1.0, "temperature": 1.0, "seed": 14},
    "no repetitions": {
        "dry": Dry(2.0, allowed_length=1, breakers=bytes([0, 0, 1])),
        "allowed_token_ids": (17, 18, 19, 20, 21, 22),
        "temperature": 1.0,
        "seed": 15,
    },
    "recent repetitions": {
        "repeat_last_n": 5,
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.3,
        "temperature": 1.0,
        "seed": 16,
    },
    "few allowed": {"allowed_token_ids": (17, 18, 19, 20), "temperature": 1.0, "seed": 12},
    "bad words": {
        "allowed_token_ids": (17, 18, 19),
        "bad_words": ((17, 18), (19, 19, 19), (18, 18)),
        "temperature": 1.0,
        "seed": 13,
    },
}


def all_requests() -> list[Request]:
    source = random.Random(5)
    return [
        request(
            name,
            [*(SHARED if n % 2 else []), *(source.randrange(3, VOCAB_SIZE) for _ in range(1 + 5 * n))],
            20 + n,
            **sampling,
        )
        for n, (name, sampling) in enumerate(SAMPLING.items())
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("drafts") / "tiny")


@cache
def plain_answers(model: Path, *, taught: bool = True, **settings: Any) -> dict[str, Answer]:
    """The answers of an engine without drafts."""
    engine = tiny_engine(model, speculate="off", **settings)
    if taught:
        teach_short_answers(engine)
    return answers(engine, all_requests())


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 17},
        {"num_kv_blocks": 10, "max_num_batched_tokens": 80},
        {"steps_in_flight": 2},
        {"steps_in_flight": 3},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()) or "together",
)
def test_drafts_change_no_answer(model: Path, settings: dict[str, Any], spoiled: float) -> None:
    expected = plain_answers(model, **settings)
    known = {name: token_ids for name, (token_ids, *_) in expected.items()}
    engine = tiny_engine(model, speculate="off", **settings)
    teach_short_answers(engine)
    speculate(engine, KnowingDrafter(known, spoiled))
    late = num_late(engine)
    assert answers(engine, all_requests()) == expected
    assert (num_accepted(engine) == 0) == (spoiled == 1.0)
    assert (late[0] > 0) == (settings.get("steps_in_flight") == 2)
    if "num_kv_blocks" in settings:
        assert engine.loop.stats().num_preemptions > 0, "the cache was meant to be too small"


@pytest.mark.parametrize("family", ["gemma4", "minimax_m2"])
def test_drafts_change_no_answer_of_layers_with_gates_and_routers(tmp_path: Path, family: str) -> None:
    """Their gates and routers have so few numbers that one vector of a CPU holds those of several rows."""
    save_tiny(family, tmp_path)
    asked = [request(f"{n}", SHARED[: 9 + n], 20, temperature=0.7 * n, logprobs=1) for n in range(3)]
    expected = answers(tiny_engine(tmp_path), asked)
    known = {name: token_ids for name, (token_ids, *_) in expected.items()}
    engine = speculate(tiny_engine(tmp_path), KnowingDrafter(known, 0.2))
    assert answers(engine, asked) == expected
    assert num_accepted(engine) > 10


@pytest.mark.parametrize("name", SAMPLING)
def test_requests_whose_logits_are_edited_depend_on_their_answer(name: str) -> None:
    """Steps of other requests are planned before the tokens in front of them are known."""
    asked = request(name, [1], **SAMPLING[name])
    edits = make_edits(asked, (), (2,), 0, VOCAB_SIZE, torch.device("cpu"))
    assert asked.sampling.depends_on_answer == (edits is not None)


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_that_are_laid_out_as_decodes_change_no_answer(
    model: Path, spoiled: float, depth: int
) -> None:
    """As on a GPU, where each drafted token is a sequence of its own."""
    expected = plain_answers(model, taught=False)
    engine = tiny_engine(model, speculate="off", max_num_batched_tokens=60, steps_in_flight=depth)
    engine.loop.executor._rows._splits_drafts = True  # type: ignore[attr-defined]
    speculate(engine, KnowingDrafter({name: found[0] for name, found in expected.items()}, spoiled))
    assert answers(engine, all_requests()) == expected


def test_tokens_behind_accepted_drafts_have_the_distribution_of_the_model() -> None:
    """5,000 requests with the same logits and other seeds, all with the same draft. Code that is right fails once in
    100,000 choices of the seeds: each of the two chi-square tests has a false-alarm rate of 5 in a million."""
    count, vocab_size, draft = 5000, 8, 3
    ops = select_ops("cpu", torch.float32)
    sampler = Sampler(ops, Staging(ops.device, 0), count, vocab_size, (), seed=1)
    for row in range(count):
        sampler.begin(row, request(f"{row}", [1], temperature=0.8, top_k=7), ())
    rows = np.arange(count)
    samples = Samples(
        request_ids=[str(row) for row in rows],
        request_rows=rows,
        at=np.arange(2 * count),
        rows=np.repeat(rows, 2),
        offsets=np.tile([0, 1], count),
        drafts=dict.fromkeys(range(count), (draft,)),
    )
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(2))
    token_ids, _ = sampler.sample(logits.repeat(count, 1), samples)
    reported = sampler.report(samples, token_ids.tolist(), {})
    first = [(*each.accepted, each.token_id)[0] for each in reported]
    behind = [each.token_id for each in reported if each.accepted]
    assert len(behind) == first.count(draft) > 100
    for row, drawn in zip(logits, (first, behind), strict=True):
        kept = row.masked_fill(row < row.topk(7).values[-1], float("-inf"))
        expected = torch.softmax(kept / 0.8, dim=0).double() * len(drawn)
        observed = torch.bincount(torch.tensor(drawn), minlength=vocab_size).double()
        possible = expected > 0
        assert not observed[~possible].any()
        statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
        degrees = torch.tensor(float(possible.sum()) - 1, dtype=torch.float64)
        assert torch.special.gammaincc(degrees / 2, statistic / 2) > 5e-6


def sampling_settings() -> st.SearchStrategy[dict[str, Any]]:
    penalty = st.sampled_from([0.0, 0.3, 1.5])
    return st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 24),
            "temperature": st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]),
            "seed": st.none() | st.integers(0, 9),
            "top_k": st.none() | st.integers(1, 40),
            "top_p": st.sampled_from([1.0, 0.9, 0.3]),
            "min_p": st.sampled_from([0.0, 0.05]),
            "frequency_penalty": penalty,
            "presence_penalty": penalty,
            "repetition_penalty": st.sampled_from([1.0, 1.0, 1.4]),
            "logit_bias": st.dictionaries(
                st.integers(0, VOCAB_SIZE - 1), st.floats(-20, 20, width=32), max_size=3
            ),
            "min_tokens": st.integers(0, 9),
            "ignore_eos": st.booleans(),
            "stop_token_ids": st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=30).map(tuple),
            "logprobs": st.none() | st.integers(0, 4),
            "prompt_logprobs": st.none() | st.integers(0, 2),
        }
    )


@given(
    sampling=st.lists(sampling_settings(), min_size=1, max_size=5),
    most=st.integers(1, 9),
    spoiled=st.sampled_from([0.0, 0.2, 0.6]),
    engine_settings=st.sampled_from(
        [{}, {"max_num_batched_tokens": 19}, {"num_kv_blocks": 9}, {"kv_cache_dtype": "int8"}]
    ),
    seed=st.integers(0, 999),
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_no_setting_makes_drafts_matter(
    model: Path,
    sampling: list[dict[str, Any]],
    most: int,
    spoiled: float,
    engine_settings: dict[str, Any],
    seed: int,
) -> None:
    source = random.Random(seed)
    requests = [
        request(
            f"{n}",
            [
                *SHARED[: source.choice([0, 40])],
                *(source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 40))),
            ],
            **chosen,
        )
        for n, chosen in enumerate(sampling)
    ]
    expected = answers(tiny_engine(model, speculate="off", **engine_settings), requests)
    known = {name: token_ids for name, (token_ids, *_) in expected.items()}
    engine = tiny_engine(model, speculate="off", **engine_settings)
    speculate(engine, KnowingDrafter(known, spoiled, seed), most)
    assert answers(engine, requests) == expected


def test_a_row_that_another_request_takes_over_has_the_settings_of_that_request() -> None:
    ops = select_ops("cpu", torch.float32)
    sampler = Sampler(ops, Staging(ops.device, 0), 1, 8, (), seed=1)
    logits = torch.arange(8, dtype=torch.float32)[None]
    samples = Samples(["r"], np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))
    found = []
    for name, settings in (("greedy", {"temperature": 0.0}), ("drawn", {"temperature": 50.0, "seed": 1})):
        sampler.begin(0, request(name, [1], **settings), ())
        found.append({int(sampler.sample(logits.clone(), samples)[0]) for _ in range(20)})
        sampler.end(0)
    assert found[0] == {7}
    assert len(found[1]) > 3
