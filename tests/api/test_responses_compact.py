"""/v1/responses/compact as the real `openai` SDK sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.api.conftest import Serve
from tests.api.scripted import prompt_of, scripted

ITEMS: Any = [
    {"role": "user", "content": "Fix the pump."},
    {"role": "assistant", "content": "It leaks."},
    {"type": "function_call", "call_id": "c", "name": "seal", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "sealed"},
    {"role": "user", "content": "And now?"},
]


def test_a_conversation_goes_on_from_its_compact_form(serve: Serve) -> None:
    served = serve(scripted("The pump leaked and is sealed."))
    sdk = served.sdk()
    compacted = sdk.responses.compact(model="bytes", input=ITEMS, instructions="Be brief.")
    assert compacted.object == "response.compaction"
    assert compacted.usage.output_tokens > 0
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    assert "leaked" not in compacted.output[-1].to_dict()["encrypted_content"], "opaque"
    asked = prompt_of(served.engine.added[-1])
    assert asked.startswith("<|system|>Be brief.")
    assert "Summarize" in asked
    onward: Any = [*(item.to_dict() for item in compacted.output), {"role": "user", "content": "Go on."}]
    response = sdk.responses.create(model="bytes", input=onward)
    prompt = prompt_of(served.engine.added[-1])
    assert "The pump leaked and is sealed." in prompt
    assert "Fix the pump." in prompt
    assert "It leaks." not in prompt
    again = sdk.responses.compact(model="bytes", previous_response_id=response.id)
    assert again.output[-1].type == "compaction"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "penstock-1.!"}]},
            "input[0].encrypted_content",
        ),
    ],
)
def test_refusals(serve: Serve, body: Any, param: str) -> None:
    served = serve(scripted("ok"))
    with pytest.raises(openai.APIStatusError) as error:
        served.sdk().responses.compact(model="bytes", **body)
    assert error.value.param == param
    assert served.engine.added == []


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(serve: Serve) -> None:
    served = serve(scripted("short", max_model_len=700))
    many: Any = [{"role": "user", "content": f"message {number} " + "x" * 40} for number in range(30)]
    compacted = served.sdk().responses.compact(model="bytes", input=many)
    assert len(compacted.output) == 31
    assert "message 29" in prompt_of(served.engine.added[-1])
