"""Faults with real processes under load: what is lost, what is repeated, what leaks. Nothing may be any of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.cluster.fleet import Fleet
from penstock.cluster.replica import ReplicaSpec, RunningReplica
from penstock.cluster.supervisor import Supervisor
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.dispatch import DispatchConfig, Send
from penstock.dispatch.health import BreakerConfig, OutlierConfig
from penstock.dispatch.requests import RetryConfig
from penstock.dispatch.suspects import SuspectConfig
from penstock.router import ReplicaState
from tests.cluster.engines import (
    ENDLESS,
    WAIT_S,
    Inbox,
    check_beginning,
    echo_spec,
    lose_patience,
    make_request,
    send,
    until,
)
from tests.copies import CopyingLauncher
from tests.engine.byte_model import write_byte_model

NUM_REQUESTS = 12


class RememberingLauncher:
    """Remembers every process, so that a test can ask afterwards how each of them ended."""

    def __init__(self) -> None:
        self._launcher = CopyingLauncher()
        self.launched: dict[str, RunningReplica] = {}

    async def launch(self, spec: ReplicaSpec, replica_id: str) -> RunningReplica:
        running = self.launched[replica_id] = await self._launcher.launch(spec, replica_id)
        return running


@dataclass
class Server:
    """All of a server but its front door."""

    supervisor: Supervisor
    fleet: Fleet

    def signal(self, replica_id: str, number: signal.Signals) -> None:
        pid = self.supervisor.pid(replica_id)
        assert pid is not None
        os.kill(pid, number)

    def num_ready(self) -> int:
        links = self.fleet.replicas.values()
        return sum(link.state is ReplicaState.READY for link in links)

    def busiest(self) -> str:
        return max(self.fleet.replicas.values(), key=lambda link: link.num_sent).id


@asynccontextmanager
async def serving(
    spec: ReplicaSpec, count: int, *, config: DispatchConfig | None = None
) -> AsyncIterator[Server]:
    """Ends with every engine that was not killed saying that it has lost track of no KV block."""
    launcher = RememberingLauncher()
    supervisor = Supervisor({"local": launcher}, heartbeat_timeout_s=60.0)
    fleet = Fleet(config)
    supervisor.on_change.append(fleet.update)
    server = Server(supervisor, fleet)
    survivors: list[str] = []
    try:
        await asyncio.gather(*(supervisor.launch(spec) for _ in range(count)))
        await until(lambda: server.num_ready() == count)
        yield server
        await until(lambda: fleet.stats.num_running == fleet.stats.num_waiting == 0)
        await until(lambda: fleet.stats.num_kv_blocks_used == 0)
        survivors = [
            member.id for member in supervisor.members() if member.replica.state is ReplicaState.READY
        ]
    finally:
        await supervisor.close()
        fleet.close()
    assert survivors
    assert [await launcher.launched[name].wait() for name in survivors] == [0] * len(survivors)


def prompts(count: int = NUM_REQUESTS) -> list[bytes]:
    return [b"request number %d of them " % number for number in range(count)]


def echoes(fleet: Fleet, texts: Sequence[bytes], max_tokens: int, name: str = "echo") -> list[Inbox]:
    return [
        send(
            fleet,
            Request(
                id=f"{name}-{number}",
                prompt_token_ids=tuple(text),
                sampling=SamplingParams(max_tokens=max_tokens),
                tenant=f"tenant-{number % 3}",
            ),
        )
        for number, text in enumerate(texts)
    ]


async def check_echoes(inboxes: Sequence[Inbox], texts: Sequence[bytes], max_tokens: int) -> None:
    for inbox, text in zip(inboxes, texts, strict=True):
        await inbox.until_over()
        assert inbox.error is None
        assert bytes(inbox.tokens) == (text * (max_tokens // len(text) + 1))[:max_tokens]


async def test_an_engine_killed_in_mid_stream() -> None:
    texts = prompts()
    async with serving(echo_spec(), 2) as server:
        inboxes = echoes(server.fleet, texts, ENDLESS)
        for inbox in inboxes:
            await inbox.until(lambda inbox: bool(inbox.tokens))
        server.signal(server.busiest(), signal.SIGKILL)
        for inbox, text in zip(inboxes, texts, strict=True):
            await check_beginning(inbox, text, len(inbox.tokens) + 1_000)
        for number in range(NUM_REQUESTS):
            server.fleet.abort(f"echo-{number}")
        assert server.fleet.verdicts["continue"] >= NUM_REQUESTS // 2
        assert set(server.fleet.verdicts) == {"continue"}
        await until(lambda: server.num_ready() == 2)


async def test_a_frozen_engine() -> None:
    texts, max_tokens = prompts(), 4_000
    async with serving(echo_spec(), 2) as server:
        inboxes = echoes(server.fleet, texts, max_tokens)
        frozen = server.busiest()
        server.signal(frozen, signal.SIGSTOP)
        lose_patience(server.supervisor, frozen)
        await check_echoes(inboxes, texts, max_tokens)
        assert sum(server.fleet.verdicts.values()) >= 1
        await until(lambda: server.num_ready() == 2)


async def test_the_only_engine_killed() -> None:
    texts = prompts(4)
    async with serving(echo_spec(), 1) as server:
        inboxes = echoes(server.fleet, texts, ENDLESS)
        await inboxes[0].until(lambda inbox: bool(inbox.tokens))
        server.signal("replica-1", signal.SIGKILL)
        await until(lambda: server.fleet.waiting.num_requests())
        late = b"came while there was nobody"
        await check_echoes(echoes(server.fleet, [late], 50, "late"), [late], 50)
        for number, (inbox, text) in enumerate(zip(inboxes, texts, strict=True)):
            await check_beginning(inbox, text, len(inbox.tokens) + 1_000)
            server.fleet.abort(f"echo-{number}")


async def test_a_gateway_restarted() -> None:
    async with serving(echo_spec(), 2) as server:
        other = Fleet()
        other.update(server.supervisor.members())
        await until(lambda: all(link.client.ready for link in other.connections.by_id.values()))
        theirs = [
            send(
                other,
                Request(id=f"lost-{n}", prompt_token_ids=(n,), sampling=SamplingParams(max_tokens=ENDLESS)),
            )
            for n in range(6)
        ]
        for inbox in theirs:
            await inbox.until(lambda inbox: bool(inbox.tokens))
        await until(lambda: server.fleet.stats.num_running == 6)
        other.close()  # what a killed process leaves: closed sockets, and no abort
        await until(lambda: server.fleet.stats.num_running == 0)
        successor = Fleet()
        successor.update(server.supervisor.members())
        await successor.wait_ready()
        await check_echoes(echoes(successor, prompts(), 100), prompts(), 100)
        successor.close()


async def test_kv_events_lost() -> None:
    """What a gateway believes is dropped, asked for again, and then leads requests as before."""
    text = b"a prefix that many requests have in common, of several blocks; " * 8
    async with serving(echo_spec(), 2) as server:
        await check_echoes(echoes(server.fleet, [text], 5), [text], 5)
        link = server.fleet.replicas[server.busiest()]
        index = server.fleet.router.index
        await until(lambda: len(index) >= len(text) // 16)
        client = server.fleet.connections.by_id[link.id].client
        hear = client._on_kv_events  # type: ignore[attr-defined]
        dropped: list[object] = []
        client._on_kv_events = dropped.append  # type: ignore[attr-defined]
        sent_before = link.num_sent
        server.fleet.abort("echo-0")
        lost = b"what this one leaves in the cache is never heard of" * 4
        for inbox in echoes(server.fleet, [lost, lost, lost], 2):
            await inbox.until_over()
        await until(lambda: dropped or link.num_sent == sent_before)
        client._on_kv_events = hear  # type: ignore[attr-defined]
        for number in range(20):
            for inbox in echoes(server.fleet, [b"news number %d of this replica" % number * 4] * 2, 2):
                await inbox.until_over()
            if link.num_resyncs:
                break
            await asyncio.sleep(0.05)
        assert link.num_resyncs == 1 or link.num_sent == sent_before
        reasons = server.fleet.reasons["prefix"]
        await until(lambda: not server.fleet.router.resyncs_needed())
        await check_echoes(echoes(server.fleet, [text], 5), [text], 5)
        assert server.fleet.reasons["prefix"] == reasons + 1


async def test_a_slow_replica_is_left_out() -> None:
    config = DispatchConfig(routing_policy="round-robin", outliers=OutlierConfig(times_in_a_row=2))
    async with serving(echo_spec(), 4, config=config) as server:
        slow = server.fleet.replicas["replica-2"]
        endless = echoes(server.fleet, prompts(8), ENDLESS, "endless")
        for inbox in endless:
            await inbox.until(lambda inbox: bool(inbox.tokens))
        async with asyncio.timeout(WAIT_S):
            while slow.state is ReplicaState.READY:
                server.signal(slow.id, signal.SIGSTOP)
                await asyncio.sleep(0.2)
                server.signal(slow.id, signal.SIGCONT)
                await asyncio.sleep(0.005)
        assert not server.fleet.verdicts, "what it has, it keeps"
        for number in range(len(endless)):
            server.fleet.abort(f"endless-{number}")
        sent = slow.num_sent
        await check_echoes(echoes(server.fleet, prompts(), 50), prompts(), 50)
        assert slow.num_sent == sent


@pytest.mark.slow
async def test_greedy_and_seeded_answers_of_a_model_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    folder = write_byte_model(tmp_path / "model", max_position_embeddings=2048)
    model = ModelConfig(model=str(folder), device="cpu", dtype="float32", load_format="random")
    config = EngineConfig(model=model, cache=CacheConfig(num_kv_blocks=512), num_threads=1)
    spec = ReplicaSpec(model="bytes", engine=config, model_path=str(folder))
    requests = [
        Request(
            id=f"request-{number}",
            prompt_token_ids=tuple(text),
            sampling=SamplingParams(
                max_tokens=150,
                ignore_eos=True,
                temperature=float(number % 2),
                seed=number,
                repetition_penalty=1.1 if number % 3 == 0 else 1.0,
            ),
        )
        for number, text in enumerate(prompts(6))
    ]
    async with serving(spec, 2) as server:
        undisturbed = [send(server.fleet, request) for request in requests]
        for inbox in undisturbed:
            await inbox.until_over()
        again = [
            # They run on for a while: a busy machine may hold up the test before it kills an engine.
            replace(request, id=f"{request.id}-again", sampling=replace(request.sampling, max_tokens=1_000))
            for request in requests
        ]
        inboxes = [send(server.fleet, request) for request in again]
        for inbox in inboxes:
            await inbox.until(lambda inbox: len(inbox.tokens) >= 10)
        server.signal(server.busiest(), signal.SIGKILL)
        for inbox, request, reference in zip(inboxes, again, undisturbed, strict=True):
            await inbox.until(lambda inbox: inbox.is_over or len(inbox.tokens) >= 150)
            assert inbox.error is None
            assert reference.finish_reason is FinishReason.LENGTH
            assert inbox.tokens[:150] == reference.tokens
            server.fleet.abort(request.id)
        assert server.fleet.verdicts["continue"]


async def test_a_request_that_kills_every_engine_it_reaches_ends_few_and_no_stream_of_others() -> None:
    """The engine of a request with poison is killed as soon as it has the request. A busy machine may stop for longer
    than the two seconds of a test, which then proves nothing: one or two more engines may have to end."""
    texts, max_tokens = prompts(), 3_000
    refusals = BreakerConfig(max_failures=2, probes=1, first_pause_s=3600.0, max_pause_s=3600.0)
    retries = RetryConfig(max_attempts=20, max_budget=2_000.0)
    config = DispatchConfig(retries=retries, suspects=SuspectConfig(breaker=refusals))
    async with serving(echo_spec(), 4, config=config) as server:
        killed: set[str] = set()
        loop = asyncio.get_running_loop()

        def kill(replica_id: str) -> None:
            if replica_id in server.fleet.replicas and replica_id not in killed:
                killed.add(replica_id)
                server.signal(replica_id, signal.SIGKILL)

        def kill_soon(sent: Send) -> None:
            if sent.request.tenant == "evil":
                loop.call_later(0.3, kill, sent.replica_id)

        server.fleet.on_sent = kill_soon
        inboxes = echoes(server.fleet, texts, max_tokens)
        poison = [
            send(server.fleet, replace(make_request(f"poison-{number}", max_tokens=ENDLESS), tenant="evil"))
            for number in range(2)
        ]
        for each in poison:
            await each.until_over()
            assert each.error is not None
        await check_echoes(inboxes, texts, max_tokens)
        num_killed = len(killed)
        assert num_killed < 20, "two requests with twenty attempts each would end forty"
        assert server.fleet.dispatcher.suspects.num_convicted == 2
        refused = send(server.fleet, replace(make_request("again"), tenant="evil"))
        await refused.until_over()
        assert refused.error is not None
        assert "refused for a while" in refused.error.message
        assert len(killed) == num_killed
        (answer,) = echoes(server.fleet, texts[:1], 10, "after")
        await check_echoes([answer], texts[:1], 10)
