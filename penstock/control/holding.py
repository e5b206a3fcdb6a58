"""Which requests may wait for a replica that does not exist yet, and for how long. Pure: keeps no request itself."""

from __future__ import annotations

import msgspec

from penstock.core.errors import EngineUnavailable, Overloaded


class HoldingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_held_requests: int = 256
    max_held_tokens: int = 500_000
    max_wait_s: float = 120.0  # longer than starting a replica takes


def check_room(config: HoldingConfig, num_held: int, tokens_held: int, num_tokens: int) -> None:
    """Raises Overloaded when one more request, of so many prompt tokens, may not be held."""
    if num_held >= config.max_held_requests or tokens_held + num_tokens > config.max_held_tokens:
        raise Overloaded(
            "No replica is running yet, and too many requests already wait for one.",
            retry_after_s=min(10.0, config.max_wait_s),
        )


def give_up_s(config: HoldingConfig, since_s: float, deadline_s: float | None) -> float:
    """Until when to hold a request."""
    latest_s = since_s + config.max_wait_s
    return latest_s if deadline_s is None else min(latest_s, deadline_s)


def too_late(config: HoldingConfig) -> EngineUnavailable:
    return EngineUnavailable(
        f"No replica became ready within {config.max_wait_s:.0f} s.", retry_after_s=config.max_wait_s / 4.0
    )
