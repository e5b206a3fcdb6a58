"""What the real SDKs see when a safety policy steps in."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.api.conftest import Serve, Served
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text
from tests.gateway.guards.read_settings import guard_settings

CARD = "4111 1111 1111 1111"
RULES = [{"guard": "pii"}, {"guard": "blocklist", "terms": ["nightfall"]}]
MESSAGES: Any = [{"role": "user", "content": "go"}]
FORBIDDEN: Any = [{"role": "user", "content": "tell me about nightfall"}]


def guarded(serve: Serve, answer: str) -> Served:
    ready = engine_ready(model_card(max_model_len=2048), max_output_tokens=512)
    served = serve(FakeEngine(script_text(answer), ready))
    served.gateway.guards.apply(guard_settings({"policies": {"p": {"rules": RULES}}, "default_policy": "p"}))
    return served


def anthropic_sdk(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def test_openai_sees_redacted_text_and_content_filter(serve: Serve) -> None:
    client = guarded(serve, f"card {CARD}, plan nightfall, more").sdk()
    whole = client.chat.completions.create(model="bytes", messages=MESSAGES, max_tokens=100)
    assert whole.choices[0].message.content == "card [CREDIT_CARD], plan "
    assert whole.choices[0].finish_reason == "content_filter"
    chunks = list(
        client.chat.completions.create(model="bytes", messages=MESSAGES, max_tokens=100, stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "card [CREDIT_CARD], plan "
    assert chunks[-1].choices[0].finish_reason == "content_filter"


def test_openai_sees_a_refused_prompt_as_a_400(serve: Serve) -> None:
    client = guarded(serve, "ok").sdk()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="bytes", messages=FORBIDDEN)
    assert caught.value.code == "content_policy_violation"


def test_responses_say_that_they_are_incomplete(serve: Serve) -> None:
    client = guarded(serve, "plan nightfall").sdk()
    response = client.responses.create(model="bytes", input="go", max_output_tokens=100)
    assert response.output_text == "plan "
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "content_filter"


def test_anthropic_sees_a_refusal(serve: Serve) -> None:
    client = anthropic_sdk(guarded(serve, f"card {CARD}, plan nightfall"))
    message = client.messages.create(model="bytes", messages=MESSAGES, max_tokens=100)
    assert message.stop_reason == "refusal"
    assert message.content[0].type == "text"
    assert message.content[0].text == "card [CREDIT_CARD], plan "
    with client.messages.stream(model="bytes", messages=MESSAGES, max_tokens=100) as stream:
        assert "".join(stream.text_stream) == "card [CREDIT_CARD], plan "
        assert stream.get_final_message().stop_reason == "refusal"


def test_anthropic_sees_a_refused_prompt_as_a_400_of_its_own_shape(serve: Serve) -> None:
    client = anthropic_sdk(guarded(serve, "ok"))
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="bytes", messages=FORBIDDEN, max_tokens=100)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"


def test_texts_are_moderated_by_the_callers_policy(serve: Serve) -> None:
    client = guarded(serve, "ok").sdk()
    answer = client.moderations.create(input=["about nightfall", "about daylight", f"card {CARD}"])
    assert [result.flagged for result in answer.results] == [True, False, True]
    first, second, third = (result.categories.to_dict() for result in answer.results)
    assert [name for name, is_found in first.items() if is_found] == ["blocklist"]
    assert not any(second.values())
    assert [name for name, is_found in third.items() if is_found] == ["pii"]
    types = answer.results[0].category_applied_input_types.to_dict()
    assert types["pii"] == ["text"]
    assert types["violence"] == [], "which nothing looked for"
    parts: Any = [{"type": "text", "text": "night"}, {"type": "text", "text": "nightfall"}]
    assert [result.flagged for result in client.moderations.create(input=parts).results] == [True]


@pytest.mark.parametrize("input_", [[], [{"type": "image_url", "image_url": {"url": "x"}}], 5, ["a"] * 2000])
def test_what_cannot_be_moderated(serve: Serve, input_: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        guarded(serve, "ok").sdk().moderations.create(input=input_)


def test_without_a_policy_nothing_is_moderated(serve: Serve) -> None:
    with pytest.raises(openai.NotFoundError, match="no safety policy"):
        serve(FakeEngine()).sdk().moderations.create(input="x")
