"""Objects that clients keep on the server: chat completions, when a request says `store: true`, and the
conversations of /v1/conversations with their items. All of them are listed, looked up, changed and deleted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http.answers import ObjectList, json_response
from penstock.api.http.context import principal_of, request_id_of
from penstock.api.http.parsing import choice_of, integer_of, text_of
from penstock.api.http.routes import PAGE, Operation
from penstock.api.openai.answers import ChatCompletion
from penstock.api.openai.messages import Message
from penstock.api.openai.responses_endpoints import DEFAULT_PAGE, MAX_PAGE, InputItemList
from penstock.api.openai.responses_history import History, no_conversation
from penstock.api.openai.responses_items import InputItem, messages_of
from penstock.api.openai.responses_requests import check_metadata
from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.identity import Principal
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, WrappedAnswer, merged_later
from penstock.gateway.responses.objects import CONVERSATION, ITEM, ObjectStore, StoredObject
from penstock.gateway.responses.service import Responses

KIND = "chat_completion"
# Of a conversation at a time, as at OpenAI: each is a row, and others wait to write theirs.
MAX_NEW_ITEMS = 20

_to_json = msgspec.json.Encoder().encode
_decode_messages = msgspec.json.Decoder(list[Message]).decode


class CompletionDeleted(msgspec.Struct):
    id: str
    object: str = "chat.completion.deleted"
    deleted: bool = True


class CompletionChanges(msgspec.Struct):
    metadata: dict[str, str] | None = None


class StoredMessage(msgspec.Struct, omit_defaults=True):
    """A message of the request, as it is listed."""

    id: str
    role: str
    content: str | None
    content_parts: list[Any] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class StoredList(ObjectList[msgspec.Raw]): ...


class KeptAnswer(WrappedAnswer):
    """An answer that is passed whole to `keep` before its reader sees the end."""

    def __init__(self, answer: AnswerStream, keep: Callable[[Sequence[Delta]], Awaitable[None]]) -> None:
        super().__init__(answer)
        self._keep = keep
        self._batches: list[list[Delta]] = []

    async def __anext__(self) -> list[Delta]:
        try:
            deltas = await anext(self._answer)
        except StopAsyncIteration:
            await self._keep(await merged_later(self._batches))
            raise
        self._batches.append(deltas)
        return deltas

    async def collect(self) -> list[Delta]:
        deltas = await self._answer.collect()
        await self._keep(deltas)
        return deltas


def kept_metadata(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Return the metadata of a request whose answer is stored, which must be texts."""
    given = metadata or {}
    if not all(isinstance(value, str) for value in given.values()):
        raise InvalidRequest("The values of metadata must be texts.", param="metadata")
    check_metadata(given)
    return given


class StoredChats:
    """Keeps chat completions for `ttl_s`."""

    def __init__(self, objects: ObjectStore, ttl_s: float) -> None:
        self.objects = objects
        self._ttl_s = ttl_s

    async def keep(
        self, principal: Principal, body: bytes, messages: list[Message], metadata: dict[str, str]
    ) -> None:
        now = time.time()
        shown = _decode_shown(body)
        kept = StoredObject(
            id=shown.id,
            workspace_id=principal.workspace_id,
            kind=KIND,
            created_at=now,
            expires_at=now + self._ttl_s,
            model=shown.model[:256],
            metadata=metadata,
            body=body,
            input=_to_json(messages),
        )
        await self.objects.add([kept])


class _Shown(msgspec.Struct):
    id: str
    model: str


_decode_shown = msgspec.json.Decoder(_Shown).decode


class StoredChatEndpoints:
    def __init__(self, chats: StoredChats) -> None:
        self._objects = chats.objects

    def routes(self) -> list[Operation]:
        one = "/v1/chat/completions/{completion_id}"
        return [
            Operation(
                "GET /v1/chat/completions",
                self.list_completions,
                StoredList,
                query=(*PAGE, "order", "model", "metadata"),
            ),
            Operation(f"GET {one}", self.show_completion, ChatCompletion),
            Operation(f"POST {one}", self.change_completion, ChatCompletion, reads=CompletionChanges),
            Operation(f"DELETE {one}", self.delete_completion, CompletionDeleted),
            Operation(f"GET {one}/messages", self.list_messages, StoredList, query=(*PAGE, "order")),
        ]

    async def list_completions(self, request: Request) -> Response:
        metadata = {
            name.removeprefix("metadata[").removesuffix("]"): value
            for name, value in request.query_params.items()
            if name.startswith("metadata[") and name.endswith("]")
        }
        page = await self._objects.page(
            principal_of(request).workspace_id,
            KIND,
            limit=_limit(request),
            order=choice_of(request, "order", default="asc", choices=("asc", "desc")),
            after=text_of(request, "after"),
            model=text_of(request, "model"),
            metadata=metadata,
        )
        ids = [each.id for each in page.objects]
        return _listed([_shown(each) for each in page.objects], ids, page.has_more)

    async def show_completion(self, request: Request) -> Response:
        return Response(_shown(await self._found(request)), media_type="application/json")

    async def change_completion(self, request: Request, wire: CompletionChanges) -> Response:
        check_metadata(wire.metadata)
        found = msgspec.structs.replace(await self._found(request), metadata=wire.metadata or {})
        if not await self._objects.change(found):
            raise _not_found(found.id)
        return Response(_shown(found), media_type="application/json")

    async def delete_completion(self, request: Request) -> Response:
        completion_id = request.path_params["completion_id"]
        if not await self._objects.delete(principal_of(request).workspace_id, KIND, completion_id):
            raise _not_found(completion_id)
        return json_response(CompletionDeleted(completion_id))

    async def list_messages(self, request: Request) -> Response:
        found = await self._found(request)
        messages = [
            _stored_message(f"{found.id}-{position}", message)
            for position, message in enumerate(_decode_messages(found.input))
        ]
        if choice_of(request, "order", default="asc", choices=("asc", "desc")) == "desc":
            messages.reverse()
        if (after := text_of(request, "after")) is not None:
            ids = [message.id for message in messages]
            if after not in ids:
                raise InvalidRequest(f"The list has no {after[:64]!r} to go on from.", param="after")
            messages = messages[ids.index(after) + 1 :]
        limit = _limit(request)
        page = messages[:limit]
        return _listed([_to_json(each) for each in page], [each.id for each in page], len(messages) > limit)

    async def _found(self, request: Request) -> StoredObject:
        completion_id = request.path_params["completion_id"]
        found = await self._objects.find(principal_of(request).workspace_id, KIND, completion_id)
        if found is None:
            raise _not_found(completion_id)
        return found


def _limit(request: Request) -> int:
    return integer_of(request, "limit", default=DEFAULT_PAGE, low=1, high=MAX_PAGE)


def _shown(found: StoredObject) -> bytes:
    return found.body[:-1] + b',"metadata":' + _to_json(found.metadata) + b"}"


def _stored_message(message_id: str, message: Message) -> StoredMessage:
    is_text = isinstance(message.content, str)
    return StoredMessage(
        message_id,
        message.role,
        message.content if isinstance(message.content, str) else None,
        None if is_text else message.content,  # type: ignore[arg-type]
        message.name,
        message.tool_calls,
        message.tool_call_id,
    )


def _listed(data: Sequence[bytes], ids: Sequence[str], has_more: bool) -> Response:
    return json_response(StoredList.of([msgspec.Raw(each) for each in data], has_more=has_more, ids=ids))


def _not_found(completion_id: str) -> NotFound:
    return NotFound(f"There is no stored chat completion with the id {completion_id[:64]!r}.")


_decode_item = msgspec.json.Decoder(InputItem).decode


class NewConversation(msgspec.Struct):
    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None


class ConversationChanges(msgspec.Struct):
    metadata: dict[str, str] | None = None


class NewItems(msgspec.Struct):
    items: list[InputItem]


class ConversationObject(msgspec.Struct):
    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class ConversationDeleted(msgspec.Struct):
    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


class ConversationEndpoints:
    def __init__(self, responses: Responses, objects: ObjectStore) -> None:
        self._responses = responses
        self._objects = objects

    def routes(self) -> list[Operation]:
        one = "/v1/conversations/{conversation_id}"
        return [
            Operation(
                "POST /v1/conversations",
                self.create_conversation,
                ConversationObject,
                reads=NewConversation,
                default=b"{}",
            ),
            Operation(f"GET {one}", self.show_conversation, ConversationObject),
            Operation(f"POST {one}", self.change_conversation, ConversationObject, reads=ConversationChanges),
            Operation(f"DELETE {one}", self.delete_conversation, ConversationDeleted),
            Operation(f"POST {one}/items", self.create_items, InputItemList, reads=NewItems),
            Operation(f"GET {one}/items", self.list_items, InputItemList, query=(*PAGE, "order")),
            Operation(f"GET {one}/items/{{item_id}}", self.show_item, InputItem),
            Operation(f"DELETE {one}/items/{{item_id}}", self.delete_item, ConversationObject),
        ]

    async def create_conversation(self, request: Request, wire: NewConversation) -> Response:
        check_metadata(wire.metadata)
        history = self._history(request)
        items = await self._checked(request, history, wire.items or [])
        history.check_room(0, items)
        now = time.time()
        made = StoredObject(
            id=f"conv_{secrets.token_hex(24)}",
            workspace_id=principal_of(request).workspace_id,
            kind=CONVERSATION,
            created_at=now,
            expires_at=now + self._responses.ttl_s,
            metadata=wire.metadata or {},
        )
        await self._objects.add([made])
        await history.add_to_conversation(made.id, items)
        return json_response(_shown_conversation(made))

    async def show_conversation(self, request: Request) -> Response:
        return json_response(_shown_conversation(await self._found(request)))

    async def change_conversation(self, request: Request, wire: ConversationChanges) -> Response:
        check_metadata(wire.metadata)
        found = msgspec.structs.replace(await self._found(request), metadata=wire.metadata or {})
        if not await self._objects.change(found):
            raise no_conversation(found.id)
        return json_response(_shown_conversation(found))

    async def delete_conversation(self, request: Request) -> Response:
        """Delete a conversation. Its responses stay."""
        conversation_id = request.path_params["conversation_id"]
        workspace_id = principal_of(request).workspace_id
        if not await self._objects.delete(workspace_id, CONVERSATION, conversation_id):
            raise no_conversation(conversation_id)
        return json_response(ConversationDeleted(conversation_id))

    async def create_items(self, request: Request, wire: NewItems) -> Response:
        found = await self._found(request)
        history = self._history(request)
        items = await self._checked(request, history, wire.items)
        history.check_room(await history.conversation_bytes(found.id), items)
        added = await history.add_to_conversation(found.id, items)
        return json_response(InputItemList.of(added, has_more=False))

    async def list_items(self, request: Request) -> Response:
        found = await self._found(request)
        page = await self._objects.page(
            found.workspace_id,
            ITEM,
            parent_id=found.id,
            limit=integer_of(request, "limit", default=DEFAULT_PAGE, low=1, high=MAX_PAGE),
            order=choice_of(request, "order", default="desc", choices=("asc", "desc")),
            after=text_of(request, "after"),
        )
        return json_response(
            InputItemList.of([_decode_item(each.body) for each in page.objects], has_more=page.has_more)
        )

    async def show_item(self, request: Request) -> Response:
        found, item_id = await self._found(request), request.path_params["item_id"]
        item = await self._objects.find(found.workspace_id, ITEM, item_id, parent_id=found.id)
        if item is None:
            raise _no_item(item_id)
        return Response(item.body, media_type="application/json")

    async def delete_item(self, request: Request) -> Response:
        found, item_id = await self._found(request), request.path_params["item_id"]
        if not await self._objects.delete(found.workspace_id, ITEM, item_id, parent_id=found.id):
            raise _no_item(item_id)
        return json_response(_shown_conversation(found))

    def _history(self, request: Request) -> History:
        return History(self._responses, self._objects, principal_of(request))

    async def _checked(self, request: Request, history: History, given: list[InputItem]) -> list[InputItem]:
        """Return the items in their full form. Raises InvalidRequest for too many items, and for items that no prompt
        could be made of."""
        if len(given) > MAX_NEW_ITEMS:
            raise InvalidRequest(f"At most {MAX_NEW_ITEMS} items can be added at a time.", param="items")
        items = await history.own_items(given, request_id_of(request), "items")
        messages_of(items, None, [], "items")
        return items

    async def _found(self, request: Request) -> StoredObject:
        conversation_id = request.path_params["conversation_id"]
        found = await self._objects.find(principal_of(request).workspace_id, CONVERSATION, conversation_id)
        if found is None:
            raise no_conversation(conversation_id)
        return found


def _shown_conversation(found: StoredObject) -> ConversationObject:
    return ConversationObject(found.id, int(found.created_at), found.metadata)


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"There is no item with the id {item_id[:64]!r}.", param="item_id")
