"""Images through both real SDKs, to a server around an engine with a tiny vision-language model."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.engine.build import Engine
from tests.api.conftest import Served, serving
from tests.api.scripted import scripted
from tests.engine.test_images import vision_engine
from tests.engine.tiny import run
from tests.gateway.fake_engine import FakeEngine
from tests.models.tiny_vision import TinyVision, picture, png
from tests.models.vision_checkpoints import make_vision

MODEL = "tiny-vl"
CAT, DOG = picture(90, 60, 1), picture(40, 100, 2)
NUM_TOKENS = 6


def url(image: Any) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def openai_part(image: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": url(image), "detail": "high"}}


def anthropic_part(image: Any, **more: Any) -> Any:
    data = base64.b64encode(png(image)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}, **more}


def text(words: str) -> Any:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return make_vision("idefics3", tmp_path_factory.mktemp("vision") / MODEL)


@pytest.fixture(scope="module")
def engine(tiny: TinyVision) -> Engine:
    return vision_engine(tiny)


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    def script(request: Request) -> list[TokenEvent]:
        return run(engine, [request])[request.id]

    gateway = GatewayConfig(max_images=3)
    with serving(FakeEngine(script, engine.ready), gateway, ServerConfig()) as running:
        yield running


def expected(tiny: TinyVision, text: str, images: list[Any]) -> tuple[str, int]:
    """Return the answer of transformers, and the number of prompt tokens."""
    prompt, answer = tiny.expected(text, images, NUM_TOKENS)
    return tiny.processor.tokenizer.decode(answer, skip_special_tokens=True), len(prompt)


def test_openai_chat(served: Served, tiny: TinyVision) -> None:
    content = [openai_part(CAT), text("what"), openai_part(DOG), text("and this?")]
    messages: Any = [{"role": "user", "content": content}]
    answer = served.sdk().chat.completions.create(
        model=str(tiny.folder),
        messages=messages,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    words, num_prompt = expected(tiny, "<s>User:<image>what<image>and this?Assistant:", [CAT, DOG])
    assert answer.choices[0].message.content == words
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt
    stream = served.sdk().chat.completions.create(
        model=str(tiny.folder),
        messages=messages,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        n=2,
        extra_body={"ignore_eos": True},
    )
    told = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            told[choice.index] += choice.delta.content or ""
    assert told == [words, words]


def test_anthropic_messages(served: Served, tiny: TinyVision) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    content = [anthropic_part(CAT, cache_control={"type": "ephemeral"}), text("what is this?")]
    messages: Any = [{"role": "user", "content": content}]
    answer = client.messages.create(
        model=str(tiny.folder), messages=messages, max_tokens=NUM_TOKENS, extra_body={"temperature": 0}
    )
    words, num_prompt = expected(tiny, "<s>User:<image>what is this?Assistant:", [CAT])
    told = answer.content[0].text if isinstance(answer.content[0], anthropic.types.TextBlock) else ""
    assert words.startswith(told)
    assert told
    usage = answer.usage
    total = (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )
    assert total == num_prompt
    counted = client.messages.count_tokens(model=str(tiny.folder), messages=messages)
    assert counted.input_tokens == num_prompt


def test_images_in_tool_results(served: Served, tiny: TinyVision) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    call: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [text("seen"), anthropic_part(CAT)]}
    messages: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with_image = client.messages.count_tokens(model=str(tiny.folder), messages=messages).input_tokens
    result["content"] = [text("seen")]
    assert (
        with_image > client.messages.count_tokens(model=str(tiny.folder), messages=messages).input_tokens + 28
    )


def test_responses(served: Served, tiny: TinyVision) -> None:
    parts = [
        {"type": "input_image", "image_url": url(DOG), "detail": "auto"},
        {"type": "input_text", "text": "hm?"},
    ]
    items: Any = [{"role": "user", "content": parts}]
    answer = served.sdk().responses.create(
        model=str(tiny.folder), input=items, max_output_tokens=NUM_TOKENS, temperature=0
    )
    words, num_prompt = expected(tiny, "<s>User:<image>hm?Assistant:", [DOG])
    assert words.startswith(answer.output_text)
    assert answer.usage is not None
    assert answer.usage.input_tokens == num_prompt


def test_the_list_of_models_says_what_a_model_takes(served: Served) -> None:
    (entry,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert entry["input_modalities"] == ["text", "image"]


def test_ollama_and_plain_text(served: Served, tiny: TinyVision) -> None:
    body = {"model": str(tiny.folder), "stream": False, "options": {"num_predict": 2, "temperature": 0}}
    image = base64.b64encode(png(CAT)).decode()
    answer = httpx.post(
        f"{served.url}/api/chat",
        json={**body, "messages": [{"role": "user", "content": "x", "images": [image]}]},
    )
    plain = httpx.post(
        f"{served.url}/api/chat", json={**body, "messages": [{"role": "user", "content": "x"}]}
    )
    assert answer.json()["prompt_eval_count"] > plain.json()["prompt_eval_count"] + 28


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}],
            "in no format",
            id="no",
        ),
        pytest.param([openai_part(CAT)] * 4, "has 4 images, and at most 3", id="many"),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "http://x.example/a"}}],
            "may not be fetched",
            id="url",
        ),
        pytest.param([{"type": "input_audio", "input_audio": {}}], "input_audio", id="audio"),
        pytest.param([{"type": "text", "image_url": url(CAT)}], "'text' without text", id="no-text"),
    ],
)
def test_bad_images_in_every_dialect(served: Served, tiny: TinyVision, parts: list[Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.sdk().chat.completions.create(
            model=str(tiny.folder), messages=[{"role": "user", "content": parts}]
        )
    assert says in str(refused.value)
    if parts[0]["type"] != "image_url":
        return
    links = [part["image_url"]["url"] for part in parts]
    items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": link} for link in links]}]
    with pytest.raises(openai.BadRequestError, match=says):
        served.sdk().responses.create(model=str(tiny.folder), input=items)
    sources = [
        {"type": "base64", "media_type": "image/png", "data": link.partition(",")[2]}
        if link.startswith("data:")
        else {"type": "url", "url": link}
        for link in links
    ]
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    blocks: Any = [{"type": "image", "source": source} for source in sources]
    with pytest.raises(anthropic.BadRequestError, match=says):
        client.messages.create(
            model=str(tiny.folder), max_tokens=5, messages=[{"role": "user", "content": blocks}]
        )


def test_a_model_of_texts_refuses_images() -> None:
    with serving(scripted("hi"), GatewayConfig(), ServerConfig()) as running:
        with pytest.raises(openai.BadRequestError, match="takes text only"):
            running.sdk().chat.completions.create(
                model="bytes", messages=[{"role": "user", "content": [openai_part(CAT)]}]
            )
        client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.BadRequestError, match="takes text only"):
            client.messages.count_tokens(
                model="bytes", messages=[{"role": "user", "content": [anthropic_part(CAT)]}]
            )
