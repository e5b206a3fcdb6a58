"""Every bound on what a request may ask for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.core.errors import ContextLengthExceeded, InvalidRequest, Overflow
from penstock.gateway.checks import check_request, resolve_max_tokens
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from tests.gateway.fake_engine import engine_ready, model_card

VOCAB_SIZE = 100


def check(n: int = 1, num_prompts: int = 1, **options: Any) -> None:
    prompts = (TextPrompt("x"),) * num_prompts
    check_request(GenerationRequest(prompts=prompts, n=n, sampling=SamplingOptions(**options)), VOCAB_SIZE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"temperature": 2.0, "top_p": 1e-9, "top_k": 1, "min_p": 1.0},
        {"repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"stop": ("a",) * 16, "stop_token_ids": (0, 99), "logit_bias": {0: -100.0, 99: 100.0}},
        {"seed": -(2**63), "logprobs": 20, "min_tokens": 3, "max_tokens": 3},
    ],
)
def test_accepted(options: dict[str, Any]) -> None:
    check(**options)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -5),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**63),
        ("logprobs", -1),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", ("a",) * 17),
        ("stop", ("",)),
        ("stop", ("a" * 1025,)),
        ("stop_token_ids", (1,) * 1025),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("n", 0),
        ("n", 129),
    ],
)
def test_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        check(**{param: value})
    assert error.value.param == param


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequest) as error:
        check(min_tokens=4, max_tokens=3)
    assert error.value.param == "min_tokens"


def test_prompts_times_n_is_bounded() -> None:
    check(n=128, num_prompts=16)
    with pytest.raises(InvalidRequest, match="2048"):
        check(n=128, num_prompts=17)
    with pytest.raises(InvalidRequest, match="at least one prompt"):
        check(num_prompts=0)


ENGINE = engine_ready(model_card(max_model_len=100), max_output_tokens=50)


def resolve(asked: int | None, default: int | None, num_prompt_tokens: int, *, refuses: bool = False) -> int:
    return resolve_max_tokens(
        asked, default, num_prompt_tokens, ENGINE, prompt_param="prompt", refuses_long_outputs=refuses
    )


def test_max_tokens_is_granted_or_filled_in() -> None:
    assert resolve(50, None, 50) == resolve(50, None, 50, refuses=True) == 50
    assert resolve(None, None, 10) == 50, "the server's cap"
    assert resolve(None, None, 90) == 10, "the room in the context"
    assert resolve(None, 16, 10) == 16
    assert resolve(None, 16, 99) == 1


def test_max_tokens_is_lowered_to_what_fits() -> None:
    assert resolve(40, None, 70) == 30, "the room in the context"
    assert resolve(2**40, None, 99) == 1
    assert resolve(51, None, 1) == 50, "the server's cap"
    assert resolve(51, 16, 1) == 50, "a default is for requests that name no number"


def test_max_tokens_past_the_context_can_be_refused_with_the_numbers() -> None:
    with pytest.raises(
        ContextLengthExceeded, match=r"100 tokens.*110.*70 in the prompt, 40 in the comp"
    ) as error:
        resolve(40, None, 70, refuses=True)
    assert error.value.param == "max_tokens"
    assert error.value.overflow == Overflow(100, 70, 40)


def test_max_tokens_past_the_cap_can_be_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 50"):
        resolve(51, None, 1, refuses=True)


@pytest.mark.parametrize("num_prompt_tokens", [100, 101])
def test_prompt_that_fills_the_context_is_refused(num_prompt_tokens: int) -> None:
    with pytest.raises(ContextLengthExceeded) as error:
        resolve(None, None, num_prompt_tokens)
    assert error.value.param == "prompt"
    assert error.value.message.startswith("This model's maximum context length is 100 tokens. However, you")


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        resolve(None, None, 0)
