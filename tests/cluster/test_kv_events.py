"""KV events, heartbeats and resumed answers on the real wire, from a real engine process without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.transport import ZmqEngineClient
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.messages import HEARTBEAT_INTERVAL_S, EngineStats, KVCleared, KVEvent, KVRemoved, KVStored
from penstock.core.plan import TokenEvent
from penstock.core.request import CacheBreakpoint, Request, SamplingParams
from tests.cluster.engines import EngineProcess, engine_process

WAIT_S = 240
PROMPT = tuple(range(70))  # four blocks of 16, and some


@dataclass
class Listener:
    """What one gateway hears."""

    events: list[KVEvent] = field(default_factory=list)
    stats: list[EngineStats] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def held(self) -> set[bytes]:
        """What the events so far say is in the cache; they must be whole."""
        held: set[bytes] = set()
        for event, expected in zip(self.events, range(self.events[0].sequence, 1 << 30), strict=False):
            assert event.sequence == expected, "a gap"
            match event:
                case KVStored():
                    held.update(event.block_hashes)
                case KVRemoved():
                    held.difference_update(event.block_hashes)
                case KVCleared():
                    held.clear()
        return held

    def on_event(self, event: TokenEvent) -> None:
        self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
        if event.finish_reason is not None:
            self.ended.add(event.request_id)


class Gateway:
    def __init__(self, endpoint: str) -> None:
        self.heard = Listener()
        self.client = ZmqEngineClient(
            endpoint, on_stats=self.heard.stats.append, on_kv_events=self.heard.events.extend
        )

    async def ask(self, request: Request) -> list[int]:
        self.client.add(request, timeout_s=None, on_event=self.heard.on_event, on_error=_fail)
        await until(lambda: request.id in self.heard.ended)
        return self.heard.tokens[request.id]


def _fail(error: Exception) -> None:
    raise error


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def make_request(request_id: str, prompt: tuple[int, ...] = PROMPT, **fields: object) -> Request:
    return Request(
        id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=8),
        **fields,  # type: ignore[arg-type]
    )


def hashes_of(request: Request) -> set[bytes]:
    return set(chain_hashes(root_hash(request.prefix_salt), request.prompt_token_ids, 16))


@pytest.fixture
async def engine() -> AsyncIterator[EngineProcess]:
    config = EngineConfig(model=ModelConfig(model="echo"), cache=CacheConfig(num_kv_blocks=64))
    async with engine_process(ReplicaSpec(model="echo", engine=config, model_path="echo")) as process:
        yield process


@pytest.fixture
async def gateways(engine: EngineProcess) -> AsyncIterator[tuple[Gateway, Gateway]]:
    pair = Gateway(engine.endpoint), Gateway(engine.endpoint)
    async with asyncio.timeout(WAIT_S):
        for gateway in pair:
            gateway.client.start()
            await gateway.client.wait_ready()
    yield pair
    for gateway in pair:
        gateway.client.close()


async def test_subscribers_learn_all_that_is_cached_whoever_asked(
    gateways: tuple[Gateway, Gateway],
) -> None:
    early, late = gateways
    early.client.subscribe_kv_events()
    first, second = make_request("first"), make_request("second", PROMPT[::-1], tenant="someone else")
    await early.ask(first)
    await until(lambda: bool(early.heard.events) and early.heard.held() >= hashes_of(first))
    assert not late.heard.events, "nobody who did not ask gets events"

    late.client.subscribe_kv_events()
    await late.ask(second)
    both = hashes_of(first) | hashes_of(second)
    await until(lambda: bool(late.heard.events) and late.heard.held() >= both)
    await until(lambda: early.heard.held() == late.heard.held())
    assert isinstance(late.heard.events[0], KVCleared)


async def test_every_gateway_hears_what_clients_of_any_gateway_had_kept(
    gateways: tuple[Gateway, Gateway],
) -> None:
    asking, other = gateways
    asking.client.subscribe_kv_events()
    marks = (CacheBreakpoint(num_tokens=50, ttl_s=300.0),)
    await asking.ask(make_request("first", cache_breakpoints=marks, min_cacheable_tokens=1))
    other.client.subscribe_kv_events()  # too late for the event itself
    await until(lambda: any(isinstance(event, KVStored) and event.kept for event in other.heard.events))
    (entry,) = (entry for event in other.heard.events if isinstance(event, KVStored) for entry in event.kept)
    assert entry.block_hash == chain_hashes(root_hash(""), PROMPT[:48], 16)[-1]
    assert entry.num_blocks == 3
    assert 0.0 < entry.left_s <= 300.0


async def test_a_lost_message_is_made_good(gateways: tuple[Gateway, Gateway]) -> None:
    gateway, _ = gateways
    gateway.client.subscribe_kv_events()
    first, second = make_request("first"), make_request("second", PROMPT[::-1])
    await gateway.ask(first)
    await until(lambda: bool(gateway.heard.events))
    gateway.heard.events.clear()
    gateway.client.restart_kv_events()
    await gateway.ask(second)
    both = hashes_of(first) | hashes_of(second)
    await until(lambda: bool(gateway.heard.events) and gateway.heard.held() >= both)
    assert isinstance(gateway.heard.events[0], KVCleared)


async def test_an_idle_engine_sends_heartbeats(gateways: tuple[Gateway, Gateway]) -> None:
    gateway, _ = gateways
    await asyncio.sleep(HEARTBEAT_INTERVAL_S)
    heard = len(gateway.heard.stats)
    await until(lambda: len(gateway.heard.stats) >= heard + 3)


async def test_an_answer_begun_elsewhere_goes_on(gateways: tuple[Gateway, Gateway]) -> None:
    here, there = gateways
    whole = await here.ask(make_request("whole"))
    rest = await there.ask(make_request("cut", output_token_ids=tuple(whole[:3])))
    assert rest == whole[3:]
