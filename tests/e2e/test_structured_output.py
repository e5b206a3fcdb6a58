"""Structured output and embeddings on the real server, with the real openai SDK."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import openai
import pytest

from .conftest import RunningServer, start_server

pytestmark = pytest.mark.e2e

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "population", "is_capital"],
    "additionalProperties": False,
}


def sdk(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, question: str, **options: object) -> str:
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": question}],
        max_tokens=100,
        temperature=0.7,
        seed=1,
        **options,  # type: ignore[call-overload]
    )
    assert answer.choices[0].finish_reason == "stop"
    return str(answer.choices[0].message.content)


def test_answers_of_every_kind_at_once(server: RunningServer) -> None:
    client = sdk(server)
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}

    def extra(**options: object) -> dict[str, object]:
        return {"extra_body": {"structured_outputs": options}}

    with ThreadPoolExecutor(4) as pool:
        city = pool.submit(ask, client, "Describe Paris.", response_format=schema)
        choice = pool.submit(ask, client, "Is it raining?", **extra(choice=["yes", "no"]))
        code = pool.submit(ask, client, "A code, please.", **extra(regex="[A-Z]{3}-[0-9]{4}"))
        rule = pool.submit(ask, client, "Greet.", **extra(grammar='root ::= ("hello" | "hi") " world"'))
    jsonschema.validate(json.loads(city.result()), CITY)
    assert choice.result() in ("yes", "no")
    assert re.fullmatch("[A-Z]{3}-[0-9]{4}", code.result())
    assert rule.result() in ("hello world", "hi world")


def test_a_stream_is_held_to_its_schema(server: RunningServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    chunks = sdk(server).chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Describe Rome."}],
        response_format=schema,  # type: ignore[arg-type]
        max_tokens=100,
        temperature=0.0,  # a small model that draws may spend all its tokens on the blanks that JSON allows
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    jsonschema.validate(json.loads(text), CITY)


@pytest.mark.parametrize(
    "options",
    [{"regex": "(a"}, {"json": {"type": "nothing"}}, {"grammar": "start: nowhere"}, {"choice": []}],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_a_400(
    server: RunningServer, options: dict[str, object], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError):
        sdk(server).chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "Hello"}],
            stream=stream,
            extra_body={"structured_outputs": options},
        )


def test_embeddings_of_a_chat_model(server: RunningServer) -> None:
    answer = sdk(server).embeddings.create(model="smollm2-135m", input=["a cat", "a kitten"])
    assert [len(entry.embedding) for entry in answer.data] == [576, 576]
    assert sum(value * value for value in answer.data[0].embedding) == pytest.approx(1.0, abs=1e-4)


def test_a_sentence_embedding_model(tmp_path: Path) -> None:
    server = start_server(tmp_path, "all-minilm-l6-v2")
    try:
        texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell sharply today."]
        answer = sdk(server).embeddings.create(model="all-minilm-l6-v2", input=texts)
        cat, kitten, market = (entry.embedding for entry in answer.data)

        def likeness(left: list[float], right: list[float]) -> float:
            return sum(a * b for a, b in zip(left, right, strict=True))

        assert likeness(cat, kitten) > 0.5 > 0.2 > likeness(cat, market)
        assert answer.usage.prompt_tokens == 27
        with pytest.raises(openai.BadRequestError, match="writes no text"):
            sdk(server).chat.completions.create(
                model="all-minilm-l6-v2", messages=[{"role": "user", "content": "Hello"}]
            )
    finally:
        assert server.stop() == 0
