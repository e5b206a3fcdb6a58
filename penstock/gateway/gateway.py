"""The story of a request between a front end and an engine.

`submit` checks it against the model card, renders and tokenizes its prompts, sends one engine request per answer,
and returns the `Generation` that its reader follows. Knows no HTTP and no wire format.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import msgspec

from penstock.cluster.client import EngineClient
from penstock.core.clock import Clock, SystemClock
from penstock.core.config import GatewayConfig
from penstock.core.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    PenstockError,
    PermissionDenied,
    ShuttingDown,
)
from penstock.core.grammar_text import token_ids_by_number
from penstock.core.messages import EngineReady
from penstock.core.request import CacheBreakpoint, Grammar, Request, SamplingParams, Tier
from penstock.gateway.accounts import Account, Accounts, Claim
from penstock.gateway.caching import Piece, breakpoints_at, locate, marked_pieces, tools_salt
from penstock.gateway.checks import check_request, check_token_ids, resolve_max_tokens
from penstock.gateway.choice import Choice
from penstock.gateway.dialect import Dialect, PreparedPrompt
from penstock.gateway.grammars import GrammarChecker
from penstock.gateway.guards.keeper import GuardKeeper
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.metrics_exchange import MetricsExchange
from penstock.gateway.plain_text import RenderedChat
from penstock.gateway.prompts import ChatPrompt, GenerationRequest, Prompt, TextPrompt
from penstock.gateway.queue_times import QueueTimes
from penstock.gateway.replies.desk import ReplyDesk
from penstock.gateway.replies.source import AnswerSource
from penstock.gateway.stream import AnswerStream, Generation
from penstock.gateway.telemetry.record import current_record
from penstock.gateway.template import ChatTemplate
from penstock.gateway.tiers import TierSettings
from penstock.gateway.tokenizer import TextTokenizer

# For an engine that starts or a server that drains: neither has a queue whose pace could tell.
RETRY_AFTER_S = 5.0
_MOST_URGENT_FIRST = tuple(Tier)


class ServedModel:
    """What the gateway built from an engine's model card. Lives as long as that engine serves."""

    def __init__(self, engine: EngineReady, config: GatewayConfig) -> None:
        self.engine = engine
        self.card = engine.model
        self.tokenizer = TextTokenizer(engine.model)
        self.dialect = Dialect(engine.model, self.tokenizer, config)
        self.template = ChatTemplate(engine.model, self.dialect.tool_format)
        self._grammars = GrammarChecker()
        self._special_token_ids = token_ids_by_number(engine.model.tokenizer_json)

    async def prepare(self, prompt: Prompt, grammar: Grammar | None = None) -> PreparedPrompt:
        """`grammar` is what the request itself demands of its answers."""
        if isinstance(prompt, TextPrompt):
            return PreparedPrompt(await self.tokenizer.encode(prompt.text, add_special_tokens=True))
        if isinstance(prompt, ChatPrompt):
            prompt = self.dialect.without_thinking_where_held(prompt, grammar)
            rendered = self.dialect.close_thinking(prompt, await self.template.render_later(prompt))
            form = self.dialect.answer_form(prompt, rendered, grammar)
            pieces = marked_pieces(prompt)
            if pieces:
                token_ids, breakpoints = await self._with_breakpoints(prompt, pieces, rendered)
                return PreparedPrompt(token_ids, form, breakpoints, tools_salt(prompt))
            # A template writes the special tokens itself.
            token_ids = await self.tokenizer.encode(
                rendered.text, add_special_tokens=False, plain_ranges=rendered.plain_ranges
            )
            return PreparedPrompt(token_ids, form)
        check_token_ids(prompt.token_ids, self.card.vocab_size, param="prompt")
        return PreparedPrompt(prompt.token_ids)

    async def _with_breakpoints(
        self, prompt: ChatPrompt, pieces: Sequence[Piece], rendered: RenderedChat
    ) -> tuple[tuple[int, ...], tuple[CacheBreakpoint, ...]]:
        def render(variant: ChatPrompt) -> str:
            return self.dialect.close_thinking(variant, self.template.render(variant)).text

        kept = locate(prompt, pieces, rendered.text, render)
        ends = sorted({end for prefix in kept for end in (prefix.end, *prefix.earlier)})
        token_ids, positions = await self.tokenizer.encode_marked(rendered.text, rendered.plain_ranges, ends)
        return token_ids, breakpoints_at(kept, positions)

    async def with_checked_grammar(self, request: Request) -> Request:
        """Raises InvalidRequest when no engine could compile it."""
        grammar = request.sampling.grammar
        if grammar is None:
            return request
        grammar = await self._grammars.check(grammar, self._special_token_ids)
        sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
        return msgspec.structs.replace(request, sampling=sampling)

    def decode(self, token_ids: Sequence[int]) -> str:
        """A prompt of token ids as text, for guards."""
        check_token_ids(token_ids, self.card.vocab_size, param="prompt")
        return self.tokenizer.decode(token_ids)

    async def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        return (await self.prepare(prompt)).token_ids


class LiveWork(Protocol):
    def fail(self, error: PenstockError) -> None: ...


class Gateway:
    """Accepts requests until `drain`. Must be used from one event loop, the one that the engine client calls back
    on."""

    def __init__(
        self,
        engine: EngineClient,
        config: GatewayConfig,
        clock: Clock | None = None,
        *,
        accounts: Accounts | None = None,
        replies: ReplyDesk | None = None,
    ) -> None:
        self.engine = engine
        self.accounts = accounts or Accounts()
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = GatewayMetrics()
        self.metrics_exchange: MetricsExchange | None = None  # set where there are several processes
        self.guards = GuardKeeper(self.submit)
        self.metrics.register(self.guards.metrics)
        self.tiers = TierSettings()
        self.replies = replies or ReplyDesk(clock=self.clock)
        self.metrics.register(self.replies)
        self.max_buffer_bytes = config.max_stream_buffer_bytes
        self._queue_times = QueueTimes()
        self._served: ServedModel | None = None
        self._live: set[LiveWork] = set()
        self._is_draining = False
        self._nothing_live = asyncio.Event()
        self._nothing_live.set()
        if engine.ready is not None:
            self.model()  # now, and not at the expense of the first request

    @property
    def num_live(self) -> int:
        """Requests whose last token has not come yet."""
        return len(self._live)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_ready(self) -> bool:
        """Whether a request would be accepted now."""
        return not self._is_draining and self.engine.ready is not None

    @property
    def is_healthy(self) -> bool:
        """False while draining and after the engine has gone; an engine that still starts is no illness."""
        return not self._is_draining and (self.engine.ready is not None or self._served is None)

    def model(self, name: str | None = None) -> ServedModel:
        """The model that serves requests for `name`; None stands for the only one there is."""
        ready = self.engine.ready
        if ready is None:
            raise EngineUnavailable("No engine is ready to serve.", retry_after_s=RETRY_AFTER_S)
        if self._served is None or self._served.engine is not ready:
            self._served = ServedModel(ready, self.config)
            self.metrics.model_name = ready.model.name
        if name is not None and name != ready.model.name:
            raise ModelNotFound(
                f"The model {name!r} is not served here; {ready.model.name!r} is.", param="model"
            )
        return self._served

    async def submit(self, wish: GenerationRequest) -> AnswerStream:
        """Raises the PenstockError that keeps the request from running."""
        self.check_accepting()
        model = self.model(wish.model)
        _check_permission(wish, model.card.name)
        _check_generates(model)
        wish = self.tiers.capped(wish)
        if (record := current_record.get()) is not None:
            record.note(wish)
        policy = self.guards.policy_for(wish.principal)
        if policy is None:
            return await self._answer(wish)
        if not wish.request_id:
            wish = msgspec.structs.replace(wish, request_id=uuid.uuid4().hex)
        case = self.guards.case(policy, wish)
        arrived_at = self.clock.now()
        checked = await self.guards.check(case, wish, model.decode)
        checked = msgspec.structs.replace(checked, timeout_s=self._time_left_s(checked, arrived_at))
        answer = await self._answer(checked)
        return self.guards.wrap(case, answer)

    async def _answer(self, wish: GenerationRequest) -> AnswerStream:
        """By what was answered before, where the caller wants that, else by an engine."""
        if not self.replies.may_know(wish):
            return await self._start(wish)
        model = self.model(wish.model)
        _check_permission(wish, model.card.name)
        source = AnswerSource(
            model.engine, partial(self._start, wish), partial(self._open_replay, wish, model.card.name)
        )
        return await self.replies.answer(wish, source)

    async def _open_replay(self, wish: GenerationRequest, model_name: str) -> Account:
        """An account for a request that costs no tokens."""
        return await self.accounts.open(_claim(wish.request_id or uuid.uuid4().hex, wish, model_name, (), ()))

    async def _start(self, wish: GenerationRequest) -> Generation:
        arrived_at = self.clock.now()
        self._queue_times.observe(self.engine.stats, arrived_at)
        self.check_accepting()
        model = self.model(wish.model)
        _check_permission(wish, model.card.name)
        check_request(wish, model.card.vocab_size)
        prompts = [await model.prepare(prompt, wish.sampling.grammar) for prompt in wish.prompts]
        self.check_accepting()  # a drain may have begun while a long prompt was tokenized
        request_id = wish.request_id or uuid.uuid4().hex
        requests = self._engine_requests(request_id, wish, prompts, model.engine)
        requests = [await model.with_checked_grammar(request) for request in requests]
        self._time_left_s(wish, arrived_at)
        choices = [
            Choice(index, request, model.tokenizer, model.card.eos_token_ids, prompts[index // wish.n].form)
            for index, request in enumerate(requests)
        ]
        account = await self.accounts.open(_claim(request_id, wish, model.card.name, prompts, requests))
        generation = Generation(account, choices, wish.n, self, self._forget)
        self._live.add(generation)
        self._nothing_live.clear()
        try:
            self.check_accepting()
            generation.start(requests, self._time_left_s(wish, arrived_at))
        except BaseException:
            generation.cancel()
            raise
        return generation

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and let live ones finish. After `timeout_s`, or when this is cancelled, those left
        end with an error.

        True when every answer came to its own end. Bytes may still be on their way to readers."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._nothing_live.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            for work in tuple(self._live):
                work.fail(ShuttingDown("The server stopped before this answer was finished."))
        return True

    def queue_drain_s(self) -> float:
        """How long the engine will need for those who wait for it now."""
        stats = self.engine.stats
        self._queue_times.observe(stats, self.clock.now())
        return self._queue_times.drain_s(stats, self.metrics.request_generation_tokens.mean)

    async def metrics_page(self) -> bytes:
        """Of all gateway processes of this server."""
        if self.metrics_exchange is not None:
            return await self.metrics_exchange.page()
        return self.render_own_metrics()

    def render_own_metrics(self) -> bytes:
        if self.engine.ready is not None:
            self.model()
        self.metrics.observe_stats(self.engine.stats)
        return self.metrics.render()

    @contextmanager
    def counted(self, work: LiveWork) -> Iterator[None]:
        """What is not a generation, but is waited for by a drain like one, and failed after it."""
        self.check_accepting()
        self._live.add(work)
        self._nothing_live.clear()
        try:
            yield
        finally:
            self._forget(work)

    def check_accepting(self) -> None:
        if self._is_draining:
            raise ShuttingDown("The server is shutting down.", retry_after_s=RETRY_AFTER_S)

    def _time_left_s(self, wish: GenerationRequest, arrived_at: float) -> float | None:
        """Of the client's own timeout or the server's, whichever ends first; None when there is neither."""
        timeouts = [limit for limit in (wish.timeout_s, self.config.request_timeout_s) if limit is not None]
        if not timeouts:
            return None
        left_s = min(timeouts) - (self.clock.now() - arrived_at)
        if left_s <= 0:
            raise DeadlineExceeded("The request's deadline passed before an engine could begin with it.")
        return left_s

    def _forget(self, work: LiveWork) -> None:
        self._live.discard(work)
        if not self._live:
            self._nothing_live.set()

    def _engine_requests(
        self,
        request_id: str,
        wish: GenerationRequest,
        prompts: Sequence[PreparedPrompt],
        engine: EngineReady,
    ) -> list[Request]:
        """One request per answer: the n answers of a prompt follow each other, with consecutive seeds."""
        default = wish.default_max_tokens or self.config.default_max_tokens
        requests: list[Request] = []
        for prompt, prepared in zip(wish.prompts, prompts, strict=True):
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            token_ids = prepared.token_ids
            max_tokens = resolve_max_tokens(
                wish.sampling.max_tokens, default, len(token_ids), engine, prompt_param=param
            )
            for sibling in range(wish.n):
                requests.append(
                    Request(
                        id=f"{request_id}-{len(requests)}",
                        prompt_token_ids=token_ids,
                        sampling=_sampling_params(wish, prepared, max_tokens, sibling),
                        tenant=wish.principal.workspace_id,
                        tier=granted_tier(wish),
                        cache_salt=prepared.cache_salt,
                        cache_breakpoints=prepared.breakpoints,
                    )
                )
        return requests


def granted_tier(wish: GenerationRequest) -> Tier:
    """The tier asked for, or the best that the caller's key allows."""
    best = wish.principal.best_tier
    return wish.tier if wish.tier is best else max(wish.tier, best, key=_MOST_URGENT_FIRST.index)


def _check_permission(wish: GenerationRequest, model_name: str) -> None:
    if not wish.principal.may_use(model_name):
        raise PermissionDenied(f"This key may not use the model {model_name!r}.", param="model")


def _check_generates(model: ServedModel) -> None:
    if model.card.is_encoder:
        raise InvalidRequest(
            f"The model {model.card.name!r} makes embeddings and writes no text.",
            param="model",
            hint="Ask /v1/embeddings.",
        )


def _claim(
    request_id: str,
    wish: GenerationRequest,
    model_name: str,
    prompts: Sequence[PreparedPrompt],
    requests: Sequence[Request],
) -> Claim:
    return Claim(
        request_id=request_id,
        principal=wish.principal,
        model=model_name,
        endpoint=wish.endpoint,
        tier=granted_tier(wish),
        input_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        max_output_tokens=sum(request.sampling.max_tokens for request in requests),
        user=wish.user,
    )


def _sampling_params(
    wish: GenerationRequest, prompt: PreparedPrompt, max_tokens: int, sibling: int
) -> SamplingParams:
    options = msgspec.structs.asdict(wish.sampling)
    if prompt.form is not None and prompt.form.grammar is not None:
        options["grammar"] = prompt.form.grammar
    options["max_tokens"] = max_tokens
    options["min_tokens"] = min(wish.sampling.min_tokens, max_tokens)
    if wish.sampling.seed is not None:
        options["seed"] = _wrapped_to_int64(wish.sampling.seed + sibling)
    return SamplingParams(**options)


def _wrapped_to_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
