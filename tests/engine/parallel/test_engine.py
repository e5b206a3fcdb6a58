"""An engine of several ranks gives the answers of one, and ends when one of its ranks does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock.core.engine_config import ParallelConfig
from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.hashing import adapter_digest
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Grammar, Pooling, Request, SamplingParams
from penstock.engine.build import Engine
from penstock.engine.drafters.interface import Drafter
from penstock.engine.drafters.length import DraftLength
from tests.copies import copied_ranks
from tests.engine.byte_model import END, constrained, text_of, write_byte_model
from tests.engine.drafting import KnowingDrafter, num_accepted, speculate
from tests.engine.tiny import (
    request,
    run,
    teach_short_answers,
    tiny_engine,
    tokens,
    unpacked,
    write_tiny_adapter,
)

TOPOLOGIES = {
    "tensor": ParallelConfig(tensor_parallel_size=2),
    "pipeline": ParallelConfig(pipeline_parallel_size=2),
    "both": ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
}
rng = random.Random(3)
SHARED = [rng.randrange(3, 255) for _ in range(40)]
PROMPTS = [
    [*(SHARED if n % 2 else []), *(rng.randrange(3, 255) for _ in range(rng.randint(1, 70)))]
    for n in range(8)
]
# So few blocks and tokens that prompts are cut and requests preempted.
SETTINGS: dict[str, Any] = {"num_kv_blocks": 12, "max_num_batched_tokens": 40, "steps_in_flight": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def one(model: Path) -> Engine:
    return tiny_engine(model, speculate="off", **SETTINGS)


@pytest.fixture(scope="module", params=TOPOLOGIES)
def several_and_drafter(
    request: pytest.FixtureRequest, model: Path
) -> Iterator[tuple[Engine, Drafter | None]]:
    """The drafter drafts in its own test alone: the number of steps would depend on measured times."""
    with copied_ranks():
        engine = tiny_engine(
            model, parallel=TOPOLOGIES[request.param], speculate=f"draft={model}", **SETTINGS
        )
    drafter, engine.loop.drafter = engine.loop.drafter, None
    yield engine, drafter
    engine.close()


@pytest.fixture
def several(several_and_drafter: tuple[Engine, Drafter | None]) -> Engine:
    return several_and_drafter[0]


def rank_pids(engine: Engine) -> list[int]:
    assert engine.ranks is not None
    return list(engine.ranks.pids)


def answers(engine: Engine, requests: list[Request]) -> dict[str, list[TokenEvent]]:
    events = run(engine, requests)
    assert set(events) == {each.id for each in requests}
    return events


def test_the_model_is_described_as_a_whole(one: Engine, several: Engine) -> None:
    assert several.ready.model.num_parameters == one.ready.model.num_parameters
    assert several.ready.model.weight_bytes >= one.ready.model.weight_bytes
    assert several.ready.num_kv_blocks == one.ready.num_kv_blocks


def test_the_same_greedy_tokens_in_chunks_with_shared_prefixes_and_preemptions(
    one: Engine, several: Engine
) -> None:
    requests = [request(f"greedy-{n}", prompt, 32) for n, prompt in enumerate(PROMPTS)]
    teach_short_answers(one)
    teach_short_answers(several)
    before = several.loop.stats()
    expected, given = answers(one, requests), answers(several, requests)
    for each in requests:
        assert tokens(given[each.id]) == tokens(expected[each.id])
    after = several.loop.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.prefix_cache_hits > before.prefix_cache_hits


def test_seeded_samples_with_penalties_and_log_probabilities(one: Engine, several: Engine) -> None:
    requests = [
        request(
            f"seeded-{n}",
            prompt,
            12,
            temperature=0.8,
            top_k=40,
            seed=n,
            repetition_penalty=1.2,
            frequency_penalty=0.2,
            logprobs=3,
        )
        for n, prompt in enumerate(PROMPTS[:4])
    ]
    expected, given = answers(one, requests), answers(several, requests)
    for each in requests:
        assert tokens(given[each.id]) == tokens(expected[each.id])
        for ours, theirs in zip(given[each.id], expected[each.id], strict=True):
            ours_found = [found.logprob for found in ours.logprobs]
            assert ours_found == pytest.approx([found.logprob for found in theirs.logprobs], abs=1e-4)


def test_log_probabilities_of_prompts(one: Engine, several: Engine) -> None:
    requests = [
        request(f"scored-{n}", prompt, 6 * (n % 2), prompt_logprobs=3) for n, prompt in enumerate(PROMPTS)
    ]
    expected, given = answers(one, requests), answers(several, requests)
    for each in requests:
        assert tokens(given[each.id]) == tokens(expected[each.id])
        (values, ids), (expected_values, expected_ids) = map(unpacked, (given[each.id], expected[each.id]))
        assert values.shape == (len(each.prompt_token_ids) - 1, 4)
        assert values == pytest.approx(expected_values, abs=1e-4)
        assert (ids == expected_ids).mean() > 0.95  # tokens that are almost equally likely may swap


def test_grammars_hold_answers(several: Engine) -> None:
    choices = Grammar("choice", '["yes", "no"]')
    events = answers(several, [constrained("choice", choices), constrained("free", None, max_tokens=8)])
    assert text_of(events["choice"]) in ("yes", "no")
    assert events["choice"][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("spoiled", [0.0, 0.4])
def test_drafts_change_nothing(one: Engine, several: Engine, spoiled: float) -> None:
    """All ranks compute the drafts; the rank that samples verifies them."""
    schema = Grammar("regex", "name: [a-z]{2,6}, year: [0-9]{4}")
    requests = [
        *(request(f"drafted-{n}", prompt, 20) for n, prompt in enumerate(PROMPTS[:4])),
        request("drafted", PROMPTS[4], 20, temperature=0.8, seed=3, frequency_penalty=0.3, logprobs=1),
        constrained("drafted-grammar", schema, 40),
    ]
    expected = {name: tokens(events) for name, events in answers(one, requests).items()}
    speculate(several, KnowingDrafter(expected, spoiled, vocab_size=END))
    try:
        given = answers(several, requests)
    finally:
        several.loop.drafter = None
    assert {name: tokens(events) for name, events in given.items()} == expected
    assert num_accepted(several) > 0


def test_a_draft_model_drafts_on_the_first_rank(
    one: Engine, several_and_drafter: tuple[Engine, Drafter | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    several, drafter = several_and_drafter
    assert drafter is not None
    monkeypatch.setattr(DraftLength, "begin", lambda self, *_: 4)
    requests = [
        request(f"model-{n}", prompt, 20, temperature=0.8 * (n % 2), seed=n)
        for n, prompt in enumerate(PROMPTS[:4])
    ]
    requests.append(constrained("model-grammar", Grammar("regex", "name: [a-z]{2,6}, year: [0-9]{4}"), 40))
    expected = {name: tokens(events) for name, events in answers(one, requests).items()}
    speculate(several, drafter)
    try:
        given = answers(several, requests)
    finally:
        several.loop.drafter = None
    assert {name: tokens(events) for name, events in given.items()} == expected
    accepted = {each.drafter: sum(each.accepted) for each in several.loop.stats().drafters}
    assert accepted["draft"] > 10


def test_an_answer_that_is_no_number_ends_alone(one: Engine, several: Engine, tmp_path: Path) -> None:
    """The step behind it is planned and computed before anybody has seen that nothing was sampled."""
    adapter = write_tiny_adapter(tmp_path / "broken", 1)
    file = Path(adapter.path) / "adapter_model.safetensors"
    save_file({name: tensor * 1e25 for name, tensor in load_file(file).items()}, file)
    adapter = msgspec.structs.replace(adapter, digest=adapter_digest(Path(adapter.path)))
    requests = [
        msgspec.structs.replace(request("broken", PROMPTS[0], 10), adapter=adapter),
        request("whole", PROMPTS[1], 10),
    ]
    for each in (answers(one, requests), answers(several, requests)):
        assert (tokens(each["broken"]), each["broken"][-1].finish_reason) == ([], FinishReason.ERROR)
        assert len(tokens(each["whole"])) == 10


def test_embeddings(one: Engine, several: Engine) -> None:
    def vectors(engine: Engine) -> list[np.ndarray]:
        poolings: list[Pooling] = ["mean", "last", "first"]
        requests = [
            Request(
                id=f"embed-{pooling}",
                prompt_token_ids=tuple(PROMPTS[3]),
                sampling=SamplingParams(max_tokens=1),
                pooling=pooling,
            )
            for pooling in poolings
        ]
        found = answers(engine, requests)
        return [np.frombuffer(found[each.id][0].embedding or b"", dtype="<f4") for each in requests]

    for given, expected in zip(vectors(several), vectors(one), strict=True):
        np.testing.assert_allclose(given, expected, atol=1e-5)


def test_adapters_are_cut_up_like_the_layers(one: Engine, several: Engine, tmp_path: Path) -> None:
    adapters = [write_tiny_adapter(tmp_path / f"{seed}", seed, rank=4 * seed) for seed in (1, 2)]
    requests = [
        msgspec.structs.replace(request(f"adapted-{n}", prompt, 10), adapter=[*adapters, None][n % 3])
        for n, prompt in enumerate(PROMPTS[:6])
    ]
    expected, given = answers(one, requests), answers(several, requests)
    for each in requests:
        assert tokens(given[each.id]) == tokens(expected[each.id])
    (plain,) = answers(one, [msgspec.structs.replace(requests[0], id="plain", adapter=None)]).values()
    assert tokens(plain) != tokens(expected[requests[0].id])


def test_an_aborted_request_leaves_the_others_alone(one: Engine, several: Engine) -> None:
    kept, dropped = request("kept", PROMPTS[0], 16), request("dropped", PROMPTS[1], 100)
    for each in (kept, dropped):
        several.loop.add(each)
    events = [event for _ in range(6) for event in several.loop.step()]
    several.loop.abort("dropped")
    while several.loop.has_work:
        events += several.loop.step()
        several.loop.scheduler.check_integrity()
    given = tokens([event for event in events if event.request_id == "kept"])
    assert given == tokens(answers(one, [kept])["kept"])
    # The id is free again.
    again = request("dropped", PROMPTS[2], 5)
    assert tokens(answers(several, [again])["dropped"]) == tokens(answers(one, [again])["dropped"])


def test_when_a_rank_is_killed_the_engine_says_so_and_none_is_left(several: Engine) -> None:
    """The last test with this engine."""
    for n, prompt in enumerate(PROMPTS[:4]):
        several.loop.add(request(f"unfinished-{n}", prompt, 400))
    several.loop.step()
    pids = rank_pids(several)
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=rf"Rank {len(pids)} of {len(pids) + 1} .* by signal 9"):
        step_for_a_while(several)
    several.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_end_with_their_engine(model: Path) -> None:
    """However it ends, and whatever state they are in."""
    script = (
        "import sys, time; from pathlib import Path; from penstock.core.engine_config import ParallelConfig;"
        "from tests.engine.tiny import tiny_engine;"
        "engine = tiny_engine(Path(sys.argv[1]), parallel=ParallelConfig(tensor_parallel_size=2));"
        "print(*engine.ranks.pids, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        engine.kill()
    assert pids
    _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(tensor_parallel_size=8), "4 attention heads"),
        (ParallelConfig(pipeline_parallel_size=3), "2 layers"),
        (ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True), "mixture of experts"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(model: Path, parallel: ParallelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_engine(model, parallel=parallel)


def step_for_a_while(engine: Engine) -> None:
    for _ in range(1000):
        engine.loop.step()
        time.sleep(0.01)


def _wait_for(condition: Any) -> None:
    gives_up = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < gives_up, "it never came true"
        time.sleep(0.02)
