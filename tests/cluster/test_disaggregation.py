"""Prefill and decode in real processes: the same answers, whichever of them is killed or frozen on the way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import pytest

from penstock.cluster.fleet import Fleet
from penstock.cluster.replica import Member, ReplicaSpec, Role, RunningReplica
from penstock.cluster.transport import ZmqEngineClient
from penstock.core.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.plan import TokenEvent
from penstock.core.request import Request, SamplingParams
from penstock.dispatch.kv_sources import TransferConfig
from penstock.engine.build import build_engine
from penstock.router import Replica
from tests.copies import CopyingLauncher
from tests.engine.tiny import run, tokens, write_tiny_model
from tests.models.tiny_families import save_tiny

pytest.importorskip("nixl_cu12", reason="needs the extra disaggregation")

# Ranks that import torch at the same time take minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)
WAIT_S = 400
MODEL = "tiny"
NUM_TOKENS = 2000  # in steps of 16, a prompt takes long enough to be interrupted


@dataclass
class Process:
    """An engine, and a gateway's connection to it."""

    spec: ReplicaSpec
    running: RunningReplica
    client: ZmqEngineClient
    answers: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    has_ended: bool = False

    @property
    def source(self) -> KVSource:
        assert self.client.ready is not None
        return KVSource(self.client.ready.kv_endpoint)

    def ask(self, request: Request, source: KVSource | None = None) -> None:
        self.answers[request.id] = []
        self.client.add(request, timeout_s=None, on_event=self._on_event, on_error=_fail, kv_source=source)

    async def answer(self, request: Request, source: KVSource | None = None) -> list[int]:
        self.ask(request, source)
        await until(lambda: request.id in self.ended)
        return self.answers[request.id]

    async def leave(self) -> None:
        """It must find its records in order when it leaves."""
        self.client.shut_down_engine()
        async with asyncio.timeout(WAIT_S):
            assert await self.running.wait() == 0
        await self.running.stop()
        self.client.close()
        self.has_ended = True

    async def kill(self) -> None:
        """End it in any state, unless it has ended: neither the process nor the connection outlives its test."""
        if self.has_ended:
            return
        self.has_ended = True
        self.client.close()
        self.running.kill()
        await self.running.wait()
        await self.running.stop()

    def signal(self, number: signal.Signals) -> None:
        assert self.running.pid is not None
        os.kill(self.running.pid, number)

    def _on_event(self, event: TokenEvent) -> None:
        self.answers[event.request_id].extend(event.token_ids)
        if event.finish_reason is not None:
            self.ended.add(event.request_id)


def _fail(error: PenstockError) -> None:
    raise error


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def make_request(request_id: str, seed: int, num_tokens: int = NUM_TOKENS, max_tokens: int = 8) -> Request:
    prompt = tuple(3 + (seed * n * n + n) % 290 for n in range(num_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(id=request_id, prompt_token_ids=prompt, sampling=sampling, model=MODEL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    longer = {"max_position_embeddings": 4096, "num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps(config | longer))
    return folder


def configured(
    folder: Path, role: Role, parallel: ParallelConfig, kv_dtype: str, load_format: Literal["random", "auto"]
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32", load_format=load_format),
        cache=CacheConfig(num_kv_blocks=1024, kv_cache_dtype=kv_dtype),  # type: ignore[arg-type]
        # Slow to prefill, quick to decode.
        scheduler=SchedulerConfig(
            itl_target_ms=None, max_num_batched_tokens=16 if role == "prefill" else 512, max_num_seqs=16
        ),
        num_threads=1,
        kv_transfer=True,
        parallel=parallel,
    )


def answers_alone(config: EngineConfig, requests: Sequence[Request]) -> list[list[int]]:
    """What an engine of one rank in this process answers, which starts in a fraction of the time of a process."""
    plain = msgspec.structs.replace(config, parallel=ParallelConfig(), kv_transfer=False)
    events = run(build_engine(plain, Path(config.model.model)), list(requests))
    return [tokens(events[each.id]) for each in requests]


class Start(Protocol):
    async def __call__(
        self, role: Role, parallel: ParallelConfig = ..., kv_dtype: str = ..., saved: Path | None = ...
    ) -> Process: ...


@pytest.fixture
async def start(model: Path) -> AsyncIterator[Start]:
    """Starts engines, and ends those that the test has left behind, for example because it failed."""
    async with AsyncExitStack() as stack:

        async def start_one(
            role: Role,
            parallel: ParallelConfig = ParallelConfig(),  # noqa: B008
            kv_dtype: str = "auto",
            saved: Path | None = None,
        ) -> Process:
            """`saved` is a model with weights of its own."""
            engine = configured(
                saved or model, role, parallel, kv_dtype, "random" if saved is None else "auto"
            )
            spec = ReplicaSpec(
                model=MODEL, engine=engine, model_path=engine.model.model, revision="a", role=role
            )
            running = await CopyingLauncher(log_level="WARNING").launch(spec, role)
            process = Process(spec, running, ZmqEngineClient(running.endpoint))
            stack.push_async_callback(process.kill)
            process.client.start()
            return process

        yield start_one


@pytest.fixture
async def engines(start: Start) -> AsyncIterator[tuple[Process, Process]]:
    """One that prefills and one that decodes. Whoever is alive at the end leaves in good order."""
    pair = await start("prefill"), await start("decode")
    async with asyncio.timeout(WAIT_S):
        for process in pair:
            await process.client.wait_ready()
    yield pair
    for process in pair:
        if not process.has_ended:
            await process.leave()


async def test_a_prefill_peer_that_freezes_and_is_killed_costs_no_request(
    engines: tuple[Process, Process],
) -> None:
    prefill, decode = engines
    expected = [await decode.answer(make_request(f"alone {n}", n)) for n in range(3)]
    for first_seed, number in ((10, signal.SIGSTOP), (20, signal.SIGKILL)):
        asked = [make_request(f"{number.name} {n}", first_seed + n) for n in range(3)]
        for each in asked:
            decode.ask(each, prefill.source)
        before = prefill.client.stats.tokens_computed
        await until(lambda: prefill.client.stats.tokens_computed > before + 200)  # noqa: B023
        assert not decode.ended & {each.id for each in asked}, "it was to be interrupted"
        prefill.signal(number)
        await until(lambda: {each.id for each in asked} <= decode.ended)  # noqa: B023
        if number is signal.SIGSTOP:
            prefill.signal(signal.SIGCONT)
        for each in asked:
            uncached = msgspec.structs.replace(each, id=f"{each.id} again", tenant="another")
            assert decode.answers[each.id] == await decode.answer(uncached)
    assert decode.client.stats.kv_fetches_failed >= 4
    await until(lambda: decode.client.stats.num_kv_blocks_used == 0)
    assert [await decode.answer(make_request(f"later {n}", n)) for n in range(3)] == expected
    await prefill.kill()


async def test_the_fleet_sends_long_prompts_by_way_of_the_prefill_replica_and_a_killed_decoder_costs_nothing(
    engines: tuple[Process, Process], start: Start
) -> None:
    prefill, doomed = engines
    spare = await start("decode")
    await asyncio.wait_for(spare.client.wait_ready(), WAIT_S)
    long = [make_request(f"long {n}", 50 + n, max_tokens=200) for n in range(2)]
    expected = {each.id: await spare.answer(each) for each in long}

    with closing(Fleet()) as fleet:
        # Times that a busy machine measures do not decide.
        fleet.dispatcher.kv_sources._config = TransferConfig(allowed_delay_s=WAIT_S)
        members = [member(process, f"r{n}") for n, process in enumerate((prefill, doomed))]
        fleet.update(members)
        await asyncio.wait_for(fleet.wait_ready(), WAIT_S)
        answers: dict[str, list[int]] = {}
        ended: set[str] = set()

        def on_event(event: TokenEvent) -> None:
            answers.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                ended.add(event.request_id)

        def ask(request: Request) -> None:
            fleet.add(request, timeout_s=None, on_event=on_event, on_error=_fail)

        await until(lambda: len(fleet.connections.by_id) == 2 and fleet.connections.first_ready is not None)
        await until(lambda: all(link.client.ready is not None for link in fleet.connections.by_id.values()))
        short = make_request("short", 60, num_tokens=100)
        ask(short)
        for each in long:
            ask(each)
        await until(lambda: all(len(answers.get(each.id, ())) >= 20 for each in long))
        assert fleet.dispatcher.kv_sources.chosen == {"here": 1, "prefill": 2}

        await doomed.kill()
        fleet.update([members[0], member(spare, "r2")])
        await until(lambda: ended >= {each.id for each in (short, *long)})
        assert {each.id: answers[each.id] for each in long} == expected
        await until(lambda: prefill.client.stats.num_kv_blocks_used == 0)

        # The two exchange their roles where they are: nothing is loaded, and the answers are the same.
        fleet.update([in_role(members[0], "decode"), in_role(member(spare, "r2"), "prefill")])
        again = msgspec.structs.replace(long[0], id="again", tenant="another")
        num_before = fleet.dispatcher.kv_sources.chosen["prefill"]
        ask(again)
        await until(lambda: "again" in ended)
        assert answers["again"] == expected[long[0].id]
        assert fleet.dispatcher.kv_sources.chosen["prefill"] == num_before + 1

        # What a replica has cached is read at a speed that the receiver reports.
        cached = make_request("cached", 70)
        lent = msgspec.structs.replace(cached, id="lent")
        expected_tokens = await prefill.answer(cached)
        source = msgspec.structs.replace(prefill.source, computes=False)
        assert await spare.answer(lent, source) == expected_tokens
        await until(lambda: spare.client.stats.kv_read_bytes > 0)
        assert spare.client.stats.kv_read_s > 0.0
    await spare.leave()


@pytest.mark.parametrize(
    ("num_ranks", "moves", "kv_heads", "kv_dtype"),
    [
        # Ranks have their own parts of blocks, half of such a part, or two.
        ((2, 2, 1), ((0, 1), (0, 2), (2, 0)), 2, "auto"),
        ((2, 1), ((0, 1), (1, 0)), 1, "int8"),  # both ranks have the only KV head
        ((2, 3), ((0, 1),), 3, "auto"),  # two heads and one, to one each
    ],
)
async def test_ranks_of_engines_with_any_numbers_of_ranks_read_their_heads(
    start: Start,
    model: Path,
    num_ranks: tuple[int, ...],
    moves: tuple[tuple[int, int], ...],
    kv_heads: int,
    kv_dtype: str,
) -> None:
    settings = json.loads((model / "config.json").read_text())
    changed = {"num_key_value_heads": kv_heads, "num_attention_heads": 6 if kv_heads == 3 else 4}
    (model / "config.json").write_text(json.dumps(settings | changed))
    try:
        engines = await asyncio.gather(
            *(start("prefill", ParallelConfig(tensor_parallel_size=count), kv_dtype) for count in num_ranks)
        )
        async with asyncio.timeout(WAIT_S):
            for process in engines:
                await process.client.wait_ready()
        asked = [make_request(f"cut {n}", 80 + n, num_tokens=700) for n in range(2 * len(moves))]
        expected = answers_alone(engines[0].spec.engine, asked)
    finally:
        (model / "config.json").write_text(json.dumps(settings))
    num_whole = 700 // 16 * 16
    for n, (sender, receiver) in enumerate(moves):
        there, here = engines[sender], engines[receiver]
        pair, answers = asked[2 * n : 2 * n + 2], expected[2 * n : 2 * n + 2]
        for each in pair:
            here.ask(each, there.source)
        await until(lambda: {each.id for each in pair} <= here.ended)  # noqa: B023
        assert [here.answers[each.id] for each in pair] == answers
        await until(lambda: here.client.stats.kv_fetched_tokens == 2 * num_whole)  # noqa: B023
        # What the sender has cached by now is read in one go.
        lent = msgspec.structs.replace(pair[0], id=f"lent {n}", tenant="another")
        assert await there.answer(msgspec.structs.replace(lent, id=f"cached {n}")) == answers[0]
        source = msgspec.structs.replace(there.source, computes=False)
        assert await here.answer(lent, source) == answers[0]
        await until(lambda: here.client.stats.kv_fetched_tokens == 3 * num_whole)  # noqa: B023
        assert here.client.stats.kv_fetches_failed == 0
    for process in engines:
        await process.leave()


@pytest.mark.parametrize(
    ("family", "is_cut"),
    [
        ("deepseek_v3", True),  # every rank has all latents
        ("gemma4", True),  # heads of two sizes, and windows
        ("gemma4-keys-as-values", False),  # layers with four and with two KV heads
    ],
)
async def test_two_ranks_of_other_families_compute_for_one(
    start: Start, tmp_path: Path, family: str, is_cut: bool
) -> None:
    save_tiny(family, tmp_path)
    two_ranks = ParallelConfig(tensor_parallel_size=2)
    there, here = await asyncio.gather(
        start("prefill", two_ranks, saved=tmp_path), start("decode", saved=tmp_path)
    )
    async with asyncio.timeout(WAIT_S):
        for process in (there, here):
            await process.client.wait_ready()
    asked = make_request("asked", 5, num_tokens=110)
    [expected] = answers_alone(here.spec.engine, [asked])
    assert await here.answer(asked, there.source) == expected
    await until(lambda: here.client.stats.kv_fetched_tokens + here.client.stats.kv_fetches_failed > 0)
    stats = here.client.stats
    assert (stats.kv_fetched_tokens, stats.kv_fetches_failed) == ((110 // 16 * 16, 0) if is_cut else (0, 1))
    for process in (there, here):
        await process.leave()


def in_role(changed: Member, role: Role) -> Member:
    return msgspec.structs.replace(changed, spec=msgspec.structs.replace(changed.spec, role=role))


def member(process: Process, replica_id: str) -> Member:
    replica = Replica(id=replica_id, models=frozenset({MODEL}), revision="a", num_kv_blocks=1024)
    return Member(replica=replica, spec=process.spec, endpoint=process.running.endpoint)
