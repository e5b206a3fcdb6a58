"""litellm: chats, streams, tools, structured output, errors and cancelling, in OpenAI's and in Anthropic's dialect."""

from __future__ import annotations

import json

import litellm
from report import API_KEY, BASE_URL, MODEL, capability

litellm.suppress_debug_info = True
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
DIALECTS = {
    "OpenAI's dialect": {"model": f"openai/{MODEL}", "api_base": f"{BASE_URL}/v1"},
    "Anthropic's dialect": {"model": f"anthropic/{MODEL}", "api_base": BASE_URL},
}
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
CITY = {
    "name": "city",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
        "required": ["name", "is_capital"],
        "additionalProperties": False,
    },
}


def ask(dialect: str, **options: object) -> object:
    settings = {"messages": QUESTION, "api_key": API_KEY, "max_tokens": 30, "timeout": 120, **DIALECTS[dialect]}
    return litellm.completion(**(settings | options))


for dialect in DIALECTS:
    with capability("chat", dialect):
        answer = ask(dialect)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0

    with capability("stream", dialect):
        chunks = list(ask(dialect, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert any(getattr(chunk, "usage", None) for chunk in chunks)

    with capability("tools", dialect):
        choice = {"type": "function", "function": {"name": "weather"}}
        answer = ask(dialect, tools=[WEATHER], tool_choice=choice, max_tokens=100)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert "city" in json.loads(call.function.arguments)

    with capability("errors", dialect):
        for options, expected in (
            ({"api_key": "wrong"}, litellm.AuthenticationError),
            ({"model": DIALECTS[dialect]["model"].replace(MODEL, "nobody")}, litellm.NotFoundError),
            ({"temperature": 9}, litellm.BadRequestError),
        ):
            try:
                ask(dialect, num_retries=0, **options)
            except expected:
                continue
            raise AssertionError(f"no {expected.__name__} for {options}")

    with capability("cancel", dialect):
        stream = ask(dialect, stream=True, max_tokens=2000)
        next(iter(stream))
        del stream
        assert ask(dialect, max_tokens=5).choices

with capability("structured"):
    answer = ask("OpenAI's dialect", response_format={"type": "json_schema", "json_schema": CITY}, max_tokens=100)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "is_capital"}

with capability("other", "text completions, embeddings"):
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="The capital of France is",
        api_base=f"{BASE_URL}/v1",
        api_key=API_KEY,
        max_tokens=5,
    )
    assert text.choices[0].text
    vector = litellm.embedding(
        model=f"openai/{MODEL}", input=["a", "b"], api_base=f"{BASE_URL}/v1", api_key=API_KEY
    )
    assert len(vector.data) == 2
