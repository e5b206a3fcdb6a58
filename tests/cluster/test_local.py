"""A real engine process (without a model) behind the real wire: served, aborted, killed, restarted, refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.cluster.local import LocalReplica
from penstock.cluster.transport import ZmqEngineClient
from penstock.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import EngineUnavailable, ModelLoadError, Overloaded, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams

WAIT_S = 20


def config(**scheduler: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="echo"),
        cache=CacheConfig(num_kv_blocks=4096),
        scheduler=SchedulerConfig(**scheduler),
    )


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


def send(replica: LocalReplica, request: Request, timeout_s: float | None = None) -> Inbox:
    inbox = Inbox()
    replica.client.add(request, timeout_s=timeout_s, on_event=inbox.on_event, on_error=inbox.on_error)
    return inbox


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def replica() -> AsyncIterator[LocalReplica]:
    replica = LocalReplica(config(), Path("echo"))
    await replica.start()
    yield replica
    await replica.stop()


async def test_requests_are_answered_token_by_token(replica: LocalReplica) -> None:
    inboxes = [send(replica, make_request(str(n), bytes([65 + n, 97 + n]))) for n in range(20)]
    for n, inbox in enumerate(inboxes):
        await inbox.until(lambda inbox: inbox.finish_reason is not None)
        assert bytes(inbox.tokens) == bytes([65 + n, 97 + n] * 4)[:7]
        assert inbox.finish_reason is FinishReason.LENGTH


async def test_an_abort_frees_the_blocks_and_silences_the_request(replica: LocalReplica) -> None:
    inbox = send(replica, make_request("endless", max_tokens=60_000))
    await inbox.until(lambda inbox: len(inbox.tokens) > 3)
    replica.client.abort("endless")
    heard = len(inbox.tokens)
    await until(lambda: replica.client.stats.num_steps > 0 and replica.client.stats.num_running == 0)
    assert len(inbox.tokens) == heard
    assert replica.client.stats.num_kv_blocks_used == 0


async def test_what_a_gateway_asked_for_ends_when_it_goes(replica: LocalReplica) -> None:
    other = ZmqEngineClient(replica.endpoint)
    other.start()
    await other.wait_ready()
    theirs, ours = Inbox(), send(replica, make_request("ours", max_tokens=60_000))
    request = make_request("theirs", max_tokens=60_000)
    other.add(request, timeout_s=None, on_event=theirs.on_event, on_error=theirs.on_error)
    await theirs.until(lambda inbox: len(inbox.tokens) > 3)
    await until(lambda: replica.client.stats.num_running == 2)
    other.close()  # what a killed process leaves: a closed socket, and no abort
    await until(lambda: replica.client.stats.num_running == 1)
    assert ours.finish_reason is None
    replica.client.abort("ours")


async def test_a_timeout_reaches_the_engine(replica: LocalReplica) -> None:
    inbox = send(replica, make_request("late", max_tokens=60_000), timeout_s=0.05)
    await inbox.until(lambda inbox: inbox.finish_reason is not None)
    assert inbox.finish_reason is FinishReason.DEADLINE


async def test_a_refused_request_gets_the_schedulers_error() -> None:
    replica = LocalReplica(config(max_num_seqs=1, max_queue_requests=0), Path("echo"))
    await replica.start()
    try:
        first = send(replica, make_request("first", max_tokens=60_000))
        await first.until(lambda inbox: bool(inbox.tokens))
        refused = send(replica, make_request("second"))
        await refused.until(lambda inbox: inbox.error is not None)
        assert isinstance(refused.error, Overloaded)
        assert refused.error.retry_after_s is not None
    finally:
        await replica.stop()


async def test_a_killed_engine_fails_its_requests_and_comes_back(replica: LocalReplica) -> None:
    inbox = send(replica, make_request("endless", max_tokens=60_000))
    await inbox.until(lambda inbox: bool(inbox.tokens))
    killed = replica.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await inbox.until(lambda inbox: inbox.error is not None)
    assert isinstance(inbox.error, EngineUnavailable)
    between = send(replica, make_request("too early"))
    assert isinstance(between.error, EngineUnavailable)
    await until(lambda: replica.client.ready is not None)
    assert replica.pid != killed
    again = send(replica, make_request("again"))
    await again.until(lambda inbox: inbox.finish_reason is not None)
    assert bytes(again.tokens) == b"abcabca"


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    replica = LocalReplica(config(), broken)
    try:
        with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
            await replica.start()
    finally:
        await replica.stop()


def test_an_engine_leaves_when_its_gateway_dies(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from penstock.cluster.local import LocalReplica
from penstock.core.config import EngineConfig

async def main():
    replica = LocalReplica(EngineConfig(), Path("echo"))
    await replica.start()
    Path({str(tmp_path / "pid")!r}).write_text(str(replica.pid))
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    gateway = subprocess.Popen([sys.executable, "-c", script])
    try:
        pid = _wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    finally:
        gateway.kill()
        gateway.wait()
    assert _wait_for(lambda: not _is_running(int(pid)))


def _is_running(pid: int) -> bool:
    """A zombie counts as gone: whoever adopted it may take its time to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(condition: Callable[[], object]) -> object:
    for _ in range(WAIT_S * 20):
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail("waited in vain")
