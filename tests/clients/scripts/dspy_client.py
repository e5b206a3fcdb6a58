"""DSPy: predictions with the JSON adapter, typed output, streams and errors."""

from __future__ import annotations

import dspy
from report import API_KEY, BASE_URL, MODEL, capability, status_of


def model(name: str = MODEL, max_tokens: int = 200) -> dspy.LM:
    return dspy.LM(
        f"openai/{name}",
        api_base=f"{BASE_URL}/v1",
        api_key=API_KEY,
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

with capability("errors"):
    assert status_of(lambda: model("no-such-model")("Hello")) == 404
