"""An answer is the same to the token however it was computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.core.plan import HalfCopy
from penstock.core.plan_log import PlanCall, read_plan_log
from penstock.engine.build import Engine

from .tiny import VOCAB_SIZE, request, run, teach_short_answers, tiny_engine, tokens, write_tiny_model

rng = random.Random(7)
SHARED = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
PROMPTS = [
    [*(SHARED if n % 2 else []), *(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 70)))]
    for n in range(10)
]
LENGTHS = [rng.randint(1, 40) for _ in PROMPTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(model: Path, dtype: str) -> list[list[int]]:
    """Each prompt in an engine of its own, whole, with nothing cached."""
    answers = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        engine = tiny_engine(model, enable_prefix_caching=False, dtype=dtype)
        answers.append(tokens(run(engine, [request("alone", prompt, length)])["alone"]))
    return answers


def all_requests() -> list[Any]:
    return [request(str(n), prompt, LENGTHS[n]) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 17},
        {"max_num_seqs": 3},
        {"num_kv_blocks": 14},
        {"num_kv_blocks": 14, "max_num_batched_tokens": 23},
        {"steps_in_flight": 2},
        {"steps_in_flight": 3, "num_kv_blocks": 14, "max_num_batched_tokens": 23},
        {"speculate": "lookup"},
        {"speculate": "auto", "steps_in_flight": 2, "max_num_batched_tokens": 17, "num_kv_blocks": 16},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()) or "together",
)
def test_tokens_are_those_of_a_request_alone(
    model: Path, dtype: str, alone: list[list[int]], settings: dict[str, Any]
) -> None:
    engine = tiny_engine(model, dtype=dtype, **settings)
    teach_short_answers(engine)
    events = run(engine, all_requests())
    assert [tokens(events[str(n)]) for n in range(len(PROMPTS))] == alone
    if settings.get("num_kv_blocks") == 14:
        assert engine.loop.stats().num_preemptions > 0, "the cache was meant to be too small"


def test_answers_vary(alone: list[list[int]]) -> None:
    """Else the comparison above would prove nothing."""
    assert len({token for answer in alone for token in answer}) > 30


def test_a_cached_prefix_is_reused_and_changes_nothing(
    model: Path, dtype: str, alone: list[list[int]]
) -> None:
    engine = tiny_engine(model, dtype=dtype)
    first = run(engine, all_requests())
    second = run(engine, all_requests())
    for n in range(len(PROMPTS)):
        assert tokens(second[str(n)]) == tokens(first[str(n)]) == alone[n]
        assert second[str(n)][0].num_cached_tokens == (len(PROMPTS[n]) - 1) // 16 * 16


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_two_requests_in_a_block_answer_as_each_alone(
    model: Path, dtype: str, tmp_path: Path, kv_cache_dtype: str, steps_in_flight: int
) -> None:
    def engine(**settings: Any) -> Engine:
        return tiny_engine(
            model, dtype=dtype, kv_cache_dtype=kv_cache_dtype, steps_in_flight=steps_in_flight, **settings
        )

    alone = [tokens(run(engine(), [each])[each.id]) for each in all_requests()]
    log = tmp_path / "plans.jsonl"
    together = run(engine(record_plans=str(log)), all_requests())
    assert [tokens(together[str(n)]) for n in range(len(PROMPTS))] == alone
    with log.open("rb") as lines:
        calls = list(read_plan_log(lines)[1])
    plans = [call.plan for call in calls if isinstance(call, PlanCall) and call.plan is not None]
    assert any(isinstance(copy, HalfCopy) for plan in plans for copy in plan.copies)
    assert {chunk.tail_offset for plan in plans for chunk in plan.chunks} == {0, 8}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_seeded_samples_are_the_same_in_any_batch(model: Path, steps_in_flight: int) -> None:
    def sampled(n: int) -> Any:
        return request(
            str(n),
            PROMPTS[n],
            16,
            temperature=0.9,
            top_p=0.95,
            top_k=50,
            seed=n,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=0.1,
        )

    alone = [tokens(run(tiny_engine(model), [sampled(n)])[str(n)]) for n in range(6)]
    engine = tiny_engine(model, steps_in_flight=steps_in_flight, num_kv_blocks=16, max_num_batched_tokens=32)
    teach_short_answers(engine)
    together = run(engine, [sampled(n) for n in range(6)])
    assert [tokens(together[str(n)]) for n in range(6)] == alone
