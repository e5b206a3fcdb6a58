"""LangChain with its packages for OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import anthropic
import ollama
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field, SecretStr
from report import API_KEY, BASE_URL, MODEL, capability

QUESTION = "What is the capital of France?"
KEY = SecretStr(API_KEY)
HEADERS = {"headers": {"Authorization": f"Bearer {API_KEY}"}}


def models(name: str, max_tokens: int) -> dict[str, ChatOpenAI | ChatAnthropic | ChatOllama]:
    return {
        "openai": ChatOpenAI(
            model=name,
            base_url=f"{BASE_URL}/v1",
            api_key=KEY,
            temperature=0,
            max_completion_tokens=max_tokens,
        ),
        "anthropic": ChatAnthropic(
            model_name=name,
            base_url=BASE_URL,
            api_key=KEY,
            temperature=0,
            max_tokens_to_sample=max_tokens,
            timeout=120,
            stop=None,
        ),
        "ollama": ChatOllama(
            model=name, base_url=BASE_URL, temperature=0, num_predict=max_tokens, client_kwargs=HEADERS
        ),
    }


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


@tool
def weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"sunny in {city}"


@tool
def clock() -> str:
    """Tells the time."""
    return "noon"


for provider, model in models(MODEL, 20).items():
    with capability("chat"):
        answer = model.invoke(QUESTION)
        assert answer.content, provider
        assert answer.usage_metadata
        assert answer.usage_metadata["output_tokens"] > 0

    with capability("stream"):
        assert "".join(str(chunk.text) for chunk in model.stream(QUESTION)), provider

for provider, model in models(MODEL, 150).items():
    with capability("structured"):
        method = {} if provider == "anthropic" else {"method": "json_schema"}
        assert isinstance(model.with_structured_output(City, **method).invoke(QUESTION), City), provider

    with capability("tools"):
        if provider == "ollama":  # which has no way to force a call
            assert model.bind_tools([weather]).invoke(QUESTION).response_metadata
            continue
        call = model.bind_tools([weather], tool_choice="weather").invoke(QUESTION)
        assert call.tool_calls[0]["name"] == "weather", provider
        demanded = model.bind_tools([weather, clock], tool_choice="any").invoke(QUESTION)
        assert 1 <= len(demanded.tool_calls) < 16, provider
        expected_names = {"weather": {"city"}, "clock": set()}
        assert all(set(each["args"]) == expected_names[each["name"]] for each in demanded.tool_calls), (
            demanded
        )
        results = [ToolMessage("sunny", tool_call_id=each["id"]) for each in call.tool_calls]
        assert model.bind_tools([weather]).invoke([HumanMessage(QUESTION), call, *results])

with capability("errors"):
    expected = {
        "openai": openai.NotFoundError,
        "anthropic": anthropic.NotFoundError,
        "ollama": ollama.ResponseError,
    }
    for provider, model in models("no-such-model", 5).items():
        try:
            model.invoke(QUESTION)
        except expected[provider]:
            continue
        raise AssertionError(f"{provider} raised nothing")

with capability("other", "embeddings"):
    vectors = OpenAIEmbeddings(
        model=MODEL, base_url=f"{BASE_URL}/v1", api_key=KEY, check_embedding_ctx_length=False
    ).embed_documents(["one", "two"])
    assert len(vectors) == 2
    assert OllamaEmbeddings(model=MODEL, base_url=BASE_URL, client_kwargs=HEADERS).embed_query("one")
