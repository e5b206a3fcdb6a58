"""Random lives of answers that others give: whatever happens, all text arrives in order, or an error does, and the
account is settled once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.external.server import OnChunks
from penstock.cluster.external.wire import ExternalCall, StreamChunk
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import OPEN_PRINCIPAL
from penstock.core.request import Tier
from penstock.gateway.accounts import Accounts, Claim, Outcome
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.external import answer as answer_module
from penstock.gateway.external.answer import ExternalAnswer
from penstock.gateway.gateway import Gateway
from tests.cluster.external.openai_server import text_chunks
from tests.gateway.fake_engine import FakeEngine


@dataclass(frozen=True)
class Plan:
    """What one server sends, and how it ends: well, in a failure, or in the middle."""

    pieces: tuple[str, ...]
    ending: str

    @property
    def is_whole(self) -> bool:
        return self.ending == "well"


PLANS = st.builds(
    Plan,
    st.lists(st.text(max_size=3), max_size=4).map(tuple),
    st.sampled_from(["well", "well", "well", "fails", "breaks off"]),
)


class ScriptedPool:
    def __init__(self, plans: list[Plan]) -> None:
        self.plans = {f"r-{number}": plan for number, plan in enumerate(plans)}
        self.num_open = 0

    async def send(self, call: ExternalCall, on_chunks: OnChunks) -> None:
        plan = self.plans[call.id]
        chunks = text_chunks(*plan.pieces)
        self.num_open += 1
        try:
            for chunk in chunks if plan.is_whole else chunks[:-2]:
                await asyncio.sleep(0)
                on_chunks([msgspec.convert(chunk, StreamChunk)])
            if plan.ending == "fails":
                raise EngineUnavailable("It fell over.")
        finally:
            self.num_open -= 1


class RecordingLedger:
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def begin(self, claim: Claim) -> None:
        pass

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def call(number: int) -> ExternalCall:
    return ExternalCall(id=f"r-{number}", model="m", api="completions", body={}, text="prompt")


async def live(plans: list[Plan], pause: int, cancel_after: int | None, collects: bool) -> None:
    ledger, pool = RecordingLedger(), ScriptedPool(plans)
    gateway = Gateway(FakeEngine(), GatewayConfig(), accounts=Accounts(ledger=ledger))
    claim = Claim(
        request_id="r",
        principal=OPEN_PRINCIPAL,
        model="m",
        endpoint="chat",
        tier=Tier.DEFAULT,
        input_tokens=1,
        max_output_tokens=1,
    )
    ended: list[ExternalAnswer] = []
    account = await gateway.accounts.open(claim)
    answer = ExternalAnswer(account, [call(number) for number in range(len(plans))], 1, gateway, ended.append)
    answer.start(pool, None, is_read_whole=collects)  # type: ignore[arg-type]
    if collects and cancel_after is not None:
        asyncio.get_running_loop().call_soon(_after_turns, cancel_after, answer)
    texts, reasons, error = await read(answer, len(plans), pause, cancel_after, collects)
    answer.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert pool.num_open == 0, "no connection outlives its reader"
    assert ended == [answer]
    (outcome,) = ledger.outcomes
    if error is None:
        assert texts == ["".join(plan.pieces) for plan in plans]
        assert reasons == [1] * len(plans)
        assert (outcome.status, outcome.usage.prompt_tokens) == ("completed", 7 * len(plans))
    else:
        assert all("".join(plan.pieces).startswith(text) for plan, text in zip(plans, texts, strict=True))
        assert outcome.status == ("cancelled" if isinstance(error, ReaderGone) else "failed")
        assert cancel_after is not None or not all(plan.is_whole for plan in plans)


def _after_turns(count: int, answer: ExternalAnswer) -> None:
    """Cancel an answer after some turns of the event loop, as a client that leaves does."""
    if count:
        asyncio.get_running_loop().call_soon(_after_turns, count - 1, answer)
    else:
        answer.cancel()


async def read(
    answer: ExternalAnswer, num_choices: int, pause: int, cancel_after: int | None, collects: bool
) -> tuple[list[str], list[int], PenstockError | ReaderGone | None]:
    """The text and the number of ends of each answer."""
    texts, reasons = [""] * num_choices, [0] * num_choices

    def take(deltas: list[Any]) -> None:
        for delta in deltas:
            assert not reasons[delta.index], "nothing follows an end"
            texts[delta.index] += delta.text
            reasons[delta.index] += delta.finish_reason is not None

    try:
        if collects:
            take(await answer.collect())
            return texts, reasons, None
        number = 0
        async for deltas in answer:
            take(deltas)
            number += 1
            if number == cancel_after:
                answer.cancel()
            for _ in range(pause):  # a slow reader finds more at once
                await asyncio.sleep(0)
    except (PenstockError, ReaderGone) as error:
        return texts, reasons, error
    return texts, reasons, None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PLANS, min_size=1, max_size=3),
    st.integers(0, 4),
    st.none() | st.integers(1, 4),
    st.booleans(),
)
def test_lives_of_external_answers(
    plans: list[Plan], pause: int, cancel_after: int | None, collects: bool
) -> None:
    asyncio.run(live(plans, pause, cancel_after, collects))


async def _collecting(
    pool: ScriptedPool, *, is_read_whole: bool = True
) -> tuple[ExternalAnswer, asyncio.Task[Any]]:
    gateway = Gateway(FakeEngine(), GatewayConfig())
    claim = Claim(request_id="r", principal=OPEN_PRINCIPAL, model="m", endpoint="chat", tier=Tier.DEFAULT)
    account = await gateway.accounts.open(claim)
    answer = ExternalAnswer(account, [call(0)], 1, gateway, lambda answer: None)
    answer.start(pool, None, is_read_whole=is_read_whole)  # type: ignore[arg-type]
    return answer, asyncio.create_task(answer.collect())


async def test_an_only_answer_that_is_read_whole_needs_no_task() -> None:
    _, collecting = await _collecting(ScriptedPool([Plan(("a", "b"), "well")]))
    before = asyncio.all_tasks()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    (delta,) = await collecting
    assert delta.text == "ab"
    assert not collecting.cancelling()


async def test_a_drain_tells_the_reader_that_does_the_work_itself() -> None:
    pool = ScriptedPool([Plan(("a",) * 4, "well")])
    answer, collecting = await _collecting(pool)
    await asyncio.sleep(0)
    answer.fail(EngineUnavailable("Enough."))
    with pytest.raises(EngineUnavailable, match="Enough"):
        await collecting
    assert pool.num_open == 0


async def test_whoever_cancels_the_reader_cancels_the_reader() -> None:
    pool = ScriptedPool([Plan(("a",) * 4, "well")])
    _, collecting = await _collecting(pool)
    await asyncio.sleep(0)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert pool.num_open == 0


@pytest.mark.parametrize("is_read_whole", [True, False])
async def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, is_read_whole: bool) -> None:
    monkeypatch.setattr(answer_module, "MAX_ANSWER_BYTES", 1000)
    pool = ScriptedPool([Plan(("a" * 100,) * 1000, "well")])
    answer, collecting = await _collecting(pool, is_read_whole=is_read_whole)
    with pytest.raises(EngineUnavailable, match="longer than"):
        await collecting
    assert pool.num_open == 0
    assert answer.usage.completion_tokens < 20
