"""What the SDK does about our refusals: it waits and tries again where that can help, and only there."""

from __future__ import annotations

import openai
import pytest

from penstock.core.errors import Overloaded, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from tests.api.conftest import Serve, Served
from tests.gateway.fake_engine import FakeEngine, script_text

USER = {"role": "user", "content": "hi"}


def refusing(times: int) -> FakeEngine:
    def script(request: Request) -> list[TokenEvent | PenstockError]:
        if len(engine.added) <= times:
            return [Overloaded("The queue is full.", retry_after_s=0.1)]
        return list(script_text("at last")(request))

    engine = FakeEngine(script)
    return engine


def patient(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_overload_is_tried_again(serve: Serve, stream: bool) -> None:
    served = serve(refusing(times=1))
    answer = patient(served).chat.completions.create(model="bytes", messages=[USER], stream=stream)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "at last"
    else:
        assert answer.choices[0].message.content == "at last"
    assert len(served.engine.added) == 2


def test_responses_are_tried_again_too(serve: Serve) -> None:
    served = serve(refusing(times=1))
    assert patient(served).responses.create(model="bytes", input="hi").output_text == "at last"


def test_a_bad_request_is_not_tried_again(serve: Serve) -> None:
    served = serve(refusing(times=0))
    with pytest.raises(openai.BadRequestError):
        patient(served).chat.completions.create(model="bytes", messages=[USER], temperature=9)
    assert served.engine.added == []
