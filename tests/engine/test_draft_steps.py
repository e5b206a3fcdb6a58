"""Steps with drafts beside everything else that a step can hold, and steps that fail."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from penstock.core.clock import SystemClock
from penstock.core.errors import InvalidRequest
from penstock.core.plan import NOT_A_NUMBER, OUT_OF_MEMORY, PREDICTION, Chunk, SampledToken, StepPlan
from penstock.core.request import FinishReason, Request
from penstock.engine import cache_memory
from penstock.engine.batch import BatchRows
from penstock.engine.drafters.lookup import LookupDrafter
from penstock.engine.echo import EchoExecutor
from penstock.engine.forward import halves
from penstock.engine.graphs import DecodeGraphs
from penstock.engine.staging import Staging
from penstock.kernels.interface import AttentionBatch, KVStore
from penstock.models.families.llama import Llama

from .drafting import KnowingDrafter, answer, answers, num_accepted, speculate
from .tiny import (
    VOCAB_SIZE,
    request,
    run,
    teach_short_answers,
    tiny_engine,
    tokens,
    write_tiny_adapter,
    write_tiny_model,
)

rng = random.Random(12)
PROMPTS = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (40, 90, 20, 70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("draft-steps") / "tiny")


def greedy(max_tokens: int = 20) -> list[Request]:
    return [request(f"{n}", prompt, max_tokens) for n, prompt in enumerate(PROMPTS)]


def known(model: Path, requests: list[Request]) -> dict[str, list[int]]:
    return {name: found[0] for name, found in answers(tiny_engine(model, speculate="off"), requests).items()}


def test_a_step_without_room_samples_every_draft_in_pieces(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [*greedy(40), request("drawn", [5, 6], 40, temperature=1.0, seed=3, frequency_penalty=0.3)]
    expected = answers(tiny_engine(model, speculate="off"), requests)
    forward = Llama.forward
    for max_tokens in (40, 3):

        def limited(self: Llama, token_ids: Tensor, *rest: Any, most: int = max_tokens) -> Tensor:
            # Prompts fit, or the requests would end: this is about drafts.
            if len(token_ids) > most and rest[0].max_context_len > 100:
                raise torch.OutOfMemoryError("injected")
            return forward(self, token_ids, *rest)

        monkeypatch.setattr(Llama, "forward", limited)
        engine = speculate(
            tiny_engine(model, speculate="off"),
            KnowingDrafter({n: a[0] for n, a in expected.items()}, 0.1),
            30,
        )
        assert answers(engine, requests) == expected
        assert num_accepted(engine) > 0
        assert engine.loop.stats().num_out_of_memory == 0, "requests can do without drafts"


@given(num_known=st.integers(1, 80), num_drafts=st.integers(0, 64), most=st.integers(1, 90))
def test_pieces_sample_where_the_chunk_does(num_known: int, num_drafts: int, most: int) -> None:
    size = num_known + num_drafts
    whole = Chunk("r", 7, size, True, (1, 2), drafts=tuple(range(100, 100 + num_drafts)), begins=True)
    pieces: list[tuple[Chunk, ...]] = [(whole,)]
    done: list[Chunk] = []
    while pieces:
        (piece,) = pieces.pop()
        parts = halves([piece]) if piece.num_tokens > most else None
        if parts is None:
            done.append(piece)
        else:
            pieces += [tuple(part) for part in reversed(parts)]
    assert [at for piece in done for at in range(piece.start, piece.start + piece.num_tokens)] == list(
        range(7, 7 + size)
    )
    sampled = [
        at
        for piece in done
        if piece.samples
        for at in range(
            piece.start + piece.num_tokens - 1 - len(piece.drafts), piece.start + piece.num_tokens
        )
    ]
    assert sampled == list(range(7 + num_known - 1, 7 + size))
    for piece in done:
        end = piece.start + piece.num_tokens - 7 - num_known
        assert piece.drafts == whole.drafts[max(0, end - len(piece.drafts)) : max(0, end)]


def test_a_chunk_that_has_no_room_at_all_ends_its_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = known(model, greedy())
    forward = Llama.forward
    fails = False

    def limited(self: Llama, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        if fails and bool((batch.context_lens > 95).any()):  # the second request's
            raise torch.OutOfMemoryError("injected")
        return forward(self, token_ids, batch, kv)

    monkeypatch.setattr(Llama, "forward", limited)
    engine = speculate(tiny_engine(model, speculate="off"), KnowingDrafter(expected, 0.0))
    for each in greedy():
        engine.loop.add(each)
    events = engine.loop.step()
    fails = True
    while engine.loop.has_work:
        events += engine.loop.step()
    found = {n: answer([event for event in events if event.request_id == n]) for n in expected}
    assert found["1"][2:] == (FinishReason.ERROR, OUT_OF_MEMORY)
    assert [found[n][0] for n in "023"] == [expected[n] for n in "023"]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "seed": 1, "logprobs": 1}], ids=["argmax", "drawn"]
)
def test_a_position_that_is_no_number_ends_the_answer_in_front_of_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    """The tokens in front of it are delivered, and log-probabilities with them."""
    requests = [request("r", PROMPTS[0], 20, **sampling), request("other", PROMPTS[2], 20, **sampling)]
    expected = answers(tiny_engine(model, speculate="off"), requests)
    bad = len(PROMPTS[0]) + 9
    forward = Llama.forward

    def broken(self: Llama, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        hidden = forward(self, token_ids, batch, kv)
        hidden[batch.positions == bad] = float("nan")
        return hidden

    monkeypatch.setattr(Llama, "forward", broken)
    plain = answers(tiny_engine(model, speculate="off"), requests)
    assert plain["r"][2:] == (FinishReason.ERROR, NOT_A_NUMBER)
    # The step behind it is planned and computed before anybody has seen that nothing was sampled.
    assert answers(tiny_engine(model, speculate="off", steps_in_flight=2), requests) == plain
    for most in (1, 3, 30):
        engine = tiny_engine(model, speculate="off")
        speculate(engine, KnowingDrafter({name: found[0] for name, found in expected.items()}, 0.0), most)
        assert answers(engine, requests) == plain
        assert engine.loop.stats().num_nan_logits == 1


def test_embeddings_and_scores_beside_drafts(model: Path) -> None:
    """A text that is embedded and a prompt that is scored come while others verify drafts."""
    late = [
        replace(request("embedded", PROMPTS[1], 1), pooling="mean"),
        request("scored", PROMPTS[3], 5, prompt_logprobs=2),
    ]
    plain = tiny_engine(model, speculate="off")
    expected = run(plain, greedy(40)) | run(plain, late)
    engine = speculate(
        tiny_engine(model, speculate="off", max_num_batched_tokens=32, enable_prefix_caching=False),
        KnowingDrafter({name: tokens(events) for name, events in expected.items()}, 0.3),
    )
    for each in greedy(40):
        engine.loop.add(each)
    events = [event for _ in range(8) for event in engine.loop.step()]
    for each in late:
        engine.loop.add(each)
    while engine.loop.has_work:
        events += engine.loop.step()
    for name in expected:
        assert tokens([event for event in events if event.request_id == name]) == tokens(expected[name])
    (embedded,) = (event for event in events if event.request_id == "embedded")
    made, vector = (
        np.frombuffer(each.embedding or b"", "<f4") for each in (embedded, expected["embedded"][0])
    )
    np.testing.assert_allclose(made, vector, atol=1e-6)
    assert num_accepted(engine) > 0


def test_requests_that_are_swapped_to_the_host(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_memory, "block_copy_s", lambda *_: 0.0)
    expected = known(model, greedy(60))
    engine = tiny_engine(model, num_kv_blocks=18, speculate="off")
    teach_short_answers(engine)
    speculate(engine, KnowingDrafter(expected, 0.3))
    assert {name: found[0] for name, found in answers(engine, greedy(60)).items()} == expected
    stats = engine.loop.stats()
    assert stats.num_blocks_from_host > 0
    assert num_accepted(engine) > 0


def test_an_answer_that_goes_on_in_another_engine(model: Path) -> None:
    penalised = request("r", PROMPTS[0], 24, temperature=0.8, seed=2, frequency_penalty=0.8, logprobs=1)
    (expected,) = answers(tiny_engine(model, speculate="off"), [penalised]).values()
    for cut in (1, 7, 23):
        rest = msgspec.structs.replace(penalised, output_token_ids=tuple(expected[0][:cut]))
        engine = speculate(tiny_engine(model, speculate="off"), KnowingDrafter({"r": expected[0]}, 0.2))
        (found,) = answers(engine, [rest]).values()
        assert found[:2] == (expected[0][cut:], expected[1][cut:])


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}], ids=["float32", "int8"])
def test_the_cached_keys_of_accepted_drafts_are_right(model: Path, settings: dict[str, Any]) -> None:
    """A later prompt has an answer in it, whose blocks are found."""
    plain = tiny_engine(model, speculate="off", enable_prefix_caching=False, **settings)
    expected = answers(plain, greedy(60))
    later = [
        request(f"later-{name}", [*PROMPTS[int(name)], *found[0], 9], 12, logprobs=1)
        for name, found in expected.items()
    ]
    expected_later = answers(plain, later)
    engine = tiny_engine(model, speculate="off", **settings)
    speculate(engine, KnowingDrafter({name: found[0] for name, found in expected.items()}, 0.3))
    assert answers(engine, greedy(60)) == expected
    events = run(engine, later)
    assert {name: answer(found) for name, found in events.items()} == expected_later
    for each in later:
        num_cached = events[each.id][0].num_cached_tokens or 0
        assert num_cached > len(each.prompt_token_ids) - 40, "most of the answer was found"


def test_a_prompt_and_drafts_in_one_chunk(model: Path) -> None:
    """No plan of today has such a chunk. The seam allows it."""
    (found,) = answers(tiny_engine(model, speculate="off"), [request("r", PROMPTS[0], 20)]).values()
    executor = tiny_engine(model, speculate="off").loop.executor
    executor.add(request("r", PROMPTS[0], 20))
    drafts = (*found[0][:5], (found[0][5] + 1) % VOCAB_SIZE, *found[0][6:8])
    size = len(PROMPTS[0]) + len(drafts)
    executor.submit(StepPlan(0, (Chunk("r", 0, size, True, (3, 1, 2, 7), begins=True, drafts=drafts),)))
    assert executor.collect().sampled == (SampledToken("r", found[0][5], accepted=tuple(found[0][:5])),)
    executor.append("r", tuple(found[0][:6]))
    executor.submit(StepPlan(1, (Chunk("r", len(PROMPTS[0]) + 5, 1, True, ()),)))
    assert executor.collect().sampled == (SampledToken("r", found[0][6]),)


@pytest.mark.parametrize("num_changed", [0, 3])
def test_a_predicted_answer_comes_in_fewer_steps_and_is_the_same(model: Path, num_changed: int) -> None:
    plain = request("r", PROMPTS[0], 40, temperature=0.8, seed=2)
    (expected,) = answers(tiny_engine(model, speculate="off"), [plain]).values()
    prediction = [*expected[0][:20], *([5] * num_changed), *expected[0][20 + num_changed :]]
    predicted = msgspec.structs.replace(plain, prediction=tuple(prediction))
    engine = speculate(tiny_engine(model, speculate="off"), LookupDrafter(), 8)
    events = run(engine, [predicted])["r"]
    assert answer(events) == expected
    assert len(events) < 15
    uses = [event.draft_use for event in events if event.draft_use is not None]
    assert sum(use.num_accepted for use in uses if use.drafter == PREDICTION) >= 25


def test_a_prediction_of_tokens_that_the_model_does_not_have_is_refused(model: Path) -> None:
    engine = tiny_engine(model)
    wrong = msgspec.structs.replace(request("r", PROMPTS[0], 4), prediction=(1, VOCAB_SIZE))
    with pytest.raises(InvalidRequest, match="no token"):
        engine.loop.add(wrong)


@pytest.mark.parametrize("spoiled", [0.0, 0.5])
def test_adapters(model: Path, tmp_path: Path, spoiled: float) -> None:
    adapters = [write_tiny_adapter(tmp_path / "a", 1), write_tiny_adapter(tmp_path / "b", 2), None]
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 4}
    requests = [
        replace(request(f"{n}-{name}", PROMPTS[n], 16, logprobs=1, **sampling), adapter=adapter)
        for n, adapter in enumerate(adapters)
        for name, sampling in (("greedy", {}), ("drawn", drawn))
    ]
    expected = answers(tiny_engine(model, speculate="off"), requests)
    assert len({tuple(found[0]) for found in expected.values()}) == 6
    engine = tiny_engine(model, speculate="off")
    speculate(engine, KnowingDrafter({name: found[0] for name, found in expected.items()}, spoiled))
    assert answers(engine, requests) == expected
    assert num_accepted(engine) > 0


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, -1])
def test_a_draft_of_tokens_that_the_model_does_not_have_is_left_out(model: Path, wrong: int) -> None:
    expected = known(model, greedy())
    drafter = KnowingDrafter(
        {name: [*found[:9], wrong, *found[10:]] for name, found in expected.items()}, 0.0
    )
    engine = speculate(tiny_engine(model, speculate="off"), drafter)
    assert {name: found[0] for name, found in answers(engine, greedy()).items()} == expected


def test_an_aborted_request_leaves_no_trace_in_its_row(model: Path) -> None:
    """The row of a request that was sampled with drafts goes to another request."""
    expected = known(model, greedy())
    engine = speculate(tiny_engine(model, max_num_seqs=1, speculate="off"), KnowingDrafter(expected, 0.0))
    engine.loop.add(request("first", PROMPTS[0], 200, frequency_penalty=0.5))
    for _ in range(5):
        engine.loop.step()
    engine.loop.abort("first")
    penalised = request("second", PROMPTS[2], 20, temperature=1.0, seed=3, frequency_penalty=0.5)
    (alone,) = answers(tiny_engine(model, speculate="off"), [penalised]).values()
    assert answers(engine, [penalised])["second"] == alone


def test_the_echo_engine_accepts_its_own_answer() -> None:
    executor = EchoExecutor(SystemClock())
    executor.add(request("r", [1, 2, 3]))

    def sample(drafts: tuple[int, ...]) -> SampledToken:
        executor.submit(StepPlan(0, (Chunk("r", 4, 1 + len(drafts), True, (), drafts=drafts),)))
        (sampled,) = executor.collect().sampled
        return sampled

    assert sample(()) == SampledToken("r", 3)
    assert sample((3, 1, 2)) == SampledToken("r", 3, accepted=(3, 1, 2))
    assert sample((3, 9, 2)) == SampledToken("r", 1, accepted=(3,))
    assert sample((9,)) == SampledToken("r", 3)


def test_a_step_with_drafts_is_no_plain_decode() -> None:
    """CUDA graphs of plain decodes have one token and one sample for each request."""
    rows = BatchRows(4, 64, 16, torch.device("cpu"), Staging(torch.device("cpu"), 0))
    for n in range(2):
        row = rows.begin(f"{n}", range(10))
        rows.place_blocks(row, Chunk(f"{n}", 0, 10, False, (n,), begins=True))
    graphs = object.__new__(DecodeGraphs)
    graphs._sizes = [4]
    plain = [Chunk("0", 9, 1, True, ()), Chunk("1", 9, 1, True, ())]
    assert graphs.fits(rows.build(plain))
    drafted = Chunk("1", 9, 3, True, (), drafts=(7, 8))
    rows.place_drafts(drafted)
    step = rows.build([plain[0], drafted])
    assert not graphs.fits(step)
    assert (step.token_ids.tolist(), step.samples.at.tolist()) == ([9, 9, 7, 8], [0, 1, 2, 3])
    assert (step.num_decodes, step.samples.rows.tolist()) == (1, [0, 1, 1, 1])
    assert rows.num_tokens("1") == 10


def test_tokens_of_a_draft_are_neighbours_on_a_gpu() -> None:
    rows = BatchRows(4, 64, 16, torch.device("cpu"), Staging(torch.device("cpu"), 0))
    rows._splits_drafts = True
    for n in range(3):
        row = rows.begin(f"{n}", range(10))
        rows.place_blocks(row, Chunk(f"{n}", 0, 10, False, (n,), begins=True))
    plain, drafted = Chunk("0", 9, 1, True, ()), Chunk("1", 9, 3, True, (), drafts=(7, 8))
    rows.place_drafts(drafted)
    step = rows.build([plain, drafted, Chunk("2", 2, 8, True, ())])
    assert step.num_decodes == 4
    assert step.context_lens.tolist() == [10, 10, 11, 12, 10]
    assert step.neighbours is not None
    assert step.neighbours.tolist() == [[0, 0, 1, 2], [1, 3, 2, 1]]
    batch = rows.attention_batch(step)
    assert batch.neighbours is not None
    assert batch.neighbours.tolist() == step.neighbours.tolist()
    assert rows.build([plain]).neighbours is None
