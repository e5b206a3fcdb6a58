"""Vectors that external servers make: accounts and drains as for our own engines, without a tokenizer or a cache.

Inputs go out a few at a time, each group as a call that the pool sends to any server of the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.wire import ExternalCall, StreamChunk, estimated_tokens
from penstock.core.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, PenstockError
from penstock.core.request import Pooling
from penstock.gateway.accounts import Account
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.embeddings.inputs import Input, Reading
from penstock.gateway.embeddings.run import EmbeddingAnswer, VectorJob, packed
from penstock.gateway.external.models import ExternalModel
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import Usage

MAX_INPUTS_PER_CALL = 64  # so that each answer stays small

PlainInput: TypeAlias = str | tuple[int, ...]


def checked_inputs(
    inputs: Sequence[Input],
    model: ExternalModel,
    pooling: Pooling | None,
    normalizes: bool | None,
    reading: Reading,
) -> list[PlainInput]:
    """Refuse options that only our own engines support. Raises InvalidRequest."""
    plain = [given for given in inputs if isinstance(given, str | tuple)]
    has_options = pooling is not None or normalizes is not None or reading != Reading()
    if has_options or len(plain) < len(inputs):
        raise InvalidRequest(
            f"The model {model.name!r} runs on another server, which is only asked for plain embeddings.",
            param="model",
            hint="Leave out pooling, normalize, prompt_name, input_type, and how texts are truncated.",
        )
    return plain


def num_tokens_of(given: PlainInput) -> int:
    """Return an estimate for a text: the server has the tokenizer."""
    return estimated_tokens(given) if isinstance(given, str) else len(given)


class ExternalEmbeddingJob(VectorJob):
    def __init__(
        self,
        gateway: Gateway,
        pool: ExternalPool,
        account: Account,
        inputs: Sequence[PlainInput],
        dimensions: int | None,
        timeout_s: float | None,
    ) -> None:
        super().__init__(gateway, account)
        self._pool = pool
        self._inputs = inputs
        self._options = {} if dimensions is None else {"dimensions": dimensions}
        self._timeout_s = timeout_s
        self._task: asyncio.Task[Any] | None = None  # while it runs
        self._error: PenstockError | ReaderGone | None = None  # that ended it early
        self._num_tokens = 0  # as the servers report

    def cancel(self) -> None:
        self._end_early(ReaderGone())

    def fail(self, error: PenstockError) -> None:
        self._end_early(error)

    def _end_early(self, error: PenstockError | ReaderGone) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._task is not None:
            self._task.cancel()
        else:
            self._settle("cancelled", self._usage)  # nothing, once it has run

    async def run(self) -> EmbeddingAnswer:
        if self._error is not None:
            raise self._error
        task = self._task = asyncio.current_task()
        try:
            with self._gateway.counted(self):
                vectors = await self._vectors()
        except PenstockError as error:
            self._settle("failed", self._usage, error.code)
            raise
        except BaseException:
            error_code = self._error.code if isinstance(self._error, PenstockError) else None
            self._settle("cancelled" if error_code is None else "failed", self._usage, error_code)
            if self._error is None or task is None:
                raise
            task.uncancel()
            raise self._error from None
        finally:
            self._task = None
        return self._answer(vectors, self._usage, self._num_tokens, None)

    @property
    def _usage(self) -> Usage:
        return Usage(self._num_tokens, 0, 0)

    async def _vectors(self) -> list[bytes]:
        vectors: list[bytes] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                for start in range(0, len(self._inputs), MAX_INPUTS_PER_CALL):
                    vectors += await self._ask(start, self._inputs[start : start + MAX_INPUTS_PER_CALL])
        except TimeoutError:
            raise DeadlineExceeded(
                "The request's deadline passed before all its vectors were there."
            ) from None
        return vectors

    async def _ask(self, start: int, inputs: Sequence[PlainInput]) -> list[bytes]:
        claim = self._account.claim
        call = ExternalCall(
            id=f"{claim.request_id}-{start}",
            model=claim.model,
            api="embeddings",
            body={"input": list(inputs), "encoding_format": "float", **self._options},
            text="",  # whose beginning no server keeps
            tenant=claim.principal.workspace_id,
            tier=claim.tier,
            region=self._gateway.catalogue.settings.region_of(claim.principal),
            is_whole=True,
            estimated_tokens=sum(map(num_tokens_of, inputs)),
        )
        chunks: list[StreamChunk] = []
        await self._pool.send(call, chunks.extend)
        entries = sorted(chunks[-1].data, key=lambda entry: entry.index)
        if [entry.index for entry in entries] != list(range(len(inputs))):
            raise EngineUnavailable("The server of this model sent other vectors than it was asked for.")
        usage = chunks[-1].usage
        self._num_tokens += call.estimated_tokens if usage is None else usage.prompt_tokens
        return [packed(entry.embedding) for entry in entries]
