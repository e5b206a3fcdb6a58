"""Measures how well a model predicts a text, and how far its predictions are from those of another model. Also
provides the texts for calibration and for measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.model import Model


def default_texts() -> tuple[str, str]:
    """Return the text for calibration and the text for measurement. They share no paragraph."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "This Python lacks its own reference, which is the default text.",
            hint="Give texts with --calibration and --evaluation.",
        ) from error
    pages = [topics[name] for name in sorted(topics)]
    evaluation = "\n\n".join(pages[1::2])
    # Some pages repeat parts of others.
    kept = set(paragraphs(evaluation))
    calibration = [part for page in pages[0::2] for part in paragraphs(page) if part not in kept]
    return "\n\n".join(calibration), evaluation


def paragraphs(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The text {path} cannot be read: {error}.") from error


WINDOW_TOKENS = 512
_BLOCK_SIZE = 16
_ROWS_AT_ONCE = 128  # of logits, which are as wide as the vocabulary
_COMPARED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Predictions:
    perplexity: float
    num_tokens: int
    logits: Tensor  # float32 [some of the first tokens, V], to be compared with another model's


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two models' predictions of the same tokens."""

    logit_error: float  # root mean square of the difference, as a share of the logits' own spread
    divergence: float  # mean Kullback-Leibler divergence, in nats
    same_choice: float  # share of tokens after which both have the same argmax


def windows(
    token_ids: Sequence[int], num_tokens: int, window_tokens: int, bos_token_id: int | None
) -> list[list[int]]:
    """Return the first `num_tokens` of a text in pieces, one after the other. The last piece may be shorter."""
    start = [] if bos_token_id is None else [bos_token_id]
    size = window_tokens - len(start)
    count = max(1, num_tokens // window_tokens)
    pieces = [start + list(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    pieces = [piece for piece in pieces if len(piece) > 1][:count]
    if not pieces:
        raise ConfigError("The text is too short to measure a model with.", hint="Give at least a paragraph.")
    return pieces


class WindowRunner:
    """Runs a model over windows, each from an empty context."""

    def __init__(self, model: Model, ops: Ops) -> None:
        self._model = model
        self._device = ops.device
        num_blocks = -(-WINDOW_TOKENS // _BLOCK_SIZE)
        self._kv = ops.allocate_kv(
            model.num_layers, num_blocks, _BLOCK_SIZE, model.num_kv_heads, model.head_dim
        )

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Return [T, hidden] after the final norm."""
        count = len(token_ids)
        places = torch.arange(count, dtype=torch.int32, device=self._device)
        batch = AttentionBatch(
            positions=places,
            slots=places,
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=self._device),
            context_lens=torch.tensor([count], dtype=torch.int32, device=self._device),
            block_tables=torch.arange(
                -(-count // _BLOCK_SIZE), dtype=torch.int32, device=self._device
            ).unsqueeze(0),
            num_requests=1,
            max_query_len=count,
            max_context_len=count,
        )
        ids = torch.tensor(token_ids, dtype=torch.int32, device=self._device)
        with torch.inference_mode():
            return self._model.forward(ids, batch, self._kv)

    def logits(self, token_ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some rows of logits at a time, each with the token that really followed."""
        hidden = self.hidden(token_ids)[:-1]
        followed = torch.tensor(token_ids[1:], device=self._device)
        with torch.inference_mode():
            for start in range(0, len(hidden), _ROWS_AT_ONCE):
                part = slice(start, start + _ROWS_AT_ONCE)
                yield self._model.logits(hidden[part].contiguous()), followed[part]


def predict(
    model: Model, ops: Ops, pieces: Sequence[Sequence[int]], on_window: Callable[[], None]
) -> Predictions:
    runner = WindowRunner(model, ops)
    surprise, num_tokens = 0.0, 0
    kept: list[Tensor] = []
    num_kept = 0
    for piece in pieces:
        for logits, followed in runner.logits(piece):
            losses = torch.nn.functional.cross_entropy(logits.float(), followed, reduction="sum")
            surprise += float(losses)
            num_tokens += len(followed)
            if num_kept < _COMPARED_TOKENS:
                kept.append(logits.cpu())
                num_kept += len(logits)
        on_window()
    return Predictions(math.exp(surprise / num_tokens), num_tokens, torch.cat(kept))


def compare(before: Predictions, after: Predictions) -> Difference:
    first, second = before.logits, after.logits
    spread = first - first.mean(dim=1, keepdim=True)
    shift = (second - first) - (second - first).mean(dim=1, keepdim=True)  # a constant changes no prediction
    log_first, log_second = torch.log_softmax(first, dim=1), torch.log_softmax(second, dim=1)
    divergence = (log_first.exp() * (log_first - log_second)).sum(dim=1).mean()
    return Difference(
        logit_error=float(shift.square().mean().sqrt() / spread.square().mean().sqrt()),
        divergence=float(divergence),
        same_choice=float((first.argmax(dim=1) == second.argmax(dim=1)).float().mean()),
    )
