"""How many ZeroMQ messages carry what gateway and engine tell each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio

from penstock.cluster.transport import ZmqEngineClient
from penstock.cluster.worker import Worker
from penstock.core.messages import (
    AbortRequests,
    AddRequest,
    Codec,
    EngineReady,
    EngineStats,
    Hello,
    RequestRejected,
    Shutdown,
    StepOutputs,
)
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.engine.echo import echo_card

WAIT_S = 240
CODEC = Codec()
READY = EngineReady(
    echo_card("echo", 1024), num_kv_blocks=8, block_size=16, max_num_seqs=8, max_output_tokens=1024
)


def make_request(request_id: str) -> Request:
    return Request(id=request_id, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=4))


class TestFromTheGateway:
    @pytest.fixture
    async def engine(self, tmp_path: Path) -> AsyncIterator[zmq.asyncio.Socket]:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(f"ipc://{tmp_path}/engine")
        yield socket
        context.destroy(linger=0)

    async def test_one_turn_of_the_loop_is_one_message(
        self, engine: zmq.asyncio.Socket, tmp_path: Path
    ) -> None:
        client = ZmqEngineClient(f"ipc://{tmp_path}/engine")
        client.start()
        async with asyncio.timeout(WAIT_S):
            gateway, hello = await engine.recv_multipart()
            assert CODEC.decode_to_engine(hello) == Hello()
            await engine.send_multipart((gateway, CODEC.encode(READY)))
            await client.wait_ready()
            for name in "ab":
                client.add(
                    make_request(name),
                    timeout_s=None,
                    on_event=lambda event: None,
                    on_error=lambda error: None,
                )
            client.abort("a")
            _, *messages = await engine.recv_multipart()
            assert [CODEC.decode_to_engine(message) for message in messages] == [
                AddRequest(make_request("a")),
                AddRequest(make_request("b")),
                AbortRequests(("a",)),
            ]
            client.abort("b")
            _, *messages = await engine.recv_multipart()
            assert [CODEC.decode_to_engine(message) for message in messages] == [AbortRequests(("b",))]
        client.close()


class ScriptedLoop:
    """An engine loop that makes `num_tokens` tokens for each request, one a step."""

    is_stuck = False

    def __init__(self, step_s: float, num_tokens: int) -> None:
        self.step_s = step_s
        self._num_tokens = num_tokens
        self._made: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._made)

    def add(self, request: Request, timeout_s: float | None, kv_source: object = None) -> None:
        self._made[request.id] = 0

    def abort(self, request_id: str) -> None:
        self._made.pop(request_id, None)

    def step(self) -> list[TokenEvent]:
        return [self._token(request_id) for request_id in list(self._made)]

    def _token(self, request_id: str) -> TokenEvent:
        self._made[request_id] += 1
        token_id = self._made[request_id]
        if token_id < self._num_tokens:
            return TokenEvent(request_id, (token_id,))
        del self._made[request_id]
        return TokenEvent(request_id, (token_id,), finish_reason=FinishReason.LENGTH)

    def take_rejections(self) -> list[RequestRejected]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats(num_steps=1)


class TestFromTheEngine:
    NUM_TOKENS = 16

    def outputs(self, tmp_path: Path, step_s: float) -> list[StepOutputs]:
        """What the worker sends for two requests that arrive together, up to the end of both."""
        endpoint = f"ipc://{tmp_path}/engine"
        worker = Worker(endpoint)
        worker._engine = SimpleNamespace(  # type: ignore[assignment]
            loop=ScriptedLoop(step_s, self.NUM_TOKENS), ready=READY, close=lambda: None
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            return list(self._read(endpoint))
        finally:
            thread.join(WAIT_S)
            worker.close()

    def _read(self, endpoint: str) -> Iterator[StepOutputs]:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        socket.connect(endpoint)
        socket.send_multipart([CODEC.encode(AddRequest(make_request(name))) for name in "ab"])
        num_ended = 0
        while num_ended < 2:
            message = CODEC.decode_from_engine(socket.recv())
            assert isinstance(message, StepOutputs)
            num_ended += sum(event.finish_reason is not None for event in message.events)
            yield message
        socket.send(CODEC.encode(Shutdown()))
        context.destroy(linger=1000)

    def test_a_step_that_takes_time_is_told_at_once(self, tmp_path: Path) -> None:
        outputs = [output for output in self.outputs(tmp_path, step_s=0.01) if output.events]
        assert [[event.token_ids for event in output.events] for output in outputs] == [
            [(token_id,)] * 2 for token_id in range(1, self.NUM_TOKENS + 1)
        ]

    def test_short_steps_lose_nothing_by_travelling_together(self, tmp_path: Path) -> None:
        outputs = self.outputs(tmp_path, step_s=0.0)
        for name in "ab":
            token_ids = [
                token_id
                for output in outputs
                for event in output.events
                if event.request_id == name
                for token_id in event.token_ids
            ]
            assert token_ids == list(range(1, self.NUM_TOKENS + 1))

    def test_the_last_news_bring_the_figures_with_them(self, tmp_path: Path) -> None:
        assert self.outputs(tmp_path, step_s=0.0)[-1].stats == EngineStats(num_steps=1)
