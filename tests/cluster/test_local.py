"""A real engine process (without a model) behind the real wire: served, aborted, refused, orphaned."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.cluster.early import EarlyProcess
from penstock.cluster.local import LocalLauncher
from penstock.cluster.transport import ZmqEngineClient
from penstock.core.errors import Overloaded
from penstock.core.request import FinishReason
from tests.cluster.engines import (
    ENDLESS,
    WAIT_S,
    EngineProcess,
    Inbox,
    echo_spec,
    engine_process,
    make_request,
    send,
    until,
)

NO_BYTECODE = Path("/proc/nobody/bytecode")


@pytest.fixture
async def engine() -> AsyncIterator[EngineProcess]:
    async with engine_process(echo_spec()) as process:
        yield process


async def test_requests_are_answered_token_by_token(engine: EngineProcess) -> None:
    inboxes = [send(engine.client, make_request(str(n), bytes([65 + n, 97 + n]))) for n in range(20)]
    for n, inbox in enumerate(inboxes):
        await inbox.until(lambda inbox: inbox.finish_reason is not None)
        assert bytes(inbox.tokens) == bytes([65 + n, 97 + n] * 4)[:7]
        assert inbox.finish_reason is FinishReason.LENGTH


async def test_a_process_is_told_where_bytecode_may_be_kept(tmp_path: Path) -> None:
    async with engine_process(echo_spec(), LocalLauncher(bytecode=tmp_path)) as process:
        command = _command(process.running.pid)
        assert command[command.index("--bytecode") + 1] == str(tmp_path)


async def test_an_abort_frees_the_blocks_and_silences_the_request(engine: EngineProcess) -> None:
    inbox = send(engine.client, make_request("endless", max_tokens=ENDLESS))
    await inbox.until(lambda inbox: len(inbox.tokens) > 3)
    engine.client.abort("endless")
    heard = len(inbox.tokens)
    await until(lambda: engine.client.stats.num_steps > 0 and engine.client.stats.num_running == 0)
    assert len(inbox.tokens) == heard
    assert engine.client.stats.num_kv_blocks_used == 0


async def test_what_a_gateway_asked_for_ends_when_it_goes(engine: EngineProcess) -> None:
    other = ZmqEngineClient(engine.endpoint)
    other.start()
    await other.wait_ready()
    theirs, ours = Inbox(), send(engine.client, make_request("ours", max_tokens=ENDLESS))
    request = make_request("theirs", max_tokens=ENDLESS)
    other.add(request, timeout_s=None, on_event=theirs.on_event, on_error=theirs.on_error)
    await theirs.until(lambda inbox: len(inbox.tokens) > 3)
    await until(lambda: engine.client.stats.num_running == 2)
    other.close()  # what a killed process leaves: a closed socket, and no abort
    await until(lambda: engine.client.stats.num_running == 1)
    assert ours.finish_reason is None
    engine.client.abort("ours")


async def test_a_timeout_reaches_the_engine(engine: EngineProcess) -> None:
    inbox = send(engine.client, make_request("late", max_tokens=ENDLESS), timeout_s=0.05)
    await inbox.until(lambda inbox: inbox.finish_reason is not None)
    assert inbox.finish_reason is FinishReason.DEADLINE


async def test_a_refused_request_gets_the_schedulers_error() -> None:
    async with engine_process(echo_spec(max_num_seqs=1, max_queue_requests=0)) as engine:
        first = send(engine.client, make_request("first", max_tokens=ENDLESS))
        await first.until(lambda inbox: bool(inbox.tokens))
        refused = send(engine.client, make_request("second"))
        await refused.until_over()
        assert isinstance(refused.error, Overloaded)
        assert refused.error.retry_after_s is not None


def test_an_engine_leaves_when_its_gateway_dies(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from penstock.cluster.early import EarlyProcess
from penstock.cluster.local import LocalLauncher
from tests.cluster.engines import echo_spec

async def main():
    running = await LocalLauncher().launch(echo_spec(), "replica-1")
    Path({str(tmp_path / "pid")!r}).write_text(str(running.pid))
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


async def test_processes_are_spread_over_the_gpus() -> None:
    launcher = LocalLauncher(gpus=("0", "1"))
    launched = [await launcher.launch(echo_spec(), f"replica-{number}") for number in range(3)]
    assert [_gpus(running.pid) for running in launched] == ["0", "1", "0"]
    for running in launched[1:]:
        running.kill()
        await running.stop()
    successor = await launcher.launch(echo_spec(), "replica-3")
    assert _gpus(successor.pid) == "1"
    for running in (launched[0], successor):
        running.kill()
        await running.stop()


def _gpus(pid: int | None) -> str:
    arguments = _command(pid)
    return arguments[arguments.index("--gpus") + 1]


def _command(pid: int | None) -> list[str]:
    """Once Linux has written it down: a program has none for a moment after its process has begun to run it."""
    file = Path(f"/proc/{pid}/cmdline")
    _wait_for(file.read_bytes)
    return file.read_text().split("\0")


async def test_an_early_process_becomes_the_first_engine() -> None:
    early = EarlyProcess(NO_BYTECODE)
    launcher = LocalLauncher(early=early)
    async with (
        engine_process(echo_spec(), launcher) as first,
        engine_process(echo_spec(), launcher) as second,
    ):
        early.close()  # It is an engine now, like the other.
        assert [_is_early(process.running.pid) for process in (first, second)] == [True, False]
        inboxes = [send(process.client, make_request("one", b"ab")) for process in (first, second)]
        for inbox in inboxes:
            await inbox.until(lambda inbox: inbox.finish_reason is not None)


async def test_the_end_of_an_early_process_is_noticed() -> None:
    running = await LocalLauncher(early=EarlyProcess(NO_BYTECODE)).launch(echo_spec(), "replica-1")
    running.kill()
    assert await asyncio.wait_for(running.wait(), WAIT_S) == -signal.SIGKILL
    await running.stop()


def _is_early(pid: int | None) -> bool:
    return "--early" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_an_early_process_that_nobody_needs_ends_at_once() -> None:
    early = EarlyProcess(NO_BYTECODE)
    process = early._process
    assert process is not None
    early.close()
    assert process.returncode == -signal.SIGKILL
    early.close()


def test_an_early_process_leaves_with_its_parent() -> None:
    process = EarlyProcess(NO_BYTECODE)._process
    assert process is not None
    process.communicate(timeout=6 * WAIT_S)  # As seen from there, it has closed its end.
    assert process.returncode == 0


async def test_an_early_process_that_died_is_replaced() -> None:
    early = EarlyProcess(NO_BYTECODE)
    assert early._process is not None
    early._process.kill()
    early._process.wait()
    running = await LocalLauncher(early=early).launch(echo_spec(), "replica-1")
    assert not _is_early(running.pid)
    running.kill()
    await running.stop()
