"""Outlines over OpenAI's SDK: text, streams, objects by JSON schema; choices and regular expressions as for vLLM."""

from __future__ import annotations

import re
from typing import Literal

import openai
import outlines
from outlines.types import Regex
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, capability

client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, timeout=120)
model = outlines.from_openai(client, MODEL)
as_vllm = outlines.from_vllm(client, MODEL)
QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


with capability("chat"):
    assert model(QUESTION, max_tokens=20)

with capability("stream"):
    assert "".join(model.stream(QUESTION, max_tokens=20))

with capability("structured"):
    for each in (model, as_vllm):
        City.model_validate_json(each(QUESTION, City, max_tokens=150, temperature=0))
    assert as_vllm(QUESTION, Literal["yes", "no"], max_tokens=20) in ("yes", "no")
    assert re.fullmatch(r"\d{4}", as_vllm("Which year?", Regex(r"\d{4}"), max_tokens=20), re.ASCII)
