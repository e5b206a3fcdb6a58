"""The waiting room: requests that wait for a replica that starts. Pure: bounded in requests, tokens and time."""

from __future__ import annotations

import msgspec

from penstock.core.errors import EngineUnavailable, Overloaded
from penstock.core.request import Request


class WaitingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_requests: int = 256
    max_tokens: int = 500_000  # of prompts
    max_wait_s: float = 120.0  # longer than starting a replica takes


class WaitingRoom:
    """Waiting requests in the order in which they came."""

    def __init__(self, config: WaitingConfig) -> None:
        self.config = config
        self._requests: dict[str, Request] = {}

    def enter(self, request: Request) -> None:
        """Raises Overloaded when there is no room for one more request of this size."""
        config = self.config
        num_tokens = self.num_tokens() + len(request.prompt_token_ids)
        if len(self._requests) >= config.max_requests or num_tokens > config.max_tokens:
            raise Overloaded(
                "No replica is running yet, and too many requests already wait for one.",
                retry_after_s=min(10.0, config.max_wait_s),
            )
        self._requests[request.id] = request

    def leave(self, request_id: str) -> bool:
        """Returns whether the request was waiting."""
        return self._requests.pop(request_id, None) is not None

    def leave_all(self) -> list[str]:
        """Empty the room. Returns the ids of the requests, in the order in which they came."""
        requests, self._requests = self._requests, {}
        return list(requests)

    def num_requests(self, model: str | None = None) -> int:
        return sum(_is_for(request, model) for request in self._requests.values())

    def num_tokens(self, model: str | None = None) -> int:
        """Tokens of the prompts that wait."""
        return sum(
            len(request.prompt_token_ids) for request in self._requests.values() if _is_for(request, model)
        )

    def give_up_s(self, since_s: float, deadline_s: float | None) -> float:
        """How long a request may wait that has waited since `since_s`."""
        latest_s = since_s + self.config.max_wait_s
        return latest_s if deadline_s is None else min(latest_s, deadline_s)

    def too_late(self) -> EngineUnavailable:
        """The error of a request that waited too long."""
        max_wait_s = self.config.max_wait_s
        return EngineUnavailable(
            f"No replica became ready within {max_wait_s:.0f} s.", retry_after_s=max_wait_s / 4.0
        )


def _is_for(request: Request, model: str | None) -> bool:
    """A request that names no model waits for any model."""
    return model is None or request.model in (model, "")
