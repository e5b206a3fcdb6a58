"""Builds the logs and traces of a server."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import sys
import threading

from penstock import __version__
from penstock.api.http.access_log import RequestLog
from penstock.core.gateway_config import TelemetryConfig
from penstock.core.log_format import formatter
from penstock.gateway.telemetry import RequestObserver
from penstock.serve.environment import otel_sampled_share, otel_service_name, otlp_headers

MAX_WAITING_LINES = 20_000
CLOSE_TIMEOUT_S = 2.0


class BackgroundHandler(logging.Handler):
    """Writes log lines to standard error on a thread, so that a slow reader does not block the event loop. If
    too many lines wait, new lines are dropped and counted. Lines that cannot be written, for want of room on a disk,
    are counted too."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING_LINES)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._num_dropped:
                line = f"{self._format_dropped()}\n{line}"
            self._lines.put_nowait(line)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
                self._thread.join(timeout=CLOSE_TIMEOUT_S)
        super().close()

    def _format_dropped(self) -> str:
        return self._format_note(
            f"{self._num_dropped} log lines were dropped because they could not be written in time"
        )

    def _format_note(self, message: str) -> str:
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None))

    def _write(self) -> None:
        num_unsure = num_lost = 0  # lines since the last flush, and those that a failure took
        while (line := self._lines.get()) is not None:
            num_unsure += 1
            if num_lost:  # a part of a line may be there
                line = f"\n{self._format_note(f'{num_lost} log lines could not be written')}\n{line}"
            try:
                sys.stderr.write(line + "\n")
                if self._lines.empty() or num_lost:
                    sys.stderr.flush()
                    num_unsure = num_lost = 0
            except (OSError, ValueError):  # ValueError: the stream was closed
                num_lost += num_unsure
                num_unsure = 0


def configure_server_logging(config: TelemetryConfig, *, process: str = "gateway") -> None:
    """Set the format of log lines, which say which process wrote them. The level stays as it is."""
    if config.log_format != "json" and not writes_access_lines(config):
        return
    root = logging.getLogger()
    previous = root.handlers[0].formatter if root.handlers else None
    handler = BackgroundHandler()
    handler.setFormatter(
        formatter(
            config.log_format,
            process=process,
            text_format=previous._fmt or ""
            if previous is not None
            else "%(asctime)s %(levelname)s %(message)s",
        )
    )
    root.handlers[:] = [handler]


def writes_access_lines(config: TelemetryConfig) -> bool:
    return config.log_format == "json" if config.access_log is None else config.access_log


def build_observer(config: TelemetryConfig) -> RequestObserver:
    """Build the observer of requests. Raises UsageError if tracing is on and the extra `otel` is not installed."""
    if config.otlp_endpoint is None:
        return RequestObserver()
    from penstock.gateway.telemetry import OpenTelemetryTracing, TracingConfig, otlp_exporter

    tracing = TracingConfig(
        endpoint=config.otlp_endpoint,
        headers=otlp_headers(),
        service_name=otel_service_name(),
        version=__version__,
        sampled_share=otel_sampled_share(),
    )
    return RequestObserver(OpenTelemetryTracing(tracing, otlp_exporter(tracing)))


def build_request_log(config: TelemetryConfig, observer: RequestObserver) -> RequestLog | None:
    """Build the log of single requests, or return None if neither access logs nor traces are on."""
    writes_lines = writes_access_lines(config)
    if not writes_lines and config.otlp_endpoint is None:
        return None
    return RequestLog(observer.tracing, writes_lines=writes_lines, keeps_prompts=config.log_prompts)
