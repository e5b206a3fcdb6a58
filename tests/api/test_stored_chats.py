"""Stored chat completions as the real `openai` SDK sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import Serve
from tests.api.scripted import TOOL_TEMPLATE, scripted
from tests.api.tenant_server import ACTOR, TenantServer
from tests.gateway.fake_engine import FakeEngine, script_text

HELLO: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_kept_changed_and_deleted(serve: Serve, stream: bool) -> None:
    sdk = serve(scripted("Bonjour.")).sdk()
    made: Any = sdk.chat.completions.create(
        model="bytes", messages=HELLO, store=True, metadata={"a": "1"}, stream=stream
    )
    if stream:
        made = list(made)[-1]
    kept = sdk.chat.completions.retrieve(made.id)
    assert kept.id == made.id
    assert kept.choices[0].message.content == "Bonjour."
    assert kept.choices[0].finish_reason == "stop"
    assert kept.to_dict()["metadata"] == {"a": "1"}
    changed = sdk.chat.completions.update(made.id, metadata={"b": "2"})
    assert changed.to_dict()["metadata"] == {"b": "2"}
    assert sdk.chat.completions.retrieve(made.id).to_dict()["metadata"] == {"b": "2"}
    messages = list(sdk.chat.completions.messages.list(made.id, limit=1))
    assert [(message.role, message.content) for message in messages] == [
        ("system", "Be kind."),
        ("user", "Hello"),
    ]
    newest = sdk.chat.completions.messages.list(made.id, order="desc").data
    assert [message.id for message in newest] == [message.id for message in reversed(messages)]
    assert sdk.chat.completions.delete(made.id).deleted
    for call in (sdk.chat.completions.retrieve, sdk.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_completions_are_listed(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    ids = [
        sdk.chat.completions.create(
            model="bytes", messages=HELLO, store=True, metadata={"parity": str(number % 2), "n": str(number)}
        ).id
        for number in range(5)
    ]
    sdk.chat.completions.create(model="bytes", messages=HELLO)  # not stored
    assert [each.id for each in sdk.chat.completions.list(limit=2)] == ids
    assert [each.id for each in sdk.chat.completions.list(order="desc")] == ids[::-1]
    assert [each.id for each in sdk.chat.completions.list(metadata={"parity": "1"})] == ids[1::2]
    assert list(sdk.chat.completions.list(model="other")) == []
    with pytest.raises(openai.BadRequestError, match="go on from"):
        sdk.chat.completions.list(after="never")
    with pytest.raises(openai.BadRequestError, match="limit"):
        sdk.chat.completions.list(limit=1000)


def test_calls_and_parts_are_kept(serve: Serve) -> None:
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    sdk = serve(scripted(call, template=TOOL_TEMPLATE)).sdk()
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Find."}]}]
    tool: Any = {"type": "function", "function": {"name": "find", "parameters": {}}}
    made = sdk.chat.completions.create(model="bytes", messages=parts, tools=[tool], store=True)
    kept = sdk.chat.completions.retrieve(made.id)
    assert kept.choices[0].message.tool_calls is not None
    (message,) = sdk.chat.completions.messages.list(made.id)
    assert message.content is None
    assert message.content_parts is not None
    assert message.content_parts[0].to_dict()["text"] == "Find."


def test_metadata_are_checked_before_anything_runs(serve: Serve) -> None:
    served = serve(scripted("ok"))
    for metadata in ({"a": 1}, {"a": "x" * 513}):
        with pytest.raises(openai.BadRequestError) as error:
            served.sdk().chat.completions.create(
                model="bytes",
                messages=HELLO,
                store=True,
                metadata=metadata,  # type: ignore[arg-type]
            )
        assert error.value.param == "metadata"
    assert served.engine.added == []


async def test_another_workspace_sees_nothing(tmp_path: Path) -> None:
    server = TenantServer(tmp_path, FakeEngine(script_text("fine")), static_key="root")
    clients = []
    for name in ("a", "b"):
        workspace = await server.tenants.directory.create_workspace(ACTOR, name, "default")
        clients.append(server.client((await server.make_key(workspace_id=workspace.id)).secret))
    async with clients[0] as owner, clients[1] as other:
        body = {"messages": HELLO, "store": True}
        made = (await owner.post("/v1/chat/completions", json=body)).json()
        path = f"/v1/chat/completions/{made['id']}"
        assert (await other.get("/v1/chat/completions")).json()["data"] == []
        for method, suffix, changes in (
            ("GET", "", None),
            ("GET", "/messages", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
        ):
            assert (await other.request(method, path + suffix, json=changes)).status_code == 404
        assert (await owner.get(path)).status_code == 200
    await server.close()
