"""The story of a request between a front end and an engine.

`submit` checks it against the model card, renders and tokenizes its prompts, sends one engine request per answer,
and returns the `Generation` that its reader follows. Knows no HTTP and no wire format.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import msgspec

from penstock.cluster.client import EngineClient
from penstock.core.clock import Clock, SystemClock
from penstock.core.config import GatewayConfig
from penstock.core.errors import EngineUnavailable, ModelNotFound, PermissionDenied, ShuttingDown
from penstock.core.messages import EngineReady
from penstock.core.request import Request, SamplingParams, Tier
from penstock.gateway.accounts import Accounts, Claim
from penstock.gateway.checks import check_request, check_token_ids, resolve_max_tokens
from penstock.gateway.choice import Choice
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.prompts import ChatPrompt, GenerationRequest, Prompt, TextPrompt
from penstock.gateway.stream import Generation
from penstock.gateway.template import ChatTemplate
from penstock.gateway.tokenizer import TextTokenizer

RETRY_AFTER_S = 5.0


class ServedModel:
    """What the gateway built from an engine's model card. Lives as long as that engine serves."""

    def __init__(self, engine: EngineReady) -> None:
        self.engine = engine
        self.card = engine.model
        self.tokenizer = TextTokenizer(engine.model)
        self.template = ChatTemplate(engine.model)

    async def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, TextPrompt):
            return await self.tokenizer.encode(prompt.text, add_special_tokens=True)
        if isinstance(prompt, ChatPrompt):
            # A template writes the special tokens itself.
            return await self.tokenizer.encode(self.template.render(prompt), add_special_tokens=False)
        check_token_ids(prompt.token_ids, self.card.vocab_size, param="prompt")
        return prompt.token_ids


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
    ) -> None:
        self.engine = engine
        self.accounts = accounts or Accounts()
        self.config = config
        self.clock = clock or SystemClock()
        self.metrics = GatewayMetrics()
        self.max_buffer_bytes = config.max_stream_buffer_bytes
        self._served: ServedModel | None = None
        self._live: set[Generation] = set()
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
            self._served = ServedModel(ready)
            self.metrics.model_name = ready.model.name
        if name is not None and name != ready.model.name:
            raise ModelNotFound(
                f"The model {name!r} is not served here; {ready.model.name!r} is.", param="model"
            )
        return self._served

    async def submit(self, wish: GenerationRequest) -> Generation:
        self._check_accepting()
        model = self.model(wish.model)
        _check_permission(wish, model.card.name)
        check_request(wish, model.card.vocab_size)
        prompts = [await model.token_ids(prompt) for prompt in wish.prompts]
        self._check_accepting()  # a drain may have begun while a long prompt was tokenized
        request_id = wish.request_id or uuid.uuid4().hex
        requests = self._engine_requests(request_id, wish, prompts, model.engine)
        account = await self.accounts.open(_claim(request_id, wish, model.card.name, prompts, requests))
        choices = [
            Choice(index, request, model.tokenizer, model.card.eos_token_ids)
            for index, request in enumerate(requests)
        ]
        generation = Generation(account, choices, wish.n, self, self._forget)
        self._live.add(generation)
        self._nothing_live.clear()
        try:
            self._check_accepting()
            generation.start(requests, wish.timeout_s or self.config.request_timeout_s)
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
            for generation in tuple(self._live):
                generation.fail(ShuttingDown("The server stopped before this answer was finished."))
        return True

    def render_metrics(self) -> bytes:
        if self.engine.ready is not None:
            self.model()
        self.metrics.observe_stats(self.engine.stats)
        return self.metrics.render()

    def _check_accepting(self) -> None:
        if self._is_draining:
            raise ShuttingDown("The server is shutting down.", retry_after_s=RETRY_AFTER_S)

    def _forget(self, generation: Generation) -> None:
        self._live.discard(generation)
        if not self._live:
            self._nothing_live.set()

    def _engine_requests(
        self,
        request_id: str,
        wish: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        engine: EngineReady,
    ) -> list[Request]:
        """One request per answer: the n answers of a prompt follow each other, with consecutive seeds."""
        default = wish.default_max_tokens or self.config.default_max_tokens
        requests: list[Request] = []
        for prompt, token_ids in zip(wish.prompts, prompts, strict=True):
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            max_tokens = resolve_max_tokens(
                wish.sampling.max_tokens, default, len(token_ids), engine, prompt_param=param
            )
            for sibling in range(wish.n):
                requests.append(
                    Request(
                        id=f"{request_id}-{len(requests)}",
                        prompt_token_ids=token_ids,
                        sampling=_sampling_params(wish, max_tokens, sibling),
                        tenant=wish.principal.workspace_id,
                        tier=granted_tier(wish),
                    )
                )
        return requests


def granted_tier(wish: GenerationRequest) -> Tier:
    """The tier asked for, or the best that the caller's key allows."""
    order = list(Tier)  # most urgent first
    return max(wish.tier, wish.principal.best_tier, key=order.index)


def _check_permission(wish: GenerationRequest, model_name: str) -> None:
    if not wish.principal.may_use(model_name):
        raise PermissionDenied(f"This key may not use the model {model_name!r}.", param="model")


def _claim(
    request_id: str,
    wish: GenerationRequest,
    model_name: str,
    prompts: Sequence[tuple[int, ...]],
    requests: Sequence[Request],
) -> Claim:
    return Claim(
        request_id=request_id,
        principal=wish.principal,
        model=model_name,
        endpoint=wish.endpoint,
        tier=granted_tier(wish),
        input_tokens=sum(map(len, prompts)),
        max_output_tokens=sum(request.sampling.max_tokens for request in requests),
        user=wish.user,
    )


def _sampling_params(wish: GenerationRequest, max_tokens: int, sibling: int) -> SamplingParams:
    options = msgspec.structs.asdict(wish.sampling)
    options["max_tokens"] = max_tokens
    options["min_tokens"] = min(wish.sampling.min_tokens, max_tokens)
    if wish.sampling.seed is not None:
        options["seed"] = _wrapped_to_int64(wish.sampling.seed + sibling)
    return SamplingParams(**options)


def _wrapped_to_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
