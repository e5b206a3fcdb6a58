"""Ranks with requests of their own give the answers of one rank, whatever each of them has to do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.engine_config import EngineConfig, ParallelConfig
from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.gateway_config import GatewayConfig
from penstock.core.plan import StepPlan
from penstock.core.request import FinishReason, Grammar, Request, SamplingParams
from penstock.engine.build import check_data_parallel
from penstock.gateway.models.served_model import ServedModel
from penstock.simulator.replay import replay
from tests.copies import copied_ranks
from tests.engine.byte_model import END, constrained, text_of, write_byte_model
from tests.engine.drafting import KnowingDrafter, num_accepted, speculate
from tests.engine.parallel.test_balancing import DEEPSEEK_V3, QWEN3_MOE
from tests.engine.parallel.test_engine import PROMPTS, SETTINGS, answers, rank_pids, step_for_a_while
from tests.engine.test_images import PICTURES, chat, vision_engine
from tests.engine.test_images import request as about_images
from tests.engine.tiny import (
    request,
    teach_short_answers,
    tiny_engine,
    tokens,
    unpacked,
    write_tiny_adapter,
)
from tests.models.vision_checkpoints import make_vision

TWO = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)
BALANCED = msgspec.structs.replace(TWO, enable_eplb=True, num_redundant_experts=2, eplb_step_interval=7)
CASES = {"qwen3-moe": (QWEN3_MOE, TWO), "deepseek-v3, balanced": (DEEPSEEK_V3, BALANCED)}


class Pair:
    """An engine of one rank, an engine of two, and the plans of the latter."""

    def __init__(self, folder: Path, family: dict[str, Any], parallel: ParallelConfig) -> None:
        model = write_byte_model(folder, **family)
        settings = {**SETTINGS, "num_kv_blocks": 9}
        self.is_balanced = parallel.enable_eplb
        self.log = folder / "plans"
        self.one = tiny_engine(model, **settings)
        with copied_ranks():
            self.several = tiny_engine(model, parallel=parallel, record_plans=str(self.log), **settings)
        self.plans: list[StepPlan] = []
        scheduler = self.several.loop.scheduler
        plan = scheduler.plan

        def noted(*arguments: Any) -> StepPlan | None:
            planned = plan(*arguments)
            self.plans += [planned] if planned is not None else []
            return planned

        scheduler.plan = noted  # type: ignore[method-assign]

    def check_same_tokens(self, requests: list[Request]) -> list[StepPlan]:
        """Returns the plans of the two ranks."""
        expected = answers(self.one, requests)
        self.plans.clear()
        given = answers(self.several, requests)
        for each in requests:
            assert tokens(given[each.id]) == tokens(expected[each.id])
        return list(self.plans)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("model"), *CASES[request.param])
    yield made
    made.several.close()


def test_images_are_encoded_on_the_rank_of_their_request(tmp_path: Path) -> None:
    """The first test: one process has one group of ranks at a time."""
    model = make_vision("glm4.5v", tmp_path / "model")
    one = vision_engine(model)
    with copied_ranks():
        several = vision_engine(model, parallel=TWO)
    try:
        served = ServedModel(several.ready, GatewayConfig())
        prompts = [asyncio.run(served.prepare(chat(images))) for images in (PICTURES[:1], PICTURES[1:], ())]
        requests = [about_images(f"{n}", prompt, max_tokens=4) for n, prompt in enumerate(prompts)]
        expected, given = answers(one, requests), answers(several, requests)
        for each in requests:
            assert tokens(given[each.id]) == tokens(expected[each.id])
        assert several.loop.stats().num_images_encoded == 2
    finally:
        several.close()


def test_the_model_is_described_as_a_whole_and_the_cache_is_that_of_all_ranks(pair: Pair) -> None:
    one, several = pair.one.ready, pair.several.ready
    assert several.model.num_parameters == one.model.num_parameters
    assert (several.num_kv_blocks, several.max_num_seqs) == (2 * one.num_kv_blocks, 2 * one.max_num_seqs)
    assert several.num_contexts == 2 * one.num_contexts
    assert pair.several.loop.stats().num_kv_blocks == several.num_kv_blocks


def test_the_same_greedy_tokens_in_chunks_with_shared_prefixes_and_preemptions(pair: Pair) -> None:
    for engine in (pair.one, pair.several):
        teach_short_answers(engine)
    before = pair.several.loop.stats()
    plans = pair.check_same_tokens([request(f"greedy-{n}", each, 32) for n, each in enumerate(PROMPTS)])
    after = pair.several.loop.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.prefix_cache_hits > before.prefix_cache_hits
    assert any(all(plan.rank_tokens) for plan in plans), "both ranks compute in one step"
    assert any(len(set(plan.rank_tokens)) > 1 for plan in plans), "ranks have unequal loads"


def test_a_rank_without_requests_takes_part_in_the_exchange(pair: Pair) -> None:
    for prompt in (PROMPTS[1], PROMPTS[2]):
        plans = pair.check_same_tokens([request(f"lone-{len(prompt)}", prompt, 6)])
        assert all(None in plan.ranks for plan in plans)


def test_an_aborted_request_leaves_the_other_rank_alone(pair: Pair) -> None:
    kept, dropped = request("kept", PROMPTS[0], 12), request("dropped", PROMPTS[5], 100)
    several = pair.several
    for each in (kept, dropped):
        several.loop.add(each)
    events = [event for _ in range(5) for event in several.loop.step()]
    several.loop.abort("dropped")
    while several.loop.has_work:
        events += several.loop.step()
        several.loop.scheduler.check_integrity()
    given = tokens([event for event in events if event.request_id == "kept"])
    assert given == tokens(answers(pair.one, [kept])["kept"])
    pair.check_same_tokens([request("dropped", PROMPTS[2], 5)])  # the id is free again


def test_samples_scores_grammars_and_vectors_come_from_the_rank_of_their_request(pair: Pair) -> None:
    sampled = [
        request(
            f"seeded-{n}",
            prompt,
            6,
            temperature=0.8,
            seed=n,
            repetition_penalty=1.2,
            logprobs=2,
            prompt_logprobs=1,
        )
        for n, prompt in enumerate(PROMPTS[:4])
    ]
    vectors = [
        Request(
            id=f"vector-{n}",
            prompt_token_ids=tuple(PROMPTS[n]),
            sampling=SamplingParams(max_tokens=1),
            pooling="mean",
        )
        for n in range(2)
    ]
    choices = Grammar("choice", '["yes", "no"]')
    held = [constrained(f"choice-{n}", choices, seed=n) for n in range(3)]
    requests = [*sampled, *vectors, *held]
    expected, given = answers(pair.one, requests), answers(pair.several, requests)
    for each in (*sampled, *held):
        assert tokens(given[each.id]) == tokens(expected[each.id])
    for each in sampled:
        (values, ids), (other_values, _) = map(unpacked, (given[each.id], expected[each.id]))
        assert values == pytest.approx(other_values, abs=1e-4)
        assert ids.shape == (len(each.prompt_token_ids) - 1, 2)
    for each in vectors:
        found = [np.frombuffer(of[each.id][0].embedding or b"", dtype="<f4") for of in (given, expected)]
        np.testing.assert_allclose(*found, atol=1e-5)
    for each in held:
        assert text_of(given[each.id]) in ("yes", "no")
        assert given[each.id][-1].finish_reason is FinishReason.STOP


def test_adapters_apply_on_every_rank(pair: Pair, tmp_path: Path) -> None:
    if "deepseek" in pair.several.ready.model.architecture:
        pytest.skip("the tiny adapter is for attention without latents")
    adapter = write_tiny_adapter(tmp_path / "adapter", 1, parts=("self_attn",))
    requests = [
        msgspec.structs.replace(request(f"adapted-{n}", prompt, 6), adapter=[adapter, None][n % 2])
        for n, prompt in enumerate(PROMPTS[:4])
    ]
    pair.check_same_tokens(requests)
    plain = msgspec.structs.replace(requests[0], id="plain", adapter=None)
    changed = answers(pair.several, [requests[0], plain])
    assert tokens(changed["plain"]) != tokens(changed[requests[0].id])


def test_experts_have_moved_by_the_tokens_of_both_ranks(pair: Pair) -> None:
    stats = pair.several.loop.stats()
    assert (stats.num_experts_moved > 0) == pair.is_balanced
    if pair.is_balanced:
        assert 1 <= stats.expert_imbalance_placed <= stats.expert_imbalance


def test_the_log_of_all_this_replays(pair: Pair) -> None:
    assert pair.several.recorder is not None
    pair.several.recorder._file.flush()
    with pair.log.open("rb") as log:
        replayed = replay(log)
    assert replayed.mismatch is None
    assert replayed.num_plans > 50


def test_drafts_change_nothing(pair: Pair) -> None:
    requests = [request(f"drafted-{n}", prompt, 12) for n, prompt in enumerate(PROMPTS[:4])]
    expected = {name: tokens(events) for name, events in answers(pair.one, requests).items()}
    speculate(pair.several, KnowingDrafter(expected, 0.4, vocab_size=END))
    try:
        given = answers(pair.several, requests)
    finally:
        pair.several.loop.drafter = None
    assert {name: tokens(events) for name, events in given.items()} == expected
    assert num_accepted(pair.several) > 0


def test_when_a_rank_is_killed_the_engine_says_so(pair: Pair) -> None:
    """The last test with this engine."""
    several = pair.several
    several.loop.add(request("unfinished", PROMPTS[0], 400))
    several.loop.step()
    os.kill(rank_pids(several)[0], signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=r"Rank 1 of 2 .* by signal 9"):
        step_for_a_while(several)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": ParallelConfig(data_parallel_size=2)}, "--enable-expert-parallel is not given"),
        (
            {"parallel": msgspec.structs.replace(TWO, tensor_parallel_size=2)},
            "support --tensor-parallel-size",
        ),
        (
            {"parallel": msgspec.structs.replace(TWO, pipeline_parallel_size=2)},
            "support --pipeline-parallel-size",
        ),
        ({"kv_transfer": True}, "support --kv-transfer"),
        ({"speculate": "draft=tiny"}, "support --speculate draft=tiny"),
        ({"speculate": "heads=mtp"}, "support --speculate heads=mtp"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_data_parallel(EngineConfig(**{"parallel": TWO, **changes}))


def test_models_without_enough_experts_are_refused(tmp_path: Path) -> None:
    dense = write_byte_model(tmp_path / "dense")
    few = write_byte_model(tmp_path / "few", **{**QWEN3_MOE, "num_experts": 2})
    with copied_ranks():
        with pytest.raises(ConfigError, match="needs a mixture of experts"):
            tiny_engine(dense, parallel=TWO)
        with pytest.raises(ConfigError, match="2 experts cannot be placed on 3 ranks"):
            tiny_engine(few, parallel=msgspec.structs.replace(TWO, data_parallel_size=3))
