"""`model: "auto"`: who is asked, who is asked next, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.core.clock import VirtualClock
from penstock.core.errors import ConfigError, ModelNotFound, Overloaded, PenstockError, PermissionDenied
from penstock.core.identity import OPEN_PRINCIPAL, Principal
from penstock.core.plan import TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request
from penstock.gateway.accounts import Accounts, Claim, Ledger, Outcome
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.settings import AutoSettings, ModelAccess, ModelSettings
from penstock.gateway.prompts import ChatMessage, ChatPrompt, GenerationRequest, SamplingOptions, TokenPrompt
from tests.gateway.fake_engine import EOS_ID, FakeEngine
from tests.gateway.models.test_catalogue import gateway_with

EASY = "What is the capital of France?"
HARD = "Prove this theorem, explain why it holds step by step, and write a Python function to compute it: n^2 = 4"
SURE, UNSURE = -0.1, -3.0


class RecordingLedger(Ledger):
    def __init__(self) -> None:
        self.rows: list[tuple[str, str, int]] = []

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        self.rows.append((claim.request_id, claim.model, outcome.usage.completion_tokens))


def auto_gateway(
    logprob_of: Callable[[str], float] = lambda model: SURE, **settings: Any
) -> tuple[Gateway, FakeEngine, RecordingLedger]:
    """Three models; each answers with its own name, as sure of itself as `logprob_of` says."""
    sizes = {"small": "s", "medium": "m", "large": "l"}
    auto = AutoSettings(**{**sizes, **settings})
    gateway, engine = gateway_with("s", "m", "l", settings=ModelSettings(auto=auto))
    ledger = RecordingLedger()
    gateway.accounts = Accounts(ledger=ledger)

    def script(request: Request) -> list[TokenEvent | PenstockError]:
        (letter,) = request.model.encode()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.logprobs is not None:
            logprobs = (TokenLogprobs(logprob_of(request.model), (), ()),)
        return [
            TokenEvent(request.id, (letter,), logprobs=logprobs),
            TokenEvent(request.id, (EOS_ID,), logprobs=logprobs, finish_reason=FinishReason.STOP),
        ]

    engine.script = script
    return gateway, engine, ledger


def request_for(text: str = EASY, principal: Principal = OPEN_PRINCIPAL, **more: Any) -> GenerationRequest:
    prompt = ChatPrompt(messages=(ChatMessage("system", "Be kind."), ChatMessage("user", text)))
    fields = {"sampling": SamplingOptions(max_tokens=8), "request_id": "r", "model": "auto", **more}
    return GenerationRequest(prompts=(prompt,), principal=principal, **fields)


async def test_the_prompt_decides_who_is_asked() -> None:
    gateway, engine, _ = auto_gateway()
    for text, expected in ((EASY, "s"), ("Write a Python function that sorts.", "m"), (HARD, "l")):
        answer = await gateway.submit(request_for(text))
        (delta,) = await answer.collect()
        assert (delta.text, answer.model) == (expected, expected)
    assert [request.model for request in engine.added] == ["s", "m", "l"]


async def test_an_unsure_answer_is_asked_for_again_of_the_next_larger_model() -> None:
    gateway, engine, ledger = auto_gateway(lambda model: UNSURE if model == "s" else SURE)
    answer = await gateway.submit(request_for())
    (delta,) = await answer.collect()
    assert (delta.text, delta.details, answer.model, answer.id) == ("m", (), "m", "r")
    assert [request.model for request in engine.added] == ["s", "m"]
    # Both worked, and both are in the ledger and in the usage.
    assert ledger.rows == [("r", "s", 2), ("r-m", "m", 2)]
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens == 2 * len(engine.added[0].prompt_token_ids)
    page = gateway.render_own_metrics().decode()
    assert 'penstock_auto_requests_total{model_name="s"} 1.0' in page
    assert 'penstock_auto_escalations_total{model_name="m"} 1.0' in page


@pytest.mark.parametrize(("most", "asked"), [(0, "s"), (1, "sm"), (2, "sml")])
async def test_escalations_are_bounded(most: int, asked: str) -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE, max_escalations=most)
    (delta,) = await (await gateway.submit(request_for())).collect()
    assert "".join(request.model for request in engine.added) == asked
    assert delta.text == asked[-1]


async def test_without_escalations_nobody_needs_log_probabilities() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE, max_escalations=0)
    await (await gateway.submit(request_for())).collect()
    assert [request.sampling.logprobs for request in engine.added] == [None]


async def test_a_stream_stays_with_its_first_model() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE)
    answer = await gateway.submit(request_for())
    deltas = [delta async for batch in answer for delta in batch]
    assert "".join(delta.text for delta in deltas) == "s"
    assert not any(delta.details for delta in deltas)
    assert len(engine.added) == 1


async def test_logprobs_are_shown_to_those_who_asked() -> None:
    gateway, _, _ = auto_gateway()
    options = SamplingOptions(max_tokens=8, logprobs=0)
    (delta,) = await (await gateway.submit(request_for(sampling=options))).collect()
    assert [detail.logprob for detail in delta.details] == [SURE]


async def test_an_answer_in_hand_survives_a_larger_model_that_fails() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE)
    answers = engine.script
    assert answers is not None

    def script(request: Request) -> Any:
        return [Overloaded("Too much to do.")] if request.model == "m" else answers(request)

    engine.script = script
    answer = await gateway.submit(request_for())
    (delta,) = await answer.collect()
    assert (delta.text, answer.model) == ("s", "s")


def with_access(gateway: Gateway, *allowed: str) -> Principal:
    access = {"w": ModelAccess(allowed=allowed)}
    gateway.catalogue.apply(msgspec.structs.replace(gateway.catalogue.settings, workspaces=access))
    return Principal(workspace_id="w")


async def test_only_models_that_the_caller_may_use_are_asked() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE)
    await (await gateway.submit(request_for(principal=with_access(gateway, "s", "l")))).collect()
    assert [request.model for request in engine.added] == ["s", "l"]
    assert (await gateway.submit(request_for(HARD, with_access(gateway, "s", "m")))).model == "m"
    with pytest.raises(PermissionDenied, match="none of the models behind 'auto'"):
        await gateway.submit(request_for(principal=with_access(gateway, "x")))


async def test_who_is_allowed_auto_may_use_all_that_is_behind_it() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE)
    principal = with_access(gateway, "auto")
    await (await gateway.submit(request_for(principal=principal))).collect()
    assert [request.model for request in engine.added] == ["s", "m"]
    with pytest.raises(PermissionDenied):
        await gateway.submit(request_for(principal=principal, model="s"))


async def test_models_that_are_not_served_are_left_out() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE)
    engine.more = []
    answer = await gateway.submit(request_for(HARD))
    await answer.collect()
    assert (answer.model, len(engine.added)) == ("s", 1)


async def test_all_models_together_have_the_time_of_one_request() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE)
    clock = gateway.clock
    assert isinstance(clock, VirtualClock)
    answers = engine.script
    assert answers is not None

    def script(request: Request) -> Any:
        clock.advance(3.0)
        return answers(request)

    engine.script = script
    await (await gateway.submit(request_for(timeout_s=5.0))).collect()
    assert [request.model for request in engine.added] == ["s", "m"]
    await (await gateway.submit(request_for(timeout_s=3.0))).collect()
    assert [request.model for request in engine.added] == ["s", "m", "s"]


async def test_repeated_requests_are_recognised_by_each_model() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE if model == "s" else SURE)
    for _ in range(2):
        answer = await gateway.submit(request_for(idempotency_key="once"))
        assert [delta.text for delta in await answer.collect()] == ["m"]
    assert len(engine.added) == 2


async def test_a_reader_that_leaves_is_not_asked_for_again() -> None:
    gateway, engine, _ = auto_gateway(lambda model: UNSURE)
    engine.script = None
    answer = await gateway.submit(request_for())
    answer.cancel()
    with pytest.raises(ReaderGone):
        await answer.collect()
    assert len(engine.added) == 1
    assert engine.aborted == [engine.added[0].id]


async def test_prompts_of_token_ids_count_by_their_length() -> None:
    gateway, engine, _ = auto_gateway(medium_from=0.005)
    for length, expected in ((3, "s"), (200, "m")):
        prompt = TokenPrompt((1,) * length)
        asked = msgspec.structs.replace(request_for(), prompts=(prompt,))
        await (await gateway.submit(asked)).collect()
        assert engine.added[-1].model == expected


def test_auto_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no model"):
        ModelSettings(auto=AutoSettings()).check()
    with pytest.raises(ConfigError, match="above large_from"):
        ModelSettings(auto=AutoSettings(small="s", medium_from=0.9)).check()
    with pytest.raises(ConfigError, match="which is itself"):
        ModelSettings(auto=AutoSettings(small="auto")).check()


async def test_auto_is_a_name_like_any_other_where_it_is_not_configured() -> None:
    gateway, _ = gateway_with("s", "m")
    with pytest.raises(ModelNotFound):
        await gateway.submit(request_for())
    gateway.catalogue.apply(ModelSettings(auto=AutoSettings(large="m")))
    assert [entry.name for entry in gateway.catalogue.listed(OPEN_PRINCIPAL)] == ["s", "m", "auto"]
    assert gateway.model("auto").card.name == "m"
