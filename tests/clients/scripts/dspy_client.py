"""DSPy: predictions with the JSON adapter, typed output, streams, an agent with a tool, and errors."""

from __future__ import annotations

import asyncio

import dspy
from report import API_KEY, BASE_URL, MODEL, capability, status_of


def model(name: str = MODEL, max_tokens: int = 200, key: str = API_KEY) -> dspy.LM:
    return dspy.LM(
        f"openai/{name}",
        api_base=f"{BASE_URL}/v1",
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


with capability("stream"), dspy.context(lm=model()):

    async def read() -> str:
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        streamed = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
        parts = [part async for part in streamed(question="What is the capital of France?")]
        assert isinstance(parts[-1], dspy.Prediction), parts
        return str(parts[-1].answer)

    assert asyncio.run(read())


def weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"sunny in {city}"


with capability("tools"), dspy.context(lm=model(max_tokens=400), adapter=dspy.JSONAdapter()):
    agent = dspy.ReAct("question -> answer", tools=[weather], max_iters=1)
    steps = agent(question="What is the weather in Paris?").trajectory
    assert steps["tool_name_0"] in ("weather", "finish"), steps

with capability("errors"):
    assert status_of(lambda: model("no-such-model")("Hello")) == 404
    assert status_of(lambda: model(key="wrong")("Hello")) == 401
