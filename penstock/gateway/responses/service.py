"""Stored and background responses: submits a request, records what comes of it, and finds it again.

This module knows no wire format: a `ResponseBuilder` turns the deltas of an answer into a body in the shape of its
API, and a `ResponseFormat` changes a stored body that this process did not build.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from penstock.core.errors import InvalidRequest, NotFound, PenstockError, StoreUnavailable
from penstock.core.identity import Principal
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, ReaderGone, WrappedAnswer
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, Usage
from penstock.gateway.responses.store import ResponseStore, StoredResponse

logger = logging.getLogger(__name__)

# A response in the background counts as lost when its gateway has not renewed its lease for so long.
LEASE_S = 30.0
RENEWAL_S = 10.0


class ResponseBuilder(Protocol):
    """One response as it grows."""

    @property
    def response_id(self) -> str: ...

    def chunk(self, delta: Delta) -> bytes: ...

    def finish(self, usage: Usage) -> None:
        """Call it after the last delta."""
        ...

    def fail(self, error: PenstockError) -> None: ...

    def to_json(self, model: str) -> bytes:
        """The body so far. `model` is the model that answers, which may be known only at the end."""
        ...


class ResponseFormat(Protocol):
    def failed(self, body: bytes) -> bytes:
        """The body of a response whose gateway has gone."""
        ...

    def cancelled(self, body: bytes) -> bytes | None:
        """The body of a cancelled response; None if it does not run in the background."""
        ...


class BuiltAnswer(WrappedAnswer):
    """An answer whose end is passed to `on_end` before its reader sees the end, so that a client that has read a
    response to its end can look it up."""

    def __init__(
        self, answer: AnswerStream, builder: ResponseBuilder, on_end: Callable[[bytes], Awaitable[object]]
    ) -> None:
        super().__init__(answer)
        self._builder = builder
        self._on_end = on_end

    async def __anext__(self) -> list[Delta]:
        """The reader passes each delta to the builder before it asks for the next."""
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
            self._builder.chunk(delta)
        await self._finish()
        return deltas

    async def _finish(self) -> None:
        self._builder.finish(self._answer.usage)
        await self._on_end(self._builder.to_json(self._answer.model))

    async def _fail(self, error: PenstockError) -> None:
        self._builder.fail(error)
        await self._on_end(self._builder.to_json(self._answer.model))


class Responses:
    """One per application. Owns the responses that run in the background."""

    def __init__(self, gateway: Gateway, store: ResponseStore, wire: ResponseFormat) -> None:
        self.gateway = gateway
        self._store = store
        self._wire = wire
        self._ttl_s = gateway.config.stored_response_days * 24 * 3600
        self._running: dict[str, tuple[AnswerStream, asyncio.Task[None]]] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def submit(
        self,
        request: GenerationRequest,
        build: Callable[[AnswerStream], ResponseBuilder],
        *,
        input_items: bytes,
        previous_id: str | None,
        is_stored: bool,
        in_background: bool,
    ) -> BuiltAnswer:
        """`input_items` is what the client sent, as JSON. In the background the answer needs no reader."""
        answer = await self.gateway.submit(request)
        builder = build(answer)
        record = StoredResponse(
            id=builder.response_id,
            workspace_id=request.principal.workspace_id,
            created_at=time.time(),
            expires_at=time.time() + self._ttl_s,
            is_final=False,
            body=b"",
            input_items=input_items,
            previous_id=previous_id,
        )
        if in_background:
            return await self._start_in_background(answer, builder, record)

        async def store(body: bytes) -> None:
            if is_stored:
                await self._store.add(_final(record, body))

        return BuiltAnswer(answer, builder, store)

    async def find(self, principal: Principal, response_id: str) -> StoredResponse:
        """Raises NotFound. A response whose gateway has gone is marked as failed."""
        found = await self._store.find(principal.workspace_id, response_id)
        if found is None:
            raise _not_found(response_id)
        if not found.is_lost(time.time()):
            return found
        failed = _final(found, self._wire.failed(found.body))
        return failed if await self._store.replace(failed) else await self.find(principal, response_id)

    async def history(self, principal: Principal, response_id: str) -> list[StoredResponse]:
        """A response and all that it continues, oldest first. The whole conversation is stored for longer by this."""
        history = await self._store.history(
            principal.workspace_id, response_id, keep_until=time.time() + self._ttl_s
        )
        if history is None:
            raise _not_found(response_id, param="previous_response_id")
        last = history[-1] if history[-1].is_final else await self.find(principal, response_id)
        if not last.is_final:
            raise InvalidRequest(
                "The previous response is still running in the background.", param="previous_response_id"
            )
        return [*history[:-1], last]

    async def delete(self, principal: Principal, response_id: str) -> None:
        if not await self._store.delete(principal.workspace_id, response_id):
            raise _not_found(response_id)
        self._stop(response_id)

    async def cancel(self, principal: Principal, response_id: str) -> bytes:
        """The body of the response, which by then is final. A response that ended before is left as it is."""
        found = await self.find(principal, response_id)
        body = self._wire.cancelled(found.body)
        if body is None:
            raise InvalidRequest("Only a response in the background can be cancelled.", param="response_id")
        if not found.is_final and await self._store.replace(_final(found, body)):
            self._stop(response_id)
        return (await self.find(principal, response_id)).body

    async def _start_in_background(
        self, answer: AnswerStream, builder: ResponseBuilder, record: StoredResponse
    ) -> BuiltAnswer:
        body, lease_until = builder.to_json(answer.model), time.time() + LEASE_S
        try:
            await self._store.add(msgspec.structs.replace(record, body=body, lease_until=lease_until))
        except BaseException:
            answer.cancel()  # nobody could ever ask for it
            raise
        built = BuiltAnswer(answer, builder, lambda body: self._store.replace(_final(record, body)))
        task = asyncio.create_task(self._run(built, record.id))
        self._running[record.id] = (answer, task)
        task.add_done_callback(lambda _: self._running.pop(record.id, None))
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return built

    async def _renew(self) -> None:
        """Renews leases as long as anything runs in the background."""
        while self._running:
            await asyncio.sleep(RENEWAL_S)
            if self._running:
                with contextlib.suppress(StoreUnavailable):
                    await self._store.renew(tuple(self._running), time.time() + LEASE_S)

    async def _run(self, built: BuiltAnswer, response_id: str) -> None:
        try:
            await built.collect()
        except (PenstockError, ReaderGone):
            return  # the response is recorded already, or its client cancelled it
        except Exception:
            logger.exception("the response %s could not be finished", response_id)

    def _stop(self, response_id: str) -> None:
        running = self._running.get(response_id)
        if running is not None:
            running[0].cancel()


def _final(record: StoredResponse, body: bytes) -> StoredResponse:
    return msgspec.structs.replace(record, is_final=True, body=body, lease_until=None)


def _not_found(response_id: str, param: str | None = None) -> NotFound:
    return NotFound(f"There is no response with the id {response_id!r}.", param=param)
