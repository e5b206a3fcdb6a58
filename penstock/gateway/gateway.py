"""The path of a request from a front end to an engine, step by step in `Gateway.ask`.

authorize → admit (size, request-rate and concurrency limits) → guard → reuse (an earlier answer) → prepare (render,
tokenize, grammar) → reserve tokens → dispatch. All steps fill in one `PreparedRequest`. The result is the answer
stream that the front end reads. Knows no HTTP and no wire format.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from math import exp
from typing import Any, NamedTuple, Protocol

from penstock.cluster.replica import EngineClient
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import PenstockError, ShuttingDown
from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import Principal
from penstock.core.messages import EngineStats
from penstock.core.shares import Holding, Shares
from penstock.gateway.accounts import Account, Accounts
from penstock.gateway.answers.beams import BeamGeneration
from penstock.gateway.answers.generation import Generation
from penstock.gateway.answers.stream import MAX_FULL_BUFFERS, AnswerStream
from penstock.gateway.checks import check_fits_queues, check_names, check_tokens_fit_queues
from penstock.gateway.documents import DocumentReader
from penstock.gateway.external.answer import ExternalAnswer
from penstock.gateway.external.models import ExternalModel
from penstock.gateway.guards.policies import GuardPolicies
from penstock.gateway.images import ImageLoader
from penstock.gateway.metrics.gateway import GatewayMetrics
from penstock.gateway.models.catalogue import RETRY_AFTER_S, Catalogue
from penstock.gateway.models.routes import AutoModel, ModelRoutes
from penstock.gateway.models.served_model import ServedModel
from penstock.gateway.prepared import PreparedRequest, prepare_for_engine, prepare_for_server
from penstock.gateway.prompts import GenerationRequest, Prompt
from penstock.gateway.reuse.reuse import AnswerReuse
from penstock.gateway.reuse.shared_cache import EmbeddingCacheSettings, SharedCaches
from penstock.gateway.settings.settings import TierSettings
from penstock.gateway.siblings import MetricsExchange
from penstock.gateway.telemetry import current_record, prompt_text
from penstock.gateway.text.caching import PromptCacheSettings
from penstock.gateway.turns import Turns

WINDOW_S = 30.0
SAMPLE_INTERVAL_S = 0.25
MIN_WAIT_S = 1.0
MAX_WAIT_S = 120.0


class _Sample(NamedTuple):
    at_s: float
    tokens_computed: int
    num_waiting: int


MAX_FILE_BYTES = 2 << 30  # of uploaded files and fetched images that requests hold in memory


class QueueTimes:
    """Estimates how long the queue of an engine takes to empty, from the tokens per second while requests waited. The
    stats of the engine are added whenever they are read. The estimate serves requests that had to leave the queue;
    the scheduler has its own estimate for requests that it refuses."""

    __slots__ = ("_sample", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._sample: _Sample | None = None
        # Both decay over the window. Time without waiting requests is left out, because it says nothing about speed.
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, stats: EngineStats, now: float) -> None:
        before = self._sample
        if before is not None and now - before.at_s < SAMPLE_INTERVAL_S:
            return
        self._sample = _Sample(now, stats.tokens_computed, stats.num_waiting)
        if before is None or not before.num_waiting or stats.tokens_computed < before.tokens_computed:
            return  # the first look, an idle stretch, or another engine
        elapsed_s = now - before.at_s
        decay = exp(-elapsed_s / WINDOW_S)
        self._tokens = self._tokens * decay + stats.tokens_computed - before.tokens_computed
        self._seconds = self._seconds * decay + elapsed_s

    def drain_s(self, stats: EngineStats, mean_answer_tokens: float) -> float:
        """Return the seconds until all waiting requests are served, within bounds for a Retry-After."""
        work_tokens = stats.num_waiting_tokens + stats.num_waiting * mean_answer_tokens
        tokens_per_s = self._tokens_per_s(stats)
        if tokens_per_s is None:
            return MIN_WAIT_S
        if work_tokens >= tokens_per_s * MAX_WAIT_S:
            return MAX_WAIT_S
        return max(MIN_WAIT_S, work_tokens / tokens_per_s)

    def _tokens_per_s(self, stats: EngineStats) -> float | None:
        if self._seconds:
            return self._tokens / self._seconds
        return stats.step_tokens / stats.step_s if stats.step_s else None


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
        reuse: AnswerReuse | None = None,
    ) -> None:
        self.engine = engine
        self.accounts = accounts or Accounts()
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = GatewayMetrics()
        self.metrics_exchange: MetricsExchange | None = None  # set where there are several processes
        self.guards = GuardPolicies(partial(self.ask, is_internal=True))
        self.metrics.register(self.guards.metrics)
        self.tiers = TierSettings()
        self.prompt_cache = PromptCacheSettings()
        self.embedding_cache = EmbeddingCacheSettings()
        self.shared_caches: SharedCaches | None = None  # set where there is a Redis
        self.documents = DocumentReader()
        self.images = ImageLoader(config)
        self._file_bytes = Shares(MAX_FILE_BYTES)
        self.reuse = reuse or AnswerReuse(clock=self.clock)
        self.metrics.register(self.reuse)
        # Called with each new request, before any work for it.
        self.on_request: Callable[[GenerationRequest], None] | None = None
        self.turns = Turns()
        self.max_buffer_bytes = config.max_stream_buffer_bytes
        self.buffers = Shares(MAX_FULL_BUFFERS * self.max_buffer_bytes)
        self.catalogue = Catalogue(engine, config)
        self.auto = AutoModel(self.ask, self.catalogue, self.clock)
        self.metrics.register(self.auto)
        self.routes = ModelRoutes(self.ask, self.catalogue, self.clock)
        self.metrics.register(self.routes)
        self._queue_times = QueueTimes()
        self._live: set[LiveWork] = set()
        # Requests not yet dispatched, and answers that judges still review.
        self._on_the_way: set[object] = set()
        self._is_leaving = False
        self._is_draining = False
        self._has_stopped = False
        self._nothing_live = asyncio.Event()  # set during a drain only
        if engine.ready is not None:
            self.model()  # build the model now, and not during the first request

    @property
    def num_live(self) -> int:
        """Return the number of requests whose last token has not arrived."""
        return len(self._live)

    @property
    def is_leaving(self) -> bool:
        """Return whether the server will end soon. New requests are still taken until the drain begins."""
        return self._is_leaving

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_ready(self) -> bool:
        """Return whether new clients should come here: a request would be accepted now, and the server is not
        leaving."""
        return not self._is_leaving and self.catalogue.is_ready

    @property
    def is_healthy(self) -> bool:
        """False while the server drains and after the engine has gone. A server whose engine still starts is
        healthy."""
        return not self._is_draining and (self.catalogue.is_ready or not self.catalogue.has_served)

    def model(self, name: str | None = None) -> ServedModel:
        """Return the model that serves requests for `name`; None stands for the first there is."""
        return self.catalogue.find(name)

    async def count_tokens(self, model: ServedModel, prompt: Prompt, principal: Principal) -> int:
        """Count the tokens of a prompt, images and files included."""
        model.check_images([prompt])
        held = self._holding(principal)
        try:
            prompt = await self.documents.read(prompt, principal.workspace_id, held)
            if model.card.vision is not None:
                prompt = await self.images.load(prompt, principal.workspace_id, held)
            return len(await model.token_ids(prompt))
        finally:
            held.release()

    def _holding(self, principal: Principal) -> Holding:
        """Return the room that a request takes for the files that it names. A small request can name many."""
        refusal = "The requests of this workspace that run or wait hold as many bytes of files as they may."
        return Holding(self._file_bytes, principal.workspace_id, refusal)

    def submit(self, request: GenerationRequest) -> Coroutine[Any, Any, AnswerStream]:
        """Return the answer to a client's request. Raises the PenstockError that keeps the request from running."""
        if self.catalogue.is_auto(request.model):
            return self.auto.answer(request)  # asks one model after another, each by `ask`
        return self.routes.answer(request)

    async def ask(self, request: GenerationRequest, *, is_internal: bool = False) -> AnswerStream:
        """Answer a request to one model. This is the path of every request: any work that costs more than a lookup
        comes after `admit`. `is_internal` is a request that the gateway makes for an admitted one: neither limited
        nor guarded, but in the ledger."""
        work = self._authorize(request, is_internal=is_internal)
        if isinstance(work.model, ExternalModel) and not is_internal and self._passes_straight(request):
            return await self._relay(work, work.model)
        release_drain = self._hold_drain()
        try:
            work.admission = await self.accounts.admit(work.claim(), is_limited=not is_internal)
            try:
                held = work.held = self._holding(request.principal)
                work.admission.on_end.append(held.release)
                work.request = await self.documents.read_request(work.request, held)
                await self._guard(work)
                answer = await self.reuse.answer(work, self._generate)
            except BaseException as error:
                work.admission.release(error.code if isinstance(error, PenstockError) else None)
                raise
            if work.case is not None and work.case.policy.output.rules:
                answer, release_drain = (
                    self.guards.wrap(work.case, answer, on_decided=release_drain),
                    _nothing,
                )
        finally:
            release_drain()
        return answer

    def _passes_straight(self, request: GenerationRequest) -> bool:
        """Return True if no guard and no cache reads the request."""
        if not request.is_plain or self.reuse.concerns(request):
            return False
        return self.guards.policy_for(request.principal) is None

    async def _relay(self, work: PreparedRequest, model: ExternalModel) -> AnswerStream:
        """Answer a plain request by an external server, with only the steps of `ask` that have work to do. The text
        is short, so its tokens are reserved together with admission."""
        self._on_the_way.add(work)  # a drain waits
        try:
            prepare_for_server(work, model)
            return self._dispatch(work, await self.accounts.open(work.claim()))
        finally:
            self._let_go(work)

    async def _generate(self, work: PreparedRequest) -> AnswerStream:
        """Run the second half of the path, for a request without a stored answer."""
        await self._prepare(work)
        account = await self._reserve(work)
        return self._dispatch(work, account)

    def _authorize(self, request: GenerationRequest, *, is_internal: bool) -> PreparedRequest:
        """Check that the caller may use the model as the request asks. No other step looks up the model, except
        when a guard sends the request to another model."""
        now = self.clock.now()
        self.check_accepting(is_admitted=is_internal)
        model = self.catalogue.answering(request.model, None if request.model_is_given else request.principal)
        model.check(request)
        if isinstance(model, ServedModel):
            self._queue_times.observe(self.engine.stats, now)
            check_fits_queues(request, model.engine, self.engine)
        check_names(request.user, request.prompt_cache_key)
        if (record := current_record.get()) is not None:
            record.note(request.request_id, map(prompt_text, request.prompts), request.sampling)
        if self.on_request is not None and not is_internal:
            self.on_request(request)
        timeout_s = request.timeout_s
        if (limit_s := self.config.request_timeout_s) is not None:
            timeout_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        region, spill_over_s = self.catalogue.settings.placed(request.region, request.principal, model.name)
        return PreparedRequest(
            request=request,
            model=model,
            id=request.request_id or uuid.uuid4().hex,
            tier=self.tiers.granted(request.principal, request.tier),
            region=region,
            spill_over_s=spill_over_s,
            default_max_tokens=request.default_max_tokens or self.config.default_max_tokens,
            deadline=None if timeout_s is None else now + timeout_s,
            is_internal=is_internal,
            refuses_long_outputs=self.config.refuse_long_outputs,
        )

    async def _guard(self, work: PreparedRequest) -> None:
        """Apply the safety policy: pass the request on, change it, send it to another model, or refuse it."""
        policy = None if work.is_internal else self.guards.policy_for(work.request.principal)
        if policy is None:
            return
        work.case = self.guards.case(policy, work.id, work.request.principal, work.tier)
        asked = work.request.model
        work.request = await self.guards.check(work.case, work.request, work.model.decode)
        if work.request.model != asked:
            work.model = self.catalogue.answering(work.request.model)
            work.model.check(work.request)
            assert work.admission is not None
            await work.admission.move_to(work.claim())

    async def _prepare(self, work: PreparedRequest) -> None:
        work.time_left_s(self.clock)
        assert work.held is not None
        if isinstance(work.model, ServedModel):
            if work.model.card.vision is not None:
                work.request = await self.images.load_request(work.request, work.held)
            await prepare_for_engine(work, work.model, self.prompt_cache, self.turns)
            num_tokens = sum([len(prompt.token_ids) for prompt in work.prompts])
            check_tokens_fit_queues(work.request, num_tokens, work.model.engine, self.engine)
        else:
            work.request = await self.images.relay_request(work.request, work.model.name, work.held)
            prepare_for_server(work, work.model)
        work.time_left_s(self.clock)

    async def _reserve(self, work: PreparedRequest) -> Account:
        assert work.admission is not None
        return await work.admission.open(work.claim())

    def _dispatch(self, work: PreparedRequest, account: Account) -> AnswerStream:
        """Send the request to an engine or to an external server. A drain waits for the answer from now on."""
        n = work.request.n
        if isinstance(work.model, ExternalModel):
            assert self.catalogue.external is not None
            elsewhere = ExternalAnswer(account, work.calls, n, self, self._forget)
            elsewhere.warnings = work.warnings
            elsewhere.asked_max_tokens = work.request.sampling.max_tokens
            elsewhere.max_tokens_param = work.request.max_tokens_param
            elsewhere.shortens_answers = not work.refuses_long_outputs
            pool = self.catalogue.external.pool
            is_read_whole = work.request.is_read_whole
            self._begin(
                elsewhere,
                lambda: elsewhere.start(pool, work.time_left_s(self.clock), is_read_whole=is_read_whole),
            )
            return elsewhere
        if work.request.beams is None:
            generation = Generation(account, work.choices, n, self, self._forget)
        else:
            generation = BeamGeneration(work.request.beams, account, work.choices, n, self, self._forget)
        generation.warnings = work.warnings
        self._begin(generation, lambda: generation.start(work.engine_requests, work.time_left_s(self.clock)))
        return generation

    def _begin(self, answer: Generation | ExternalAnswer, start: Callable[[], None]) -> None:
        """Start an answer, which lives from then on."""
        self._live.add(answer)
        try:
            self.check_accepting(is_admitted=True)
            start()
        except BaseException:
            answer.cancel()
            raise

    def leave(self) -> None:
        """Report that the server is no longer ready, and continue taking requests until `drain`."""
        self._is_leaving = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and let admitted requests finish, with the reviews of judges. After `timeout_s`, or
        when this call is cancelled, unfinished requests end with an error.

        Returns True if every answer ended normally. Bytes may still be on their way to readers."""
        self._is_leaving = self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._live or self._on_the_way:
                    self._nothing_live.clear()
                    await self._nothing_live.wait()
        except TimeoutError:
            return False
        finally:
            self._has_stopped = True
            for work in tuple(self._live):
                work.fail(ShuttingDown("The server stopped before this answer was finished."))
        return True

    def queue_drain_s(self) -> float:
        """Return how many seconds the engine will need for the requests that wait now."""
        stats = self.engine.stats
        self._queue_times.observe(stats, self.clock.now())
        return self._queue_times.drain_s(stats, self.metrics.mean_answer_tokens)

    async def metrics_page(self) -> bytes:
        """Return the metrics of all gateway processes of this server."""
        if self.metrics_exchange is not None:
            return await self.metrics_exchange.page()
        return self.render_own_metrics()

    def render_own_metrics(self) -> bytes:
        self.metrics.observe_engines(self.engine)
        return self.metrics.render()

    @contextmanager
    def counted(self, work: LiveWork) -> Iterator[None]:
        """Count work that is no generation: a drain waits for the work, and fails it after the timeout, like a
        generation."""
        self.check_accepting(is_admitted=True)
        self._live.add(work)
        try:
            yield
        finally:
            self._forget(work)

    @contextmanager
    def holding_drain(self) -> Iterator[None]:
        """Keep a drain waiting until the context ends."""
        release_drain = self._hold_drain()
        try:
            yield
        finally:
            release_drain()

    def _hold_drain(self) -> Callable[[], None]:
        """Keep a drain waiting until the returned function is called."""
        hold = object()
        self._on_the_way.add(hold)
        return partial(self._let_go, hold)

    def _let_go(self, hold: object) -> None:
        self._on_the_way.discard(hold)
        if self._is_draining:
            self._note_end()

    def check_accepting(self, *, is_admitted: bool = False) -> None:
        """Raises ShuttingDown during a drain, and for work of an admitted request only after the drain."""
        if self._has_stopped or (self._is_draining and not is_admitted):
            raise ShuttingDown("The server is shutting down.", retry_after_s=RETRY_AFTER_S)

    def _forget(self, work: LiveWork) -> None:
        self._live.discard(work)
        if self._is_draining:
            self._note_end()

    def _note_end(self) -> None:
        if not self._live and not self._on_the_way:
            self._nothing_live.set()


def _nothing() -> None:
    pass
