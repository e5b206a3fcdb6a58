"""Several external servers as one: who gets a request, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.cluster.external import waiting
from penstock.cluster.external.pool import MAX_MISSED_PROBES, ExternalPool
from penstock.cluster.external.server import MAX_OBJECTS, ExternalServer, ServerDown
from penstock.cluster.external.wire import ExternalCall, StreamChunk, WireDelta
from penstock.core.clock import VirtualClock
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PenstockError,
)
from penstock.core.request import Tier
from penstock.core.tasks import running
from penstock.dispatch.health import BreakerConfig, Circuit
from penstock.dispatch.requests import RetryConfig
from penstock.router import ReplicaState, Router
from penstock.router.policies import RoundRobin
from tests.cluster.engines import until
from tests.cluster.external.openai_server import OpenAIServer, serving, text_chunks, whole_answer

PATIENT = BreakerConfig(max_failures=100)


def call(number: int = 0, text: str = "some prompt", **changes: Any) -> ExternalCall:
    fields: dict[str, Any] = {
        "id": f"request-{number}",
        "model": "theirs",
        "api": "chat/completions",
        "body": {"messages": [{"role": "user", "content": text}]},
        "text": text,
    }
    return ExternalCall(**(fields | changes))


@contextlib.asynccontextmanager
async def pool_of(*servers: OpenAIServer, **options: Any) -> AsyncIterator[ExternalPool]:
    settings = options.pop("settings", {})
    async with serving(*servers):
        pool = ExternalPool(
            [ExternalServer(ExternalServerConfig(url=server.url, **settings)) for server in servers],
            **{"breaker": PATIENT, "router": Router(RoundRobin()), **options},
        )
        await pool.probe()
        try:
            yield pool
        finally:
            await pool.close()


async def ask(pool: ExternalPool, asked: ExternalCall | None = None) -> str:
    deltas: list[WireDelta | None] = []

    def take(chunks: list[StreamChunk]) -> None:
        deltas.extend(choice.delta for chunk in chunks for choice in chunk.choices)

    await pool.send(asked or call(), take)
    return "".join(delta.content or "" for delta in deltas if delta is not None)


def fails(status: int, message: str = "no", **headers: str) -> list[JSONResponse]:
    return [JSONResponse({"error": {"message": message}}, status, headers)]


async def test_an_answer_by_the_servers_own_name_for_the_model() -> None:
    server = OpenAIServer("big/model")
    settings = {"models": {"theirs": "big/model"}, "api_key": "secret"}
    async with pool_of(server, settings=settings) as pool:
        assert dict(pool.models) == {"theirs": None}
        assert await ask(pool) == "Hello"
    (body,) = server.bodies
    assert body["model"] == "big/model"
    assert body["stream"] is True
    assert server.headers[0]["authorization"] == "Bearer secret"


async def test_all_models_of_a_server_may_be_asked_for() -> None:
    async with pool_of(OpenAIServer("a", "b"), OpenAIServer("b", "c")) as pool:
        assert set(pool.models) == {"a", "b", "c"}
        with pytest.raises(ModelNotFound):
            await ask(pool, call(model="d"))


@pytest.mark.parametrize("status", [401, 404, 408, 429, 500, 502, 503])
async def test_another_server_answers_when_one_fails(status: int) -> None:
    broken, whole = OpenAIServer(), OpenAIServer()
    broken.script = lambda body: fails(status)
    async with pool_of(broken, whole) as pool:
        for number in range(10):
            assert await ask(pool, call(number, f"prompt {number} " * 20)) == "Hello"
        assert broken.bodies, "it was asked, too"
        assert pool.num_retries == len(broken.bodies)


async def test_an_error_in_the_stream_before_any_text_is_retried_too() -> None:
    broken, whole = OpenAIServer(), OpenAIServer()
    broken.script = lambda body: [text_chunks("x")[0], {"error": {"message": "out of memory", "code": 500}}]
    async with pool_of(broken, whole) as pool:
        answers = [await ask(pool, call(number, f"prompt {number} " * 20)) for number in range(10)]
    assert set(answers) == {"Hello"}
    assert broken.bodies


def breaking(*ending: Any) -> Any:
    return lambda body: [*text_chunks("Hel")[:2], *ending]


async def test_a_stream_that_breaks_after_its_first_text_is_an_error() -> None:
    """Where no server completes an assistant's message."""
    broken = [OpenAIServer(script=breaking({"error": "gone"})) for _ in range(2)]
    for server in broken:
        server.owned_by = "somebody"
    async with pool_of(*broken) as pool:
        with pytest.raises(EngineUnavailable):
            await ask(pool)
        assert pool.num_retries == 0


@pytest.mark.parametrize("ending", [({"error": "gone"},), ({"choices": 7},), ()])
async def test_a_chat_that_breaks_off_goes_on_elsewhere(ending: tuple[Any, ...]) -> None:
    """By an assistant's message that the next server completes: no text is lost or repeated."""
    broken = OpenAIServer(script=breaking(*ending))
    whole = OpenAIServer(script=lambda body: text_chunks("lo"))
    chunks: list[StreamChunk] = []
    async with pool_of(broken, whole) as pool:
        assert await ask(pool, call(0, body={"messages": [], "max_tokens": 5})) == "Hello"
        await pool.send(call(1, body={"messages": [], "max_tokens": 5}), chunks.extend)
        assert pool.num_continued
    (continued, *_) = [body for body in whole.bodies if body["messages"]]
    assert continued["messages"] == [{"role": "assistant", "content": "Hel"}]
    assert continued["continue_final_message"]
    assert continued["add_generation_prompt"] is False
    assert continued["max_tokens"] == 4


async def test_a_completion_goes_on_by_a_longer_prompt() -> None:
    def text(piece: str, finish_reason: str | None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]}

    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    broken = OpenAIServer(script=lambda body: [text("Hel", None), {"error": "gone"}])
    whole = OpenAIServer(script=lambda body: [text("lo", "stop"), {"choices": [], "usage": usage}])
    broken.owned_by = whole.owned_by = "somebody"
    async with pool_of(broken, whole, router=Router(RoundRobin())) as pool:
        for number in range(2):
            chunks: list[StreamChunk] = []
            await pool.send(call(number, api="completions", body={"prompt": "Say: "}), chunks.extend)
        assert broken.bodies
    told = [chunk.usage for chunk in chunks if chunk.usage is not None][-1]
    assert any(body["prompt"] == "Say: Hel" for body in whole.bodies)
    assert (told.prompt_tokens, told.completion_tokens) in ((8, 3), (9, 2))


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [], "logprobs": True},
        {"messages": [], "response_format": {"type": "json_object"}},
        {"messages": [], "max_tokens": 1},
    ],
)
async def test_answers_that_nobody_can_continue(body: dict[str, Any]) -> None:
    servers = [OpenAIServer(script=breaking({"error": "gone"})) for _ in range(2)]
    async with pool_of(*servers) as pool:
        with pytest.raises(EngineUnavailable):
            await ask(pool, call(body=body))
        assert pool.num_retries == 0


async def test_a_server_that_is_full_lets_requests_wait_by_tier() -> None:
    may_answer = asyncio.Event()
    server = OpenAIServer(script=lambda body: [may_answer, *text_chunks("ok")])
    async with pool_of(server, settings={"max_concurrent": 1}) as pool:
        tiers = [Tier.DEFAULT, Tier.BATCH, Tier.BATCH, Tier.DEFAULT, Tier.PRIORITY]
        calls = [
            asyncio.create_task(ask(pool, call(number, f"prompt {number}", tier=tier)))
            for number, tier in enumerate(tiers)
        ]
        while pool.num_waiting < 4:
            await asyncio.sleep(0.001)
        calls[2].cancel()
        may_answer.set()
        assert [await each for place, each in enumerate(calls) if place != 2] == ["ok"] * 4
        assert pool.num_waiting == 0
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert asked == ["prompt 0", "prompt 4", "prompt 3", "prompt 1"]


async def test_tenants_that_wait_have_turns() -> None:
    calls = waiting.WaitingCalls()
    granted: list[str] = []

    async def wait(tenant: str, tier: Tier = Tier.DEFAULT) -> None:
        await calls.wait("m", tier, tenant)
        calls.taken()
        granted.append(tenant)

    async def grant(number: int) -> None:
        for _ in range(number):
            places = [True]
            calls.grant(lambda _, places=places: bool(places) and places.pop())  # type: ignore[misc]
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for tenant in ("greedy", "greedy", "greedy", "greedy"):
            group.create_task(wait(tenant))
        await asyncio.sleep(0)
        await grant(1)
        for tenant in ("late", "late"):
            group.create_task(wait(tenant))
        group.create_task(wait("batch", Tier.BATCH))
        await asyncio.sleep(0)
        await grant(6)
    assert granted == ["greedy", "greedy", "late", "greedy", "late", "greedy", "batch"]
    assert len(calls) == 0


async def test_a_tenant_leaves_places_to_others_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING", 4)
    calls = waiting.WaitingCalls()
    waiters = [asyncio.create_task(calls.wait("m", Tier.DEFAULT, "greedy")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="of this workspace"):
        await calls.wait("m", Tier.DEFAULT, "greedy")
    waiters.append(asyncio.create_task(calls.wait("m", Tier.DEFAULT, "late")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="Too many requests wait"):
        await calls.wait("m", Tier.DEFAULT, "third")
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    assert len(calls) == 0
    assert not calls.num_granted


async def test_waiting_requests_use_every_place_that_is_free() -> None:
    servers = [OpenAIServer(script=lambda body: [0.02, *text_chunks("ok")]) for _ in range(2)]
    async with pool_of(*servers, settings={"max_concurrent": 1}) as pool:
        answers = await asyncio.gather(*(ask(pool, call(number)) for number in range(8)))
        assert pool.num_waiting == 0
    assert answers == ["ok"] * 8
    assert [len(server.bodies) for server in servers] == [4, 4]


async def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING", 0)
    server = OpenAIServer(script=lambda body: [30.0])
    async with pool_of(server, settings={"max_concurrent": 1}) as pool:
        first = asyncio.create_task(ask(pool))
        while not server.bodies:
            await asyncio.sleep(0.001)
        with pytest.raises(Overloaded):
            await ask(pool)
        first.cancel()


async def test_cheaper_servers_are_asked_first_while_they_have_room() -> None:
    cheap, dear = OpenAIServer(), OpenAIServer()
    may_answer = asyncio.Event()
    cheap.script = lambda body: [may_answer, *text_chunks("ok")]
    async with serving(cheap, dear):
        configs = [
            ExternalServerConfig(url=dear.url, cost=2.0),
            ExternalServerConfig(url=cheap.url, cost=1.0, max_concurrent=2),
        ]
        pool = ExternalPool([ExternalServer(config) for config in configs])
        await pool.probe()
        asking = [asyncio.create_task(ask(pool, call(number, f"prompt {number}"))) for number in range(5)]
        await until(lambda: len(dear.bodies) == 3)
        may_answer.set()
        await asyncio.gather(*asking)
        await ask(pool, call(9))
        await pool.close()
    assert (len(cheap.bodies), len(dear.bodies)) == (3, 3)


async def test_a_request_that_may_not_leave_its_region() -> None:
    servers = [OpenAIServer(), OpenAIServer()]
    async with serving(*servers):
        pool = ExternalPool(
            [
                ExternalServer(ExternalServerConfig(url=server.url, region=region))
                for server, region in zip(servers, ("eu", "us"), strict=True)
            ]
        )
        await pool.probe()
        await ask(pool, call(0, region="eu", spill_over_s=math.inf))
        with pytest.raises(EngineUnavailable, match="Nothing in the region 'mars' serves 'theirs'"):
            await ask(pool, call(1, region="mars", spill_over_s=math.inf))
        servers[0].script = lambda body: fails(503)
        with pytest.raises(Overloaded):
            await ask(pool, call(2, region="eu", spill_over_s=math.inf))
        await pool.close()
    assert [len(server.bodies) for server in servers] == [2, 0]


async def test_a_key_may_go_in_another_header() -> None:
    server = OpenAIServer()
    async with pool_of(server, settings={"api_key": "secret", "api_key_header": "Api-Key"}) as pool:
        await ask(pool)
    assert server.headers[0]["api-key"] == "secret"
    assert "authorization" not in server.headers[0]


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (400, "temperature is wrong", InvalidRequest),
        (422, "no", InvalidRequest),
        (400, "This model's maximum context length is 8 tokens", ContextLengthExceeded),
        (429, "slow down", Overloaded),
        (404, "unknown", ModelNotFound),
        (401, "your key sk-123 is wrong", EngineUnavailable),
        (500, "Traceback", EngineUnavailable),
    ],
)
async def test_what_a_refusal_means(status: int, message: str, error: type[PenstockError]) -> None:
    headers = {"retry-after": "17"}
    async with pool_of(OpenAIServer(script=lambda body: fails(status, message, **headers))) as pool:
        with pytest.raises(error) as raised:
            await ask(pool)
    assert type(raised.value) is error
    assert (message in raised.value.message) == (status in (400, 422)), "only what is the client's business"
    if error is Overloaded:
        assert raised.value.retry_after_s == 17.0


async def test_what_is_no_stream_of_chunks_is_an_error() -> None:
    async with pool_of(OpenAIServer(script=lambda body: [{"choices": "none"}])) as pool:
        with pytest.raises(EngineUnavailable, match="something else"):
            await ask(pool)
    async with pool_of(OpenAIServer(script=lambda body: [])) as pool:
        with pytest.raises(EngineUnavailable, match="before it began"):
            await ask(pool)


async def test_cancelling_a_request_reaches_the_server() -> None:
    server = OpenAIServer(script=lambda body: [*text_chunks("a", "b")[:2], 30.0, *text_chunks("c")])
    async with pool_of(server) as pool:
        has_begun = asyncio.Event()
        sending = asyncio.create_task(
            pool.send(call(), lambda chunks: has_begun.set() if chunks[-1].says_something else None)
        )
        await has_begun.wait()
        assert pool.views()[0].num_running == 1
        sending.cancel()
        async with asyncio.timeout(60):
            while not server.num_abandoned:
                await asyncio.sleep(0.01)
        (view,) = pool.views()
        assert (view.num_running, view.outcomes) == (0, {"abandoned": 1})
        assert view.circuit is Circuit.CLOSED


async def test_a_server_that_keeps_failing_is_left_alone() -> None:
    broken, whole = OpenAIServer(), OpenAIServer()
    broken.script = lambda body: fails(500)
    async with pool_of(broken, whole, breaker=BreakerConfig(max_failures=2, first_pause_s=1000.0)) as pool:
        for number in range(30):
            assert await ask(pool, call(number, f"prompt {number} " * 20)) == "Hello"
        assert len(broken.bodies) == 2
        assert [view.circuit for view in pool.views()] == [Circuit.OPEN, Circuit.CLOSED]


@pytest.mark.parametrize("num_servers", [1, 2])
async def test_one_workspaces_poison_closes_no_server_to_another(num_servers: int) -> None:
    def script(body: dict[str, Any]) -> list[Any]:
        is_poison = body["messages"][0]["content"].startswith("poison")
        return fails(500) if is_poison else text_chunks("Hel", "lo")

    servers = [OpenAIServer(script=script) for _ in range(num_servers)]
    breaker = BreakerConfig(max_failures=2, first_pause_s=1000.0)
    async with pool_of(*servers, breaker=breaker) as pool:
        for number in range(10):
            with pytest.raises(EngineUnavailable):
                await ask(pool, call(number, f"poison {number}", tenant="theirs"))
            assert await ask(pool, call(100 + number, f"prompt {number}", tenant="others")) == "Hello"
        assert sum(len(server.bodies) for server in servers) == 10 + 2 * num_servers, "then it is left out"
        with pytest.raises(EngineUnavailable):
            await ask(pool, call(200, "a good prompt", tenant="theirs"))


async def test_a_workspace_whose_requests_end_the_server_is_left_out_when_the_server_is_back() -> None:
    """A server that hangs up at the poison, also over a connection that had been kept."""
    connections: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                body = await reader.readexactly(int(lines.get(b"content-length", b"0")))
                if b"poison" in body:
                    listener.close()
                    for each in connections:
                        each.close()
                    return
                answer = json.dumps(
                    whole_answer(text_chunks("Hello"))
                    if lines.get(b"content-type")
                    else {"data": [{"id": "theirs"}]}
                ).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    config = ExternalServerConfig(url=f"http://127.0.0.1:{port}")
    breaker = BreakerConfig(max_failures=2, first_pause_s=1000.0)
    pool = ExternalPool([ExternalServer(config)], breaker=breaker)
    num_ends = 0
    try:
        for number in range(6):
            await pool.probe()
            with pytest.raises(EngineUnavailable):
                await ask(pool, call(number, "poison", tenant="theirs", is_whole=True))
            if not listener.is_serving():
                num_ends += 1
                listener = await asyncio.start_server(serve, "127.0.0.1", port)
            await pool.probe()
            good = call(100 + number, "a good prompt", tenant="others", is_whole=True)
            assert await ask(pool, good) == "Hello"
    finally:
        listener.close()
        await pool.close()
    assert num_ends == 2


async def test_one_workspace_does_not_use_up_the_retries_of_all() -> None:
    failing, whole = OpenAIServer(), OpenAIServer()
    failing.script = lambda body: fails(500)
    retries = RetryConfig(max_budget=10.0, budget_ratio=0.0, budget_per_s=0.0, first_pause_s=0.0)
    clock = VirtualClock()
    async with pool_of(failing, whole, retries=retries, clock=clock) as pool:
        num_refused = 0
        for number in range(40):
            try:
                await ask(pool, call(number, f"prompt {number}", tenant="theirs"))
            except EngineUnavailable:
                num_refused += 1
        assert pool.num_retries == 5, "half of all"
        assert num_refused
        for number in range(8):
            assert await ask(pool, call(100 + number, f"prompt {number}", tenant="others")) == "Hello"
        assert pool.num_retries > 5


async def test_without_any_server_that_is_well_nothing_is_asked() -> None:
    server = OpenAIServer()
    async with pool_of(server) as pool:
        server.is_well = False
        for _ in range(MAX_MISSED_PROBES):
            assert pool.is_ready
            await pool.probe()
        assert not pool.is_ready
        with pytest.raises(EngineUnavailable):
            await ask(pool)
        assert "theirs" in pool.models, "it is only away"
        server.is_well = True
        await pool.probe()
        assert await ask(pool) == "Hello"


class StandingServer(OpenAIServer):
    """Sends the beginning of an answer, and the rest when it is thawed."""

    def __init__(self, *beginning: Any) -> None:
        super().__init__(script=lambda body: [*beginning, self.thaws, *text_chunks("thawed")])
        self.thaws = asyncio.Event()


def stand_still(pool: ExternalPool, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let probes of a server go unanswered from now on."""

    async def probe() -> None:
        raise ServerDown("it did not answer in time", is_silent=True)

    (member,) = (each for each in pool._members.values() if each.server.config.url == server.url)
    monkeypatch.setattr(member.server, "probe", probe)


async def begun(pool: ExternalPool, server: OpenAIServer) -> None:
    """Return when a server has sent all that it sends before it stands still."""
    relays = [run.relay for member in pool._members.values() for run in member.runs]
    await until(lambda: server.bodies and not any(relay.num_chunks == 0 for relay in relays))


@pytest.mark.parametrize("beginning", [(), text_chunks("Hel")[:2]], ids=["nothing", "some text"])
async def test_requests_leave_a_server_that_answers_neither_them_nor_probes(
    monkeypatch: pytest.MonkeyPatch, beginning: Sequence[Any]
) -> None:
    standing = StandingServer(*beginning)
    other = OpenAIServer(script=lambda body: text_chunks("Hello"[3 if len(body["messages"]) > 1 else 0 :]))
    async with pool_of(standing, other) as pool:
        asking = [asyncio.create_task(ask(pool, call(number))) for number in range(2)]  # one at each
        await until(lambda: any(task.done() for task in asking) and len(standing.bodies) == 1)
        if beginning:
            await begun(pool, standing)
        stand_still(pool, standing, monkeypatch)
        for _ in range(MAX_MISSED_PROBES - 1):
            await pool.probe()
        assert not any(task.cancelling() for task in asking)
        await pool.probe()
        assert await asyncio.gather(*asking) == ["Hello", "Hello"]
        assert not any(task.cancelling() for task in asking)
        assert sum(view.outcomes.get("failed", 0) for view in pool.views()) == 1


async def test_a_request_that_a_silent_server_still_answers_stays_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probes may wait behind much work."""
    busy, other = StandingServer(*text_chunks("Hel")[:2]), OpenAIServer()
    goes_on = asyncio.Event()
    busy.script = lambda body: [
        *text_chunks("Hel")[:2],
        goes_on,
        text_chunks("l")[1],
        busy.thaws,
        text_chunks("o")[1],
    ]
    async with pool_of(busy, other) as pool:
        asking = [asyncio.create_task(ask(pool, call(number))) for number in range(2)]
        await until(lambda: any(task.done() for task in asking) and len(busy.bodies) == 1)
        await begun(pool, busy)
        stand_still(pool, busy, monkeypatch)
        await pool.probe()
        (run,) = (run for member in pool._members.values() for run in member.runs)
        num_before = run.relay.num_chunks
        goes_on.set()
        await until(lambda: run.relay.num_chunks > num_before)
        for _ in range(MAX_MISSED_PROBES):
            await pool.probe()
        assert not any(task.cancelling() for task in asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_request_that_no_other_server_can_take_waits_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = StandingServer(*text_chunks("Hel")[:2])
    async with pool_of(alone) as pool:
        asking = asyncio.create_task(ask(pool))
        await until(lambda: alone.bodies)
        await begun(pool, alone)
        stand_still(pool, alone, monkeypatch)
        for _ in range(MAX_MISSED_PROBES + 1):
            await pool.probe()
        alone.thaws.set()
        assert await asking == "Helthawed"


async def test_a_client_that_leaves_as_its_server_is_given_up_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    standing, other = StandingServer(), OpenAIServer()
    async with pool_of(standing, other) as pool:
        asking = [asyncio.create_task(ask(pool, call(number))) for number in range(2)]
        await until(lambda: any(task.done() for task in asking) and len(standing.bodies) == 1)
        (waiting_task,) = (task for task in asking if not task.done())
        stand_still(pool, standing, monkeypatch)
        for _ in range(MAX_MISSED_PROBES):
            await pool.probe()
        waiting_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting_task
        assert len(other.bodies) == 1


async def test_an_error_that_nobody_foresaw_ends_no_probing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cluster.external.pool.PROBE_INTERVAL_S", 0.01)
    server = OpenAIServer()
    async with pool_of(server) as pool:
        (member,) = pool._members.values()
        probe = member.server.probe

        async def fail_once() -> None:
            monkeypatch.setattr(member.server, "probe", probe)
            raise KeyError("unforeseen")

        monkeypatch.setattr(member.server, "probe", fail_once)
        num_before = server.num_probes
        async with running(pool.run()):
            await until(lambda: server.num_probes > num_before)


async def test_whether_a_server_that_is_down_answers_at_all() -> None:
    server = OpenAIServer()
    server.is_well = False
    async with serving(server):
        for url, is_silent in ((server.url, False), ("http://127.0.0.1:1", True)):
            external = ExternalServer(ExternalServerConfig(url=url))
            with pytest.raises(ServerDown) as down:
                await external.probe()
            assert down.value.is_silent is is_silent
            await external.close()


async def test_a_server_that_never_was_there() -> None:
    pool = ExternalPool([ExternalServer(ExternalServerConfig(url="http://127.0.0.1:1"))])
    await pool.probe()
    assert [view.state for view in pool.views()] == [ReplicaState.UNHEALTHY]
    assert not pool.models
    await pool.close()


class CachingServer(OpenAIServer):
    """Takes its time for a system prompt that it has not seen. The pool's clock knows no other time than that: how
    long this machine takes must not count."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(script=self.answer)
        self.known: set[str] = set()
        self._clock = clock

    def answer(self, body: dict[str, Any]) -> list[Any]:
        beginning = body["messages"][0]["content"][:60]
        self._clock.advance(0.001 if beginning in self.known else 0.05)
        self.known.add(beginning)
        return text_chunks("ok")


async def test_requests_with_the_same_beginning_go_to_the_same_server() -> None:
    clock = VirtualClock()
    servers = [CachingServer(clock) for _ in range(3)]
    async with pool_of(*servers, router=Router(), clock=clock) as pool:
        for turn in range(5):
            for tenant in range(6):
                system = f"You are the assistant of tenant number {tenant}. " * 40
                await ask(pool, call(turn * 6 + tenant, f"{system} turn {turn}"))
    num_cold = sum(len(server.known) for server in servers)
    assert num_cold <= 11, "in turn, or by chance, most tenants would be at all three servers"
    assert all(server.bodies for server in servers), "and none is left out"


async def test_load_that_servers_tell_keeps_requests_away() -> None:
    busy, idle = OpenAIServer(), OpenAIServer()
    busy.metrics = "vllm:num_requests_running 50\nvllm:num_requests_waiting 200\n"
    idle.metrics = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    # Time stands still: how long this machine takes for an answer must not count.
    async with pool_of(busy, idle, router=Router(), clock=VirtualClock()) as pool:
        for number in range(10):
            await ask(pool, call(number, f"prompt {number}"))
        assert (len(busy.bodies), len(idle.bodies)) == (0, 10)
        load = pool.views()[0].load
        assert load is not None
        assert load.num_waiting == 200


async def test_a_preferred_region() -> None:
    servers = [OpenAIServer(), OpenAIServer()]
    async with serving(*servers):
        regions = ("eu", "us")
        pool = ExternalPool(
            [
                ExternalServer(ExternalServerConfig(url=server.url, region=region))
                for server, region in zip(servers, regions, strict=True)
            ]
        )
        await pool.probe()
        for number in range(6):
            await ask(pool, call(number, f"prompt {number}", region="us"))
        await pool.close()
    assert [len(server.bodies) for server in servers] == [0, 6]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", ""])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError):
        ExternalServer(ExternalServerConfig(url=url))


async def test_a_url_may_end_with_the_version() -> None:
    async with serving(server := OpenAIServer()):
        for url in (server.url, f"{server.url}/", f"{server.url}/v1", f"{server.url}/v1/"):
            external = ExternalServer(ExternalServerConfig(url=url))
            await external.probe()
            assert external.models == {"theirs": "theirs"}
            await external.close()


async def test_a_prefix_stays_at_its_server_until_the_queue_there_is_much_longer() -> None:
    async with pool_of(OpenAIServer(), OpenAIServer(), router=None, clock=VirtualClock()) as pool:
        numbers = itertools.count()

        def place(text: str, *excluded: str) -> str:
            waits = call(next(numbers), text, estimated_tokens=len(text) // 4)
            return pool._choose(waits, frozenset(excluded)).server.name

        holder = place("a" * 4_000)
        (other,) = {view.name for view in pool.views()} - {holder}
        for letter in "bc":
            assert place(letter * 4_000, other) == holder
        assert place("a" * 4_000) == holder, "three times the prefix wait there"
        for letter in "de":
            assert place(letter * 4_000, other) == holder
        assert place("a" * 4_000) == other, "a copy"


async def test_servers_that_send_nonsense_are_probed_again() -> None:
    class Nested(OpenAIServer):
        async def _models(self, request: Request) -> Response:
            if self.is_well:
                return await super()._models(request)
            self.num_probes += 1
            return Response(b'{"x": ' + b"[" * 100_000)

    liar = Nested("m")
    liar.metrics = "vllm:num_requests_running 1\n"
    async with pool_of(liar, OpenAIServer("n")) as pool:
        liar.metrics = "vllm:num_requests_running +Inf\n"
        await pool.probe()
        liar.is_well = False
        await pool.probe()
        liar.is_well = True
        await pool.probe()
        assert [view.state for view in pool.views()] == [ReplicaState.READY] * 2


@pytest.mark.parametrize("is_whole", [True, False])
async def test_an_answer_of_very_many_parts_is_not_decoded(is_whole: bool) -> None:
    many = b'{"choices": [' + b"{}," * MAX_OBJECTS + b"{}]}"
    nested = b'{"error": ' + b"[" * 100_000
    for body in (many, nested):
        script = [Response(body if is_whole else b"data: " + body + b"\n\n")]
        async with pool_of(OpenAIServer(script=lambda body, script=script: script)) as pool:
            with pytest.raises(EngineUnavailable, match="something else"):
                await pool.send(call(is_whole=is_whole), lambda chunks: None)


async def test_a_list_of_very_many_models_is_refused() -> None:
    server = OpenAIServer(*(str(number) for number in range(MAX_OBJECTS)))
    async with pool_of(server) as pool:
        assert not pool.is_ready
        assert not pool.models


@pytest.mark.parametrize("number", [-5, 2**31, 10**30])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_usage_that_cannot_be_is_left_out(number: int, is_whole: bool) -> None:
    details = {"cached_tokens": number}
    told = {"prompt_tokens": 3, "completion_tokens": 1}
    lies: list[dict[str, Any]] = [
        {"prompt_tokens": number},
        {"completion_tokens": number},
        {"prompt_tokens_details": details},
        {"completion_tokens_details": {"reasoning_tokens": number}},
    ]
    replies = [text_chunks("a", usage=told | lie) for lie in lies]
    replies.append([*text_chunks("a", usage=told), {"choices": [], "timings": {"cache_n": number}}])
    async with pool_of(OpenAIServer(script=lambda body: replies.pop())) as pool:
        for is_credible in (True, *(False for _ in lies)):
            chunks: list[StreamChunk] = []
            await pool.send(call(is_whole=is_whole, text="x" * 39), chunks.extend)
            usage = [chunk.usage for chunk in chunks if chunk.usage is not None]
            if is_credible:
                assert (usage[0].prompt_tokens, usage[0].completion_tokens) == (3, 1)
            elif is_whole:  # estimated
                assert (usage[0].prompt_tokens, usage[0].completion_tokens) == (10, 1)
            else:
                assert usage == []
            assert all(chunk.timings is None for chunk in chunks)
