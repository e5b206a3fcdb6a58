"""/v1/conversations: create, look up, change and delete conversations, and the items in them."""

from __future__ import annotations

import secrets
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http.answers import json_response
from penstock.api.http.context import principal_of, request_id_of
from penstock.api.http.parsing import choice_of, integer_of, text_of
from penstock.api.http.routes import PAGE, Operation
from penstock.api.openai.responses_endpoints import DEFAULT_PAGE, MAX_PAGE, InputItemList, item_list
from penstock.api.openai.responses_history import CONVERSATION, ITEM, History, no_conversation
from penstock.api.openai.responses_items import InputItem, messages_of
from penstock.api.openai.responses_requests import check_metadata
from penstock.core.errors import NotFound
from penstock.gateway.responses.objects import ObjectStore, StoredObject
from penstock.gateway.responses.service import Responses

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
        history.check_room([], items)
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
        return json_response(_shown(made))

    async def show_conversation(self, request: Request) -> Response:
        return json_response(_shown(await self._found(request)))

    async def change_conversation(self, request: Request, wire: ConversationChanges) -> Response:
        check_metadata(wire.metadata)
        found = msgspec.structs.replace(await self._found(request), metadata=wire.metadata or {})
        if not await self._objects.change(found):
            raise no_conversation(found.id)
        return json_response(_shown(found))

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
        history.check_room(await history.conversation_items(found.id), items)
        return json_response(item_list(await history.add_to_conversation(found.id, items), has_more=False))

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
            item_list([_decode_item(each.body) for each in page.objects], has_more=page.has_more)
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
        return json_response(_shown(found))

    def _history(self, request: Request) -> History:
        return History(self._responses, self._objects, principal_of(request))

    async def _checked(self, request: Request, history: History, given: list[InputItem]) -> list[InputItem]:
        """Return the items in their full form. Raises InvalidRequest for items that no prompt could be made of."""
        items = await history.own_items(given, request_id_of(request), "items")
        messages_of(items, None, [], "items")
        return items

    async def _found(self, request: Request) -> StoredObject:
        conversation_id = request.path_params["conversation_id"]
        found = await self._objects.find(principal_of(request).workspace_id, CONVERSATION, conversation_id)
        if found is None:
            raise no_conversation(conversation_id)
        return found


def _shown(found: StoredObject) -> ConversationObject:
    return ConversationObject(found.id, int(found.created_at), found.metadata)


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"There is no item with the id {item_id[:64]!r}.", param="item_id")
