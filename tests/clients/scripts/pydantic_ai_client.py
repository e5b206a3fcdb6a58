"""Pydantic AI with its models for OpenAI chat, OpenAI Responses and Anthropic."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import API_KEY, BASE_URL, MODEL, capability

QUESTION = "What is the capital of France?"
SHORT = ModelSettings(max_tokens=20, temperature=0)
LONG = ModelSettings(max_tokens=200, temperature=0)
openai = OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key=API_KEY)
anthropic = AnthropicProvider(base_url=BASE_URL, api_key=API_KEY)
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "anthropic": AnthropicModel(MODEL, provider=anthropic),
}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


async def streamed(model: object) -> str:
    async with Agent(model, model_settings=SHORT).run_stream(QUESTION) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


async def main() -> None:
    for kind, model in MODELS.items():
        with capability("chat"):
            assert (await Agent(model, model_settings=SHORT).run(QUESTION)).output, kind

        with capability("stream"):
            assert await streamed(model), kind

        with capability("tools"):  # the answer itself is a forced tool call
            agent = Agent(model, output_type=City, model_settings=LONG)
            assert isinstance((await agent.run(QUESTION)).output, City), kind

    with capability("structured"):
        agent = Agent(MODELS["chat"], output_type=NativeOutput(City), model_settings=LONG)
        assert isinstance((await agent.run(QUESTION)).output, City)

    with capability("errors"):
        try:
            await Agent(OpenAIChatModel("no-such-model", provider=openai)).run(QUESTION)
        except ModelHTTPError as error:
            if error.status_code != 404:
                raise
        else:
            raise AssertionError("no error")


asyncio.run(main())
