"""The steps of a request for embeddings: checked, admitted, looked up, tokenized, reserved, computed, settled.

Accounts, tiers and drains treat the request like any other; only its answers are vectors. Knows no HTTP. The cache
holds vectors of texts that were embedded before: exact matches only, bounded in bytes, for each workspace separately.
The workspace's name is a part of every key, so no other workspace can read or time its entries. Keys are digests: no
text is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Literal, TypeAlias

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.errors import ContextLengthExceeded, InvalidRequest, PenstockError
from penstock.core.figures import parse_bytes
from penstock.core.identity import OPEN_PRINCIPAL, Principal, RateLimits
from penstock.core.request import Pooling, Request, SamplingParams, Tier
from penstock.gateway.accounts import Account, Claim, Outcome
from penstock.gateway.checks import check_token_ids
from penstock.gateway.embeddings.run import EmbeddingRun, shortened
from penstock.gateway.gateway import Gateway, granted_tier
from penstock.gateway.metrics.table import metric
from penstock.gateway.models.served_model import ServedModel
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt, TokenPrompt, Usage
from penstock.gateway.telemetry import current_record
from penstock.gateway.text.tokenizer import DIRECT_ENCODE_CHARS

_ENTRY_BYTES = 200  # what Python needs for an entry besides its vector


class CachedVector(msgspec.Struct, frozen=True):
    vector: bytes
    num_tokens: int  # of the text, which need not be tokenized again to be counted


class EmbeddingCache(Collector):
    """Least recently used entries are dropped first. `begin` tells models, and versions of one model, apart."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, CachedVector] = OrderedDict()  # least recently used first
        self._models: dict[str, tuple[object, int]] = {}
        self._num_generations = 0
        self.num_hits = 0
        self.num_misses = 0

    def begin(self, name: str, model: object) -> int:
        """A number for the keys of a model's vectors. `model` is whatever stands for it; another object, such as
        after a restart, stands for other weights."""
        known, generation = self._models.get(name, (None, 0))
        if known is not model:
            generation = self._num_generations = self._num_generations + 1
            self._models[name] = model, generation
        return generation

    def get(self, key: bytes) -> CachedVector | None:
        found = self._entries.get(key)
        if found is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, entry: CachedVector) -> None:
        size = _size(entry)
        if size > self._max_bytes or key in self._entries:
            return
        self._entries[key] = entry
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= _size(dropped)

    def collect(self) -> Iterator[Metric]:
        yield metric("embedding_cache_hits", self.num_hits)
        yield metric("embedding_cache_misses", self.num_misses)
        yield metric("embedding_cache_bytes", self._num_bytes)


def cache_key(
    workspace_id: str,
    generation: int,
    pooling: Pooling,
    text: str | tuple[int, ...],
    *,
    truncates: bool = False,
) -> bytes:
    """A text that may be cut has a key of its own: where nothing is cut, a text that is too long is refused."""
    digest = hashlib.blake2b(digest_size=24)
    content = msgspec.msgpack.encode((workspace_id, generation, pooling, text, truncates))
    digest.update(content)
    return digest.digest()


def _size(entry: CachedVector) -> int:
    return len(entry.vector) + _ENTRY_BYTES


MAX_INPUTS = 2048

Status: TypeAlias = Literal["completed", "cancelled", "failed"]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each input: a text, or the token ids of one."""

    inputs: tuple[str | tuple[int, ...], ...]
    model: str | None = None
    dimensions: int | None = None  # None leaves vectors as long as the model makes them
    pooling: Pooling | None = None  # None takes the model's own
    truncates: bool = False  # cut inputs that are too long, instead of refusing them
    uses_cache: bool = True
    principal: Principal = OPEN_PRINCIPAL
    request_id: str = ""
    tier: Tier = Tier.DEFAULT
    user: str | None = None
    timeout_s: float | None = None


class EmbeddingAnswer(msgspec.Struct, frozen=True):
    vectors: list[bytes]  # little-endian float32, of length 1
    model: str
    usage: Usage
    rate_limits: RateLimits


class _Text(msgspec.Struct):
    """One input: its cache key, and its token ids and vector once they are known."""

    key: bytes
    known: CachedVector | None
    token_ids: tuple[int, ...] = ()
    vector: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.known is None else self.known.num_tokens


class Embeddings:
    """Must be used from the gateway's event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._cache = EmbeddingCache(parse_bytes(gateway.config.embedding_cache_memory))
        gateway.metrics.register(self._cache)

    async def open(self, request: EmbeddingRequest) -> EmbeddingJob:
        """Everything that can be refused is refused here. The job must be run or cancelled."""
        gateway = self._gateway
        gateway.check_accepting()
        model = gateway.catalogue.permitted(request.principal, request.model)
        pooling = _checked_pooling(request, model)
        signed = gateway.tiers.capped(_as_generation(request))
        if (record := current_record.get()) is not None:
            record.note(signed)
        claim = Claim(
            request_id=request.request_id or uuid.uuid4().hex,
            principal=request.principal,
            model=model.card.name,
            endpoint="embeddings",
            tier=granted_tier(signed),
            user=request.user,
        )
        with ExitStack() as way:
            way.enter_context(gateway.holding_drain())
            admission = await gateway.accounts.admit(claim)
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
                prompt_token_ids=text.token_ids,
                sampling=SamplingParams(max_tokens=1),
                tenant=request.principal.workspace_id,
                tier=claim.tier,
                model=model.base_name,
                adapter=model.adapter,
                region=gateway.catalogue.settings.region_of(request.principal),
                pooling=pooling,
            )
            for index, text in enumerate(missing)
        ]
        run = EmbeddingRun(gateway.engine, requests, _timeout_s(request, gateway))
        cache = self._cache if request.uses_cache else None
        return EmbeddingJob(gateway, account, run, texts, cache, request.dimensions, on_over)

    async def _texts(self, request: EmbeddingRequest, model: ServedModel, pooling: Pooling) -> list[_Text]:
        generation = self._cache.begin(model.card.name, model)
        texts = []
        num_characters = 0
        for index, given in enumerate(request.inputs):
            num_characters += len(given)
            if num_characters > DIRECT_ENCODE_CHARS:  # many short texts are as much work as a long one
                num_characters = 0
                await asyncio.sleep(0)
            if not given:
                raise InvalidRequest(f"input[{index}] is empty.", param="input")
            key = cache_key(
                request.principal.workspace_id, generation, pooling, given, truncates=request.truncates
            )
            known = self._cache.get(key) if request.uses_cache else None
            text = _Text(key, known)
            if known is None:
                text.token_ids = await _token_ids(given, index, model, truncates=request.truncates)
            texts.append(text)
        return texts


class EmbeddingJob:
    """An opened request: `run` it for its answer, `cancel` it at any moment."""

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
        self._gateway = gateway
        self._account = account
        self._run = run
        self._texts = texts
        self._cache = cache
        self._dimensions = dimensions
        self._on_over = on_over
        self._started_at = gateway.clock.now()

    @property
    def rate_limits(self) -> RateLimits:
        return self._account.rate_limits

    def cancel(self) -> None:
        self._on_over()
        self._run.cancel()

    async def run(self) -> EmbeddingAnswer:
        try:
            with self._gateway.counted(self._run):
                vectors = await self._run.vectors()
        except PenstockError as error:
            self._settle("failed", self._usage_so_far(), error.code)
            raise
        except BaseException:
            self._settle("cancelled", self._usage_so_far())
            raise
        finally:
            self._on_over()
        self._take(vectors)
        self._gateway.metrics.of(self._account.claim.model).prompt_tokens += self._run.num_embedded_tokens
        usage = Usage(
            prompt_tokens=sum(text.num_tokens for text in self._texts),
            completion_tokens=0,
            cached_tokens=sum(text.num_tokens for text in self._texts if text.known is not None)
            + self._run.num_cached_tokens,
        )
        self._settle("completed", usage)
        found = [text.vector if text.known is None else text.known.vector for text in self._texts]
        if self._dimensions is not None:
            found = [shortened(vector, self._dimensions) for vector in found]
        return EmbeddingAnswer(found, self._account.claim.model, usage, self._account.rate_limits)

    def _take(self, vectors: Sequence[bytes]) -> None:
        missing = [text for text in self._texts if text.known is None]
        for text, vector in zip(missing, vectors, strict=True):
            text.vector = vector
            if self._cache is not None:
                self._cache.put(text.key, CachedVector(vector, text.num_tokens))

    def _usage_so_far(self) -> Usage:
        return Usage(self._run.num_embedded_tokens, 0, self._run.num_cached_tokens)

    def _settle(self, status: Status, usage: Usage, error_code: str | None = None) -> None:
        outcome = Outcome(
            usage=usage,
            status=status,
            error_code=error_code,
            duration_s=self._gateway.clock.now() - self._started_at,
            queue_s=self._run.queue_s,
        )
        self._account.settle(outcome)


async def _token_ids(
    given: str | tuple[int, ...], index: int, model: ServedModel, *, truncates: bool = False
) -> tuple[int, ...]:
    card = model.card
    longest = card.max_model_len if card.is_encoder else card.max_model_len - 1
    characters_per_token = model.tokenizer.max_characters_per_token if isinstance(given, str) else 1
    if truncates:
        given = given[: longest * characters_per_token]
    at_least = len(given) // characters_per_token
    if at_least > longest:  # before it is tokenized
        raise _too_long(index, f"at least {at_least}", longest)
    if isinstance(given, tuple):
        check_token_ids(given, card.vocab_size, param=f"input[{index}]")
        token_ids = given
    elif card.is_encoder:
        token_ids = await model.tokenizer.encode_with_template(given)
    else:
        token_ids = await model.tokenizer.encode(given, add_special_tokens=True)
    if len(token_ids) > longest and truncates:  # an encoder reads the end of a text in its last token
        token_ids = (*token_ids[: longest - 1], token_ids[-1]) if card.is_encoder else token_ids[:longest]
    if len(token_ids) > longest:
        raise _too_long(index, str(len(token_ids)), longest)
    if not token_ids:
        raise InvalidRequest(f"input[{index}] has no tokens.", param="input")
    return model.known(token_ids, f"input[{index}]")


def _too_long(index: int, num_tokens: str, longest: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {longest} tokens. However, input[{index}] has {num_tokens} tokens.",
        param="input",
        hint="Split it, and embed the parts.",
    )


def _checked_pooling(request: EmbeddingRequest, model: ServedModel) -> Pooling:
    card = model.card
    if not card.embedding_size:
        raise InvalidRequest(f"The model {card.name!r} makes no embeddings.", param="model")
    if not request.inputs:
        raise InvalidRequest("There must be at least one input.", param="input")
    if len(request.inputs) > MAX_INPUTS:
        raise InvalidRequest(
            f"There are {len(request.inputs)} inputs; one request may have at most {MAX_INPUTS}.",
            param="input",
        )
    if request.dimensions is not None and not 1 <= request.dimensions <= card.embedding_size:
        raise InvalidRequest(
            f"dimensions must be between 1 and {card.embedding_size}, not {request.dimensions}.",
            param="dimensions",
        )
    if card.is_encoder and request.pooling not in (None, card.pooling):
        raise InvalidRequest(f"This model was trained for pooling {card.pooling!r} only.", param="pooling")
    return request.pooling or card.pooling


def _as_generation(request: EmbeddingRequest) -> GenerationRequest:
    """The same request as limits and tiers know requests."""
    return GenerationRequest(
        prompts=tuple(
            TextPrompt(given) if isinstance(given, str) else TokenPrompt(given) for given in request.inputs
        ),
        sampling=SamplingOptions(),
        model=request.model,
        tier=request.tier,
        principal=request.principal,
        request_id=request.request_id,
        endpoint="embeddings",
        user=request.user,
        timeout_s=request.timeout_s,
    )


def _timeout_s(request: EmbeddingRequest, gateway: Gateway) -> float | None:
    limits = [limit for limit in (request.timeout_s, gateway.config.request_timeout_s) if limit is not None]
    return min(limits, default=None)
