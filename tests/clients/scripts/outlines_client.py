"""Outlines over OpenAI's SDK: text, streams and objects by JSON schema."""

from __future__ import annotations

import openai
import outlines
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, capability

model = outlines.from_openai(openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, timeout=120), MODEL)
QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


with capability("chat"):
    assert model(QUESTION, max_tokens=20)

with capability("stream"):
    assert "".join(model.stream(QUESTION, max_tokens=20))

with capability("structured"):
    City.model_validate_json(model(QUESTION, City, max_tokens=150, temperature=0))
