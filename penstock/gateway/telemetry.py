"""Everything that is known about the request that is being served, for its access line and its trace.

The front end makes a record when a request arrives, and reads it when the answer has been sent. The record travels in
a context variable, so that no code in between has to pass it on. `RequestObserver` follows the accounts of requests
and fills in the record.

`OpenTelemetryTracing` (the extra `otel`) writes a span for each request, below it a span for each generation, and
below the generation a span for the time in the engine. Its events are queue, prefill, first token and finish. The
engine writes no spans: it measures how long a request waited and sends that number with the first token, so that only
one process has an exporter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Any

from penstock.core.errors import UsageError
from penstock.core.machine import install_command
from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.prompts import ChatPrompt, Prompt, SamplingOptions, TextPrompt

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


# A W3C trace context: version, trace id, parent span, flags.
_TRACEPARENT = re.compile(
    r"^(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-|$)"
)
MAX_LOGGED_PROMPT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The place of this request in the caller's trace."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parse_traceparent(header: str | None) -> TraceParent | None:
    """None for an absent or malformed header, which is ignored as the standard says."""
    match = _TRACEPARENT.match(header) if header is not None and len(header) < 512 else None
    return TraceParent(match[1], match[2], bool(int(match[3], 16) & 1)) if match else None


@dataclass(slots=True)
class RequestRecord:
    """Written by the event loop's thread only. `accounts` has an entry for every generation, a judge's too."""

    request_id: str
    parent: TraceParent | None = None
    keeps_prompts: bool = False
    started_ns: int = field(default_factory=time_ns)  # since the epoch, for traces
    began_s: float = field(default_factory=monotonic)  # for durations: this clock is never set
    sampling: SamplingOptions | None = None
    prompts: list[str] = field(default_factory=list)
    accounts: list[tuple[Claim, Outcome]] = field(default_factory=list)
    span: Any = None  # the tracing library's span of the whole request, while one is open

    def note(self, request_id: str, texts: Iterable[str], sampling: SamplingOptions | None = None) -> None:
        """Note what a request asks for. `texts` are its prompts as people read them."""
        if request_id != self.request_id:  # a judge asks on this request's behalf
            return
        self.sampling = sampling
        if self.keeps_prompts:
            self.prompts += [text[:MAX_LOGGED_PROMPT_CHARS] for text in texts]

    @property
    def own_account(self) -> tuple[Claim, Outcome] | None:
        """Return the generation that the client asked for, once it is settled."""
        return next((account for account in self.accounts if account[0].request_id == self.request_id), None)


current_record: ContextVar[RequestRecord | None] = ContextVar("penstock_request", default=None)


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as people read it."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, ChatPrompt):
        texts = [(message.role, "".join(part.text for part in message.parts)) for message in prompt.messages]
        return "\n".join(f"{role}: {text}" for role, text in texts)
    return f"({len(prompt.token_ids)} token ids)"


class Tracing:
    """The receiver of spans. No method may block; another thread exports the spans. This one drops them."""

    def begin(self, record: RequestRecord, name: str, attributes: dict[str, str]) -> None:
        """Open the span of a whole request, below the caller's own where it sent one."""

    def end(self, record: RequestRecord, status: int | None) -> None:
        """Close the span."""

    def generated(
        self, record: RequestRecord | None, claim: Claim, outcome: Outcome, started_ns: int
    ) -> None:
        """Write the span of one generation, which has just ended."""

    def close(self) -> None:
        """Export the spans that are left."""


class RequestObserver:
    """An `accounts.Observer`."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing or Tracing()

    def begin(self, claim: Claim) -> Callable[[Outcome], None]:
        record = current_record.get()
        started_ns = time_ns()

        def settled(outcome: Outcome) -> None:
            if record is not None:
                record.accounts.append((claim, outcome))
            self.tracing.generated(record, claim, outcome, started_ns)

        return settled


# Everything else is a chat.
_OPERATIONS = {"completions": "text_completion"} | {
    name: name for name in ("embeddings", "rerank", "score", "classify", "pooling")
}
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
            "Tracing needs the OpenTelemetry packages.", hint=f"Install them with: {install_command('otel')}"
        ) from error
    endpoint = config.endpoint.rstrip("/")
    if not endpoint.endswith("/v1/traces"):
        endpoint += "/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint, headers=dict(config.headers))


class OpenTelemetryTracing(Tracing):
    """Hands spans to OpenTelemetry."""

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
        if outcome.draft_tokens:
            span.set_attribute("penstock.draft_tokens", outcome.draft_tokens)
            span.set_attribute("penstock.accepted_draft_tokens", outcome.accepted_draft_tokens)
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
        asked = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        attributes |= {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
    return attributes
