"""Runs the model on the chunks of a step: one forward pass, or several where the device lacks memory for one.

A pass replays a captured graph where one fits. Besides logits, a pass computes other results that requests ask for:
embeddings, scores of prompts, and hidden states for heads that draft. A step that lacks memory is computed in pieces
(`halves`), and a piece that cannot be halved ends its own request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import NOT_A_NUMBER, Chunk, PromptLogprobs, ScoredChunk
from penstock.core.request import Request
from penstock.engine.adapters import LoRAModel, Slots
from penstock.engine.batch import BatchRows, HostStep
from penstock.engine.drafters.hidden_states import HiddenStates
from penstock.engine.graphs import DecodeGraphs, PromptGraphs
from penstock.engine.images import ImageEncoder, PlacedImages
from penstock.engine.pooling import HiddenPooler, VectorMaker
from penstock.engine.staging import Staging
from penstock.kernels.interface import KVStore
from penstock.models.model import Model, TappedModel

logger = logging.getLogger(__name__)


MAX_LOGIT_BYTES = 64 << 20  # of the positions that are computed at a time


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of one piece of a prompt, on the host once the step is done; see `PromptLogprobs`."""

    request_id: str
    start: int
    values: Tensor
    ids: Tensor

    def report(self) -> ScoredChunk:
        if not bool(torch.isfinite(self.values).all()):
            return ScoredChunk(self.request_id, None, NOT_A_NUMBER)
        num_tokens, width = self.values.shape
        values = self.values.numpy().astype("<f4").tobytes()
        ids = self.ids.numpy().astype("<i4").tobytes()
        return ScoredChunk(self.request_id, PromptLogprobs(self.start, num_tokens, width - 1, values, ids))


class PromptScorer:
    """Follows the requests that ask for log-probabilities of their prompts, from `begin` to `end`.

    The logits of a whole prompt would need as much memory as its tokens times the vocabulary: a prompt of 8,192
    tokens has 5 GB of them with a vocabulary of 152,000. They are computed for a few positions at a time instead,
    and only the requested values are kept.
    """

    def __init__(self, model: Model, staging: Staging, vocab_size: int, *, has_logits: bool = True) -> None:
        """Without `has_logits` this is a rank that helps to compute logits and does not get them all."""
        self._model = model
        self._staging = staging
        self._has_logits = has_logits
        self._rows_at_a_time = max(1, MAX_LOGIT_BYTES // (4 * vocab_size))
        self._requests: dict[str, Request] = {}

    def begin(self, request: Request) -> None:
        if request.sampling.prompt_logprobs is not None:
            self._requests[request.id] = request

    def end(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def any_of(self, chunks: Sequence[Chunk]) -> bool:
        return bool(self._requests) and any(chunk.scores_from is not None for chunk in chunks)

    def take(self, hidden: Tensor, step: HostStep, chunks: Sequence[Chunk]) -> list[Scores]:
        """Read this step's hidden states [T, hidden]; returns the scores, on the device, of the chunks that ask for
        them."""
        made = []
        for index, chunk in enumerate(chunks):
            request = self._requests.get(chunk.request_id)
            if chunk.scores_from is None or request is None:
                continue
            prompt = request.prompt_token_ids
            first = max(chunk.start, chunk.scores_from)
            end = min(chunk.start + chunk.num_tokens, len(prompt) - 1)
            if first >= end:
                continue
            states = hidden[int(step.chunk_starts[index]) + first - chunk.start :][: end - first]
            targets = np.array(prompt[first + 1 : end + 1], dtype=np.int64)
            parts = self._score(states, targets, request.sampling.prompt_logprobs or 0)
            if parts:
                values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
                made.append(Scores(request.id, first + 1, values, ids))
        return made

    def _score(
        self, states: Tensor, targets: np.ndarray[tuple[int], np.dtype[np.int64]], num_top: int
    ) -> list[tuple[Tensor, Tensor]]:
        parts = []
        for start in range(0, len(targets), self._rows_at_a_time):
            end = start + self._rows_at_a_time
            logits = self._model.logits(states[start:end])
            if self._has_logits:
                parts.append(score_tokens(logits, self._staging.to_device(targets[start:end]), num_top))
        return parts


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """float32 [n, V], int64 [n] → float32 and int32 [n, 1 + num_top], as `PromptLogprobs` has them."""
    own = logits.gather(1, token_ids.unsqueeze(1))
    total = logits.logsumexp(dim=1, keepdim=True)
    ranks = (logits > own).sum(dim=1, keepdim=True) + 1
    top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=1)
    return torch.cat((own, top), dim=1) - total, torch.cat((ranks, top_ids), dim=1).to(torch.int32)


@dataclass(slots=True)
class FromHidden:
    """The results of one step from hidden states, besides samples."""

    embeddings: dict[str, Tensor] = field(default_factory=dict)  # on the device, by request
    scores: list[Scores] = field(default_factory=list)
    states: list[StepStates] = field(default_factory=list)  # of each pass, for heads


@dataclass(frozen=True, slots=True)
class StepStates:
    chunks: Sequence[Chunk]
    step: HostStep
    values: Tensor  # [T, ...], valid until the next pass


class ForwardPass:
    """Follows requests from `begin` to `end`, and computes their chunks."""

    def __init__(
        self,
        model: Model,
        kv: KVStore,
        *,
        rows: BatchRows,
        staging: Staging,
        vocab_size: int,
        has_logits: bool = True,
        graphs: DecodeGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
        lora: LoRAModel | None = None,
        states: HiddenStates | None = None,
        images: ImageEncoder | None = None,
        vectors: VectorMaker | None = None,
    ) -> None:
        """`states` keeps the hidden states of every step, for heads that draft. `has_logits` is false on ranks
        that do not sample."""
        self._model = model
        self._kv = kv
        self._rows = rows
        self._staging = staging
        self._vocab_size = vocab_size
        self._graphs = graphs
        self._prompt_graphs = prompt_graphs
        self.lora = lora
        self._states = states
        self.images = images
        self._pooler = HiddenPooler(vectors)
        self._scorer = PromptScorer(model, staging, vocab_size, has_logits=has_logits)
        # The latest pass was launched piece by piece: its graph is recorded next time.
        self.lacks_graph = False

    def begin(self, request: Request) -> None:
        self._pooler.begin(request)
        self._scorer.begin(request)
        if self.images is not None:
            self.images.begin(request)
        if self.lora is not None:
            self.lora.begin(request)

    def end(self, request_id: str) -> None:
        self._pooler.end(request_id)
        self._scorer.end(request_id)
        if self.images is not None:
            self.images.end(request_id)
        if self.lora is not None:
            self.lora.end(request_id)

    def take_capture_s(self) -> float:
        """Return the seconds that the latest passes spent on capturing graphs, which later passes need not do."""
        return 0.0 if self._graphs is None else self._graphs.take_capture_s()

    def build(self, chunks: Sequence[Chunk]) -> HostStep:
        """Lay out chunks for the model. Requests that pool their hidden states do not sample."""
        step = self._rows.build(chunks, self._pooler.request_ids)
        return step if self.images is None else self.images.arranged(chunks, step)

    def run(
        self, chunks: Sequence[Chunk], step: HostStep, taken: FromHidden, *, only_argmax: bool = False
    ) -> tuple[Tensor | None, list[Chunk]]:
        """Run `_compute` in as many passes as the memory needs. Also returns the chunks, or their rests, that no pass
        had room for. Their logits and vectors are not numbers."""
        try:
            return self._compute(chunks, step, taken, only_argmax=only_argmax), []
        except torch.OutOfMemoryError:
            pass  # the exception keeps the memory of the pass, so the next attempt comes after this block
        if self._rows.states is not None:
            # Some layers have seen the tokens of the pass and others have not: no state can be used any more.
            logger.warning("out of memory in a step of a model with states: its requests end")
            nothing = [part for chunk in chunks for part in self._nothing_for(chunk, taken.embeddings)]
            return torch.cat(nothing) if nothing else None, list(chunks)
        return self._compute_in_pieces(chunks, taken)

    def _compute(
        self,
        chunks: Sequence[Chunk],
        step: HostStep,
        taken: FromHidden,
        *,
        graphs: bool = True,
        only_argmax: bool = False,
    ) -> Tensor | None:
        """Run the model. Returns float32 [S, V] for the requests that sample, if any; with `only_argmax` perhaps
        int64 [S], the argmax of each row. `taken` gets embeddings of prompts that ended, and scores of prompts."""
        slots = None if self.lora is None else self.lora.slots_of(chunks, step.chunk_starts)
        pools, scores = self._pooler.any_of(chunks), self._scorer.any_of(chunks)
        placed = None if self.images is None else self.images.place(chunks, step)
        has_taps = self._states is not None and slots is None and placed is None
        taps = self._states.taps if self._states is not None and has_taps else ()
        if slots is not None and self.lora is not None:
            graphs = graphs and self.lora.records_graphs
        graphs = graphs and not pools and placed is None
        self.lacks_graph = False
        if graphs and not scores and self._graphs is not None and self._graphs.fits(step):
            logits = self._graphs.logits(step, slots)
            if logits is not None:
                self._note_states(taken, chunks, step, self._graphs.hidden)
                return logits
            graphs, self.lacks_graph = False, True
        hidden = None
        if graphs and not taps and step.late is None and self._prompt_graphs is not None:
            hidden = self._prompt_graphs.hidden(step, slots)
        only_argmax = only_argmax and hidden is None and not pools
        states = None
        if hidden is None and taps:
            hidden, states = self._tapped(step, taps)
        elif hidden is None:
            hidden = self._hidden(step, slots, placed)
        made = self._head(hidden, step, only_argmax)
        self._note_states(taken, chunks, step, states if taps else hidden)
        scored = self._scorer.take(hidden, step, chunks) if scores else []
        if pools:
            taken.embeddings.update(self._pooler.take(hidden, step, chunks))
        taken.scores += scored  # nothing is taken of a pass that lacks memory
        return made

    def _compute_in_pieces(
        self, chunks: Sequence[Chunk], taken: FromHidden
    ) -> tuple[Tensor | None, list[Chunk]]:
        logger.warning("out of memory in a step of %d tokens", sum(chunk.num_tokens for chunk in chunks))
        made: list[Tensor] = []
        lost: dict[str, Chunk] = {}  # by request, the first lost piece; later pieces are lost with it
        pieces = [chunks]
        while pieces:
            piece = pieces.pop()
            first = piece[0]
            parts = None
            if first.request_id not in lost:
                if self._staging.device.type == "cuda":
                    torch.cuda.empty_cache()
                try:
                    logits = self._compute(piece, self.build(piece), taken, graphs=False)
                except torch.OutOfMemoryError:
                    parts = halves(piece)
                else:
                    made += [] if logits is None else [logits]
                    continue
            if parts is not None:
                pieces += reversed(parts)
            else:
                # Drafts are optional.
                if first.in_flight or first.start < self._rows.num_tokens(first.request_id):
                    lost.setdefault(first.request_id, first)
                made += self._nothing_for(first, taken.embeddings)
        return torch.cat(made) if made else None, list(lost.values())

    def _nothing_for(self, chunk: Chunk, embeddings: dict[str, Tensor]) -> list[Tensor]:
        if not chunk.samples:
            return []
        shape = (1 + len(chunk.drafts), self._vocab_size)
        nothing = torch.full(shape, torch.nan, device=self._staging.device)
        if self._pooler.pools(chunk.request_id):
            embeddings[chunk.request_id] = nothing[0]
            return []
        return [nothing]

    def _hidden(self, step: HostStep, slots: Slots | None, placed: PlacedImages | None) -> Tensor:
        rows = self._rows
        token_ids, batch = rows.token_ids(step), rows.attention_batch(step)
        if slots is not None and self.lora is not None:
            return self.lora.forward(token_ids, batch, self._kv, slots, placed)
        if placed is not None:
            return placed.forward(self._model, token_ids, batch, self._kv)
        return self._model.forward(token_ids, batch, self._kv)

    def _tapped(self, step: HostStep, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        rows = self._rows
        assert isinstance(self._model, TappedModel), "the loader has checked this"
        return self._model.forward_tapped(rows.token_ids(step), rows.attention_batch(step), self._kv, taps)

    def _note_states(
        self, taken: FromHidden, chunks: Sequence[Chunk], step: HostStep, states: Tensor | None
    ) -> None:
        """Note hidden states for heads. Steps with adapters have none of inner layers."""
        kept = self._states
        if kept is not None and states is not None and states.shape[1] == kept.width:
            taken.states.append(StepStates(chunks, step, states))

    def _head(self, hidden: Tensor, step: HostStep, only_argmax: bool = False) -> Tensor | None:
        if not step.samples.request_ids:
            return None
        rows = hidden[self._staging.to_device(step.samples.at)]
        chosen = self._model.argmax(rows) if only_argmax else None
        return chosen if chosen is not None else self._model.logits(rows)


# Smaller pieces would need hardly less memory.
SMALLEST_PIECE_TOKENS = 16


def halves(chunks: Sequence[Chunk]) -> tuple[Sequence[Chunk], Sequence[Chunk]] | None:
    """Cut a step that lacks memory for its activations in two, to be computed in this order; None when its one chunk
    is too small to be cut. Drafts are cut off a small chunk, since they are optional. Rows and blocks must be up to
    date, because the parts do not contain them. Together the parts sample at the same positions."""
    if len(chunks) > 1:
        middle = len(chunks) // 2
        return chunks[:middle], chunks[middle:]
    (chunk,) = chunks
    count, num_known = chunk.num_tokens // 2, chunk.num_tokens - len(chunk.drafts)
    if count < SMALLEST_PIECE_TOKENS:
        if num_known == chunk.num_tokens:
            return None
        count = num_known
    rest = chunk.num_tokens - count
    first = msgspec.structs.replace(
        chunk,
        num_tokens=count,
        samples=chunk.samples and count >= num_known,
        drafts=chunk.drafts[: max(0, count - num_known)],
        new_block_ids=(),
        begins=False,
        in_flight=chunk.in_flight if count >= num_known else 0,
    )
    # A part that has only drafts samples at each of its tokens, the first included.
    second = msgspec.structs.replace(
        chunk,
        start=chunk.start + count,
        num_tokens=rest,
        drafts=chunk.drafts[max(0, len(chunk.drafts) - rest + 1) :],
        new_block_ids=(),
        begins=False,
        in_flight=chunk.in_flight if count < num_known else 0,
    )
    return (first,), (second,)
