"""DSPy: predictions with the JSON adapter, typed output, streams, a tool, and errors."""

from __future__ import annotations

import asyncio

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider
from report import API_KEY, BASE_URL, MODEL, capability, status_of

# DSPy sends no schema to a model whose support for schemas nobody has stated.
register_provider(
    ProviderDefinition.chat(
        AccessPolicy(provider="penstock", base_url=f"{BASE_URL}/v1"), compat=OpenAIChatCompat.preset("vllm")
    ),
    supports=ModelSupport(function_calling=True, response_schema=True),
)


def model(name: str = MODEL, max_tokens: int = 200, key: str = API_KEY) -> dspy.LM:
    return dspy.LM(
        f"penstock/{name}",
        api_key=key,
        max_tokens=max_tokens,
        temperature=0.0,
        cache=False,
        num_retries=0,
    )


class Capital(dspy.Signature):
    """Say whether a city is a capital."""

    city: str = dspy.InputField()
    is_capital: bool = dspy.OutputField()


with capability("chat"):
    assert model(max_tokens=20)("What is the capital of France?")

with capability("structured"), dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
    assert isinstance(dspy.Predict(Capital)(city="Paris").is_capital, bool)


with capability("stream"), dspy.context(lm=model(), adapter=dspy.JSONAdapter()):

    async def read() -> None:
        parts = [part async for part in dspy.streamify(dspy.Predict(Capital))(city="Paris")]
        assert len(parts) > 1, parts
        assert isinstance(parts[-1].is_capital, bool), parts

    asyncio.run(read())

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

with capability("tools"):
    (answer,) = model()("What is the weather in Paris?", tools=[WEATHER], tool_choice="required")
    assert "weather" in str(answer["tool_calls"][0]), answer

with capability("errors"):
    assert status_of(lambda: model("no-such-model")("Hello")) == 404
    assert status_of(lambda: model(key="wrong")("Hello")) == 401
