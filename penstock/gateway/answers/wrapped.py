"""The base of everything that wraps an answer: a guard, a recorder, one of several readers. Knows none of them."""

from __future__ import annotations

from typing import Self

from penstock.core.request import Tier
from penstock.gateway.accounts import RateLimits
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream, CacheStatus
from penstock.gateway.prompts import Usage


class WrappedAnswer:
    """An AnswerStream that passes everything on to another one. Subclasses change parts of it."""

    def __init__(self, answer: AnswerStream) -> None:
        self._answer = answer

    @property
    def id(self) -> str:
        return self._answer.id

    @property
    def model(self) -> str:
        return self._answer.model

    @property
    def tier(self) -> Tier:
        return self._answer.tier

    @property
    def rate_limits(self) -> RateLimits:
        return self._answer.rate_limits

    @property
    def num_choices(self) -> int:
        return self._answer.num_choices

    @property
    def usage(self) -> Usage:
        return self._answer.usage

    @property
    def cache_status(self) -> CacheStatus | None:
        return self._answer.cache_status

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        return await anext(self._answer)

    async def collect(self) -> list[Delta]:
        return await self._answer.collect()

    def cancel(self) -> None:
        self._answer.cancel()
