"""Instructor over OpenAI's and Anthropic's SDKs: objects by tools and by JSON schema."""

from __future__ import annotations

import anthropic
import instructor
import openai
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, capability

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
chat = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, timeout=120)
messages = anthropic.Anthropic(base_url=BASE_URL, api_key=API_KEY, timeout=120)


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


def ask(client: instructor.Instructor) -> City:
    return client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_model=City, max_tokens=200, temperature=0, max_retries=0
    )


with capability("tools"):
    assert isinstance(ask(instructor.from_openai(chat, mode=instructor.Mode.TOOLS)), City)
    assert isinstance(ask(instructor.from_anthropic(messages, mode=instructor.Mode.ANTHROPIC_TOOLS)), City)

with capability("structured"):
    assert isinstance(ask(instructor.from_openai(chat, mode=instructor.Mode.JSON_SCHEMA)), City)

with capability("stream"):
    partial = instructor.from_openai(chat, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
        model=MODEL, messages=QUESTION, response_model=City, max_tokens=200, temperature=0
    )
    assert list(partial)[-1].is_capital is not None
