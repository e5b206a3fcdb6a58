"""OpenAI's Python SDK: chat, Responses, streams, tools, structured output, files and batches, errors, cancelling."""

from __future__ import annotations

import json
import time

import openai
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, capability

client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, timeout=120)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


with capability("chat"):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=20)
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.completion_tokens > 0
    response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=20)
    assert response.output_text

with capability("stream"):
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens > 0
    events = list(client.responses.create(model=MODEL, input="Hello", max_output_tokens=20, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")

with capability("tools"):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
        max_tokens=100,
    )
    message = answer.choices[0].message
    assert message.tool_calls
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city"}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    turns = [*QUESTION, message.model_dump(exclude_none=True), *results]
    final = client.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER], max_tokens=20)
    assert final.choices[0].finish_reason

with capability("structured"):
    parsed = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=City, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, City)

with capability("files"):
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": QUESTION, "max_tokens": 10},
    }
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 120
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch.status
        time.sleep(0.3)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id, batch
    assert json.loads(client.files.content(batch.output_file_id).text)["custom_id"] == "one"

with capability("errors"):
    raised = []
    for call in (
        lambda: client.with_options(api_key="wrong").models.list(),
        lambda: client.chat.completions.create(model="no-such-model", messages=QUESTION),
        lambda: client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9),
    ):
        try:
            call()
        except openai.APIStatusError as error:
            raised.append(type(error))
    assert raised == [openai.AuthenticationError, openai.NotFoundError, openai.BadRequestError], raised

with capability("cancel"):
    with client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    assert client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5).choices

with capability("other", "AzureOpenAI"):
    azure = openai.AzureOpenAI(
        azure_endpoint=BASE_URL, api_key=API_KEY, api_version="2024-10-21", timeout=120
    )
    answer = azure.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5)
    assert answer.choices[0].message.content
    assert MODEL in [model.id for model in azure.models.list()]
