"""Whether KV should come from another replica instead of being computed where a request is served. Pure arithmetic.

Three ways to a first token are compared in predicted seconds: compute what is missing here; fetch what another
replica has cached and compute the rest here; or let a prefill replica compute it, whose KV arrives while it does. A
replica that is meant to decode leaves long prompts to others even where that is no quicker, since a prefill there
would make every answer that it streams stutter.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    min_prefill_tokens: int = 256  # uncached; below, a prompt is computed where it is served
    min_saved_s: float = 0.005  # that make a fetch worth its while
    min_saved_share: float = 0.2  # of what computing would take
    latency_s: float = 0.005  # to ask and be answered
    bytes_per_s: float = 1e9
    # How much longer than here a first token by way of a prefill replica may take: a busy pool is not waited for.
    max_slowdown: float = 2.0
    allowed_delay_s: float = 0.25


class Way(enum.StrEnum):
    """Where the KV of a prompt comes from."""

    HERE = "here"
    FETCH = "fetch"  # what another replica has cached; the rest is computed here
    PREFILL = "prefill"  # a prefill replica computes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is known about one request and the replica that will serve it."""

    num_tokens: int  # prompt, and answer so far
    cached_here: int  # tokens
    queue_here_s: float
    token_here_s: float  # for each token that is computed
    kv_bytes_per_token: int
    cached_elsewhere: int = 0  # the most tokens that one other replica has
    prefill_s: float | None = (
        None  # predicted, until a prefill replica has computed it; None without such replicas
    )
    is_for_decode: bool = False  # the replica that will serve it is not meant to compute prompts


def cheapest_way(options: Options, config: TransferConfig) -> Way:
    missing = options.num_tokens - options.cached_here
    here_s = missing * options.token_here_s
    if options.is_for_decode and options.prefill_s is not None and missing >= config.min_prefill_tokens:
        limit_s = config.max_slowdown * (options.queue_here_s + here_s) + config.allowed_delay_s
        if options.prefill_s + config.latency_s <= limit_s:
            return Way.PREFILL
    fetched = options.cached_elsewhere - options.cached_here
    if fetched <= 0:
        return Way.HERE
    transfer_s = config.latency_s + fetched * options.kv_bytes_per_token / config.bytes_per_s
    saved_s = fetched * options.token_here_s - transfer_s
    if saved_s >= config.min_saved_s and saved_s >= config.min_saved_share * here_s:
        return Way.FETCH
    return Way.HERE
