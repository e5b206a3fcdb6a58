"""What the gateway lends to those who may answer in its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.gateway.accounts import Account
from penstock.gateway.stream import AnswerStream


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """How to have a request answered, or accounted for without an engine."""

    model_fingerprint: bytes  # what answers depend on besides the request
    generate: Callable[[], Awaitable[AnswerStream]]
    open_account: Callable[[], Awaitable[Account]]  # of a request that uses no tokens; limits still apply
