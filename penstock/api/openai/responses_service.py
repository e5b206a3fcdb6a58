"""Makes responses: gathers the conversation, submits it, and stores what comes of it. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from penstock.api.openai.responses_answers import ResponseBody, ResponseError, ResponseEvents, new_response
from penstock.api.openai.responses_items import InputItem, input_items, response_id_of
from penstock.api.openai.responses_requests import ResponseRequest
from penstock.core.errors import InvalidRequest, NotFound, PenstockError, StoreUnavailable
from penstock.core.identity import Principal
from penstock.gateway.choice import Delta
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest
from penstock.gateway.responses.store import HistoryBound, ResponseStore, StoredResponse
from penstock.gateway.served_model import ServedModel
from penstock.gateway.stream import AnswerStream, ReaderGone
from penstock.gateway.wrapped_answer import WrappedAnswer

logger = logging.getLogger(__name__)

# A response in the background is given up when its gateway has not spoken of it for so long.
LEASE_S = 30.0
RENEWAL_S = 10.0

_to_json = msgspec.json.Encoder().encode


class _StoredOutput(msgspec.Struct):
    """The part of a stored body that a conversation goes on from."""

    output: list[InputItem]


_decode_output = msgspec.json.Decoder(_StoredOutput).decode
_decode_items = msgspec.json.Decoder(list[InputItem]).decode


class RecordedAnswer(WrappedAnswer):
    """Hands its end to `on_end` before its reader sees it: whoever has read a response to its end can look it up."""

    def __init__(
        self,
        answer: AnswerStream,
        events: ResponseEvents,
        on_end: Callable[[ResponseBody], Awaitable[object]],
    ) -> None:
        super().__init__(answer)
        self._on_end = on_end
        self.events = events

    async def __anext__(self) -> list[Delta]:
        """The reader passes each delta to `events` before it asks for the next."""
        try:
            return await anext(self._answer)
        except StopAsyncIteration:
            await self._finish()
            raise
        except PenstockError as error:
            await self._fail(error)
            raise

    async def collect(self) -> list[Delta]:
        try:
            deltas = await self._answer.collect()
        except PenstockError as error:
            await self._fail(error)
            raise
        for delta in deltas:
            self.events.chunk(delta)
        await self._finish()
        return deltas

    async def _finish(self) -> None:
        self.events.body.model = self._answer.model  # which may turn out at the end
        self.events.finish(self._answer.usage)
        await self._on_end(self.events.body)

    async def _fail(self, error: PenstockError) -> None:
        self.events.fail(error)
        await self._on_end(self.events.body)


class Responses:
    """One per application. Owns the responses that run in the background."""

    def __init__(self, gateway: Gateway, store: ResponseStore) -> None:
        self._gateway = gateway
        self._store = store
        self._ttl_s = gateway.config.stored_response_days * 24 * 3600
        self._running: dict[str, tuple[AnswerStream, asyncio.Task[None]]] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def create(
        self,
        request: ResponseRequest,
        principal: Principal,
        sign: Callable[[GenerationRequest], GenerationRequest],
    ) -> RecordedAnswer:
        """`sign` adds to a wish what is known about its caller."""
        request.check()
        own_items = await self._own_items(request, principal)
        items = [*await self._earlier_items(request, principal), *own_items]
        wish = sign(request.to_generation(items))
        if request.truncation == "auto":
            wish = msgspec.structs.replace(wish, drops_oldest_turns=True)
        answer = await self._gateway.submit(wish)
        body = new_response(request, answer)
        events = ResponseEvents(
            body, wants_logprobs=request.wants_logprobs, custom_tools=request.custom_tools
        )
        record = StoredResponse(
            id=body.id,
            workspace_id=principal.workspace_id,
            created_at=time.time(),
            expires_at=time.time() + self._ttl_s,
            is_final=False,
            body=b"",
            input_items=_to_json(own_items),
            previous_id=request.previous_response_id,
        )
        if request.background:
            return await self._start_in_background(answer, events, record)
        return RecordedAnswer(answer, events, lambda body: self._keep(body, record))

    async def count_tokens(self, request: ResponseRequest, principal: Principal) -> int:
        request.check()
        model = self._model(request, principal)
        async with self._gateway.accounts.errand(principal, model.card.name, "count_tokens"):
            own_items = await self._own_items(request, principal)
            items = [*await self._earlier_items(request, principal), *own_items]
            return len(await model.token_ids(request.chat_prompt(items)))

    async def find(self, principal: Principal, response_id: str) -> StoredResponse:
        found = await self._store.find(principal.workspace_id, response_id)
        if found is None:
            raise _not_found(response_id)
        if not found.is_lost(time.time()):
            return found
        body = msgspec.json.decode(found.body, type=ResponseBody)
        body.status = "failed"
        body.error = ResponseError("server_error", "The server stopped before this response was finished.")
        failed = _final(found, body)
        return failed if await self._store.replace(failed) else await self.find(principal, response_id)

    async def list_items(self, principal: Principal, response_id: str) -> list[InputItem]:
        return _decode_items((await self.find(principal, response_id)).input_items)

    async def delete(self, principal: Principal, response_id: str) -> None:
        if not await self._store.delete(principal.workspace_id, response_id):
            raise _not_found(response_id)
        self._stop(response_id)

    async def cancel(self, principal: Principal, response_id: str) -> bytes:
        """The body of the response, which by then is final. One that ended before is left as it is."""
        found = await self.find(principal, response_id)
        body = msgspec.json.decode(found.body, type=ResponseBody)
        if not body.background:
            raise InvalidRequest("Only a response in the background can be cancelled.", param="response_id")
        if not found.is_final:
            body.status = "cancelled"
            cancelled = _final(found, body)
            if await self._store.replace(cancelled):
                self._stop(response_id)
        return (await self.find(principal, response_id)).body

    async def _own_items(self, request: ResponseRequest, principal: Principal) -> list[InputItem]:
        """The items of the request, with those in place that it only refers to."""
        outputs: dict[str, dict[str | None, InputItem]] = {}  # of the responses referred to, by item id
        bound = HistoryBound("input")
        items: list[InputItem] = []
        for position, item in enumerate(input_items(request.input)):
            if item.type != "item_reference":
                items.append(item)
                continue
            param = f"input[{position}].id"
            response_id = response_id_of(item.id or "")
            if response_id is not None and response_id not in outputs:
                found = await self._store.find(principal.workspace_id, response_id)
                output = _decode_output(found.body).output if found is not None and found.is_final else []
                outputs[response_id] = {known.id: known for known in output}
                bound.add(0 if found is None else len(found.body))
            referred = outputs.get(response_id or "", {}).get(item.id)
            if referred is None:
                raise NotFound(f"There is no item with the id {item.id!r}.", param=param)
            bound.add(len(_to_json(referred)), num_responses=0)
            items.append(referred)
        return items

    async def _earlier_items(self, request: ResponseRequest, principal: Principal) -> list[InputItem]:
        if request.previous_response_id is None:
            return []
        history = await self._store.history(
            principal.workspace_id, request.previous_response_id, keep_until=time.time() + self._ttl_s
        )
        if history is None:
            raise _not_found(request.previous_response_id, param="previous_response_id")
        last = history[-1] if history[-1].is_final else await self.find(principal, history[-1].id)
        if not last.is_final:
            raise InvalidRequest(
                "The previous response is still running in the background.", param="previous_response_id"
            )
        items: list[InputItem] = []
        for response in history:
            items += _decode_items(response.input_items)
            items += _decode_output(response.body).output
        return items

    def _model(self, request: ResponseRequest, principal: Principal) -> ServedModel:
        return self._gateway.catalogue.permitted(principal, request.model)

    async def _keep(self, body: ResponseBody, record: StoredResponse) -> None:
        if body.store:
            await self._store.add(_final(record, body))

    async def _start_in_background(
        self, answer: AnswerStream, events: ResponseEvents, record: StoredResponse
    ) -> RecordedAnswer:
        try:
            await self._store.add(
                msgspec.structs.replace(record, body=_to_json(events.body), lease_until=time.time() + LEASE_S)
            )
        except BaseException:
            answer.cancel()  # nobody could ever ask for it
            raise
        recorded = RecordedAnswer(
            answer,
            events,
            lambda body: self._store.replace(_final(record, body)),
        )
        task = asyncio.create_task(self._run(recorded))
        self._running[record.id] = (answer, task)
        task.add_done_callback(lambda _: self._running.pop(record.id, None))
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return recorded

    async def _renew(self) -> None:
        """As long as anything runs in the background."""
        while self._running:
            await asyncio.sleep(RENEWAL_S)
            if self._running:
                with contextlib.suppress(StoreUnavailable):
                    await self._store.renew(tuple(self._running), time.time() + LEASE_S)

    async def _run(self, recorded: RecordedAnswer) -> None:
        try:
            await recorded.collect()
        except (PenstockError, ReaderGone):
            return  # recorded already, or cancelled by whoever asked for it
        except Exception:
            logger.exception("the response %s could not be finished", recorded.events.body.id)

    def _stop(self, response_id: str) -> None:
        running = self._running.get(response_id)
        if running is not None:
            running[0].cancel()


def _final(record: StoredResponse, body: ResponseBody) -> StoredResponse:
    return msgspec.structs.replace(record, is_final=True, body=_to_json(body), lease_until=None)


def _not_found(response_id: str, param: str | None = None) -> NotFound:
    return NotFound(f"There is no response with the id {response_id!r}.", param=param)
