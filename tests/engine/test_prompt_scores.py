"""Log-probabilities of prompt tokens on the real loop, against one whole forward pass."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.core.request import FinishReason
from penstock.engine import forward
from penstock.engine.build import Engine
from penstock.engine.forward import score_tokens
from penstock.simulator.replay import replay

from .tiny import (
    VOCAB_SIZE,
    request,
    run,
    teach_short_answers,
    tiny_engine,
    tokens,
    unpacked,
    write_tiny_model,
)

rng = random.Random(9)
PROMPT = [rng.randrange(3, VOCAB_SIZE) for _ in range(100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Engine:
    """Computes every prompt whole, and reuses nothing."""
    return tiny_engine(model, enable_prefix_caching=False)


def next_token_logprobs(oracle: Engine, prompt: list[int]) -> list[float]:
    """What a sampler says of each token, when the prompt ends before it."""
    alone = {}
    for end in range(1, len(prompt)):
        asked = request(f"end-{end}", prompt[:end], 1, logprobs=20, logit_bias={prompt[end]: 100.0})
        (event,) = run(oracle, [asked])[asked.id]
        assert event.token_ids == (prompt[end],)
        alone[end] = event.logprobs[0].logprob
    return [alone[end] for end in range(1, len(prompt))]


def test_scores_are_the_sampler_s_log_probabilities(oracle: Engine) -> None:
    events = run(oracle, [request("scored", PROMPT[:30], 3, prompt_logprobs=4)])["scored"]
    values, ids = unpacked(events)
    assert values.shape == ids.shape == (29, 5)
    assert values[:, 0] == pytest.approx(next_token_logprobs(oracle, PROMPT[:30]), abs=1e-4)
    assert (np.diff(values[:, 1:]) <= 0).all()
    for row, (rank, *top) in enumerate(ids.tolist()):
        assert (rank <= 4) == (PROMPT[row + 1] in top)
        if rank <= 4:
            assert top[rank - 1] == PROMPT[row + 1]
    assert tokens(events) == tokens(run(oracle, [request("plain", PROMPT[:30], 3)])["plain"])


@pytest.mark.parametrize("depth", [1, 3])
def test_chunks_prefix_hits_and_preemptions_change_no_score(model: Path, oracle: Engine, depth: int) -> None:
    engine = tiny_engine(
        model, num_kv_blocks=14, max_num_batched_tokens=24, steps_in_flight=depth, max_num_seqs=6
    )
    teach_short_answers(engine)
    run(engine, [request("warm", PROMPT, 2)])
    asked = [
        request(f"scored-{n}", [*PROMPT[:40], 3 + n, *PROMPT[40 : 44 + 8 * n]], 60, prompt_logprobs=2)
        for n in range(5)
    ]
    plain = [request(f"plain-{n}", [*PROMPT[:40], 9 + n], 60) for n in range(3)]
    before = engine.loop.stats()
    given = run(engine, [*asked, *plain])
    after = engine.loop.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.prefix_cache_hits > before.prefix_cache_hits, "other requests still reuse the prefix"
    for each in asked:
        expected = run(oracle, [each])[each.id]
        assert unpacked(given[each.id])[0] == pytest.approx(unpacked(expected)[0], abs=1e-4)
        assert tokens(given[each.id]) == tokens(expected)
    for each in plain:
        assert tokens(given[each.id]) == tokens(run(oracle, [each])[each.id])


def test_a_cached_prefix_is_computed_again_and_stays_for_others(model: Path) -> None:
    engine = tiny_engine(model)
    run(engine, [request("warm", PROMPT, 1)])
    scored = run(engine, [request("scored", PROMPT, 1, prompt_logprobs=0)])["scored"]
    assert scored[-1].num_cached_tokens == 0
    assert unpacked(scored)[0].shape == (99, 1)
    again = run(engine, [request("again", PROMPT, 1)])["again"]
    assert again[0].num_cached_tokens == 96
    assert again[0].prompt_logprobs is None


def test_a_cache_of_eight_bits_and_no_prefix_cache(model: Path, oracle: Engine) -> None:
    expected = unpacked(run(oracle, [request("scored", PROMPT, 1, prompt_logprobs=1)])["scored"])[0]
    for settings in ({"kv_cache_dtype": "int8"}, {"enable_prefix_caching": False}):
        engine = tiny_engine(model, max_num_batched_tokens=33, **settings)
        values, _ = unpacked(run(engine, [request("scored", PROMPT, 1, prompt_logprobs=1)])["scored"])
        assert values == pytest.approx(expected, abs=0.05)


def test_a_prompt_alone(model: Path, tmp_path: Path) -> None:
    """As long as the whole context, and nothing is sampled."""
    engine = tiny_engine(model, max_num_batched_tokens=64, record_plans=str(tmp_path / "plans.jsonl"))
    context = engine.ready.model.max_model_len
    prompt = [3 + n % 200 for n in range(context)]
    events = run(engine, [request("scored", prompt, 0, prompt_logprobs=1), request("empty", PROMPT, 0)])
    assert unpacked(events["scored"])[0].shape == (context - 1, 2)
    for each in events.values():
        assert tokens(each) == []
        assert each[-1].finish_reason is FinishReason.LENGTH
        assert each[-1].num_cached_tokens == 0
        assert each[-1].queue_s is not None
    engine.close()
    with (tmp_path / "plans.jsonl").open("rb") as log:
        replayed = replay(log)
    assert replayed.mismatch is None
    assert replayed.num_plans > context // 64


def test_logits_of_few_positions_exist_at_a_time(
    model: Path, oracle: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("scored", PROMPT, 1, prompt_logprobs=3)
    expected = unpacked(run(oracle, [asked])["scored"])
    monkeypatch.setattr(forward, "MAX_LOGIT_BYTES", 4 * VOCAB_SIZE * 7)
    engine = tiny_engine(model)
    sizes = []

    def noted(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Any:
        sizes.append(len(logits))
        return score_tokens(logits, token_ids, num_top)

    monkeypatch.setattr(forward, "score_tokens", noted)
    values, ids = unpacked(run(engine, [asked])["scored"])
    assert max(sizes) == 7
    assert values == pytest.approx(expected[0], abs=1e-5)
    assert (ids == expected[1]).all()


def test_no_numbers_end_the_request_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(model)

    def broken(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Any:
        values, ids = score_tokens(logits, token_ids, num_top)
        return values * torch.nan, ids

    monkeypatch.setattr(forward, "score_tokens", broken)
    events = run(engine, [request("scored", PROMPT, 4, prompt_logprobs=1), request("plain", PROMPT[:9], 4)])
    assert [event.finish_reason for event in events["scored"]] == [FinishReason.ERROR]
    assert "not numbers" in (events["scored"][0].error or "")
    assert events["plain"][-1].finish_reason is FinishReason.LENGTH


def test_an_answer_that_another_engine_began_is_not_scored_again(model: Path) -> None:
    asked = request("begun", PROMPT, 5, prompt_logprobs=1)
    begun = msgspec.structs.replace(asked, output_token_ids=(7,))
    events = run(tiny_engine(model), [begun])["begun"]
    assert all(event.prompt_logprobs is None for event in events)
    assert len(tokens(events)) == 4
