"""The data of the router: requests in, decisions out. Knows hashes of the prompt, never its tokens or text."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class RandomSource(Protocol):
    """The source of randomness, passed in so that a seed repeats every decision."""

    def random(self) -> float:
        """A number from 0 up to, not including, 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    id: str
    model: str
    num_prompt_tokens: int
    block_hashes: Sequence[bytes] = ()  # leading full blocks in chain order; `prompt` makes them
    expected_output_tokens: int = 128
    revision: str | None = None  # None: any
    region: str | None = None  # preferred; others serve when it is overloaded
    affinity_key: str | None = None  # a session id or prompt_cache_key: requests that likely share a prefix
    excluded: frozenset[str] = frozenset()  # replicas that already failed this request


class Reason(enum.StrEnum):
    """Why a replica was picked."""

    ONLY = "only"  # no other replica could serve the request
    TURN = "turn"  # it was this replica's turn
    LOAD = "load"  # nothing of the prompt is known anywhere that matters: the shortest predicted wait
    PREFIX = "prefix"  # it holds the longest known prefix
    COPY = "copy"  # another one holds more of the prefix, but computing it here is quicker than waiting there
    AFFINITY = "affinity"  # the session, or prompt_cache_key, leads here


@dataclass(frozen=True, slots=True)
class Decision:
    replica_id: str
    reason: Reason
    matched_tokens: int  # of the prompt, that this replica is thought to hold
    best_matched_tokens: int  # the most that any candidate is thought to hold
    predicted_ttft_s: float
    is_spilled_over: bool  # served outside of the preferred region
