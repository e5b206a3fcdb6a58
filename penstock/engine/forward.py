"""Runs the model on the chunks of a step: one forward pass, or several where the device lacks memory for one.

A pass replays a captured graph where one fits. Besides logits, a pass computes other results that requests ask for:
embeddings, scores of prompts, and hidden states for heads that draft. A step that lacks memory is computed in pieces
(`halves`), and a piece that cannot be halved ends its own request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.core.plan import Chunk
from penstock.core.request import Request
from penstock.engine.adapters import LoRAModel, Slots
from penstock.engine.batch import BatchRows, HostStep, halves
from penstock.engine.drafters.hidden_states import HiddenStates
from penstock.engine.graphs import DecodeGraphs, PromptGraphs
from penstock.engine.images import ImageEncoder, PlacedImages
from penstock.engine.pooling import HiddenPooler, VectorMaker
from penstock.engine.prompt_scores import PromptScorer, Scores
from penstock.engine.staging import Staging
from penstock.kernels.interface import KVStore
from penstock.models.model import Model, TappedModel

logger = logging.getLogger(__name__)


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
        if graphs and not scores and self._graphs is not None and self._graphs.fits(step):
            logits = self._graphs.logits(step, slots)
            self._note_states(taken, chunks, step, self._graphs.hidden)
            return logits
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
                if first.in_flight or first.start < self._rows.num_tokens(
                    first.request_id
                ):  # drafts are optional
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
