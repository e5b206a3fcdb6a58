"""The steps of a request for vectors: checked, admitted, looked up, tokenized, reserved, computed, settled.

Accounts, tiers and drains treat the request like any other; only its answers are vectors: embeddings, or the logits
of a classifier. Knows no HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack

import msgspec

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.figures import parse_bytes
from penstock.core.identity import OPEN_PRINCIPAL, Principal
from penstock.core.messages import ModelCard
from penstock.core.request import Pooling, Request, SamplingParams, Tier
from penstock.gateway.accounts import Account, Claim
from penstock.gateway.checks import check_names
from penstock.gateway.embeddings.inputs import (
    SHARED_KIND,
    CachedVector,
    EmbeddingCache,
    Input,
    Pair,
    Reading,
    TextWithRole,
    Tokens,
    cache_key,
    check_reading,
    decode_vector,
    encode_vector,
    num_characters,
    tokens_of,
    within_reach,
)
from penstock.gateway.embeddings.run import (
    EmbeddingAnswer,
    EmbeddingRun,
    ExternalEmbeddingJob,
    VectorJob,
    checked_inputs,
    num_tokens_of,
    shortened,
)
from penstock.gateway.external.models import ExternalModel
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.served_model import ServedModel
from penstock.gateway.prompts import GenerationRequest, TokenPrompt, Usage
from penstock.gateway.reuse.shared_cache import entry_name
from penstock.gateway.telemetry import current_record, prompt_text
from penstock.gateway.text.tokenizer import DIRECT_ENCODE_CHARS
from penstock.gateway.turns import Turns

MAX_INPUTS = 2048
TEXT_CHARACTERS = 256  # whose tokenizing costs as much as all else that is done for a text
MAX_PAIR_TOKENS = 1 << 20  # of all pairs of a request: a small request can repeat one text in many pairs
MAX_NUMBERS = 1 << 24  # of an answer that has one vector for each token


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each input."""

    inputs: tuple[Input, ...] = ()
    labels: tuple[str, ...] = ()  # of inputs, for errors; empty: input[0], input[1], …
    endpoint: str = "embeddings"
    model: str | None = None
    dimensions: int | None = None  # None leaves vectors as long as the model makes them
    pooling: Pooling | None = None  # None takes the model's own
    normalizes: bool | None = None  # None: as the model's files specify
    reading: Reading = Reading()
    uses_cache: bool = True
    principal: Principal = OPEN_PRINCIPAL
    request_id: str = ""
    tier: Tier = Tier.DEFAULT
    user: str | None = None
    timeout_s: float | None = None
    is_internal: bool = False  # the gateway's own, for an admitted request: not limited, but in the ledger
    allows_external: bool = False  # whether vectors of an external server are acceptable

    def label_of(self, index: int) -> str:
        return self.labels[index] if self.labels else f"input[{index}]"


class _Text(msgspec.Struct):
    """One input: its cache key, and its token ids and vector once they are known."""

    key: bytes
    known: CachedVector | None
    tokens: Tokens = Tokens(())
    vector: bytes = b""
    shared_name: str = ""  # of its entry in Redis; empty if it has none

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.ids) if self.known is None else self.known.num_tokens


class Embeddings:
    """Must be used from the gateway's event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._cache = EmbeddingCache(parse_bytes(gateway.config.embedding_cache_memory))
        gateway.metrics.register(self._cache)
        gateway.reuse.embed = self.vector_of

    def model_of(self, principal: Principal, name: str | None) -> ServedModel:
        return self._gateway.catalogue.permitted(principal, name)

    async def vector_of(self, text: str, request: GenerationRequest, model: str) -> tuple[bytes, bytes]:
        """Return the vector of a text that belongs to an admitted request, and the identity of the model that made
        it."""
        wanted = EmbeddingRequest(
            inputs=(text,),
            endpoint="semantic_cache",
            model=model,
            normalizes=True,
            principal=request.principal,
            tier=request.tier,
            is_internal=True,
        )
        job = await self.open_here(wanted)
        try:
            vectors = (await job.run()).vectors
        except BaseException:
            job.cancel()
            raise
        return vectors[0], self._gateway.catalogue.find(model).fingerprint

    async def open(self, request: EmbeddingRequest) -> EmbeddingJob | ExternalEmbeddingJob:
        """Open a job. Every refusal is raised here. The job must be run or cancelled."""
        gateway = self._gateway
        gateway.check_accepting(is_admitted=request.is_internal)
        if request.allows_external:
            elsewhere = gateway.catalogue.answering(request.model, request.principal)
            if isinstance(elsewhere, ExternalModel):
                return await self._open_elsewhere(request, elsewhere)
        return await self.open_here(request)

    async def _open_elsewhere(self, request: EmbeddingRequest, model: ExternalModel) -> ExternalEmbeddingJob:
        gateway = self._gateway
        assert gateway.catalogue.external is not None
        inputs = checked_inputs(request.inputs, model, request.pooling, request.normalizes, request.reading)
        _check_num_inputs(request)
        claim = self._claim(request, model.name, input_tokens=sum(map(num_tokens_of, inputs)))
        account = await gateway.accounts.open(claim)
        pool = gateway.catalogue.external.pool
        return ExternalEmbeddingJob(
            gateway, pool, account, inputs, request.dimensions, _timeout_s(request, gateway)
        )

    async def open_here(self, request: EmbeddingRequest) -> EmbeddingJob:
        """`open`, for a model of our own engines."""
        gateway = self._gateway
        if request.is_internal:
            model = gateway.catalogue.find(request.model)
        else:
            model = self.model_of(request.principal, request.model)
        pooling = _checked_pooling(request, model.card)
        claim = self._claim(request, model.card.name)
        with ExitStack() as way:
            way.enter_context(gateway.holding_drain())
            admission = await gateway.accounts.admit(claim, is_limited=not request.is_internal)
            try:
                texts = await self._texts(request, model, pooling)
                missing = [text for text in texts if text.known is None]
                input_tokens = sum(text.num_tokens for text in missing)
                account = await admission.open(msgspec.structs.replace(claim, input_tokens=input_tokens))
            except BaseException as error:
                admission.release(error.code if isinstance(error, PenstockError) else None)
                raise
            on_over = way.pop_all().close
        requests = [
            Request(
                id=f"{claim.request_id}-{index}",
                prompt_token_ids=text.tokens.ids,
                sampling=SamplingParams(max_tokens=1),
                tenant=request.principal.workspace_id,
                tier=claim.tier,
                model=model.base_name,
                adapter=model.adapter,
                region=gateway.catalogue.settings.region_of(request.principal),
                pooling=pooling,
                normalizes=request.normalizes,
                second_text_at=text.tokens.second_at,
            )
            for index, text in enumerate(missing)
        ]
        run = EmbeddingRun(gateway.engine, requests, _timeout_s(request, gateway))
        cache = self._cache if request.uses_cache else None
        dimensions = _dimensions(request, model.card)
        return EmbeddingJob(gateway, account, run, texts, cache, dimensions, on_over)

    def _claim(self, request: EmbeddingRequest, model: str, *, input_tokens: int = 0) -> Claim:
        check_names(request.user)
        if (record := current_record.get()) is not None and not request.is_internal:
            record.note(request.request_id, map(_shown, request.inputs))
        return Claim(
            request_id=request.request_id or uuid.uuid4().hex,
            principal=request.principal,
            model=model,
            endpoint=request.endpoint,
            tier=self._gateway.tiers.granted(request.principal, request.tier),
            input_tokens=input_tokens,
            user=request.user,
        )

    async def _texts(self, request: EmbeddingRequest, model: ServedModel, pooling: Pooling) -> list[_Text]:
        generation = self._cache.begin(model.card.name, model)
        workspace_id = request.principal.workspace_id
        turns = self._gateway.turns
        texts: list[_Text] = []
        num_pair_tokens = 0
        request = _within_reach(request, model)
        async for _, given in _in_turns(request.inputs, turns):
            key = cache_key(workspace_id, generation, pooling, request.normalizes, given, request.reading)
            texts.append(_Text(key, self._cache.get(key) if request.uses_cache else None))
        if request.uses_cache:
            await self._ask_shared(request, model, pooling, texts)
        async for index, given in _in_turns(request.inputs, turns):
            text = texts[index]
            if text.known is None:
                text.tokens = await tokens_of(given, request.label_of(index), model, request.reading)
            if isinstance(given, Pair):
                num_pair_tokens += text.num_tokens
                _check_total(num_pair_tokens, MAX_PAIR_TOKENS, "tokens of pairs")
        if pooling == "all":
            num_numbers = sum(text.num_tokens for text in texts) * model.card.embedding_size
            _check_total(num_numbers, MAX_NUMBERS, "numbers in the answer")
        return texts

    async def _ask_shared(
        self, request: EmbeddingRequest, model: ServedModel, pooling: Pooling, texts: Sequence[_Text]
    ) -> None:
        """Look in Redis for the vectors that are not in memory, and give all new texts names there."""
        caches = self._gateway.shared_caches
        if caches is None or not self._gateway.embedding_cache.shared:
            return
        workspace_id = request.principal.workspace_id
        unknown = []
        for given, text in zip(request.inputs, texts, strict=True):
            if text.known is None:
                text.shared_name = entry_name(
                    workspace_id, model.fingerprint, pooling, request.normalizes, given, request.reading
                )
                unknown.append(text)
        found = await caches.get_many(SHARED_KIND, [text.shared_name for text in unknown])
        for text, entry in zip(unknown, found, strict=True):
            if entry is not None and (vector := decode_vector(entry.value)) is not None:
                text.known = vector
                self._cache.put(text.key, vector)


class EmbeddingJob(VectorJob):
    def __init__(
        self,
        gateway: Gateway,
        account: Account,
        run: EmbeddingRun,
        texts: Sequence[_Text],
        cache: EmbeddingCache | None,
        dimensions: int | None,
        on_over: Callable[[], None],  # called when the job is over, perhaps more than once
    ) -> None:
        super().__init__(gateway, account)
        self._run = run
        self._texts = texts
        self._cache = cache
        self._dimensions = dimensions
        self._on_over = on_over

    def cancel(self) -> None:
        self._on_over()
        self._run.cancel()

    async def run(self) -> EmbeddingAnswer:
        try:
            with self._gateway.counted(self._run):
                vectors = await self._run.vectors()
        except PenstockError as error:
            self._settle("failed", self._usage_so_far(), error.code, queue_s=self._run.queue_s)
            raise
        except BaseException:
            self._settle("cancelled", self._usage_so_far(), queue_s=self._run.queue_s)
            raise
        finally:
            self._on_over()
        self._take(vectors)
        usage = Usage(
            prompt_tokens=sum(text.num_tokens for text in self._texts),
            completion_tokens=0,
            cached_tokens=sum(text.num_tokens for text in self._texts if text.known is not None)
            + self._run.num_cached_tokens,
        )
        found = [text.vector if text.known is None else text.known.vector for text in self._texts]
        if self._dimensions is not None:
            found = [shortened(vector, self._dimensions) for vector in found]
        return self._answer(found, usage, self._run.num_embedded_tokens, self._run.queue_s)

    def _take(self, vectors: Sequence[bytes]) -> None:
        missing = [text for text in self._texts if text.known is None]
        for text, vector in zip(missing, vectors, strict=True):
            text.vector = vector
            if self._cache is not None:
                cached = CachedVector(vector, text.num_tokens)
                self._cache.put(text.key, cached)
                self._share(text, cached)

    def _share(self, text: _Text, cached: CachedVector) -> None:
        caches, settings = self._gateway.shared_caches, self._gateway.embedding_cache
        if caches is not None and text.shared_name:
            data = encode_vector(cached)
            caches.put(SHARED_KIND, text.shared_name, data, settings.ttl_s, settings.shared_max_bytes)

    def _usage_so_far(self) -> Usage:
        return Usage(self._run.num_embedded_tokens, 0, self._run.num_cached_tokens)


def _within_reach(request: EmbeddingRequest, model: ServedModel) -> EmbeddingRequest:
    """Return the request with the parts of its inputs that the model can read. Raises if an input is too long."""
    inputs = tuple(
        within_reach(given, request.label_of(index), model, request.reading)
        for index, given in enumerate(request.inputs)
    )
    return msgspec.structs.replace(request, inputs=inputs)


async def _in_turns(inputs: Sequence[Input], turns: Turns) -> AsyncIterator[tuple[int, Input]]:
    """Yield all inputs, in turns with others: many short texts are as much work as a long one."""
    num_waiting_characters = 0
    for index, given in enumerate(inputs):
        num_waiting_characters += TEXT_CHARACTERS + num_characters(given)
        if num_waiting_characters > DIRECT_ENCODE_CHARS:
            num_waiting_characters = 0
            await turns.next()
        yield index, given


def _check_total(number: int, most: int, what: str) -> None:
    if number > most:
        raise InvalidRequest(
            f"This request would have more than the {most:,} {what} that one request may have.",
            hint="Send several smaller requests.",
        )


def _check_num_inputs(request: EmbeddingRequest) -> None:
    param = (request.labels or ("input",))[0].partition("[")[0]
    if not request.inputs:
        raise InvalidRequest("There must be at least one input.", param=param)
    check_num_inputs(len(request.inputs), param)


def check_num_inputs(number: int, param: str = "input") -> None:
    if number > MAX_INPUTS:
        raise InvalidRequest(
            f"There are {number} inputs; one request may have at most {MAX_INPUTS}.", param=param
        )


def _checked_pooling(request: EmbeddingRequest, card: ModelCard) -> Pooling:
    if not card.embedding_size:
        raise InvalidRequest(f"The model {card.name!r} makes no embeddings.", param="model")
    _check_num_inputs(request)
    check_reading(request.reading, card)
    _dimensions(request, card)
    if request.pooling in (None, card.pooling):
        return card.pooling
    if request.pooling == "all" and not card.pooler.labels:
        return "all"
    if card.is_encoder or card.pooler.source:
        raise InvalidRequest(f"This model was trained for pooling {card.pooling!r} only.", param="pooling")
    assert request.pooling is not None
    return request.pooling


def _dimensions(request: EmbeddingRequest, card: ModelCard) -> int | None:
    """Return how many numbers of a vector are kept; None keeps all of them."""
    asked, size, allowed = request.dimensions, card.embedding_size, card.pooler.matryoshka
    if asked is None:
        return card.pooler.cut_to if not card.pooler.labels and request.pooling != "all" else None
    if not 1 <= asked <= size:
        raise InvalidRequest(f"dimensions must be between 1 and {size}, not {asked}.", param="dimensions")
    if asked == size:
        return None
    if allowed is None:
        raise InvalidRequest(
            f"The files of the model {card.name!r} do not say that its vectors may be cut; they have {size} numbers.",
            param="dimensions",
            hint='The operator may add "is_matryoshka": true to its config.json, if the model was trained for it.',
        )
    if allowed and asked not in allowed:
        listed = ", ".join(map(str, allowed))
        raise InvalidRequest(f"dimensions must be one of {listed}, not {asked}.", param="dimensions")
    return asked


def _shown(given: Input) -> str:
    """Return an input as people read it."""
    if isinstance(given, Pair):
        return f"{given.first}\n{given.second}"
    if isinstance(given, tuple):
        return prompt_text(TokenPrompt(given))
    return given.text if isinstance(given, TextWithRole) else given


def _timeout_s(request: EmbeddingRequest, gateway: Gateway) -> float | None:
    limits = [limit for limit in (request.timeout_s, gateway.config.request_timeout_s) if limit is not None]
    return min(limits, default=None)
