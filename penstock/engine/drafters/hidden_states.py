"""Hidden states of the served model, kept for heads that draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from penstock.engine.batch import HostStep

KEPT_STATES = 8192  # most hidden states that wait for a call
NOTHING: Mapping[str, int] = MappingProxyType({})


class HiddenStates:
    """Keeps hidden states of the served model's latest steps, by request, until a head reads them."""

    def __init__(
        self,
        width: int,
        features: Callable[[Tensor], Tensor] | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        """`features` turns hidden states, each of `width` elements, into a head's input. `taps` are the layers whose
        inputs the states are; without any, the states are the model's final ones."""
        self.width, self.taps = width, taps
        self._features = features
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        self._num_kept = 0

    def take_step(
        self, request_ids: Sequence[str], step: HostStep, hidden: Tensor, read: Mapping[str, int] = NOTHING
    ) -> None:
        """Keep the hidden states of a step: [T, ...], except the first ones of each request of which this many have
        been `read`. With too many, those of requests that came first go."""
        found = [
            (request_id, begin, end)
            for index, request_id in enumerate(request_ids)
            if (begin := int(step.chunk_starts[index]) + read.get(request_id, 0))
            < (end := int(step.chunk_starts[index + 1]))
        ]
        if not found:
            return
        # A copy, because a graph writes the next step to the same place.
        hidden = torch.cat([hidden[begin:end] for _, begin, end in found]) if read else hidden.clone()
        rest = hidden.split([end - begin for _, begin, end in found])
        for (request_id, begin, end), rows in zip(found, rest, strict=True):
            self._parts.setdefault(request_id, []).append((int(step.positions[begin]), rows))
            self._num_kept += end - begin
        while self._num_kept > KEPT_STATES and len(self._parts) > 1:
            self.forget(next(iter(self._parts)))

    def take(self, request_id: str, start: int, end: int) -> tuple[int, Tensor | None]:
        """Take the head's input for positions up to `end`, from `start` on or from the first position behind which
        none is missing. Returns that position too. A later step replaces an earlier one."""
        found: list[Tensor] = []
        last = end
        for first, rows in reversed(self._parts.get(request_id, ())):
            if first < end <= first + len(rows) and start < end:
                begin = max(first, start)
                found.insert(0, rows[begin - first : end - first])
                end = begin
        self.forget(request_id)
        if end == last:
            return end, None
        return end, self.features(torch.cat(found))

    def features(self, states: Tensor) -> Tensor:
        """Turn hidden states into a head's input."""
        return states if self._features is None else self._features(states)

    def forget(self, request_id: str) -> None:
        self._num_kept -= sum(len(rows) for _, rows in self._parts.pop(request_id, ()))
