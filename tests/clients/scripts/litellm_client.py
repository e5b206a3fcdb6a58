"""LiteLLM as a library, with its providers openai, anthropic and ollama_chat."""

from __future__ import annotations

import json

import litellm
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, capability

litellm.telemetry = False
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WAYS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{BASE_URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": BASE_URL},
    "ollama_chat": {"model": f"ollama_chat/{MODEL}", "api_base": BASE_URL},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


def ask(way: str, max_tokens: int = 20, **options: object) -> litellm.ModelResponse:
    settings = {
        "api_key": API_KEY,
        "timeout": 120,
        "max_tokens": max_tokens,
        "num_retries": 0,
        "temperature": 0,
    }
    return litellm.completion(**(WAYS[way] | settings | {"messages": QUESTION} | options))


for way in WAYS:
    with capability("chat"):
        assert ask(way).choices[0].message.content, way

    with capability("stream"):
        pieces = [chunk.choices[0].delta.content or "" for chunk in ask(way, stream=True)]
        assert "".join(pieces), way

for way in ("openai", "anthropic"):
    with capability("tools"):
        answer = ask(way, 100, tools=[WEATHER], tool_choice="required")
        (call, *_) = answer.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"city"}, way

with capability("structured"):
    City.model_validate_json(ask("openai", 150, response_format=City).choices[0].message.content)
    City.model_validate_json(ask("ollama_chat", 150, response_format=City).choices[0].message.content)

with capability("errors"):
    for way, error in (("openai", litellm.NotFoundError), ("anthropic", litellm.NotFoundError)):
        try:
            ask(way, model=WAYS[way]["model"].replace(MODEL, "no-such-model"))
        except error:
            pass
        else:
            raise AssertionError(f"{way}: no error")
        try:  # which LiteLLM tells from a bad request by OpenAI's words
            ask(way, api_key="wrong")
        except litellm.AuthenticationError:
            continue
        raise AssertionError(f"{way}: a wrong key is no error")

with capability("other", "embeddings"):
    vectors = litellm.embedding(
        f"openai/{MODEL}", input=["one"], api_base=f"{BASE_URL}/v1", api_key=API_KEY, encoding_format="float"
    )
    assert vectors.data[0]["embedding"]
