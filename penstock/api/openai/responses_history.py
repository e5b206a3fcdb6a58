"""The history of a request to /v1/responses: stored responses, conversations, and referenced items.

The gateway stores responses as JSON; `StoredBodies` and `History` read them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from penstock.api.http.parsing import translated
from penstock.api.openai.responses_answers import ResponseBody, ResponseError
from penstock.api.openai.responses_items import InputItem, OutputItem, input_items, new_id, response_id_of
from penstock.core.errors import InvalidRequest, NotFound, quoted
from penstock.core.identity import Principal
from penstock.gateway.responses.objects import ITEM, ROW_BYTES, ObjectStore, StoredObject
from penstock.gateway.responses.service import Responses
from penstock.gateway.responses.store import HistoryBound, StoredResponse
from penstock.gateway.turns import in_thread

_MAX_ID_CHARS = 96

_to_json = msgspec.json.Encoder().encode


class StoredBodies:
    """Changes stored bodies; implements `ResponseFormat`."""

    def failed(self, body: bytes) -> bytes:
        response = _decode_body(body)
        response.status = "failed"
        message = "The server stopped before this response was finished."
        response.error = ResponseError("server_error", message)
        return _to_json(response)

    def cancelled(self, body: bytes) -> bytes | None:
        response = _decode_body(body)
        response.status = "cancelled"
        return _to_json(response) if response.background else None

    def ending(self, body: bytes, last_event: bytes, number: int) -> bytes:
        if _decode_body(body).status != "failed" or last_event.startswith(b"event: response.failed"):
            return b""
        start = b'{"type":"response.failed","sequence_number":%d,"response":' % number
        return b"event: response.failed\ndata: " + start + body + b"}\n\n"


class _StoredOutput(msgspec.Struct):
    """The part of a stored body that a conversation continues from."""

    output: list[InputItem]


_decode_body = msgspec.json.Decoder(ResponseBody).decode
_decode_output = msgspec.json.Decoder(_StoredOutput).decode
_decode_item = msgspec.json.Decoder(InputItem).decode
_decode_items = msgspec.json.Decoder(list[InputItem]).decode
_decode_raw_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_DIRECT_BYTES = 256 << 10  # that are decoded on the event loop

Result = TypeVar("Result")


async def _decoded(num_bytes: int, decode: Callable[[], Result]) -> Result:
    """Decode stored JSON of this size: in a thread if there is much of it."""
    return decode() if num_bytes <= _DIRECT_BYTES else await in_thread(decode)


def _items_in(data: bytes) -> list[InputItem]:
    """Decode the items of a request; many of them one by one, because in between other threads have their turns."""
    if len(data) <= _DIRECT_BYTES:
        return _decode_items(data)
    return [_decode_item(item) for item in _decode_raw_items(data)]


def _all_items_of(response: StoredResponse) -> list[InputItem]:
    """Return the items that a response was made from, and those that it put out."""
    return [*_items_in(response.input_items), *_decode_output(response.body).output]


async def input_items_of(response: StoredResponse) -> list[InputItem]:
    data = response.input_items
    return await _decoded(len(data), lambda: _items_in(data))


class History:
    """Gathers the items of one request. `recent` are responses that only this connection has, by their ids."""

    def __init__(
        self,
        responses: Responses,
        objects: ObjectStore,
        principal: Principal,
        recent: Mapping[str, StoredResponse] | None = None,
    ) -> None:
        self._responses = responses
        self._objects = objects
        self._principal = principal
        self._recent = recent or {}

    async def earlier_items(self, previous_id: str | None, conversation_id: str | None) -> list[InputItem]:
        """Return the items of the responses, or of the conversation, that the request continues with."""
        items: list[InputItem] = []
        if previous_id is not None:
            responses = await self._continued(previous_id)
            num_bytes = sum(response.num_bytes for response in responses)
            items += await _decoded(
                num_bytes, lambda: [item for response in responses for item in _all_items_of(response)]
            )
        if conversation_id is not None:
            items += await self.conversation_items(conversation_id)
        return items

    async def own_items(
        self, wire: str | list[InputItem], owner: str, param: str = "input"
    ) -> list[InputItem]:
        """Return the items of the request, with the items in place that it only refers to. `owner` is the request's
        id, from which items without an id get one."""
        known: dict[str, dict[str | None, InputItem]] = {}  # of the responses referred to, by item id
        bound = HistoryBound(param)
        items: list[InputItem] = []
        messages = wire if isinstance(wire, list) else ()
        full = await translated(messages, lambda: input_items(wire, owner, param))
        for position, item in enumerate(full):
            if item.type != "item_reference":
                items.append(item)
                continue
            response_id = response_id_of(item.id or "")
            if response_id is not None and response_id not in known:
                known[response_id] = await self._items_of(response_id, bound)
            referred = known.get(response_id or "", {}).get(item.id)
            if referred is None:
                raise NotFound(
                    f"There is no item with the id {quoted(item.id)}.", param=f"{param}[{position}].id"
                )
            bound.add(len(_to_json(referred)), num_responses=0)
            items.append(referred)
        return items

    async def conversation_items(self, conversation_id: str) -> list[InputItem]:
        found = await self._objects.children(
            self._principal.workspace_id,
            ITEM,
            conversation_id,
            keep_until=time.time() + self._responses.ttl_s,
            param="conversation",
        )
        if found is None:
            raise no_conversation(conversation_id)
        num_bytes = sum(len(each.body) for each in found)
        return await _decoded(num_bytes, lambda: [_decode_item(each.body) for each in found])

    async def add_to_conversation(
        self, conversation_id: str, items: Sequence[InputItem | OutputItem]
    ) -> list[InputItem]:
        """Does nothing to a conversation that has been deleted. Items whose ids are taken get new ones."""
        workspace_id = self._principal.workspace_id
        given = [item.id or "" for item in items]
        taken = await self._objects.known_ids(workspace_id, ITEM, given, parent_id=conversation_id)
        added: list[InputItem] = []
        for item in items:
            full = _decode_item(_to_json(item))
            if not full.id or full.id in taken or len(full.id) > _MAX_ID_CHARS or "\0" in full.id:
                full.id = new_id(full.type or "message")
            taken.add(full.id)
            added.append(full)
        now = time.time()
        await self._objects.add(
            [
                StoredObject(
                    id=item.id or "",
                    workspace_id=workspace_id,
                    kind=ITEM,
                    parent_id=conversation_id,
                    created_at=now,
                    expires_at=now + self._responses.ttl_s,
                    body=_to_json(item),
                )
                for item in added
            ]
        )
        return added

    async def conversation_bytes(self, conversation_id: str) -> int:
        num_bytes = await self._objects.num_child_bytes(
            self._principal.workspace_id,
            ITEM,
            conversation_id,
            keep_until=time.time() + self._responses.ttl_s,
        )
        if num_bytes is None:
            raise no_conversation(conversation_id)
        return num_bytes

    def check_room(self, num_bytes: int, items: Sequence[InputItem]) -> None:
        """Refuse items that would make a conversation of so many bytes too long to be read."""
        bound = HistoryBound("items")
        bound.add(num_bytes + sum(len(_to_json(item)) + ROW_BYTES for item in items))

    def unstored(self, previous_id: str | None) -> tuple[list[InputItem], str | None]:
        """Return the items of a response that only this connection has, and the stored response that it continues. Of
        a stored response: nothing, and itself."""
        recent = self._recent.get(previous_id or "")
        if recent is None:
            return [], previous_id
        return _all_items_of(recent), recent.previous_id

    async def _continued(self, response_id: str) -> list[StoredResponse]:
        """Return the responses from the first to this one. A recent response holds the items of all that are not
        stored."""
        recent = self._recent.get(response_id)
        if recent is None:
            return await self._responses.history(self._principal, response_id)
        if recent.previous_id is None:
            return [recent]
        return [*await self._responses.history(self._principal, recent.previous_id), recent]

    async def _items_of(self, response_id: str, bound: HistoryBound) -> dict[str | None, InputItem]:
        """Return the items that a response was made from and those that it put out, by their ids."""
        found = self._recent.get(response_id)
        try:
            found = found or await self._responses.find(self._principal, response_id)
        except NotFound:
            return {}
        bound.add(found.num_bytes)
        if not found.is_final:
            return {}
        stored = found
        items = await _decoded(found.num_bytes, lambda: _all_items_of(stored))
        return {item.id: item for item in items}


def no_conversation(conversation_id: str) -> NotFound:
    return NotFound(f"There is no conversation with the id {conversation_id[:64]!r}.", param="conversation")


def page_of(items: list[InputItem], after: str | None, limit: int) -> tuple[list[InputItem], bool]:
    """Return the items behind the item with the id `after`, and whether there are more of them."""
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise InvalidRequest(f"There is no item with the id {after[:64]!r}.", param="after")
        items = items[ids.index(after) + 1 :]
    return items[:limit], len(items) > limit
