"""The models and heads that a drafter runs, behind one interface."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, KVStore
from penstock.models.drafters.heads import EagleHead
from penstock.models.drafters.mtp import MtpHead
from penstock.models.model import Model


class Guesser(Protocol):
    """The model or head that a drafter runs. `lag` is 1 for a head, whose input at a position is the token of the
    next position, and the served model's hidden state."""

    lag: int
    records_graphs: bool  # whether CUDA graphs may record its forward pass

    def forward(self, token_ids: Tensor, states: Tensor | None, batch: AttentionBatch, kv: KVStore) -> Tensor:
        """Compute int32 [T] (and hidden states [T, ...]) → [T, hidden]."""
        ...

    def argmax(self, hidden: Tensor) -> Tensor:
        """Guess the next tokens: [S, hidden] → int64 [S]."""
        ...

    def with_distinct_layers(self) -> Guesser:
        """Return this guesser with one layer of each kind: together these launch the same kernels."""
        ...


@runtime_checkable
class TreeGuesser(Guesser, Protocol):
    """A guesser that ranks several guesses for one place. It knows `num_guesses` tokens."""

    num_guesses: int

    def top(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Guess the `count` most likely next tokens: [S, hidden] → their log-probabilities [S, count], best first,
        and the tokens, int64 [S, count]."""
        ...


class ModelGuesser:
    lag = 0

    def __init__(self, model: Model) -> None:
        self._model = model
        self.records_graphs = model.records_graphs

    def forward(self, token_ids: Tensor, states: Tensor | None, batch: AttentionBatch, kv: KVStore) -> Tensor:
        return self._model.forward(token_ids, batch, kv)

    def argmax(self, hidden: Tensor) -> Tensor:
        chosen = self._model.argmax(hidden)
        return chosen if chosen is not None else self._model.logits(hidden).argmax(dim=1)

    def with_distinct_layers(self) -> ModelGuesser:
        return ModelGuesser(self._model.with_distinct_layers())


class HeadGuesser:
    lag = 1

    def __init__(self, head: EagleHead | MtpHead) -> None:
        self._head = head
        self.records_graphs = head.records_graphs
        self.argmax = head.argmax

    def forward(self, token_ids: Tensor, states: Tensor | None, batch: AttentionBatch, kv: KVStore) -> Tensor:
        assert states is not None, "a head reads hidden states"
        return self._head.forward(token_ids, states, batch, kv)

    def with_distinct_layers(self) -> HeadGuesser:
        return self


class EagleGuesser(HeadGuesser):
    def __init__(self, head: EagleHead) -> None:
        super().__init__(head)
        self.top, self.num_guesses = head.top, head.num_guesses
