"""Requests of coding agents as they were captured, trimmed. The agents themselves run in `make test-clients`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.conftest import direct_client
from tests.api.scripted import TOOL_TEMPLATE, prompt_of, scripted

CAPTURED = Path(__file__).parent / "captured"


@pytest.mark.parametrize(
    ("name", "path", "end"),
    [
        ("claude-code-2.1", "/v1/messages?beta=true", "message_stop"),
        ("opencode-1.18", "/v1/chat/completions", "[DONE]"),
        ("codex-0.166", "/v1/responses", "response.completed"),
    ],
)
async def test_requests_of_agents_are_answered(name: str, path: str, end: str) -> None:
    body = json.loads((CAPTURED / f"{name}.json").read_text())
    engine = scripted("All done.", template=TOOL_TEMPLATE, max_model_len=65_536)
    async with direct_client(engine) as client:
        answer = await client.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    assert end in answer.text
    assert "event: error" not in answer.text
    assert '"error":{' not in answer.text
    (request,) = engine.added
    assert "<tools>" in prompt_of(request)
