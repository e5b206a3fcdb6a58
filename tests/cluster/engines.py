"""Real engine processes for the tests of this room, and what a client hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.cluster.local import LocalLauncher
from penstock.cluster.replica import EngineClient, ReplicaSpec, RunningReplica
from penstock.cluster.supervisor import Supervisor
from penstock.cluster.transport import ZmqEngineClient
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams

WAIT_S = 240  # a busy machine may take a minute to start an engine
ENDLESS = 1_000_000  # tokens: no engine makes so many while a busy machine holds up the test


def echo_config(**scheduler: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="echo", max_model_len=1 << 20),
        cache=CacheConfig(num_kv_blocks=1 << 18),
        scheduler=SchedulerConfig(**scheduler),
    )


def echo_spec(**scheduler: object) -> ReplicaSpec:
    return ReplicaSpec(model="echo", engine=echo_config(**scheduler), model_path="echo")


def make_request(request_id: str, prompt: bytes = b"abc", max_tokens: int = 7) -> Request:
    return Request(
        id=request_id, prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=max_tokens)
    )


class Inbox:
    """What a client hears of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: PenstockError | None = None
        self.changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.finish_reason is not None

    def on_event(self, event: TokenEvent) -> None:
        self.tokens.extend(event.token_ids)
        self.finish_reason = event.finish_reason
        self.changed.set()

    def on_error(self, error: PenstockError) -> None:
        self.error = error
        self.changed.set()

    async def until(self, condition: Callable[[Inbox], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self):
                await self.changed.wait()
                self.changed.clear()

    async def until_over(self) -> None:
        await self.until(lambda inbox: inbox.is_over)


async def check_beginning(inbox: Inbox, text: bytes, count: int) -> None:
    """Wait for so many tokens of an echo that has no end."""
    await inbox.until(lambda inbox: len(inbox.tokens) >= count or inbox.is_over)
    assert not inbox.is_over
    assert bytes(inbox.tokens[:count]) == (text * (count // len(text) + 1))[:count]


def send(client: EngineClient, request: Request, timeout_s: float | None = None) -> Inbox:
    inbox = Inbox()
    client.add(request, timeout_s=timeout_s, on_event=inbox.on_event, on_error=inbox.on_error)
    return inbox


def lose_patience(supervisor: Supervisor, replica_id: str) -> None:
    """From now on, this replica counts as frozen after 0.6 s of silence. Other replicas may be as slow as a busy
    machine makes them."""
    supervisor._slot(replica_id).process._silence._timeout_s = 0.6


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    running: RunningReplica
    client: ZmqEngineClient

    @property
    def endpoint(self) -> str:
        return self.running.endpoint


@asynccontextmanager
async def engine_process(
    spec: ReplicaSpec, launcher: LocalLauncher | None = None
) -> AsyncIterator[EngineProcess]:
    """One that nobody watches or restarts."""
    running = await (launcher or LocalLauncher()).launch(spec, "replica-1")
    client = ZmqEngineClient(running.endpoint)
    client.start()
    try:
        await asyncio.wait_for(client.wait_ready(), WAIT_S)
        yield EngineProcess(running, client)
        client.shut_down_engine()
        assert await asyncio.wait_for(running.wait(), WAIT_S) == 0  # also says that no KV block was lost
    finally:
        running.kill()
        await running.stop()
        client.close()
