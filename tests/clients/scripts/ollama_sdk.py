"""Ollama's Python client: chat, generate, streams, tools, structured output, errors, cancelling, embeddings."""

from __future__ import annotations

import ollama
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, capability

client = ollama.Client(BASE_URL, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=120)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"num_predict": 20}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


def weather(city: str) -> str:
    """Tells the weather in a city.

    Args:
      city: The name of the city.
    """
    return f"sunny in {city}"


with capability("chat"):
    answer = client.chat(MODEL, QUESTION, options=SHORT)
    assert answer.message.content
    assert answer.eval_count
    assert client.generate(MODEL, "Once upon a time", raw=True, options=SHORT).response

with capability("stream"):
    parts = list(client.chat(MODEL, QUESTION, options=SHORT, stream=True))
    assert "".join(part.message.content or "" for part in parts)
    assert parts[-1].done
    assert parts[-1].eval_duration

with capability("tools"):
    answer = client.chat(MODEL, QUESTION, tools=[weather], options=SHORT)
    assert answer.done
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    assert client.chat(MODEL, turns, tools=[weather], options=SHORT).message.content

with capability("structured"):
    schema = City.model_json_schema()
    answer = client.chat(MODEL, QUESTION, format=schema, options={"num_predict": 100})
    City.model_validate_json(answer.message.content or "")

with capability("errors"):
    statuses = []
    for ask in (
        lambda: ollama.Client(BASE_URL, headers={"Authorization": "Bearer wrong"}).list(),
        lambda: client.chat("no-such-model", QUESTION),
        lambda: client.chat(MODEL, QUESTION, options={"temperature": 9}),
    ):
        try:
            ask()
        except ollama.ResponseError as error:
            statuses.append(error.status_code)
    assert statuses == [401, 404, 400], statuses

with capability("cancel"):
    stream = client.chat(MODEL, QUESTION, options={"num_predict": 2000}, stream=True)
    next(stream)
    stream.close()
    assert client.chat(MODEL, QUESTION, options={"num_predict": 3}).done

with capability("other", "list, show, ps, embed"):
    assert MODEL in [model.model for model in client.list().models]
    assert client.show(MODEL).capabilities
    assert client.ps().models
    assert client.embed(MODEL, ["one", "two"]).embeddings
