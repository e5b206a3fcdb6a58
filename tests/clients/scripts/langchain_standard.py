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

LONG_TEXT = "The sun is a star at the center of the solar system, and the planets move around it. " * 200


class Standard(ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        base_url = BASE_URL if self.chat_model_class is ChatAnthropic else f"{BASE_URL}/v1"
        return {"model": MODEL, "base_url": base_url, "api_key": API_KEY, "max_tokens": 300, "timeout": 240}

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
        return _second_answer(ChatOpenAI(**self.chat_model_params, stream_usage=True), LONG_TEXT, stream)


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
    if not stream:
        return model.invoke(prompt, max_tokens=5)
    first, *chunks = model.stream(prompt, max_tokens=5)
    return sum(chunks, start=first)


def capability_of(test: str) -> str:
    kinds = {
        "tool": "tools",
        "agent": "tools",
        "structured": "structured",
        "json": "structured",
        "stream": "stream",
    }
    return next((name for word, name in kinds.items() if word in test), "chat")


class Results:
    """Counts results of tests, and reports each capability when all tests are over."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.partition("::")[2]
        kind = "expected failures" if hasattr(report, "wasxfail") else report.outcome
        self.counts[kind] += 1
        failed = self.failed.setdefault(capability_of(name), [])
        if report.outcome == "failed":
            failed.append(name)

    def report(self) -> None:
        print(flush=True)  # pytest's last line may not have ended
        for capability, failed in self.failed.items():
            report(capability, not failed, ", ".join(failed))
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        report("other", not self.counts["failed"], counts)


if __name__ == "__main__":
    options = [
        "-o",
        "asyncio_mode=auto",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
        "-q",
        "--tb=short",
        "-rfEx",
        *sys.argv[1:],
    ]
    results = Results()
    pytest.main([*options, __file__], plugins=[results])
    results.report()
