"""LangChain's standard tests of chat models, with its packages for OpenAI (both APIs) and Anthropic.

The file is a pytest module, and the script runs pytest on itself."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, Literal

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from report import API_KEY, BASE_URL, MODEL, report

Details = dict[Literal["invoke", "stream"], list[str]]

LONG_TEXT = "The sun is a star at the center of the solar system, and the planets move around it. " * 60


# What a model of 135 million parameters does not do. With another model these tests must pass.
SMALL_MODEL = "smollm2-135m"
REPEATS_ITSELF = "repeats itself inside a string until max_tokens"
CHAT, RESPONSES, MESSAGES = "TestChatCompletions", "TestResponses", "TestMessages"
EVERY_API = (CHAT, RESPONSES, MESSAGES)
# Why a test fails, and with which APIs: their prompts differ. The model takes the most probable token, so the same
# tests fail each time on one processor. Another one rounds otherwise, and some of them may pass.
CANNOT = {
    "test_agent_loop": ("does not call a tool unless it must", EVERY_API),
    "test_json_mode": ("invents keys of its own where no schema binds it", (CHAT, RESPONSES)),
    "test_structured_output[pydantic]": (REPEATS_ITSELF, EVERY_API),
    "test_structured_output[typeddict]": (REPEATS_ITSELF, (CHAT,)),
    "test_structured_output[json_schema]": (REPEATS_ITSELF, (CHAT,)),
    "test_structured_output_async[pydantic]": (REPEATS_ITSELF, EVERY_API),
    "test_structured_output_async[typeddict]": (REPEATS_ITSELF, (CHAT,)),
    "test_structured_output_async[json_schema]": (REPEATS_ITSELF, (CHAT,)),
    "test_structured_output_optional_param": (REPEATS_ITSELF, EVERY_API),
    "test_structured_output_pydantic_2_v1": (REPEATS_ITSELF, (CHAT, RESPONSES)),
    "test_unicode_tool_call_integration": ("translates Japanese names", EVERY_API),
}


class Standard(ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        settings = {"model": MODEL, "api_key": API_KEY, "temperature": 0, "max_tokens": 200, "timeout": 240}
        if self.chat_model_class is ChatAnthropic:
            return {**settings, "base_url": BASE_URL}
        return {**settings, "base_url": f"{BASE_URL}/v1", "stream_usage": True}

    @property
    def supports_model_override(self) -> bool:
        return False  # the server has one model


class TestChatCompletions(Standard):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Details:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return _second_answer(ChatOpenAI(**self.chat_model_params), LONG_TEXT, stream)


class TestResponses(TestChatCompletions):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestMessages(Standard):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Details:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        text = [{"type": "text", "text": LONG_TEXT, "cache_control": {"type": "ephemeral"}}]
        return _second_answer(ChatAnthropic(**self.chat_model_params), [("human", text)], stream)

    invoke_with_cache_creation_input = invoke_with_cache_read_input


def _second_answer(model: BaseChatModel, prompt: Any, stream: bool) -> AIMessage:
    """The answer to a prompt that the server has seen before."""
    model.invoke(prompt, max_tokens=5)
    if stream:
        first, *chunks = model.stream(prompt, max_tokens=5)
        answer = sum(chunks, start=first)
    else:
        answer = model.invoke(prompt, max_tokens=5)
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0, answer.usage_metadata
    return answer


def capability_of(test: str) -> str:
    kinds = {"tool": "tools", "agent": "tools", "structured": "structured", "json": "structured"}
    return next((name for word, name in {**kinds, "stream": "stream"}.items() if word in test), "chat")


class Results:
    """Counts the results of tests for each API, and reports each capability when all tests are over."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.failed: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for item in items:
            reason, apis = CANNOT.get(item.name) or CANNOT.get(item.originalname) or ("", ())
            if MODEL == SMALL_MODEL and item.cls.__name__ in apis:
                item.add_marker(pytest.mark.xfail(reason=reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        _, api, name = report.nodeid.split("::")
        is_expected = hasattr(report, "wasxfail") and report.outcome == "skipped"
        counts = self.counts.setdefault(api.removeprefix("Test"), Counter())
        counts["beyond the model" if is_expected else report.outcome] += 1
        failed = self.failed.setdefault(capability_of(name), [])
        if report.outcome == "failed":
            failed.append(f"{api}.{name}")

    def report(self) -> None:
        print(flush=True)  # pytest's last line may not have ended
        for capability, failed in self.failed.items():
            report(capability, not failed, ", ".join(failed))
        counts = "; ".join(
            f"{api}: {', '.join(f'{count} {kind}' for kind, count in sorted(each.items()))}"
            for api, each in self.counts.items()
        )
        report("other", not any(self.failed.values()), counts)


if __name__ == "__main__":
    # LangChain keeps its connections for all tests, so the tests share one event loop.
    options = (
        "-o asyncio_mode=auto -o asyncio_default_test_loop_scope=session -p no:cacheprovider -q --tb=short"
    )
    options += " --noconftest -c /dev/null --rootdir ."
    results = Results()
    pytest.main([*options.split(), *sys.argv[1:], __file__], plugins=[results])
    results.report()
