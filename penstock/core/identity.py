"""The caller of a request, and the caller's limits. Knows neither keys nor tokens: the code that checks those creates
a `Principal`, and the limiter fills in `RateLimits`.

Organisations own workspaces, workspaces own keys. The workspace is the isolation boundary: caches, files, batches,
stored answers and usage belong to one workspace and are never visible from another.
"""

from __future__ import annotations

import enum

import msgspec

from penstock.core.request import Tier


class Scope(enum.StrEnum):
    """A permission of a key."""

    INFERENCE = "inference"  # ask models for answers and embeddings, and keep files, batches and responses
    USAGE = "usage"  # read the usage of its own workspace
    METRICS = "metrics"  # read /metrics
    ADMIN = "admin"  # manage organisations, workspaces, keys and settings, and read everyone's usage


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The authenticated caller of one request."""

    organization_id: str = "default"
    workspace_id: str = "default"
    key_id: str = "open"  # "open" when the server asks for no key
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})
    allowed_models: frozenset[str] | None = None  # None allows every model
    best_tier: Tier = Tier.DEFAULT  # the most urgent tier that this caller may claim
    caches_responses: bool = False  # whether its key opted in to the response cache

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_use(self, model: str) -> bool:
        return self.allowed_models is None or model in self.allowed_models


# Without keys, a caller that reaches the (loopback) port owns the machine.
OPEN_PRINCIPAL = Principal(scopes=frozenset(Scope), best_tier=Tier.PRIORITY)


class LimitState(msgspec.Struct, frozen=True):
    """One limit, after this request's reservation."""

    limit: int
    remaining: int
    reset_s: float  # until the limit is fully available again


class RateLimits(msgspec.Struct, frozen=True):
    """The tightest limits of a caller; None where there is no limit."""

    requests: LimitState | None = None
    input_tokens: LimitState | None = None
    output_tokens: LimitState | None = None

    @property
    def tokens(self) -> LimitState | None:
        """Return the token limit with the least remaining."""
        inputs, outputs = self.input_tokens, self.output_tokens
        if inputs is None or outputs is None:
            return inputs or outputs
        return inputs if inputs.remaining * outputs.limit <= outputs.remaining * inputs.limit else outputs
