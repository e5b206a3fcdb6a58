"""Traces in OpenTelemetry's form, after its conventions for generative AI. Needs the extra `otel`.

A request has a span; each of its generations has one below it, and below that one for the time in the engine, with
events for queue, prefill, first token and finish. The engine process itself writes no spans: it measures how long a
request waited and sends that back with the first token, so the wire carries one number instead of a trace context,
and only one process has an exporter. Times are the gateway's clock, the queue's length is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import UsageError
from penstock.core.installation import install_command
from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings"}  # everything else is a chat
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TracingConfig:
    endpoint: str  # of an OTLP collector, over HTTP
    headers: Mapping[str, str]
    service_name: str = "penstock"
    version: str = ""
    sampled_share: float = 1.0  # of requests whose caller did not decide


def otlp_exporter(config: TracingConfig) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise UsageError(
            "Tracing needs the OpenTelemetry packages.",
            hint=f"Install them with: {install_command('otel')}",
        ) from error
    endpoint = config.endpoint.rstrip("/")
    if not endpoint.endswith("/v1/traces"):
        endpoint += "/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint, headers=dict(config.headers))


class OpenTelemetryTracing:
    """Implements `record.Tracing`."""

    def __init__(self, config: TracingConfig, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create({"service.name": config.service_name, "service.version": config.version})
        sampler = ParentBased(TraceIdRatioBased(config.sampled_share))
        self._provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock", config.version)

    def begin(self, record: RequestRecord, name: str, attributes: dict[str, str]) -> None:
        from opentelemetry.trace import SpanKind

        record.span = self._tracer.start_span(
            name,
            context=_parent_context(record),
            kind=SpanKind.SERVER,
            attributes={**attributes, "penstock.request.id": record.request_id},
            start_time=record.started_ns,
        )

    def end(self, record: RequestRecord, status: int | None) -> None:
        from opentelemetry.trace import StatusCode

        if record.span is None:
            return
        if status is not None:
            record.span.set_attribute("http.response.status_code", status)
            if status >= 500:
                record.span.set_status(StatusCode.ERROR)
        record.span.end()

    def generated(
        self, record: RequestRecord | None, claim: Claim, outcome: Outcome, started_ns: int
    ) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        parent = None
        if record is not None and record.span is not None:
            parent = set_span_in_context(record.span)
        operation = _OPERATIONS.get(claim.endpoint, "chat")
        span = self._tracer.start_span(
            f"{operation} {claim.model}",
            context=parent,
            kind=SpanKind.INTERNAL,
            attributes=_attributes(operation, record, claim, outcome),
            start_time=started_ns,
        )
        ended_ns = started_ns + int(outcome.duration_s * _NS)
        if outcome.error_code is not None:
            span.set_attribute("error.type", outcome.error_code)
            span.set_status(StatusCode.ERROR, outcome.error_code)
        self._write_engine_span(span, outcome, started_ns, ended_ns)
        span.end(end_time=ended_ns)

    def close(self) -> None:
        self._provider.shutdown()

    def _write_engine_span(self, parent: Any, outcome: Outcome, started_ns: int, ended_ns: int) -> None:
        """The life of the request in the engine, as the gateway saw it."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        if outcome.is_cached:
            return
        span = self._tracer.start_span(
            "engine", context=set_span_in_context(parent), kind=SpanKind.CLIENT, start_time=started_ns
        )
        span.add_event("queue", timestamp=started_ns)
        if outcome.queue_s is not None:
            span.set_attribute("penstock.queue_s", outcome.queue_s)
            span.add_event("prefill", timestamp=started_ns + int(outcome.queue_s * _NS))
        if outcome.first_token_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", outcome.first_token_s)
            span.add_event("first_token", timestamp=started_ns + int(outcome.first_token_s * _NS))
        span.add_event("finish", {"penstock.status": outcome.status}, timestamp=ended_ns)
        span.end(end_time=ended_ns)


def _parent_context(record: RequestRecord) -> Any:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if record.parent is None:
        return None
    remote = SpanContext(
        trace_id=int(record.parent.trace_id, 16),
        span_id=int(record.parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if record.parent.is_sampled else TraceFlags.DEFAULT),
    )
    return set_span_in_context(NonRecordingSpan(remote))


def _attributes(
    operation: str, record: RequestRecord | None, claim: Claim, outcome: Outcome
) -> dict[str, str | int | float | list[str]]:
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": claim.model,
        "gen_ai.response.model": claim.model,
        "gen_ai.response.id": claim.request_id,
        "gen_ai.request.max_tokens": claim.max_output_tokens,
        "gen_ai.usage.input_tokens": outcome.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": outcome.usage.cached_tokens,
        "penstock.workspace.id": claim.principal.workspace_id,
        "penstock.key.id": claim.principal.key_id,
        "penstock.tier": claim.tier.value,
        "penstock.status": outcome.status,
    }
    if outcome.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = list(outcome.finish_reasons)
    sampling = record.sampling if record is not None else None
    if sampling is not None:
        attributes["gen_ai.request.temperature"] = sampling.temperature
        attributes["gen_ai.request.top_p"] = sampling.top_p
    return attributes
