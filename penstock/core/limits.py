"""A caller's limits as rate-limit headers show them. The limiter fills them in."""

from __future__ import annotations

import msgspec


class LimitState(msgspec.Struct, frozen=True):
    """One limit, after this request's reservation."""

    limit: int
    remaining: int
    reset_s: float  # until it is whole again


class RateLimits(msgspec.Struct, frozen=True):
    """The tightest limits that apply to a caller; None where there is none."""

    requests: LimitState | None = None
    input_tokens: LimitState | None = None
    output_tokens: LimitState | None = None

    @property
    def tokens(self) -> LimitState | None:
        """Of the two token limits, the one of which less is left."""
        if self.input_tokens is None or self.output_tokens is None:
            return self.input_tokens or self.output_tokens
        return min(self.input_tokens, self.output_tokens, key=lambda state: state.remaining / state.limit)
