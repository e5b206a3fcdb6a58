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
from penstock.core.errors import DeadlineExceeded, InvalidRequest, PenstockError, ShuttingDown
from penstock.core.gateway_config import GatewayConfig
from penstock.core.request import Request, SamplingParams, Tier
from penstock.gateway.accounts import Account, Accounts, Claim
from penstock.gateway.auto import AutoModel
from penstock.gateway.caching import PromptCacheSettings
from penstock.gateway.catalogue import RETRY_AFTER_S, AnsweringModel, Catalogue
from penstock.gateway.checks import check_request, resolve_max_tokens
from penstock.gateway.choice import Choice
from penstock.gateway.dialect import PreparedPrompt
from penstock.gateway.external.answer import ExternalAnswer
from penstock.gateway.external.calls import calls_for
from penstock.gateway.external.models import ExternalModel
from penstock.gateway.generation import Generation
from penstock.gateway.guards.keeper import GuardKeeper
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.metrics_exchange import MetricsExchange
from penstock.gateway.prompts import ChatPrompt, GenerationRequest
from penstock.gateway.queue_times import QueueTimes
from penstock.gateway.replies.desk import ReplyDesk
from penstock.gateway.replies.source import AnswerSource
from penstock.gateway.served_model import ServedModel
from penstock.gateway.stream import AnswerStream
from penstock.gateway.telemetry.record import current_record
from penstock.gateway.tiers import TierSettings

# Of a request to an external server that names no limit: what is reserved for its answer.
ASSUMED_MAX_TOKENS = 1024
MAX_VOCAB_SIZE = 1 << 31  # of a model whose vocabulary is not known here
_MOST_URGENT_FIRST = tuple(Tier)


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
        self.prompt_cache = PromptCacheSettings()
        self.replies = replies or ReplyDesk(clock=self.clock)
        self.metrics.register(self.replies)
        self.max_buffer_bytes = config.max_stream_buffer_bytes
        self.catalogue = Catalogue(engine, config)
        self.auto = AutoModel(self.submit, self.catalogue, self.clock)
        self.metrics.register(self.auto)
        self._queue_times = QueueTimes()
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
        return not self._is_draining and self.catalogue.is_ready

    @property
    def is_healthy(self) -> bool:
        """False while draining and after the engine has gone; an engine that still starts is no illness."""
        return not self._is_draining and (self.catalogue.is_ready or not self.catalogue.has_served)

    def model(self, name: str | None = None) -> ServedModel:
        """The model that serves requests for `name`; None stands for the first there is."""
        return self.catalogue.find(name)

    def _permitted_model(self, wish: GenerationRequest) -> AnsweringModel:
        return self.catalogue.answering(wish.model, None if wish.model_is_given else wish.principal)

    async def submit(self, wish: GenerationRequest) -> AnswerStream:
        """Raises the PenstockError that keeps the request from running."""
        self.check_accepting()
        if self.catalogue.is_auto(wish.model):
            return await self.auto.answer(wish)
        model = self._permitted_model(wish)
        if isinstance(model, ServedModel):
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
        model = self._permitted_model(wish)
        source = AnswerSource(
            model.fingerprint, partial(self._start, wish), partial(self._open_replay, wish, model.name)
        )
        return await self.replies.answer(wish, source)

    async def _open_replay(self, wish: GenerationRequest, model_name: str) -> Account:
        """An account for a request that costs no tokens."""
        return await self.accounts.open(_claim(wish.request_id or uuid.uuid4().hex, wish, model_name))

    async def _start(self, wish: GenerationRequest) -> AnswerStream:
        arrived_at = self.clock.now()
        self._queue_times.observe(self.engine.stats, arrived_at)
        self.check_accepting()
        model = self._permitted_model(wish)
        if isinstance(model, ExternalModel):
            return await self._start_elsewhere(wish, model, arrived_at)
        check_request(wish, model.card.vocab_size)
        prompts = [await model.prepare(prompt, wish.sampling.grammar) for prompt in wish.prompts]
        self.check_accepting()  # a drain may have begun while a long prompt was tokenized
        request_id = wish.request_id or uuid.uuid4().hex
        requests = self._engine_requests(request_id, wish, prompts, model)
        requests = [await model.with_checked_grammar(request) for request in requests]
        self._time_left_s(wish, arrived_at)
        choices = [
            Choice(index, request, model.tokenizer, model.card.eos_token_ids, prompts[index // wish.n].form)
            for index, request in enumerate(requests)
        ]
        claim = _claim(
            request_id,
            wish,
            model.name,
            input_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            max_output_tokens=sum(request.sampling.max_tokens for request in requests),
        )
        account = await self.accounts.open(claim)
        generation = Generation(account, choices, wish.n, self, self._forget)
        with self._beginning(generation):
            generation.start(requests, self._time_left_s(wish, arrived_at))
        return generation

    async def _start_elsewhere(
        self, wish: GenerationRequest, model: ExternalModel, arrived_at: float
    ) -> ExternalAnswer:
        """By an external server, which tokenizes: until it tells what a request used, that is estimated."""
        assert self.catalogue.external is not None
        check_request(wish, MAX_VOCAB_SIZE)
        request_id = wish.request_id or uuid.uuid4().hex
        max_tokens = wish.sampling.max_tokens or wish.default_max_tokens or self.config.default_max_tokens
        region = wish.region or self.catalogue.settings.region_of(wish.principal)
        calls = calls_for(request_id, wish, model=model.name, max_tokens=max_tokens, region=region)
        claim = _claim(
            request_id,
            wish,
            model.name,
            input_tokens=sum(call.estimated_tokens for call in calls[:: wish.n]),
            max_output_tokens=len(calls) * (max_tokens or ASSUMED_MAX_TOKENS),
        )
        account = await self.accounts.open(claim)
        answer = ExternalAnswer(account, calls, wish.n, self, self._forget)
        with self._beginning(answer):
            answer.start(self.catalogue.external.pool, self._time_left_s(wish, arrived_at))
        return answer

    @contextmanager
    def _beginning(self, answer: Generation | ExternalAnswer) -> Iterator[None]:
        """An answer is started here, and lives from then on."""
        self._live.add(answer)
        self._nothing_live.clear()
        try:
            self.check_accepting()
            yield
        except BaseException:
            answer.cancel()
            raise

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
        return self._queue_times.drain_s(stats, self.metrics.mean_answer_tokens)

    async def metrics_page(self) -> bytes:
        """Of all gateway processes of this server."""
        if self.metrics_exchange is not None:
            return await self.metrics_exchange.page()
        return self.render_own_metrics()

    def render_own_metrics(self) -> bytes:
        self.metrics.observe_engines(self.engine)
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
        model: ServedModel,
    ) -> list[Request]:
        """One request per answer: the n answers of a prompt follow each other, with consecutive seeds."""
        default = wish.default_max_tokens or self.config.default_max_tokens
        region = wish.region or self.catalogue.settings.region_of(wish.principal)
        # Without a better reason, where the adapter is likely loaded already.
        affinity_key = wish.prompt_cache_key or (model.adapter.digest if model.adapter else "")
        requests: list[Request] = []
        for prompt, prepared in zip(wish.prompts, prompts, strict=True):
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            token_ids = prepared.token_ids
            max_tokens = resolve_max_tokens(
                wish.sampling.max_tokens, default, len(token_ids), model.engine, prompt_param=param
            )
            for sibling in range(wish.n):
                requests.append(
                    Request(
                        id=f"{request_id}-{len(requests)}",
                        prompt_token_ids=token_ids,
                        sampling=_sampling_params(wish, prepared, max_tokens, sibling),
                        tenant=wish.principal.workspace_id,
                        tier=granted_tier(wish),
                        model=model.base_name,
                        adapter=model.adapter,
                        region=region,
                        affinity_key=affinity_key,
                        cache_salt=prepared.cache_salt,
                        cache_breakpoints=prepared.breakpoints,
                        min_cacheable_tokens=self.prompt_cache.min_tokens if prepared.breakpoints else None,
                    )
                )
        return requests


def granted_tier(wish: GenerationRequest) -> Tier:
    """The tier asked for, or the best that the caller's key allows."""
    best = wish.principal.best_tier
    return wish.tier if wish.tier is best else max(wish.tier, best, key=_MOST_URGENT_FIRST.index)


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
    *,
    input_tokens: int = 0,
    max_output_tokens: int = 0,
) -> Claim:
    return Claim(
        request_id=request_id,
        principal=wish.principal,
        model=model_name,
        endpoint=wish.endpoint,
        tier=granted_tier(wish),
        input_tokens=input_tokens,
        max_output_tokens=max_output_tokens,
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
