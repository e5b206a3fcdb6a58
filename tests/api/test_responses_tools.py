"""The tools of /v1/responses: Codex's own request, namespaces, custom tools, tools that clients run, hosted tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import Serve, direct_client
from tests.api.scripted import TOOL_TEMPLATE, prompt_of, scripted

CAPTURED = Path(__file__).parent / "captured"
WARNING = "warning"
SPACE: Any = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "note"},
    ],
}


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_the_request_of_codex_is_answered() -> None:
    body = json.loads((CAPTURED / "codex-0.166.json").read_text())
    engine = scripted(
        call("multi_agent_v1__spawn_agent", {"message": "go"}), template=TOOL_TEMPLATE, max_model_len=65536
    )
    async with direct_client(engine) as client:
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert "'web_search' was skipped" in answer.headers[WARNING]
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        final = events[-1]["response"]
        assert final["status"] == "completed"
        assert "'web_search'" in final["warnings"][0]["message"]
        (item,) = final["output"]
        assert (item["type"], item["namespace"], item["name"]) == (
            "function_call",
            "multi_agent_v1",
            "spawn_agent",
        )
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "spawned"}
        again = await client.post("/v1/responses", json=body | {"input": [*body["input"], item, output]})
        assert again.status_code == 200, again.text
    prompt = prompt_of(engine.added[-1])
    assert '"multi_agent_v1__spawn_agent"' in prompt.partition("</tools>")[2]
    assert "<|tool|>spawned" in prompt
    assert "web_search" not in prompt.partition("</tools>")[0]


def test_tools_of_a_namespace_are_flat_for_the_model(serve: Serve) -> None:
    served = serve(scripted(call("crm__note", {"input": "hi"}), template=TOOL_TEMPLATE))
    sdk = served.sdk()
    response = sdk.responses.create(model="bytes", input="x", tools=[SPACE])
    (item,) = response.output
    assert item.type == "custom_tool_call"
    assert (item.namespace, item.name, item.input) == ("crm", "note", "hi")
    tools = prompt_of(served.engine.added[-1]).partition("</tools>")[0]
    assert "crm__find" in tools
    assert "Customers." in tools
    choice: Any = {"type": "custom", "name": "note"}
    sdk.responses.create(model="bytes", input="x", tools=[SPACE], tool_choice=choice)
    grammar = served.engine.added[-1].sampling.grammar
    assert grammar is not None
    assert "crm__note" in grammar.text
    assert "crm__find" not in grammar.text
    stored = sdk.responses.retrieve(response.id)
    assert stored.tools[0].to_dict() == SPACE


def test_grammars_of_custom_tools(serve: Serve) -> None:
    """A regular expression is enforced; a Lark grammar, which cannot be, is shown to the model."""
    patch: Any = {"type": "custom", "name": "apply_patch", "description": "Applies a patch."}
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'}
    served = serve(scripted(call("apply_patch", {"input": "*** Begin"}), template=TOOL_TEMPLATE))
    sdk = served.sdk()
    raw = sdk.responses.with_raw_response.create(model="bytes", input="x", tools=[patch | {"format": lark}])
    assert "'apply_patch'" in raw.headers[WARNING]
    assert raw.parse().output[0].to_dict()["input"] == "*** Begin"
    assert "*** Begin" in prompt_of(served.engine.added[-1])
    regex = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    raw = sdk.responses.with_raw_response.create(
        model="bytes", input="x", tools=[patch | {"format": regex}], tool_choice="required"
    )
    assert WARNING not in raw.headers
    grammar = served.engine.added[-1].sampling.grammar
    assert grammar is not None
    assert "^(?:[0-9]+)$" in grammar.text


@pytest.mark.parametrize(
    ("tool", "arguments", "field", "value"),
    [
        (
            {"type": "apply_patch"},
            {"type": "create_file", "path": "a", "diff": "+b"},
            "operation",
            {"type": "create_file", "path": "a", "diff": "+b"},
        ),
        (
            {"type": "apply_patch"},
            {"type": "delete_file", "path": "a", "diff": ""},
            "operation",
            {"type": "delete_file", "path": "a"},
        ),
        (
            {"type": "shell", "environment": {"type": "local"}},
            {"commands": ["ls"]},
            "action",
            {"commands": ["ls"], "timeout_ms": None, "max_output_length": None},
        ),
        (
            {"type": "local_shell"},
            {"command": ["ls"]},
            "action",
            {"type": "exec", "env": {}, "command": ["ls"]},
        ),
    ],
)
def test_tools_that_clients_run(serve: Serve, tool: Any, arguments: Any, field: str, value: Any) -> None:
    served = serve(scripted(call(tool["type"], arguments), template=TOOL_TEMPLATE))
    sdk = served.sdk()
    raw = sdk.responses.with_raw_response.create(model="bytes", input="x", tools=[tool])
    assert WARNING not in raw.headers
    (item,) = raw.parse().output
    assert item.type == f"{tool['type']}_call"
    assert item.to_dict()[field] == value
    events = list(sdk.responses.create(model="bytes", input="x", tools=[tool], stream=True))
    assert [event.type for event in events[2:4]] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    shell_output = [{"stdout": "fine", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    output = {
        "type": f"{item.type}_output",
        "call_id": item.call_id,
        "output": shell_output if tool["type"] == "shell" else "fine",
        "status": "completed",
    }
    sdk.responses.create(model="bytes", input=[item.to_dict(), output], tools=[tool])  # type: ignore[list-item]
    prompt = prompt_of(served.engine.added[-1])
    assert "fine" in prompt.partition("</tools>")[2]
    assert f'"name": "{tool["type"]}"' in prompt.partition("</tools>")[2]


def test_a_call_that_is_cut_off_stays_a_function_call(serve: Serve) -> None:
    served = serve(
        scripted('<tool_call>{"name": "apply_patch", "arguments": {"type": "create', template=TOOL_TEMPLATE)
    )
    response = served.sdk().responses.create(model="bytes", input="x", tools=[{"type": "apply_patch"}])
    (item,) = response.output
    assert item.type == "function_call"
    assert item.arguments.startswith('{"type"')


def test_hosted_tools_are_skipped_and_named(serve: Serve) -> None:
    served = serve(scripted("ok", template=TOOL_TEMPLATE))
    sdk = served.sdk()
    hosted: Any = [
        {"type": "web_search_preview"},
        {"type": "mcp", "server_label": "a", "server_url": "https://example.com", "authorization": "secret"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "café\nx: y" * 20},
    ]
    raw = sdk.responses.with_raw_response.create(
        model="bytes", input="x", tools=hosted, metadata={"mine": "1"}
    )
    warning = raw.headers[WARNING]
    assert all(f"'{kind}'" in warning for kind in ("web_search_preview", "mcp", "shell", "code_interpreter"))
    response = raw.parse()
    assert response.metadata == {"mine": "1"}
    named = [warning["message"] for warning in json.loads(raw.text)["warnings"]]
    assert "'mcp'" in named[1]
    assert "secret" not in raw.text
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "a"}]}
    sdk.responses.create(model="bytes", input="x", tools=hosted, tool_choice=choice)
    plain = sdk.responses.with_raw_response.create(model="bytes", input="x")
    assert WARNING not in plain.headers
    assert plain.parse().metadata == {}
    for refused in ("required", {"type": "web_search_preview"}, choice | {"mode": "required"}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            sdk.responses.create(model="bytes", input="x", tools=hosted, tool_choice=refused)


def test_items_of_hosted_tools_and_images_of_tools_are_left_out(serve: Serve) -> None:
    served = serve(scripted("ok", template=TOOL_TEMPLATE))
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": "data:"}],
        },
    ]
    raw = served.sdk().responses.with_raw_response.create(model="bytes", input=items)
    assert "'web_search_call'" in raw.headers[WARNING]
    assert "'input_image'" in raw.headers[WARNING]
    assert "An image" in prompt_of(served.engine.added[-1])


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function"}],
        [{"type": "custom", "name": ""}],
        [{"type": "namespace", "name": "a"}],
        [{"type": "namespace", "tools": []}],
        [SPACE, {"type": "function", "name": "crm__find"}],
        [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "peg", "definition": "x"}}],
        [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}}],
    ],
)
def test_tools_that_make_no_sense(serve: Serve, tools: Any) -> None:
    served = serve(scripted("ok"))
    with pytest.raises(openai.BadRequestError) as error:
        served.sdk().responses.create(model="bytes", input="x", tools=tools)
    assert error.value.param == "tools"
    assert served.engine.added == []
