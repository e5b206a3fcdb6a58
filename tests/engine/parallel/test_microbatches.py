"""A plan in parts does what the whole plan does, and parts do not wait for each other without need."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import SystemClock
from penstock.core.plan import BlockCopy, Chunk, SampledToken, StepPlan
from penstock.core.request import Request, SamplingParams
from penstock.engine.parallel.executor import MicroBatcher, PipelineExecutor, without_samples
from penstock.engine.parallel.processes import Sampled, Step
from penstock.models.sharding import Shard


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    decodes = [
        Chunk(f"decode-{n}", draw(st.integers(1, 90)), 1, True, (n,), in_flight=draw(st.integers(0, 1)))
        for n in range(draw(st.integers(0, 6)))
    ]
    drafted = [
        Chunk(f"drafted-{n}", draw(st.integers(1, 90)), 1 + count, True, (n,), drafts=tuple(range(count)))
        for n, count in enumerate(draw(st.lists(st.integers(1, 64), max_size=3)))
    ]
    prompts = [
        Chunk(
            f"prompt-{n}",
            start=draw(st.sampled_from([0, 16, 48])),
            num_tokens=draw(st.integers(1, 200)),
            samples=draw(st.booleans()),
            new_block_ids=(100 + n, 200 + n),
            begins=draw(st.booleans()),
        )
        for n in range(draw(st.integers(0 if decodes else 1, 4)))
    ]
    chunks = sorted([*decodes, *drafted, *prompts], key=lambda chunk: chunk.num_tokens > 1)
    return StepPlan(7, tuple(chunks), ("gone",), (BlockCopy(1, 2, True),))


@given(plans(), st.integers(2, 4))
def test_parts_make_up_the_plan(plan: StepPlan, num_parts: int) -> None:
    parts = MicroBatcher(num_parts).split(plan)
    assert 1 <= len(parts) <= num_parts
    assert {part.step_id for part in parts} == {7}
    assert [part.released for part in parts] == [("gone",)] + [()] * (len(parts) - 1)
    assert [part.copies for part in parts] == [plan.copies] + [()] * (len(parts) - 1)
    for chunk in plan.chunks:
        pieces = [piece for part in parts for piece in part.chunks if piece.request_id == chunk.request_id]
        computed = [at for piece in pieces for at in range(piece.start, piece.start + piece.num_tokens)]
        assert computed == list(range(chunk.start, chunk.start + chunk.num_tokens)), "in order, without gaps"
        assert [piece.new_block_ids for piece in pieces] == [chunk.new_block_ids] + [()] * (len(pieces) - 1)
        assert [piece.begins for piece in pieces] == [chunk.begins] + [False] * (len(pieces) - 1)
        assert [piece.samples for piece in pieces] == [False] * (len(pieces) - 1) + [chunk.samples]
        assert not chunk.drafts or pieces == [chunk], "drafts stay with the token in front of them"
    for part in parts:
        kinds = [(chunk.num_tokens > 1, not chunk.drafts) for chunk in part.chunks]
        assert kinds == sorted(kinds), "single tokens come first, then drafts"


@given(plans(), st.integers(2, 4))
def test_a_cached_prefix_is_read_in_the_last_part(plan: StepPlan, num_parts: int) -> None:
    """Whoever writes it in the same step is in the same part, or in an earlier one."""
    parts = MicroBatcher(num_parts).split(plan)
    readers = {chunk.request_id for chunk in plan.chunks if chunk.begins and chunk.start > 0}
    for part in parts[:-1]:
        assert not readers & {chunk.request_id for chunk in part.chunks}


def decoding(step_id: int, *request_ids: str, in_flight: int = 0) -> StepPlan:
    chunks = tuple(Chunk(each, 9 + step_id, 1, True, (), False, in_flight) for each in request_ids)
    return StepPlan(step_id, chunks)


def members(parts: tuple[StepPlan, ...]) -> list[list[str]]:
    return [[chunk.request_id for chunk in part.chunks] for part in parts]


def test_running_requests_keep_their_part() -> None:
    batcher = MicroBatcher(2)
    assert members(batcher.split(decoding(1, "a", "b", "c"))) == [["a", "c"], ["b"]]
    batcher.forget("b")
    assert members(batcher.split(decoding(2, "a", "c", "d"))) == [["a", "c"], ["d"]], (
        "the new one fills the gap"
    )
    assert members(batcher.split(decoding(3, "d", "c"))) == [["c"], ["d"]]


def test_a_long_prompt_is_spread() -> None:
    plan = StepPlan(1, (Chunk("prompt", 0, 512, True, (1,), True),))
    assert [part.num_tokens for part in MicroBatcher(4).split(plan)] == [128] * 4


def test_stages_that_do_not_sample_compute_the_same() -> None:
    plan = decoding(1, "a", "b")
    stripped = without_samples(plan)
    assert not any(chunk.samples for chunk in stripped.chunks)
    assert members((stripped,)) == members((plan,))


@dataclass
class FakeRank:
    shard: Shard = field(default_factory=lambda: Shard(num_stages=2))
    ran: list[tuple[list[str], dict[str, int]]] = field(default_factory=list)
    executor: Any = None
    lora: Any = None

    def add(self, request: Request, grammar: object) -> None:
        pass

    def run(self, plan: StepPlan, in_flight: dict[str, int]) -> None:
        self.ran.append(([chunk.request_id for chunk in plan.chunks], dict(in_flight)))


class FakeRanks:
    """Answers as a second stage would that is one part behind."""

    def __init__(self) -> None:
        self.told: list[Step] = []
        self._waiting: deque[Sampled] = deque()

    def next_sampled(self, rank: int) -> Sampled:
        assert rank == 1
        assert len(self._waiting) > 1, "the first rank waits for what nobody has computed yet"
        return self._waiting.popleft()

    def tell(self, step: Step) -> None:
        self.told.append(step)
        tokens = [SampledToken(each.request_id, 10 * step.plan.step_id) for each in step.plan.chunks]
        self._waiting.append(Sampled(tuple(tokens)))

    def explaining(self) -> Any:
        return nullcontext()


def test_a_part_of_the_next_step_starts_before_this_step_is_done() -> None:
    local, others = FakeRank(), FakeRanks()
    executor = PipelineExecutor(local, others, SystemClock())  # type: ignore[arg-type]
    for each in ("a", "b"):
        executor.add(Request(id=each, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9)))
    executor.submit(decoding(1, "a", "b"))
    # The second stage still computes "b" of the first step when "a" of the second step starts.
    executor.submit(decoding(2, "a", "b", in_flight=1))
    assert local.ran == [(["a"], {}), (["b"], {}), (["a"], {"a": 10}), (["b"], {"b": 10})]
    assert [step.in_flight for step in others.told] == [{}, {}, {"a": 10}, {"b": 10}]
    result = executor.collect()
    assert [(token.request_id, token.token_id) for token in result.sampled] == [("a", 10), ("b", 10)]
    assert result.elapsed_s >= 0
