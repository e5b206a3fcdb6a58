"""Logs, traces, recorded requests and history of the real server and its engine process."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.gateway.store.database import DATABASE_FILE
from penstock.planner.traffic import read_trace
from tests.e2e.conftest import start_server
from tests.gateway.telemetry.test_tracing import PARENT_ID, TRACE_ID, otlp_receiver

KEY = "sk-a-key-nobody-may-see"


@pytest.mark.slow
def test_a_request_leaves_a_line_and_a_trace_and_no_secret(tmp_path: Path) -> None:
    with otlp_receiver() as (collector, received):
        server = start_server(
            tmp_path,
            *("--model", "echo", "--data-dir", str(tmp_path), "--log-format", "json", "--api-key", KEY),
            *(
                "--otlp-endpoint",
                collector,
                "--keep-history",
                "--record-requests",
                str(tmp_path / "requests.jsonl"),
            ),
        )
        try:
            answer = httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "private words", "max_tokens": 8},
                headers={"authorization": f"Bearer {KEY}", "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"},
            )
            assert answer.status_code == 200
            assert server.stop() == 0
        finally:
            server.process.kill()
    log = server.log.read_text()
    assert KEY not in log
    assert "private words" not in log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (access,) = (line for line in lines if line["logger"] == "penstock.access")
    assert access["request_id"] == answer.headers["x-request-id"]
    assert access["trace_id"] == TRACE_ID
    assert access["completion_tokens"] == 8
    spans = []
    for _, _, body in received:
        message = ExportTraceServiceRequest()
        message.ParseFromString(body)
        spans += [
            span
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
    assert {span.name for span in spans} == {"POST /v1/completions", "text_completion echo", "engine"}
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    (engine,) = (span for span in spans if span.name == "engine")
    assert [event.name for event in engine.events] == ["queue", "prefill", "first_token", "finish"]
    (recorded,) = read_trace(tmp_path / "requests.jsonl").lines
    assert (recorded.prompt_tokens, recorded.output_tokens) == (answer.json()["usage"]["prompt_tokens"], 8)
    assert "private words" not in (tmp_path / "requests.jsonl").read_text()
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as database:
        assert database.execute("SELECT count(*) FROM history_samples").fetchone() > (0,)
