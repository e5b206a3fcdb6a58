"""Families with a fixed state, in the engine: prefixes from snapshots, chunks, preemption, replay by another engine,
host memory, and settings that such models refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import ConfigError
from penstock.core.plan_log import PlanCall, read_plan_log
from penstock.core.request import Request
from penstock.engine.build import Engine, build_engine
from penstock.simulator.replay import replay
from tests.engine.tiny import request, run, teach_short_answers, tokens
from tests.models.checkpoints import Reference
from tests.models.conftest import random_prompt
from tests.models.tiny_families import save_tiny

DOCUMENT = random_prompt(90, seed=1)
PROMPTS = [[*DOCUMENT, *random_prompt(13 + 5 * n, seed=2 + n)] for n in range(3)]
LENGTH = 24
FAMILIES = ["mamba2", "granite-hybrid", "jamba", "kimi_linear", "zaya"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def engine_of(folder: Path, num_blocks: int = 64, **settings: Any) -> Engine:
    scheduling = {key: settings.pop(key) for key in list(settings) if key.startswith("max_num")}
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32"),
        cache=CacheConfig(num_kv_blocks=num_blocks),
        scheduler=SchedulerConfig(itl_target_ms=None, **{"max_num_seqs": 4, **scheduling}),
        num_threads=1,
        **settings,
    )
    return build_engine(config, folder)


def answers(engine: Engine, name: str, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    requests = [request(f"{name}-{n}", prompt, LENGTH) for n, prompt in enumerate(prompts)]
    events = run(engine, requests)
    engine.loop.scheduler.check_integrity()
    return [tokens(events[each.id]) for each in requests]


def cached_tokens(engine: Engine, each: Request) -> tuple[int | None, list[int]]:
    events = run(engine, [each])[each.id]
    return events[0].num_cached_tokens, tokens(events)


def test_answers_do_not_depend_on_snapshots_chunks_preemption_or_the_engine(
    family: Reference, tmp_path: Path
) -> None:
    log = tmp_path / "plans.jsonl"
    engine = engine_of(family.folder, record_plans=str(log))
    cached, answer = cached_tokens(engine, request("alone", PROMPTS[0], LENGTH))
    expected = family.logits(PROMPTS[0] + answer)[len(PROMPTS[0]) - 1 : -1].argmax(dim=1)
    assert (cached, answer) == (0, expected.tolist())
    assert cached_tokens(engine, request("again", PROMPTS[0], LENGTH)) == (96, answer)

    # The second prompt takes a snapshot in the block where it leaves the first one, and others start from there.
    together = answers(engine, "together")
    assert together[0] == answer
    assert cached_tokens(engine, request("third", PROMPTS[2], LENGTH)) == (80, together[2])

    # Another engine goes on where this one stopped.
    half = msgspec.structs.replace(
        request("moved", PROMPTS[1], LENGTH), output_token_ids=tuple(together[1][:19])
    )
    assert cached_tokens(engine_of(family.folder), half)[1] == together[1][19:]

    apart = [random_prompt(60 + n, seed=7 + n) for n in range(2)]
    expected_apart = answers(engine, "apart", apart)
    small = engine_of(family.folder, 10, max_num_batched_tokens=43)
    teach_short_answers(small)
    assert answers(small, "preempted", apart) == expected_apart
    assert small.loop.stats().num_preemptions > 0, "the cache was meant to be too small"
    engine.close()
    with log.open("rb") as lines:
        assert replay(lines).mismatch is None
    with log.open("rb") as lines:
        calls = [call for call in read_plan_log(lines)[1] if isinstance(call, PlanCall)]
    assert all(not chunk.drafts for call in calls if call.plan for chunk in call.plan.chunks)


def test_settings_that_a_state_cannot_follow_are_refused(tmp_path: Path) -> None:
    folder = save_tiny("lfm2", tmp_path).folder
    with pytest.raises(ConfigError, match="cannot go back when a draft is rejected"):
        engine_of(folder, speculate="lookup")
    with pytest.raises(ConfigError, match="KV transfers do not carry the fixed states"):
        engine_of(folder, kv_transfer=True)


def test_a_model_too_large_for_the_memory_is_told_with_its_sizes(tmp_path: Path) -> None:
    folder = save_tiny("mamba2", tmp_path).folder
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32"),
        cache=CacheConfig(kv_cache_memory="20KiB"),
    )
    with pytest.raises(ConfigError, match=r"take \d.* KiB for each request, and 20\.0 KiB of memory"):
        build_engine(config, folder)
