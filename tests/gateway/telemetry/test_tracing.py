"""Traces, as an in-memory exporter and a real OTLP receiver see them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.api.app import create_app
from penstock.api.http.access_log import RequestLog
from penstock.core.errors import PenstockError
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.plan import PREDICTION, DraftUse, TokenEvent
from penstock.core.request import Request
from penstock.gateway.accounts import Accounts
from penstock.gateway.gateway import Gateway
from penstock.gateway.telemetry import (
    OpenTelemetryTracing,
    RequestObserver,
    TracingConfig,
    otlp_exporter,
    parse_traceparent,
)
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text
from tests.gateway.guards.read_settings import guard_settings

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CHAT = {"messages": [{"role": "user", "content": "my secret prompt"}], "temperature": 0.5, "max_tokens": 20}


class Traced:
    """An application whose spans a test can read."""

    def __init__(
        self, engine: FakeEngine, sampled_share: float = 1.0, exporter: SpanExporter | None = None
    ) -> None:
        self._exporter = InMemorySpanExporter()
        config = TracingConfig(endpoint="unused", headers={}, version="9", sampled_share=sampled_share)
        self.tracing = OpenTelemetryTracing(config, exporter or self._exporter)
        observer = RequestObserver(self.tracing)
        self.gateway = Gateway(engine, GatewayConfig(), accounts=Accounts(observers=[observer]))
        request_log = RequestLog(self.tracing, writes_lines=False)
        self.app = create_app(self.gateway, ServerConfig(), request_log=request_log)

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            return await client.post(path, json=body)

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracing.close()
        return {span.name: span for span in self._exporter.get_finished_spans()}


async def test_drafts_of_a_request_are_in_its_trace_and_its_usage() -> None:
    def script(request: Request) -> list[TokenEvent]:
        return [
            TokenEvent(request.id, (104,), queue_s=0.0),
            TokenEvent(request.id, (105, 106), draft_use=DraftUse("lookup", 3, 1)),
            TokenEvent(request.id, (107, 108, 109), draft_use=DraftUse(PREDICTION, 4, 2)),
            # A stop string ends the answer inside of this group.
            TokenEvent(request.id, (110, 111, 112, 113), draft_use=DraftUse(PREDICTION, 5, 3)),
        ]

    traced = Traced(FakeEngine(script))
    answer = await traced.post("/v1/chat/completions", {**CHAT, "stop": ["no"]})
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 5,
    }
    attributes = traced.spans()["engine"].attributes
    assert attributes is not None
    assert attributes["penstock.draft_tokens"] == 12
    assert attributes["penstock.accepted_draft_tokens"] == 5


async def test_a_request_is_a_server_span_a_generation_and_its_time_in_the_engine() -> None:
    traced = Traced(FakeEngine(script_text("hello", num_cached_tokens=3)))
    answer = await traced.post("/v1/chat/completions", CHAT)
    spans = traced.spans()
    server, chat, engine = spans["POST /v1/chat/completions"], spans["chat bytes"], spans["engine"]
    assert chat.parent is not None
    assert engine.parent is not None
    assert chat.parent.span_id == server.context.span_id
    assert engine.parent.span_id == chat.context.span_id
    assert server.attributes is not None
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["penstock.request.id"] == answer.headers["x-request-id"]
    assert chat.attributes is not None
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "bytes",
        "gen_ai.response.model": "bytes",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "penstock.workspace.id": "default",
    }
    assert {name: chat.attributes[name] for name in expected} == expected
    assert [event.name for event in engine.events] == ["queue", "prefill", "first_token", "finish"]
    times = [event.timestamp for event in engine.events]
    assert times == sorted(times)
    assert "secret" not in "".join(span.to_json() for span in spans.values())


async def test_a_callers_trace_is_continued() -> None:
    traced = Traced(FakeEngine(script_text("hello")))
    await traced.post("/v1/chat/completions", CHAT, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
    spans = traced.spans()
    server = spans["POST /v1/chat/completions"]
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" == PARENT_ID
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}


async def test_sampling_is_the_callers_choice_first() -> None:
    traced = Traced(FakeEngine(script_text("hello")))
    await traced.post("/v1/chat/completions", CHAT, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
    assert traced.spans() == {}
    traced = Traced(FakeEngine(script_text("hello")), sampled_share=0.0)
    await traced.post("/v1/chat/completions", CHAT)
    assert traced.spans() == {}


async def test_errors_are_marked() -> None:
    traced = Traced(FakeEngine(lambda request: [PenstockError("broken")]))
    assert (await traced.post("/v1/completions", {"prompt": "hi"})).status_code == 500
    spans = traced.spans()
    span = spans["text_completion bytes"]
    assert span.attributes is not None
    assert span.attributes["error.type"] == "internal_error"
    assert not span.status.is_ok
    assert not spans["POST /v1/completions"].status.is_ok


async def test_a_judge_has_its_own_span_below_the_request_it_judges() -> None:
    ready = engine_ready(model_card(max_model_len=4096), max_output_tokens=1024)
    traced = Traced(FakeEngine(script_text('{"verdict": "allow"}'), ready))
    rule = {"guard": "judge", "constitution": "x", "stage": "input"}
    traced.gateway.guards.apply(guard_settings({"policies": {"p": {"rules": [rule]}}, "default_policy": "p"}))
    assert (await traced.post("/v1/completions", {"prompt": "hi", "temperature": 0.25})).status_code == 200
    spans = traced.spans()
    server, judge, own = spans["POST /v1/completions"], spans["chat bytes"], spans["text_completion bytes"]
    for span in (judge, own):
        assert span.parent is not None
        assert span.parent.span_id == server.context.span_id
    assert judge.attributes is not None
    assert judge.attributes["penstock.workspace.id"] == "default", "asked in the name of the caller"
    assert own.attributes is not None
    assert own.attributes["gen_ai.request.temperature"] == 0.25


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "junk",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}",
        f"00-{TRACE_ID}-{PARENT_ID}-01" + "x" * 10_000,
    ],
)
def test_malformed_trace_parents_are_ignored(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_a_newer_trace_parent_is_understood() -> None:
    parent = parse_traceparent(f"01-{TRACE_ID}-{PARENT_ID}-03-more")
    assert parent is not None
    assert (parent.trace_id, parent.span_id, parent.is_sampled) == (TRACE_ID, PARENT_ID, True)


@contextmanager
def otlp_receiver() -> Iterator[tuple[str, list[tuple[str, dict[str, str], bytes]]]]:
    received: list[tuple[str, dict[str, str], bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_real_collector_receives_them() -> None:
    with otlp_receiver() as (url, received):
        config = TracingConfig(endpoint=url, headers={"x-token": "abc"}, service_name="front")
        tracing = OpenTelemetryTracing(config, otlp_exporter(config))
        gateway = Gateway(
            FakeEngine(script_text("hi")),
            GatewayConfig(),
            accounts=Accounts(observers=[RequestObserver(tracing)]),
        )
        app = create_app(gateway, ServerConfig(), request_log=RequestLog(tracing, writes_lines=False))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            await client.post("/v1/chat/completions", json=CHAT)
        tracing.close()
    path, headers, body = received[0]
    assert (path, headers["x-token"]) == ("/v1/traces", "abc")
    message = ExportTraceServiceRequest()
    message.ParseFromString(body)
    resource = {item.key: item.value.string_value for item in message.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "front"
    names = {span.name for spans in message.resource_spans[0].scope_spans for span in spans.spans}
    assert names == {"POST /v1/chat/completions", "chat bytes", "engine"}


class BrokenExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise ConnectionError("nobody there")


async def test_a_dead_collector_costs_no_answer() -> None:
    traced = Traced(FakeEngine(script_text("hello")), exporter=BrokenExporter())
    assert (await traced.post("/v1/chat/completions", CHAT)).status_code == 200
    traced.tracing.close()
