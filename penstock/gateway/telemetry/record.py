"""What is known about the request that is being served, for its access line and its trace.

The front end makes a record when a request arrives, and reads it when the answer has been sent. The record travels in
a context variable, so that no code in between has to pass it on. `RequestObserver` follows the accounts of requests
and fills in the record.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import time_ns
from typing import Any, Protocol

from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.prompts import ChatPrompt, GenerationRequest, Prompt, SamplingOptions, TextPrompt

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
    started_ns: int = field(default_factory=time_ns)
    sampling: SamplingOptions | None = None
    prompts: list[str] = field(default_factory=list)
    accounts: list[tuple[Claim, Outcome]] = field(default_factory=list)
    span: Any = None  # the tracing library's span of the whole request, while one is open

    def note(self, request: GenerationRequest) -> None:
        if request.request_id != self.request_id:  # a judge asks on this request's behalf
            return
        self.sampling = request.sampling
        if self.keeps_prompts:
            self.prompts += [_prompt_text(prompt)[:MAX_LOGGED_PROMPT_CHARS] for prompt in request.prompts]

    @property
    def own_account(self) -> tuple[Claim, Outcome] | None:
        """The generation that the client asked for, once it is settled."""
        return next((account for account in self.accounts if account[0].request_id == self.request_id), None)


current_record: ContextVar[RequestRecord | None] = ContextVar("penstock_request", default=None)


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, ChatPrompt):
        return "\n".join(
            f"{message.role}: "
            + (
                message.content
                if isinstance(message.content, str)
                else "".join(part.text for part in message.content)
            )
            for message in prompt.messages
        )
    return f"({len(prompt.token_ids)} token ids)"


class Tracing(Protocol):
    """The receiver of spans. No method may block; another thread exports the spans."""

    def begin(self, record: RequestRecord, name: str, attributes: dict[str, str]) -> None:
        """Open the span of a whole request, below the caller's own where it sent one."""
        ...

    def end(self, record: RequestRecord, status: int | None) -> None: ...

    def generated(
        self, record: RequestRecord | None, claim: Claim, outcome: Outcome, started_ns: int
    ) -> None:
        """Write the span of one generation, which has just ended."""
        ...

    def close(self) -> None:
        """Export the spans that are left."""
        ...


class NoTracing:
    def begin(self, record: RequestRecord, name: str, attributes: dict[str, str]) -> None:
        pass

    def end(self, record: RequestRecord, status: int | None) -> None:
        pass

    def generated(
        self, record: RequestRecord | None, claim: Claim, outcome: Outcome, started_ns: int
    ) -> None:
        pass

    def close(self) -> None:
        pass


class RequestObserver:
    """An `accounts.Observer`."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing: Tracing = tracing or NoTracing()

    def begin(self, claim: Claim) -> Callable[[Outcome], None]:
        record = current_record.get()
        started_ns = time_ns()

        def settled(outcome: Outcome) -> None:
            if record is not None:
                record.accounts.append((claim, outcome))
            self.tracing.generated(record, claim, outcome, started_ns)

        return settled
