"""/v1/conversations, and responses in conversations, as the real `openai` SDK sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from penstock.api.app import create_app
from penstock.api.openai import responses_history
from penstock.api.openai.stored_chats import MAX_NEW_ITEMS
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.gateway.accounts import Accounts
from penstock.gateway.gateway import Gateway
from penstock.gateway.ratelimits.local import LocalLimiter
from penstock.gateway.ratelimits.settings import LimitSettings, ScopeLimits
from penstock.gateway.responses.objects import ObjectStore
from penstock.gateway.store.database import Database, sqlite_url
from tests.api.conftest import Serve, direct_client
from tests.api.scripted import TOOL_TEMPLATE, prompt_of, scripted
from tests.api.tenant_server import ACTOR, TenantServer
from tests.gateway.fake_engine import FakeEngine, script_text
from tests.gateway.store.ready_made import ready_made_database

HELLO: Any = {"type": "message", "role": "user", "content": "Hello"}


def test_conversations_are_made_changed_and_deleted(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    made = sdk.conversations.create(metadata={"a": "1"}, items=[HELLO])
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"a": "1"})
    assert sdk.conversations.retrieve(made.id) == made
    assert sdk.conversations.update(made.id, metadata={"b": "2"}).metadata == {"b": "2"}
    assert sdk.conversations.retrieve(made.id).metadata == {"b": "2"}
    assert sdk.conversations.delete(made.id).deleted
    for call in (sdk.conversations.retrieve, sdk.conversations.delete, sdk.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            call(made.id)
    assert sdk.conversations.create().metadata == {}


def test_items(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    made = sdk.conversations.create()
    assert list(sdk.conversations.items.list(made.id)) == []
    words = [{"type": "message", "role": "user", "content": str(number)} for number in range(5)]
    added = sdk.conversations.items.create(made.id, items=words)  # type: ignore[arg-type]
    assert len({item.id for item in added.data}) == 5
    in_order = [
        item.content[0].text  # type: ignore[union-attr]
        for item in sdk.conversations.items.list(made.id, order="asc", limit=2)
    ]
    assert in_order == ["0", "1", "2", "3", "4"], "the SDK reads all pages"
    newest = sdk.conversations.items.list(made.id, limit=1).data[0]
    assert newest == added.data[-1]
    assert newest.id is not None
    assert sdk.conversations.items.retrieve(newest.id, conversation_id=made.id) == newest
    assert sdk.conversations.items.delete(newest.id, conversation_id=made.id).id == made.id
    for call in (sdk.conversations.items.retrieve, sdk.conversations.items.delete):
        with pytest.raises(openai.NotFoundError, match="no item"):
            call(newest.id, conversation_id=made.id)
    with pytest.raises(openai.BadRequestError) as error:
        sdk.conversations.items.list(made.id, after="never")
    assert error.value.param == "after"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_go_on_with_a_conversation(serve: Serve, stream: bool) -> None:
    served = serve(scripted(lambda request: f"answer {len(requests)}"))
    requests = served.engine.added
    sdk = served.sdk()
    made = sdk.conversations.create(items=[HELLO])
    for text in ("one", "two"):
        answered: Any = sdk.responses.create(
            model="bytes", input=text, conversation=made.id, stream=stream, store=False
        )
        if stream:
            answered = list(answered)[-1].response
        assert answered.conversation.id == made.id
    assert prompt_of(requests[-1]) == (
        "<|user|>Hello<|end|><|user|>one<|end|><|assistant|>answer 1<|end|><|user|>two<|end|><|assistant|>"
    )
    items = list(sdk.conversations.items.list(made.id, order="asc"))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    counted = sdk.responses.input_tokens.count(model="bytes", input="x", conversation={"id": made.id})
    assert counted.input_tokens > 40


def test_a_conversation_with_calls_in_the_background(serve: Serve) -> None:
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    served = serve(scripted(call, template=TOOL_TEMPLATE))
    sdk = served.sdk()
    made = sdk.conversations.create()
    response = sdk.responses.create(
        model="bytes",
        input="x",
        conversation={"id": made.id},
        background=True,
        tools=[{"type": "function", "name": "find", "parameters": {}, "strict": False}],
    )
    served.wait_until(lambda: len(list(sdk.conversations.items.list(made.id))) == 2)
    kinds = [item.type for item in sdk.conversations.items.list(made.id, order="asc")]
    assert kinds == ["message", "function_call"]
    assert sdk.responses.retrieve(response.id).conversation == response.conversation


def test_a_failed_response_adds_nothing(serve: Serve) -> None:
    sdk = serve(scripted("ok", max_model_len=64)).sdk()
    made = sdk.conversations.create()
    with pytest.raises(openai.BadRequestError):
        sdk.responses.create(model="bytes", input="x" * 100, conversation=made.id)
    assert list(sdk.conversations.items.list(made.id)) == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"conversation": "conv_none"}, "conversation"),
        ({"conversation": "\0"}, "conversation"),
        ({"conversation": "a", "previous_response_id": "resp_1"}, "conversation"),
    ],
)
def test_refused_responses(serve: Serve, options: Any, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        serve(scripted("ok")).sdk().responses.create(model="bytes", input="x", **options)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"role": "robot", "content": "x"}]}, "items[0].role"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items[0].id"),
        ({"items": "x"}, "items"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_refused_conversations(serve: Serve, body: Any, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        serve(scripted("ok")).sdk().conversations.create(**body)
    assert error.value.param == param


def test_a_conversation_is_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.responses.store.MAX_HISTORY_BYTES", 10_000)
    sdk = serve(scripted("ok")).sdk()
    made = sdk.conversations.create()
    with pytest.raises(openai.BadRequestError, match="10000 bytes"):
        sdk.conversations.items.create(made.id, items=[HELLO] * MAX_NEW_ITEMS)
    for _ in range(2):
        sdk.conversations.items.create(made.id, items=[HELLO] * 6)
    with pytest.raises(openai.BadRequestError, match="10000 bytes"):
        sdk.conversations.items.create(made.id, items=[HELLO] * 6)


def test_references_to_items_that_a_client_sent(serve: Serve) -> None:
    served = serve(scripted("ok"))
    sdk = served.sdk()
    first = sdk.responses.create(model="bytes", input="Hello there")
    (sent,) = sdk.responses.input_items.list(first.id)
    sdk.responses.create(model="bytes", input=[{"type": "item_reference", "id": sent.id}, HELLO])  # type: ignore[typeddict-item]
    assert "Hello there" in prompt_of(served.engine.added[-1])


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TenantServer]:
    server = TenantServer(tmp_path, FakeEngine(script_text("fine")), static_key="root")
    yield server
    await server.close()


async def test_conversations_of_another_workspace_do_not_exist(server: TenantServer) -> None:
    clients = []
    for name in ("a", "b"):
        workspace = await server.tenants.directory.create_workspace(ACTOR, name, "default")
        clients.append(server.client((await server.make_key(workspace_id=workspace.id)).secret))
    async with clients[0] as owner, clients[1] as other:
        made = (await owner.post("/v1/conversations", json={"items": [HELLO]})).json()
        path = f"/v1/conversations/{made['id']}"
        item = (await owner.get(f"{path}/items")).json()["data"][0]["id"]
        for method, suffix, body in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [HELLO]}),
            ("GET", f"/items/{item}", None),
            ("DELETE", f"/items/{item}", None),
        ):
            assert (await other.request(method, path + suffix, json=body)).status_code == 404
        asked = await other.post("/v1/responses", json={"input": "x", "conversation": made["id"]})
        assert asked.status_code == 404
        assert len((await owner.get(f"{path}/items")).json()["data"]) == 1


async def test_conversations_survive_a_restart(tmp_path: Path) -> None:
    made: Any = None
    ready_made_database(tmp_path).close()
    for _ in range(2):
        database = Database(sqlite_url(tmp_path))
        app = create_app(
            Gateway(FakeEngine(script_text("fine")), GatewayConfig()),
            ServerConfig(),
            objects=ObjectStore(database),
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            if made is None:
                made = (await client.post("/v1/conversations", json={"items": [HELLO]})).json()
            assert (await client.get(f"/v1/conversations/{made['id']}")).json() == made
            items = (await client.get(f"/v1/conversations/{made['id']}/items")).json()["data"]
            assert len(items) == 1
        database.close()


async def test_a_long_history_is_decoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads: list[object] = []

    async def noted(work: Callable[[], Any]) -> Any:
        in_threads.append(work)
        return work()

    async def prompts_and_items() -> tuple[list[tuple[int, ...]], list[Any]]:
        engine = FakeEngine(script_text("fine"))
        async with direct_client(engine) as client:

            async def respond(**body: Any) -> Any:
                answer = await client.post("/v1/responses", json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            first = await respond(input="one")
            second = await respond(input="two", previous_response_id=first["id"])
            conversation = (await client.post("/v1/conversations", json={})).json()["id"]
            await respond(input="three", conversation=conversation)
            await respond(input="four", conversation=conversation)
            await respond(input=[{"type": "item_reference", "id": first["output"][0]["id"]}])
            items = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
            return [request.prompt_token_ids for request in engine.added], [each["content"] for each in items]

    monkeypatch.setattr(responses_history, "in_thread", noted)
    directly = await prompts_and_items()
    assert not in_threads
    monkeypatch.setattr(responses_history, "_DIRECT_BYTES", 0)
    assert await prompts_and_items() == directly
    assert len(in_threads) == 4  # a response, a conversation, a reference, a list


def test_what_is_stored_is_read_for_requests_that_limits_let_in(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LimitSettings(key=ScopeLimits(requests_per_minute=2))
    sdk = serve(scripted("ok"), accounts=Accounts(LocalLimiter(limits))).sdk()
    conversation = sdk.conversations.create(items=[HELLO]).id
    read: list[str] = []
    children = ObjectStore.children

    async def noted(self: ObjectStore, workspace_id: str, kind: str, parent_id: str, **options: Any) -> Any:
        read.append(parent_id)
        return await children(self, workspace_id, kind, parent_id, **options)

    monkeypatch.setattr(ObjectStore, "children", noted)
    for _ in range(2):  # to read for a request does not count as another request
        sdk.responses.create(model="bytes", input="Hi", conversation=conversation)
    for model in ("bytes", "nobody's"):
        with pytest.raises(openai.RateLimitError):
            sdk.responses.create(model=model, input="Hi", conversation=conversation)
    assert read == [conversation] * 2


def test_few_items_are_added_at_a_time(serve: Serve) -> None:
    sdk = serve(scripted("ok")).sdk()
    made = sdk.conversations.create(items=[HELLO] * MAX_NEW_ITEMS)
    for add in (
        lambda: sdk.conversations.create(items=[HELLO] * (MAX_NEW_ITEMS + 1)),
        lambda: sdk.conversations.items.create(made.id, items=[HELLO] * (MAX_NEW_ITEMS + 1)),
    ):
        with pytest.raises(openai.BadRequestError, match="At most 20 items"):
            add()
