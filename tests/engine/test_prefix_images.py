"""Answers of models whose prompts' tokens all attend to each other (PaliGemma) equal those of transformers, and what
cannot be equal is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.gateway_config import GatewayConfig
from penstock.core.request import Request
from penstock.engine.build import Engine
from penstock.gateway.models.served_model import PreparedPrompt, ServedModel
from penstock.gateway.prompts import ChatMessage, ChatPrompt
from penstock.kvcache.cache import blocks_of_context
from penstock.models.load import open_checkpoint
from tests.engine.test_images import NUM_TOKENS, PICTURES, chat, request, vision_engine
from tests.engine.tiny import run, tokens
from tests.models.tiny_vision import TinyVision
from tests.models.vision_checkpoints import PREFIX_CHECKPOINTS, make_vision

LONG_ANSWER = 60
# Two texts about one image with a common beginning, and another image.
ASKED = (
    (PICTURES[:1], "answer en what is this"),
    (PICTURES[:1], "answer en what is it?"),
    (PICTURES[1:], "caption"),
)


@dataclass(frozen=True)
class Case:
    model: TinyVision
    engine: Engine
    served: ServedModel
    prompts: list[PreparedPrompt]
    answers: list[list[int]]

    def answers_of(self, engine: Engine) -> list[list[int]]:
        requests = [request(str(number), prompt) for number, prompt in enumerate(self.prompts)]
        events = run(engine, requests)
        return [tokens(events[each.id]) for each in requests]


@pytest.fixture(scope="module", params=PREFIX_CHECKPOINTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = make_vision(request.param, tmp_path_factory.mktemp("vision") / request.param)
    engine = vision_engine(model)
    served = ServedModel(engine.ready, GatewayConfig())
    prompts, answers = [], []
    for images, text in ASKED:
        prompts.append(asyncio.run(served.prepare(chat(images, text))))
        expected_prompt, answer = model.expected(f"<image><s>{text}\n", images, NUM_TOKENS)
        assert list(prompts[-1].token_ids) == expected_prompt
        answers.append(answer)
    assert len({tuple(answer) for answer in answers}) == len(ASKED)
    return Case(model, engine, served, prompts, answers)


def test_answers_are_those_of_transformers(case: Case, shows: Callable[..., None]) -> None:
    shows(open_checkpoint(case.model.folder).architecture.name, "images")
    for number, (prompt, answer) in enumerate(zip(case.prompts, case.answers, strict=True)):
        name = f"alone-{number}"
        assert tokens(run(case.engine, [request(name, prompt)])[name]) == answer
    assert case.answers_of(case.engine) == case.answers  # now with every prompt in the prefix cache
    assert case.engine.loop.stats().prefix_cache_hits > 0


def test_another_text_about_the_same_image_shares_no_block(case: Case) -> None:
    events = run(case.engine, [request("one", case.prompts[0]), request("other", case.prompts[1])])
    assert tokens(events["other"]) == case.answers[1]
    keys = [
        Request(
            id="key",
            prompt_token_ids=each.token_ids,
            images=each.images,
            sampling=request("x", each).sampling,
        ).key_token_ids
        for each in case.prompts[:2]
    ]
    assert not set(keys[0]) & set(keys[1])


def test_small_steps_and_preemption_change_nothing(case: Case) -> None:
    longest = max(len(prompt.token_ids) for prompt in case.prompts)
    windows = case.engine.loop.scheduler.cache.window_layout
    num_blocks = blocks_of_context(longest + LONG_ANSWER, 16, windows, longest) + 4
    small = vision_engine(case.model, num_blocks, max_num_batched_tokens=longest)
    assert case.answers_of(small) == case.answers
    # As the engine learns from most requests, answers are short.
    run(small, [request(f"short-{number}", case.prompts[0], max_tokens=1) for number in range(16)])
    made = [
        run(
            engine,
            [request(str(number), each, max_tokens=LONG_ANSWER) for number, each in enumerate(case.prompts)],
        )
        for engine in (case.engine, small)
    ]
    assert small.loop.stats().num_preemptions > 0
    for number in range(len(case.prompts)):
        assert tokens(made[0][str(number)]) == tokens(made[1][str(number)])


def test_prompts_that_cannot_see_both_ways_are_refused(case: Case) -> None:
    prompt = case.prompts[0]
    with pytest.raises(InvalidRequest, match="about an image"):
        case.engine.loop.add(msgspec.structs.replace(request("text", prompt), images=()))
    small = vision_engine(case.model, max_num_batched_tokens=len(prompt.token_ids) - 1)
    assert not run(small, [request("large", prompt)])
    (rejected,) = small.loop.take_rejections()
    assert (rejected.code, "in one step" in rejected.message) == ("invalid_request_error", True)


def test_a_prompt_longer_than_a_window_is_refused(case: Case) -> None:
    long = asyncio.run(case.served.prepare(chat(PICTURES[:1], "a" * 60)))
    if case.model.folder.name == "paligemma":  # which has no windows
        assert len(tokens(run(case.engine, [request("long", long)])["long"])) == NUM_TOKENS
        return
    with pytest.raises(InvalidRequest, match="attends to at most 64"):
        case.engine.loop.add(request("long", long))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (chat(PICTURES), "one image"),
        (
            ChatPrompt(messages=(ChatMessage("system", "be brief"), *chat(PICTURES[:1]).messages)),
            "one message",
        ),
    ],
    ids=["two images", "two turns"],
)
def test_chats_that_the_model_does_not_know_are_refused(case: Case, asked: ChatPrompt, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        asyncio.run(case.served.prepare(asked))
