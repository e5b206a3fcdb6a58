"""OpenAI's Agents SDK: runs, streams, tools and typed output, over Responses and chat completions."""

from __future__ import annotations

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, capability

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, timeout=120)
QUESTION = "What is the capital of France?"
CALLED: list[str] = []


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


@function_tool
def weather(city: str) -> str:
    """Tells the weather in a city."""
    CALLED.append(city)
    return "sunny"


def agent(kind: type, *, model: str = MODEL, max_tokens: int = 20, **settings: object) -> Agent:
    choice = settings.pop("tool_choice", None)
    return Agent(
        name="helper",
        model=kind(model, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=choice),
        **settings,
    )


async def streamed(kind: type) -> int:
    result = Runner.run_streamed(agent(kind), QUESTION)
    return len([event async for event in result.stream_events()])


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        with capability("chat"):
            assert (await Runner.run(agent(kind), QUESTION)).final_output

        with capability("stream"):
            assert await streamed(kind) > 1

        with capability("tools"):
            CALLED.clear()
            helper = agent(
                kind,
                tools=[weather],
                tool_choice="required",
                max_tokens=100,
                tool_use_behavior="stop_on_first_tool",
            )
            assert "sunny" in str((await Runner.run(helper, QUESTION)).final_output)
            assert CALLED

        with capability("structured"):
            result = await Runner.run(agent(kind, output_type=City, max_tokens=150), QUESTION)
            assert isinstance(result.final_output, City)

        with capability("errors"):
            try:
                await Runner.run(agent(kind, model="no-such-model"), QUESTION)
            except openai.NotFoundError:
                continue
            raise AssertionError("no error")


asyncio.run(main())
