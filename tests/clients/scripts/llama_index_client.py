"""LlamaIndex with its OpenAI-like and Ollama models."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, capability, status_of

QUESTION = [ChatMessage(role="user", content="What is the capital of France?")]


def model(name: str = MODEL, max_tokens: int = 20) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=f"{BASE_URL}/v1",
        api_key=API_KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
        timeout=120,
    )


ollama = Ollama(
    model=MODEL,
    base_url=BASE_URL,
    request_timeout=120,
    context_window=4096,
    additional_kwargs={"num_predict": 20},
    headers={"Authorization": f"Bearer {API_KEY}"},
)


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


def weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"sunny in {city}"


for llm in (model(), ollama):
    with capability("chat"):
        assert llm.chat(QUESTION).message.content
        assert llm.complete("Hello").text

    with capability("stream"):
        assert "".join(chunk.delta or "" for chunk in llm.stream_chat(QUESTION))

with capability("tools"):
    response = model(max_tokens=100).chat_with_tools(
        [FunctionTool.from_defaults(weather)], user_msg=QUESTION[0].content, tool_required=True
    )
    assert model().get_tool_calls_from_response(response)[0].tool_name == "weather"

with capability("structured"):
    assert isinstance(model(max_tokens=150).as_structured_llm(City).chat(QUESTION).raw, City)

with capability("errors"):
    assert status_of(lambda: model("no-such-model").chat(QUESTION)) == 404

with capability("cancel"):
    stream = model(max_tokens=2000).stream_chat(QUESTION)
    next(stream)
    stream.close()
    assert model(max_tokens=3).chat(QUESTION).message
