"""Anthropic's Python SDK: messages, streams, tools, message batches, errors, cancelling."""

from __future__ import annotations

import time

import anthropic
from report import API_KEY, BASE_URL, MODEL, capability

client = anthropic.Anthropic(base_url=BASE_URL, api_key=API_KEY, timeout=120)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "weather",
    "description": "Tells the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

with capability("chat"):
    answer = client.messages.create(model=MODEL, messages=QUESTION, max_tokens=20)
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.usage.output_tokens > 0
    assert client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 0

with capability("stream"), client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=20) as stream:
    text = "".join(stream.text_stream)
    assert text
    assert text == stream.get_final_text()

with capability("tools"):
    answer = client.messages.create(
        model=MODEL,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather"},
        max_tokens=100,
        extra_body={"temperature": 0},  # newer versions have no parameter for it
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls
    assert set(calls[0].input) == {"city"}
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    turns = [
        *QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    final = client.messages.create(model=MODEL, messages=turns, tools=[WEATHER], max_tokens=20)
    assert final.stop_reason

with capability("files"):
    batch = client.messages.batches.create(
        requests=[{"custom_id": "one", "params": {"model": MODEL, "messages": QUESTION, "max_tokens": 10}}]
    )
    deadline = time.monotonic() + 120
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline, batch.processing_status
        time.sleep(0.3)
        batch = client.messages.batches.retrieve(batch.id)
    (result,) = client.messages.batches.results(batch.id)
    assert result.result.type == "succeeded"

with capability("errors"):
    raised = []
    for call in (
        lambda: client.with_options(api_key="wrong").models.list(),
        lambda: client.messages.create(model="no-such-model", messages=QUESTION, max_tokens=5),
        lambda: client.messages.create(model=MODEL, messages=[], max_tokens=5),
    ):
        try:
            call()
        except anthropic.APIStatusError as error:
            raised.append(type(error))
    assert raised == [anthropic.AuthenticationError, anthropic.NotFoundError, anthropic.BadRequestError], (
        raised
    )

with capability("cancel"):
    with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=2000) as stream:
        next(iter(stream))
    assert client.messages.create(model=MODEL, messages=QUESTION, max_tokens=5).content
