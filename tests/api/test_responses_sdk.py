"""/v1/responses as the real `openai` SDK sees it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from penstock.core.errors import EngineUnavailable
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from tests.api.conftest import Serve, Served
from tests.api.scripted import THINKING_TEMPLATE, TOOL_TEMPLATE, prompt_of, scripted
from tests.gateway.fake_engine import FakeEngine

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_create(serve: Serve) -> None:
    served = serve(scripted("Bonjour."))
    response = served.sdk().responses.create(
        model="bytes",
        input="Hello",
        instructions="Speak French.",
        max_output_tokens=50,
        temperature=0.5,
        metadata={"a": "b"},
        service_tier="flex",
        user="me",
    )
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text, response.model) == ("completed", "Bonjour.", "bytes")
    (message,) = response.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == len("Bonjour.") + 1
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.metadata, response.service_tier, response.temperature) == ({"a": "b"}, "flex", 0.5)
    assert response.instructions == "Speak French."
    (request,) = served.engine.added
    assert request.sampling.max_tokens == 50
    assert prompt_of(request) == "<|system|>Speak French.<|end|><|user|>Hello<|end|><|assistant|>"


def test_stream_events_come_in_the_promised_order(serve: Serve) -> None:
    events = list(serve(scripted("Hi!")).sdk().responses.create(model="bytes", input="Hello", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hi!"
    assert events[-4].text == "Hi!"  # type: ignore[union-attr]
    final = events[-1].response  # type: ignore[union-attr]
    assert final.output_text == "Hi!"
    assert final.usage is not None
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_stream_helper_of_the_sdk(serve: Serve) -> None:
    sdk = serve(scripted(f"Wait. {CALL}")).sdk()
    with sdk.responses.stream(model="bytes", input="Weather?", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    message, call = final.output
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Paris"}', "completed")


def test_function_calls_and_their_outputs(serve: Serve) -> None:
    def answer(request: Request) -> str:
        return "It is sunny." if "sunny" in prompt_of(request) else CALL

    served = serve(scripted(answer))
    sdk = served.sdk()
    first = sdk.responses.create(model="bytes", input="Weather in Paris?", tools=[WEATHER])
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    second = sdk.responses.create(
        model="bytes",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        tools=[WEATHER],
    )
    assert second.output_text == "It is sunny."
    assert second.previous_response_id == first.id
    prompt = prompt_of(served.engine.added[-1])
    assert "<|user|>Weather in Paris?<|end|>" in prompt
    assert CALL in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


def test_required_tools_are_enforced(serve: Serve) -> None:
    served = serve(scripted(CALL))
    for choice in ("required", {"type": "function", "name": "weather"}):
        served.sdk().responses.create(model="bytes", input="x", tools=[WEATHER], tool_choice=choice)
    assert all(request.sampling.grammar is not None for request in served.engine.added)


def test_a_conversation_goes_on(serve: Serve) -> None:
    served = serve(scripted(lambda request: f"answer {len(served_requests)}"))
    served_requests = served.engine.added
    sdk = served.sdk()
    first = sdk.responses.create(model="bytes", input="one", instructions="Be kind.")
    second = sdk.responses.create(model="bytes", input="two", previous_response_id=first.id)
    sdk.responses.create(model="bytes", input="three", previous_response_id=second.id)
    assert prompt_of(served.engine.added[-1]) == (
        "<|user|>one<|end|><|assistant|>answer 1<|end|><|user|>two<|end|><|assistant|>answer 2<|end|>"
        "<|user|>three<|end|><|assistant|>"
    ), "instructions are not carried on"


def test_items_of_every_kind(serve: Serve) -> None:
    served = serve(scripted("ok"))
    served.sdk().responses.create(
        model="bytes",
        store=False,
        input=[
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Go on"},
        ],
    )
    assert prompt_of(served.engine.added[0]) == (
        "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello.<|end|><|user|>Go on<|end|><|assistant|>"
    )


def test_reasoning_is_an_item_of_its_own(serve: Serve) -> None:
    sdk = serve(scripted("I wonder.\n</think>\n\nYes.", template=THINKING_TEMPLATE)).sdk()
    response = sdk.responses.create(model="bytes", input="?")
    reasoning, _ = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == ["I wonder."]
    assert response.output_text == "Yes."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    kinds = [event.type for event in sdk.responses.create(model="bytes", input="?", stream=True)]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2


class City(pydantic.BaseModel):
    name: str


def test_structured_output(serve: Serve) -> None:
    served = serve(scripted('{"name": "Paris"}'))
    response = served.sdk().responses.parse(model="bytes", input="?", text_format=City)
    assert response.output_parsed == City(name="Paris")
    grammar = served.engine.added[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_logprobs_when_asked_for(serve: Serve) -> None:
    sdk = serve(scripted("ab")).sdk()
    response = sdk.responses.create(
        model="bytes", input="?", top_logprobs=1, include=["message.output_text.logprobs"]
    )
    logprobs = response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert logprobs is not None
    assert [entry.token for entry in logprobs] == ["a", "b"]
    assert logprobs[0].top_logprobs[0].logprob == -0.25


@pytest.mark.parametrize("stream", [False, True])
def test_cut_short_is_incomplete(serve: Serve, stream: bool) -> None:
    sdk = serve(scripted("x" * 50)).sdk()
    if stream:
        events = list(sdk.responses.create(model="bytes", input="?", max_output_tokens=10, stream=True))
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
    else:
        response = sdk.responses.create(model="bytes", input="?", max_output_tokens=10)
    assert response.status == "incomplete"
    assert response.completed_at is None
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_an_answer_without_a_word_is_still_a_message(serve: Serve) -> None:
    response = serve(scripted("")).sdk().responses.create(model="bytes", input="?")
    assert response.output_text == ""
    assert response.output[0].type == "message"


def test_failure_in_the_middle_of_a_stream(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent | EngineUnavailable]:
        return [TokenEvent(request.id, tuple(b"par")), EngineUnavailable("The engine has gone.")]

    served = serve(FakeEngine(script))
    events = list(served.sdk().responses.create(model="bytes", input="?", stream=True))
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert failed.error is not None
    assert failed.error.message == "The engine has gone."
    assert served.sdk().responses.retrieve(failed.id).status == "failed"


def test_stored_listed_and_deleted(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    made = sdk.responses.create(model="bytes", input=[{"role": "user", "content": text} for text in "abc"])
    found = sdk.responses.retrieve(made.id)
    assert found.model_dump() == made.model_dump()
    items = list(sdk.responses.input_items.list(made.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == ["a", "b", "c"]  # type: ignore[union-attr]
    newest = sdk.responses.input_items.list(made.id, limit=1)
    assert newest.data[0].content[0].text == "c"  # type: ignore[union-attr]
    assert newest.has_more
    sdk.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.create(model="bytes", input="x", previous_response_id=made.id)


def test_streamed_responses_are_stored_before_their_end_is_seen(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    final = list(sdk.responses.create(model="bytes", input="x", stream=True))[-1].response  # type: ignore[union-attr]
    assert sdk.responses.retrieve(final.id).output_text == "ok"


def test_not_stored_when_not_wanted(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    made = sdk.responses.create(model="bytes", input="x", store=False)
    assert made.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)


def test_an_idempotent_request_has_one_response(serve: Serve) -> None:
    served = serve(scripted(f"Wait. {CALL}"))
    sdk = served.sdk()
    first, again = (
        sdk.responses.create(
            model="bytes", input="x", tools=[WEATHER], extra_headers={"Idempotency-Key": "k1"}
        )
        for _ in range(2)
    )
    assert len(served.engine.added) == 1
    assert first.id == again.id
    assert [item.id for item in first.output] == [item.id for item in again.output]
    assert sdk.responses.retrieve(first.id).output_text == "Wait."


def in_background(served: Served) -> Any:
    return served.sdk().responses.create(model="bytes", input="x", background=True)


def test_in_the_background(serve: Serve) -> None:
    served = serve(FakeEngine())
    made = in_background(served)
    assert (made.status, made.background, made.output) == ("in_progress", True, [])
    assert served.sdk().responses.retrieve(made.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still running"):
        served.sdk().responses.create(model="bytes", input="x", previous_response_id=made.id)


def test_the_background_comes_to_its_end(serve: Serve) -> None:
    served = serve(scripted("done"))
    made = in_background(served)
    served.wait_until(lambda: served.sdk().responses.retrieve(made.id).status == "completed")
    assert served.sdk().responses.retrieve(made.id).output_text == "done"
    assert served.sdk().responses.cancel(made.id).status == "completed"


def test_cancelled_in_the_background(serve: Serve) -> None:
    served = serve(FakeEngine())
    made = in_background(served)
    assert served.sdk().responses.cancel(made.id).status == "cancelled"
    assert served.engine.aborted == [served.engine.added[0].id]
    assert served.sdk().responses.retrieve(made.id).status == "cancelled"


def test_deleting_stops_the_background(serve: Serve) -> None:
    served = serve(FakeEngine())
    made = in_background(served)
    served.sdk().responses.delete(made.id)
    assert served.engine.aborted == [served.engine.added[0].id]


def test_only_the_background_can_be_cancelled(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    made = sdk.responses.create(model="bytes", input="x")
    with pytest.raises(openai.BadRequestError):
        sdk.responses.cancel(made.id)


def test_truncation_drops_the_oldest(serve: Serve) -> None:
    served = serve(scripted("ok", max_model_len=128))
    items: Any = [{"role": "user", "content": f"message {number:02}"} for number in range(20)]
    with pytest.raises(openai.BadRequestError) as error:
        served.sdk().responses.create(model="bytes", input=items, instructions="Rules.")
    assert error.value.code == "context_length_exceeded"
    served.sdk().responses.create(model="bytes", input=items, instructions="Rules.", truncation="auto")
    prompt = prompt_of(served.engine.added[-1])
    assert prompt.startswith("<|system|>Rules.<|end|><|user|>message 1")
    assert prompt.endswith("message 19<|end|><|assistant|>")
    assert 100 < len(served.engine.added[-1].prompt_token_ids) < 128


def test_input_tokens_are_counted(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    counted = sdk.responses.input_tokens.count(model="bytes", input="Hello")
    made = sdk.responses.create(model="bytes", input="Hello")
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True, "store": False}, "store"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_refusals(serve: Serve, options: dict[str, Any], param: str) -> None:
    served = serve(scripted("ok"))
    with pytest.raises(openai.APIStatusError) as error:
        served.sdk().responses.create(**({"model": "bytes", "input": "x"} | options))
    assert error.value.status_code in (400, 404)
    assert error.value.param == param
    assert served.engine.added == []


def test_an_item_of_an_earlier_response_can_be_referred_to(serve: Serve) -> None:
    """Vercel's AI SDK sends such references in every second turn."""
    served = serve(scripted("one"))
    first = served.sdk().responses.create(model="bytes", input="Hello")
    reference = {"type": "item_reference", "id": first.output[0].id}
    user = {"role": "user", "content": "And now?"}
    served.sdk().responses.create(model="bytes", input=[reference, user])  # type: ignore[list-item]
    assert prompt_of(served.engine.added[-1]).count("one") == 1
    items = [{"type": "item_reference", "id": "msg_0123456789abcdef-0"}, user]
    with pytest.raises(openai.NotFoundError, match="no item"):
        served.sdk().responses.create(model="bytes", input=items)  # type: ignore[arg-type]


def test_references_cannot_blow_a_request_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.responses.store.MAX_HISTORY_BYTES", 10_000)
    served = serve(scripted("word " * 100))
    first = served.sdk().responses.create(model="bytes", input="Hello")
    reference = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(openai.BadRequestError, match="10000 bytes"):
        served.sdk().responses.create(model="bytes", input=[reference] * 1000)  # type: ignore[arg-type]


PATCH = {"type": "custom", "name": "apply_patch", "description": "Applies a patch."}


def test_custom_tools_take_free_text(serve: Serve) -> None:
    served = serve(
        scripted(
            '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** a"}}</tool_call>',
            template=TOOL_TEMPLATE,
        )
    )
    sdk = served.sdk()
    response = sdk.responses.create(model="bytes", input="Fix it.", tools=[PATCH])  # type: ignore[list-item]
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("apply_patch", "*** a")
    events = list(sdk.responses.create(model="bytes", input="Fix it.", tools=[PATCH], stream=True))  # type: ignore[list-item]
    assert [event.type for event in events[3:6]] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    for start in (
        {"previous_response_id": response.id, "input": [output]},
        {"input": [{"role": "user", "content": "Fix it."}, call.model_dump(exclude_none=True), output]},
    ):
        sdk.responses.create(model="bytes", tools=[PATCH], **start)  # type: ignore[arg-type, list-item]
        prompt = prompt_of(served.engine.added[-1])
        assert "*** a" in prompt
        assert "<|tool|>done" in prompt
