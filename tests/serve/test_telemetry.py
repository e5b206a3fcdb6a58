"""How logs and traces are put together from settings and the environment."""

from __future__ import annotations

import errno
import io
import json
import logging
import resource
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.core.errors import UsageError
from penstock.core.gateway_config import ServerConfig, TelemetryConfig
from penstock.core.log_format import JsonFormatter
from penstock.core.machine import install_command
from penstock.gateway.telemetry import Tracing
from penstock.serve.config import resolve
from penstock.serve.environment import otel_sampled_share, otel_service_name, otlp_headers
from penstock.serve.process import (
    MAX_WAITING_LINES,
    RESERVED_FILES,
    BackgroundHandler,
    build_observer,
    build_request_log,
    configure_server_logging,
    within_file_limit,
    writes_access_lines,
)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    yield root
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers


def test_nothing_is_built_unless_asked_for() -> None:
    config = TelemetryConfig()
    observer = build_observer(config)
    assert type(observer.tracing) is Tracing
    assert build_request_log(config, observer) is None


@pytest.mark.parametrize(
    ("config", "writes"),
    [
        (TelemetryConfig(), False),
        (TelemetryConfig(access_log=True), True),
        (TelemetryConfig(log_format="json"), True),
        (TelemetryConfig(log_format="json", access_log=False), False),
    ],
)
def test_access_lines_come_with_json_unless_told_otherwise(config: TelemetryConfig, writes: bool) -> None:
    assert writes_access_lines(config) is writes
    assert (build_request_log(config, build_observer(config)) is not None) is writes


def test_json_lines_reach_standard_error(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_server_logging(TelemetryConfig(log_format="json"))
    logging.getLogger("penstock.test").warning("careful with %s", "water", extra={"fields": {"depth_m": 3}})
    root.handlers[0].close()
    line = json.loads(stream.getvalue())
    assert (line["message"], line["depth_m"], line["level"]) == ("careful with water", 3, "warning")


def test_a_slow_reader_of_logs_costs_lines_and_not_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error blocks; the program goes on, and later logs how many lines were lost."""
    may_write = threading.Event()

    class Blocked(io.StringIO):
        def write(self, text: str) -> int:
            may_write.wait(60)
            return super().write(text)

    stream = Blocked()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = BackgroundHandler()
    handler.setFormatter(JsonFormatter("gateway"))

    def log(message: str) -> None:
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, message, None, None))

    for number in range(MAX_WAITING_LINES + 50):
        log(f"line {number}")
    may_write.set()
    while not handler._lines.empty():
        time.sleep(0.01)
    log("the last")
    handler.close()
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages[0] == "line 0"
    assert messages[-1] == "the last"
    num_written = len(messages) - 2
    assert messages[-2].startswith(f"{MAX_WAITING_LINES + 50 - num_written} log lines were dropped")


def test_lines_go_on_when_the_disk_has_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    is_full = threading.Event()
    failed = threading.Event()

    class Disk(io.StringIO):
        def write(self, text: str) -> int:
            if is_full.is_set():
                failed.set()
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stream = Disk()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = BackgroundHandler()
    handler.setFormatter(JsonFormatter("gateway"))

    def log(message: str) -> None:
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, message, None, None))

    is_full.set()
    log("lost")
    assert failed.wait(60)
    is_full.clear()
    log("the first")
    handler.close()
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines() if line]
    assert messages == ["1 log lines could not be written", "the first"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError) as caught:
        build_observer(TelemetryConfig(otlp_endpoint="http://localhost:4318"))
    assert caught.value.hint is not None
    assert install_command("otel") in caught.value.hint


def test_opentelemetrys_own_variables_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b, other = c ,")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    assert otlp_headers() == {"x-key": "a b", "other": "c"}
    assert otel_service_name() == "front"
    for text, share in (("0.25", 0.25), ("7", 1.0), ("-1", 0.0), ("much", 1.0), ("", 1.0)):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", text)
        assert otel_sampled_share() == share


def test_settings_resolve() -> None:
    config = resolve({}, {"log_format": "json", "otlp_endpoint": "http://c:4318", "max_websockets": "7"})
    assert config.telemetry == TelemetryConfig(log_format="json", otlp_endpoint="http://c:4318")
    assert config.server.max_websockets == 7


def test_connections_fit_into_what_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert within_file_limit(ServerConfig(max_connections=16_000)).max_connections == 4096 - RESERVED_FILES
    assert limits["now"] == (4096, 4096)
    limits["now"] = (1024, resource.RLIM_INFINITY)
    assert within_file_limit(ServerConfig(max_connections=16_000)).max_connections == 16_000
    assert limits["now"][0] == 16_000 + RESERVED_FILES
