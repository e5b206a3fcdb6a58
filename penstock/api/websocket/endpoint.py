"""/v1/stream: many requests over one WebSocket, each answered token by token.

One task reads messages; each request has a task that writes its answer. A reader that is slow makes those tasks wait,
and waiting answers are merged; one that falls too far behind loses its connection, and the engine never waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from penstock.api.extensions import EXTENSION_FIELDS, refuse_foreign
from penstock.api.http.access_log import RequestLog
from penstock.api.http.authenticate import KEY_SUBPROTOCOL
from penstock.api.http.bodies import PendingBodies
from penstock.api.http.browsers import AllowedOrigins, is_foreign_page
from penstock.api.http.context import current_principal_of, principal_of
from penstock.api.http.errors import error_response, nested_too_deeply, sentence
from penstock.api.http.parsing import BodyDecoder, translated
from penstock.api.openai.answers import wire_finish_reason, wire_usage
from penstock.api.openai.requests import ChatCompletionRequest, CompletionRequest
from penstock.core.errors import (
    AuthenticationFailed,
    Conflict,
    InvalidRequest,
    NotFound,
    Overloaded,
    PenstockError,
    PermissionDenied,
    RateLimited,
    quoted,
)
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import OPEN_PRINCIPAL
from penstock.core.shares import Shares
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, ReaderGone
from penstock.gateway.gateway import Gateway
from penstock.gateway.metrics.table import Figures, figures_of
from penstock.gateway.prompts import GenerationRequest

logger = logging.getLogger(__name__)


MAX_ID_CHARS = 128

RequestId: TypeAlias = str | int | None
_to_json = msgspec.json.Encoder().encode


class Envelope(msgspec.Struct):
    """The fields that determine the kind of a message. `Raw` parts are decoded when the kind is known.

    The fields of a request are those of /v1/completions when it has a `prompt`, and those of /v1/chat/completions
    when it has `messages`.
    """

    id: str | int | None = None
    cancel: str | int | msgspec.UnsetType = msgspec.UNSET
    ping: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class MessageDecoder:
    def __init__(self) -> None:
        self._envelope = BodyDecoder(Envelope)
        self._chat = BodyDecoder(ChatCompletionRequest, EXTENSION_FIELDS, refuse_foreign)
        self._completion = BodyDecoder(CompletionRequest, EXTENSION_FIELDS, refuse_foreign)

    async def envelope(self, socket: WebSocket, data: bytes) -> Envelope:
        envelope = await self._envelope.decode_in_turns(socket, data)
        if isinstance(envelope.id, str) and not 0 < len(envelope.id) <= MAX_ID_CHARS:
            raise InvalidRequest(f"An id has 1 to {MAX_ID_CHARS} characters.", param="id")
        return envelope

    async def request(self, socket: WebSocket, data: bytes, envelope: Envelope) -> GenerationRequest:
        has_prompt = envelope.prompt is not msgspec.UNSET
        if has_prompt == (envelope.messages is not msgspec.UNSET):
            raise InvalidRequest("Give either prompt or messages; or cancel or ping.", param="prompt")
        decoder = self._completion if has_prompt else self._chat
        wire = await decoder.decode_in_turns(socket, data)
        wire.stream = True  # everything streams here, whether or not the client says so
        if wire.logprobs is not None and wire.logprobs is not False:
            raise InvalidRequest(
                "Log-probabilities are not part of this protocol.",
                param="logprobs",
                hint="Use /v1/chat/completions or /v1/completions.",
            )
        messages = wire.messages if isinstance(wire, ChatCompletionRequest) else ()
        return await translated(messages, wire.to_generation)


class MessageWriter:
    """Writes the messages of one request. Everything but the text of a token is encoded once."""

    def __init__(self, request_id: RequestId, answer: AnswerStream) -> None:
        self._named = {} if request_id is None else {"id": request_id}
        self._start = b"{" if request_id is None else b'{"id":%b,' % _to_json(request_id)
        self._answer = answer
        self._numbers_choices = answer.num_choices > 1
        self._reasons: dict[int, str] = {}
        self._called_tools: set[int] = set()

    def news(self, deltas: Sequence[Delta]) -> list[bytes]:
        return [message for delta in deltas if (message := self._news_of(delta)) is not None]

    def done(self) -> bytes:
        reasons = [self._reasons[index] for index in sorted(self._reasons)]
        return _to_json(
            {
                **self._named,
                "done": True,
                "finish_reason": reasons if self._numbers_choices else reasons[0],
                "model": self._answer.model,
                "request_id": self._answer.id,
                "usage": wire_usage(self._answer.usage),
                **({"warnings": self._answer.warnings} if self._answer.warnings else {}),
            }
        )

    def _news_of(self, delta: Delta) -> bytes | None:
        if delta.tool_calls:
            self._called_tools.add(delta.index)
        if delta.finish_reason is not None:
            called_tools = delta.index in self._called_tools
            self._reasons[delta.index] = wire_finish_reason(delta.finish_reason, called_tools=called_tools)
        if delta.reasoning or delta.tool_calls:
            return _to_json(self._named | self._parts(delta))
        if not delta.text:
            return None
        index = b'"index":%d,' % delta.index if self._numbers_choices else b""
        return b'%b%b"token":%b}' % (self._start, index, _to_json(delta.text))

    def _parts(self, delta: Delta) -> dict[str, Any]:
        parts: dict[str, Any] = {"index": delta.index} if self._numbers_choices else {}
        if delta.reasoning:
            parts["reasoning"] = delta.reasoning
        if delta.text:
            parts["token"] = delta.text
        if delta.tool_calls:
            parts["tool_calls"] = delta.tool_calls
        return parts


def error_message(request_id: RequestId, error: PenstockError) -> bytes:
    detail: dict[str, Any] = {
        "message": sentence(error),
        "type": error.type,
        "code": error.code,
        "param": error.param,
        "status": error.status,
    }
    if error.retry_after_s is not None:
        detail["retry_after_s"] = error.retry_after_s
    return _to_json({"error": detail} if request_id is None else {"error": detail, "id": request_id})


def cancelled_message(request_id: RequestId, answer: AnswerStream | None) -> bytes:
    """Return the end of a request that its own client cancelled. Tokens that were generated before count as usage."""
    message: dict[str, Any] = {"id": request_id, "done": True, "cancelled": True}
    if answer is not None:
        message["usage"] = wire_usage(answer.usage)
    return _to_json(message)


def pong_message(value: msgspec.Raw) -> bytes:
    return b'{"pong":%b}' % bytes(value)


PATH = "/v1/stream"
POLICY_VIOLATION = 1008
MESSAGE_TOO_BIG = 1009
IDLE_TOO_LONG = 4408
TOO_SLOW = 4409
MAX_BAD_MESSAGES = 100  # after this many that make no sense, the client does not speak this protocol


@dataclass
class SocketMetrics:
    num_open: int = 0
    num_accepted: int = 0
    num_refused: int = 0
    num_requests: int = 0
    num_too_slow: int = 0

    def figures(self) -> Figures:
        return figures_of(self, "websockets")


class WebSocketEndpoint:
    def __init__(self, gateway: Gateway, config: ServerConfig, request_log: RequestLog | None = None) -> None:
        self.gateway = gateway
        self.config = config
        self.request_log = request_log
        self._origins = AllowedOrigins(config.allowed_origins)
        self.decoder = MessageDecoder()
        self.metrics = SocketMetrics()
        self._shares = Shares(config.max_websockets)
        gateway.metrics.register(self.metrics)

    def routes(self) -> list[WebSocketRoute]:
        return [WebSocketRoute(PATH, self.serve)]

    async def serve(self, socket: WebSocket) -> None:
        await self.run(SocketSession(self, socket), socket)

    async def run(self, session: SocketSession, socket: WebSocket) -> None:
        """Accept a connection, unless there are too many or it comes from a foreign page, and serve it to its end."""
        refusal = self._refusal(socket)
        if refusal is not None:
            await socket.send_denial_response(error_response(refusal))
            return
        # Counted before the first wait, so that a flood of handshakes cannot pass the limit together.
        self.metrics.num_open += 1
        self.metrics.num_accepted += 1
        holder = _holder_of(socket)
        self._shares.add(holder)
        try:
            await socket.accept(subprotocol_of(socket))
            await session.run()
        except WebSocketDisconnect:
            pass
        finally:
            self.metrics.num_open -= 1
            self._shares.add(holder, -1)

    def _refusal(self, socket: WebSocket) -> PenstockError | None:
        if self.metrics.num_open >= self.config.max_websockets:
            self.metrics.num_refused += 1
            return Overloaded(
                f"This server holds at most {self.config.max_websockets} WebSockets, and all are in use.",
                retry_after_s=5.0,
            )
        holder = _holder_of(socket)
        if self._shares.is_full_for(holder):
            self.metrics.num_refused += 1
            return RateLimited(
                f"This workspace has {self._shares.of(holder)} WebSockets, and the rest is kept for others.",
                retry_after_s=5.0,
            )
        # A host name could point here only for the attack (DNS rebinding), and a socket shows its page the answers.
        headers = socket.scope["headers"]
        is_checked = principal_of(socket) == OPEN_PRINCIPAL and not self._origins.names(headers)
        if is_checked and is_foreign_page(headers, needs_local_name=True):
            return PermissionDenied(
                "Without keys, pages of other sites may not open WebSockets to this server.",
                hint="Use a key, or open the page from this server's own address.",
            )
        return None


def refusal_of(caught: PenstockError | RecursionError) -> PenstockError:
    return nested_too_deeply() if isinstance(caught, RecursionError) else caught


def _holder_of(socket: WebSocket) -> str:
    """Return the workspace whose share a connection takes: none on a server without keys, which has one owner."""
    principal = principal_of(socket)
    return "" if principal is OPEN_PRINCIPAL else principal.workspace_id


def subprotocol_of(socket: WebSocket) -> str | None:
    """Return the first subprotocol that the client offers, except those that carry a key: no key is repeated. A
    browser gives up where it offered some and none is chosen."""
    offered: list[str] = socket.scope.get("subprotocols", [])
    return next((each for each in offered if not each.startswith(KEY_SUBPROTOCOL)), None)


class SocketSession:
    """One connection. `_live` holds its requests by id, from their first message to their last."""

    def __init__(self, endpoint: WebSocketEndpoint, socket: WebSocket) -> None:
        self._endpoint = endpoint
        self._socket = socket
        self._live: dict[RequestId, asyncio.Task[None]] = {}
        self._answers: dict[RequestId, AnswerStream] = {}
        self._bodies: PendingBodies = socket.app.pending_bodies
        self._kept: dict[RequestId, int] = {}  # bytes of the messages of requests
        self._holder = _holder_of(socket)
        self._num_bad_messages = 0

    async def run(self) -> None:
        try:
            while (data := await self._receive()) is not None:
                await self._handle(data)
                if not self._live and await self._has_lost_its_key():
                    await self._close(POLICY_VIOLATION, "the key is not valid any more")
                    return
        finally:
            tasks = list(self._live.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for name in list(self._kept):
                self._release(name)

    async def _has_lost_its_key(self) -> bool:
        """Return whether the key was revoked, or may do this no longer. Its connection would keep its place for as
        long as the client sends pings. Answers that run come to their end before that."""
        try:
            await current_principal_of(self._socket)
        except (AuthenticationFailed, PermissionDenied):
            return True
        except PenstockError:  # keys cannot be checked now
            return False
        return False

    async def _receive(self) -> bytes | None:
        """Return the next message; None when the connection is over."""
        while True:
            try:
                async with asyncio.timeout(self._endpoint.config.websocket_idle_timeout_s):
                    message = await self._socket.receive()
                break
            except TimeoutError:
                if not self._live:
                    await self._close(IDLE_TOO_LONG, "nothing was asked for too long")
                    return None
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        data: bytes = text.encode() if text is not None else message["bytes"]
        if len(data) > self._endpoint.config.max_body_bytes:
            await self._close(MESSAGE_TOO_BIG, "the message is too large")
            return None
        return data

    async def _handle(self, data: bytes) -> None:
        request_id: RequestId = None
        try:
            envelope = await self._endpoint.decoder.envelope(self._socket, data)
            request_id = envelope.id
            if envelope.ping is not msgspec.UNSET:
                await self._send(pong_message(envelope.ping))
            elif envelope.cancel is not msgspec.UNSET:
                await self._cancel(envelope.cancel)
            else:
                await self._start(data, envelope)
        except (PenstockError, RecursionError) as caught:
            error = refusal_of(caught)
            await self._refuse(error, error_message(request_id, error))

    async def _refuse(self, error: PenstockError, message: bytes) -> None:
        """Answer a message that begins no request, unless the client does not speak this protocol."""
        await self._send(message)
        if isinstance(error, InvalidRequest):
            self._num_bad_messages += 1
            if self._num_bad_messages >= MAX_BAD_MESSAGES:
                await self._close(POLICY_VIOLATION, "too many messages that make no sense")

    async def _start(self, data: bytes, envelope: Envelope) -> None:
        config = self._endpoint.config
        if envelope.id in self._live:
            raise Conflict(
                "A request with this id is still running.",
                param="id",
                hint="Give each request an id of its own.",
            )
        if len(self._live) >= config.max_websocket_requests:
            raise RateLimited(
                f"A connection runs at most {config.max_websocket_requests} requests at once.",
                retry_after_s=1.0,
            )
        request = await self._endpoint.decoder.request(self._socket, data, envelope)
        self._keep(envelope.id, len(data))
        self._endpoint.metrics.num_requests += 1
        task = asyncio.create_task(self._answer(envelope.id, request))
        self._live[envelope.id] = task
        task.add_done_callback(lambda _: self._forget(envelope.id))

    def _keep(self, request_id: RequestId, num_bytes: int) -> None:
        """Count a message that is kept until its request ends. Raises RateLimited."""
        self._bodies.keep(self._holder, num_bytes)
        self._kept[request_id] = self._kept.get(request_id, 0) + num_bytes

    def _forget(self, request_id: RequestId) -> None:
        self._live.pop(request_id, None)
        self._answers.pop(request_id, None)
        self._release(request_id)

    def _release(self, request_id: RequestId) -> None:
        self._bodies.kept.add(self._holder, -self._kept.pop(request_id, 0))

    async def _cancel(self, request_id: RequestId) -> None:
        task = self._live.get(request_id)
        if task is None:
            raise NotFound(f"There is no running request with the id {quoted(request_id)}.", param="cancel")
        answer = self._answers.get(request_id)
        if answer is not None:
            answer.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._forget(request_id)
        await self._send(cancelled_message(request_id, answer))

    async def _answer(self, request_id: RequestId, request: GenerationRequest) -> None:
        """Runs as a task of its own, so that its trace is its own too."""
        request = msgspec.structs.replace(request, request_id=uuid.uuid4().hex)
        async with self._answering(request.request_id, PATH, partial(error_message, request_id)):
            principal = await current_principal_of(self._socket)
            answer = await self._endpoint.gateway.submit(
                msgspec.structs.replace(request, principal=principal)
            )
            self._answers[request_id] = answer
            await self._write(MessageWriter(request_id, answer), answer)

    @contextlib.asynccontextmanager
    async def _answering(
        self, name: str, path: str, message_of: Callable[[PenstockError], bytes]
    ) -> AsyncIterator[None]:
        """Log the request that is answered meanwhile, and tell the client of its failure."""
        log = self._endpoint.request_log
        record = None if log is None else log.begin(name, "WS", path, self._socket.scope["headers"])
        status = 499
        try:
            yield
            status = 200
        except (PenstockError, RecursionError) as caught:
            error = refusal_of(caught)
            status = error.status
            await self._send(message_of(error))
        except ReaderGone:
            pass
        except Exception:
            status = 500
            logger.exception("request %s (WebSocket %s) failed", name, path)
            await self._send(message_of(PenstockError("The server met an error that it did not foresee.")))
        finally:
            if log is not None and record is not None:
                log.end(record, "WS", path, status, principal_of(self._socket))

    async def _write(self, writer: MessageWriter, answer: AnswerStream) -> None:
        has_begun = False
        try:
            async for deltas in answer:
                has_begun = True
                for message in writer.news(deltas):
                    await self._send(message)
            await self._send(writer.done())
        except Overloaded as error:
            if not has_begun:
                raise
            # The engine takes back nothing that it has begun: this reader fell behind by more than a buffer.
            self._endpoint.metrics.num_too_slow += 1
            await self._close(TOO_SLOW, error.message)
        finally:
            answer.cancel()

    async def _send(self, message: bytes) -> None:
        """Waits while the reader's buffers are full. That the reader has gone is for `_receive` to find out."""
        if self._socket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(WebSocketDisconnect):
                await self._socket.send_text(message.decode())

    async def _close(self, code: int, reason: str) -> None:
        if self._socket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(WebSocketDisconnect):
                await self._socket.close(code, reason[:120])
