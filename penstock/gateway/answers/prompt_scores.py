"""Log-probabilities of a prompt's tokens, on their way from engine events to the readers of its answers. Knows no
text.

One engine request scores a prompt, and all answers to the prompt share the result. The numbers stay packed, as they
came, until an API writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from penstock.core.plan import PromptLogprobs


class TokenScore(msgspec.Struct, frozen=True):
    """`rank` is 1 for the most likely token. `top` has the most likely tokens and their log-probabilities."""

    logprob: float
    rank: int
    top: Sequence[tuple[int, float]]


class ScoredPrompt(msgspec.Struct, frozen=True):
    """A prompt and the log-probabilities of its tokens, in pieces that follow each other from the second token on."""

    token_ids: tuple[int, ...]
    pieces: tuple[PromptLogprobs, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.token_ids) + sum(len(piece.values) + len(piece.ids) for piece in self.pieces)

    def scores(self, num_top: int) -> Iterator[tuple[int, TokenScore | None]]:
        """Return each token of the prompt with its score. Nothing predicts the first token; an engine that does not
        score prompts leaves all others without a score too."""
        unscored = (None for _ in self.token_ids)
        scored = chain.from_iterable(_scores(piece, num_top) for piece in self.pieces)
        return zip(self.token_ids, chain([None], scored, unscored), strict=False)


def _scores(piece: PromptLogprobs, num_top: int) -> Iterator[TokenScore]:
    width = 1 + piece.num_top
    shown = 1 + min(num_top, piece.num_top)
    values, ids = memoryview(piece.values).cast("f"), memoryview(piece.ids).cast("i")
    for at in range(0, piece.num_tokens * width, width):
        row_values, row_ids = values[at : at + shown].tolist(), ids[at : at + shown].tolist()
        yield TokenScore(row_values[0], row_ids[0], list(zip(row_ids[1:], row_values[1:], strict=True)))


class PromptScores:
    """Collects the scores of one prompt. They are over when the last piece has come, or will not come any more."""

    __slots__ = ("_num_tokens", "_pieces", "_scored", "_token_ids", "is_over")

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._pieces: list[PromptLogprobs] = []
        self._num_tokens = 1  # with a score, and the first token, which has none
        self._scored: ScoredPrompt | None = None
        self.is_over = len(token_ids) <= 1

    def add(self, piece: PromptLogprobs) -> None:
        """Take in the next piece. An engine that takes over a request begins with the prompt again: tokens that
        have a score are skipped."""
        num_known = self._num_tokens - piece.start
        if num_known >= piece.num_tokens:
            return
        if num_known > 0:
            skipped = num_known * (1 + piece.num_top) * 4
            piece = PromptLogprobs(
                self._num_tokens,
                piece.num_tokens - num_known,
                piece.num_top,
                piece.values[skipped:],
                piece.ids[skipped:],
            )
        self._pieces.append(piece)
        self._num_tokens += piece.num_tokens
        self.is_over = self._num_tokens >= len(self._token_ids)

    def scored(self) -> ScoredPrompt:
        if self._scored is None:
            self._scored = ScoredPrompt(self._token_ids, tuple(self._pieces))
        return self._scored
