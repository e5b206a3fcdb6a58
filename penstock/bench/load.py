"""Sends a workload to one OpenAI-compatible server and records what happened to every request, or hands it to an
engine in this process and measures the throughput. The engine comes in as a function.

Token times are the times at which events arrive; token counts are the server's own (`usage`), or the number of events
where it reports none. A request that fails in any way is an outcome with an `error`, never an exception.

Workloads are random token-id prompts of exact lengths, and their times of arrival. Everything follows from a seed, so
that two servers get the very same requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.bench.http import Endpoint, ProtocolError, exchange
from penstock.core.clock import Clock
from penstock.core.errors import ConfigError, PenstockError, UsageError
from penstock.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class IntRange:
    """A range of whole numbers, both ends included, from which lengths are drawn uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, *, minimum: int = 1) -> IntRange:
        """Read `128` or `100:1024`."""
        low, colon, high = text.partition(":")
        try:
            chosen = cls(int(low), int(high if colon else low))
        except ValueError:
            raise ConfigError(
                f"'{text}' is neither a whole number nor a range.", hint="Write 128, or 100:1024."
            ) from None
        if not minimum <= chosen.low <= chosen.high:
            raise ConfigError(
                f"The range {text} must begin at {minimum} or more and not end before it begins."
            )
        return chosen

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}–{self.high}"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of clients, each of which sends its next request when its last one is answered."""

    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} stream{'s' if self.concurrency != 1 else ''}"


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Requests that arrive on their own schedule, whatever the server does."""

    requests_per_s: float

    def __str__(self) -> str:
        return f"{self.requests_per_s:g} requests/s"


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    arrivals: ClosedLoop | PoissonArrivals
    num_requests: int
    input_len: IntRange = IntRange(128, 128)  # tokens of each prompt, without the shared prefix
    output_len: IntRange = IntRange(64, 64)
    shared_prefix_len: int = 0  # tokens that all prompts begin with
    vocabulary: IntRange = IntRange(1000, 39_999)  # token ids to draw from; low ids are often control tokens
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones of every request

    def __str__(self) -> str:
        shared = f"{self.shared_prefix_len:,} shared + " if self.shared_prefix_len else ""
        return f"{self.arrivals}, {shared}{self.input_len} in, {self.output_len} out"

    def prompts(self) -> list[Prompt]:
        rng = random.Random(self.seed)
        shared = self._tokens(rng, self.shared_prefix_len)
        return [
            Prompt(shared + self._tokens(rng, self.input_len.draw(rng)), self.output_len.draw(rng))
            for _ in range(self.num_requests)
        ]

    def arrival_times_s(self) -> list[float] | None:
        """Return the seconds from the start at which each request is sent, or None for a closed loop."""
        if not isinstance(self.arrivals, PoissonArrivals):
            return None
        rng = random.Random(f"arrivals {self.seed}")
        times, now = [], 0.0
        for _ in range(self.num_requests):
            times.append(now)
            now += rng.expovariate(self.arrivals.requests_per_s)
        return times

    def warm_up(self, num_requests: int) -> Workload:
        """Return requests of the same shape with other tokens and another shared prefix."""
        streams = self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else num_requests
        return replace(
            self,
            arrivals=ClosedLoop(max(1, min(streams, num_requests))),
            num_requests=num_requests,
            seed=self.seed + 1_000_003,
        )

    def _tokens(self, rng: random.Random, count: int) -> tuple[int, ...]:
        low, high = self.vocabulary.low, self.vocabulary.high
        return tuple(rng.randint(low, high) for _ in range(count))


def _streams(count: int, num_requests: int) -> Workload:
    return Workload(arrivals=ClosedLoop(count), num_requests=num_requests)


STANDARD_WORKLOADS: dict[str, Workload] = {
    "streams-1": _streams(1, 8),
    "streams-8": _streams(8, 32),
    "streams-32": _streams(32, 96),
    "shared-prefix": Workload(
        arrivals=ClosedLoop(16),
        num_requests=48,
        shared_prefix_len=1024,
        input_len=IntRange(32, 32),
        output_len=IntRange(32, 32),
    ),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test."""

    name: str
    endpoint: Endpoint
    model: str


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are seconds on one clock; `gaps_s` are between token events."""

    num_input_tokens: int
    start_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def time_per_token_s(self) -> float | None:
        """Return the mean time between tokens; None for an answer of one token."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadResult:
    outcomes: list[Outcome]
    duration_s: float  # from the first request sent to the last one answered


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_models = msgspec.json.Decoder(_ModelList).decode


class _StreamReader:
    """Fills an Outcome from the payloads of one stream."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._num_events = 0
        self._usage: _Usage | None = None
        self.saw_done = False

    def on_payload(self, payload: bytes, now: float) -> None:
        outcome = self._outcome
        if payload == b"[DONE]":
            self.saw_done = True
            return
        event = _decode_event(payload)
        if event.error is not None:
            raise ProtocolError(f"the stream reported {str(event.error)[:200]}")
        self._usage = event.usage or self._usage
        if not event.choices:
            return
        choice = event.choices[0]
        if choice.finish_reason and not choice.text and outcome.first_token_s is not None:
            return  # the closing event carries no token
        if outcome.last_token_s is None:
            outcome.first_token_s = now
        else:
            outcome.gaps_s.append(now - outcome.last_token_s)
        outcome.last_token_s = now
        self._num_events += 1

    def finish(self) -> None:
        usage = self._usage
        self._outcome.num_output_tokens = usage.completion_tokens if usage else self._num_events
        if usage and usage.prompt_tokens_details:
            self._outcome.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


async def find_target(name: str | None, url: str, model: str | None, api_key: str | None) -> Target:
    """Ask the server for its models. Raises UsageError if no OpenAI-compatible server answers."""
    endpoint = Endpoint.parse(url, api_key)
    try:
        async with asyncio.timeout(10):
            status, body = await exchange(endpoint, endpoint.request("GET", "/v1/models"))
    except (OSError, ProtocolError, TimeoutError) as error:
        raise UsageError(
            f"No server answers at {url} ({str(error) or type(error).__name__}).",
            hint="Start one with `penstock serve`, or check the address.",
        ) from error
    if status != 200:
        hint = "Give its key with --api-key." if status in (401, 403) else "Check the address."
        raise UsageError(f"The server at {url} answered /v1/models with status {status}.", hint=hint)
    try:
        served = [entry.id for entry in _decode_models(body).data]
    except msgspec.MsgspecError as error:
        raise UsageError(f"The server at {url} does not speak the OpenAI API: {error}.") from error
    if model is None and not served:
        raise UsageError(f"The server at {url} serves no model.", hint="Name one with --model.")
    return Target(name or f"{endpoint.host}:{endpoint.port}", endpoint, model or served[0])


def encode_request(target: Target, prompt: Prompt, fields: Mapping[str, Any]) -> bytes:
    body = {
        "model": target.model,
        "prompt": prompt.token_ids,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return target.endpoint.request("POST", "/v1/completions", msgspec.json.encode(body))


async def run_load(
    target: Target,
    workload: Workload,
    *,
    timeout_s: float = 600.0,
    on_done: Callable[[int], None] = lambda _: None,
) -> LoadResult:
    """Send every prompt of the workload; `on_done` is called with 1 after each answer."""
    prompts = workload.prompts()
    # Requests are encoded before the clock starts, so that the timed part only sends and receives bytes.
    requests = [encode_request(target, prompt, workload.fields) for prompt in prompts]
    outcomes: list[Outcome] = []

    async def send(index: int) -> None:
        outcome = Outcome(len(prompts[index].token_ids), time.perf_counter())
        outcomes.append(outcome)
        await _send(target, requests[index], outcome, timeout_s)
        on_done(1)

    start = time.perf_counter()
    arrival_times = workload.arrival_times_s()
    if arrival_times is None:
        assert isinstance(workload.arrivals, ClosedLoop)
        waiting = iter(range(len(requests)))
        clients = min(workload.arrivals.concurrency, len(requests))
        await asyncio.gather(*(_client(waiting, send) for _ in range(clients)))
    else:
        async with asyncio.TaskGroup() as group:
            for index, arrival_s in enumerate(arrival_times):
                await asyncio.sleep(max(0.0, start + arrival_s - time.perf_counter()))
                group.create_task(send(index))
    return LoadResult(outcomes, time.perf_counter() - start)


async def _client(waiting: Iterator[int], send: Callable[[int], Awaitable[None]]) -> None:
    for index in waiting:
        await send(index)


async def _send(target: Target, request: bytes, outcome: Outcome, timeout_s: float) -> None:
    reader = _StreamReader(outcome)
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await exchange(target.endpoint, request, reader.on_payload)
        if status != 200:
            outcome.error = f"status {status}: {body[:200].decode(errors='replace')}"
        elif not reader.saw_done:
            outcome.error = "the stream ended without [DONE]"
        elif outcome.first_token_s is None:
            outcome.error = "the stream held no token"
    except TimeoutError:
        outcome.error = f"no complete answer within {timeout_s:g} s"
    except (OSError, ProtocolError, msgspec.MsgspecError) as error:
        outcome.error = str(error) or type(error).__name__
    reader.finish()
    outcome.end_s = time.perf_counter()


Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], Sequence[int]]
"""Prompts and their settings in; the number of tokens generated for each out."""


class OfflineSummary(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def measure_offline(
    model: str, prompts: Sequence[Prompt], temperature: float, generate: Generate, clock: Clock
) -> OfflineSummary:
    """Hand every prompt to `generate` at once and time it. Each answer must have its exact length."""
    sampling = [
        SamplingParams(max_tokens=prompt.max_tokens, temperature=temperature, seed=index, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    start = clock.now()
    lengths = generate([prompt.token_ids for prompt in prompts], sampling)
    duration_s = clock.now() - start

    short = sum(length != prompt.max_tokens for length, prompt in zip(lengths, prompts, strict=True))
    if short:
        raise PenstockError(
            f"{short} of {len(prompts)} answers did not have the length asked for, so the figure would be wrong.",
            hint="Prompt and answer together must fit into --max-model-len.",
        )
    num_input = sum(len(prompt.token_ids) for prompt in prompts)
    num_output = sum(lengths)
    return OfflineSummary(
        model=model,
        num_prompts=len(prompts),
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        duration_s=duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_input + num_output) / duration_s,
    )
