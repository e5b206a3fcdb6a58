"""Samples tokens from logits, for all rows at once. Knows requests' sampling settings, not the model.

Settings live in arrays with one entry per batch row, written once when a request begins. Only requests that change
their logits (penalties, bias, min_tokens, a grammar) cost work per row. The random draw is a function of the
request's seed and the token's index in the answer, so neither other requests nor a resumption change the sample.

A request with drafts is sampled at several positions at once, at each as if the drafts before it were part of
the answer. The samples up to the first one that differs from the draft after it are therefore the tokens that single
steps would have sampled. Such a request's state advances when its tokens are committed, any other's when it samples.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import NO_TOKEN_LEFT, NOT_A_NUMBER, SampledToken, TokenLogprobs
from penstock.core.request import Request
from penstock.engine.batch import Int64Array, Samples
from penstock.engine.grammar_masks import StepMasks
from penstock.engine.logit_edits import History, LogitEdits, make_edits
from penstock.engine.staging import Staging
from penstock.kernels.interface import Ops, SamplingBatch
from penstock.kernels.reference import forbid

# Below this temperature, float32 quotients overflow; the result is the argmax.
MIN_TEMPERATURE = 1e-5


class Sampler:
    has_logits = True  # whether this process gets the logits of all tokens

    def __init__(
        self,
        ops: Ops,
        staging: Staging,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        self._ops = ops
        self._staging = staging
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._seed = seed
        self._temperature = np.zeros(max_rows, dtype=np.float32)
        self._top_k = np.zeros(max_rows, dtype=np.int32)
        self._top_p = np.ones(max_rows, dtype=np.float32)
        self._min_p = np.zeros(max_rows, dtype=np.float32)
        self._seeds = np.zeros(max_rows, dtype=np.int64)
        self._positions = np.zeros(max_rows, dtype=np.int64)  # index of the row's next token in its answer
        self._num_begun = 0  # requests
        self._settings: tuple[tuple[int, bytes], SamplingBatch] | None = None  # of the latest samples
        self._edits: dict[int, LogitEdits] = {}
        self._logprobs: dict[int, int] = {}
        # Rows that were sampled with drafts, whose state is to advance: the most tokens of each uncommitted step.
        self._uncommitted: dict[int, deque[int]] = {}
        self._most_uncommitted = np.zeros(max_rows, dtype=np.int64)  # their sums

    def begin(self, row: int, request: Request, output_token_ids: Sequence[int]) -> None:
        params = request.sampling
        self._num_begun += 1
        self._temperature[row] = params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0
        self._top_k[row] = min(params.top_k or 0, self.vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = self._drawn_seed(request.id) if params.seed is None else params.seed
        self._positions[row] = len(output_token_ids)
        self._most_uncommitted[row] = 0
        if params.logprobs is not None:
            self._logprobs[row] = params.logprobs
        seed = int(self._seeds[row])
        edits = make_edits(
            request, output_token_ids, self._eos_token_ids, seed, self.vocab_size, self._ops.device
        )
        if edits is not None:
            self._edits[row] = edits

    def end(self, row: int) -> None:
        self._edits.pop(row, None)
        self._logprobs.pop(row, None)
        self._uncommitted.pop(row, None)

    def needs_only_argmax(self, samples: Samples) -> bool:
        """Return whether these samples need only the argmax of their logits."""
        rows = samples.request_rows
        if any(int(row) in special for special in (self._edits, self._logprobs) if special for row in rows):
            return False
        return not self._temperature[rows].any()

    def knows_no_text(self, row: int) -> bool:
        """Return whether samples of this row depend on logits alone, and not on the tokens before them."""
        return row not in self._edits

    def note_drawn(self, samples: Samples, late: Collection[int] = ()) -> None:
        """Note that tokens were sampled for all requests but the `late` ones, by index in N. The state of a request
        with drafts waits for `commit`, and so does that of a request that starts late."""
        rows = samples.request_rows
        waiting = {*samples.drafts, *samples.late}
        if waiting or self._uncommitted:
            for index, row in enumerate(rows.tolist()):
                if index not in samples.in_flight:
                    self._uncommitted.pop(row, None)  # of a step whose samples were not taken
                    self._most_uncommitted[row] = 0
                if index in waiting:
                    most = 1 + len(samples.drafts.get(index, ()))
                    self._uncommitted.setdefault(row, deque()).append(most)
                    self._most_uncommitted[row] += most
        if waiting or late:
            rows = np.delete(rows, [*late, *waiting])
        self._positions[rows] += 1

    def commit(self, row: int, token_ids: Sequence[int]) -> None:
        """Take the tokens that were committed for a row, whose state advances if drafts were sampled with them."""
        steps = self._uncommitted.get(row)
        if steps is None:
            return
        self._most_uncommitted[row] -= steps.popleft()
        if not steps:
            del self._uncommitted[row]
        self._positions[row] += len(token_ids)
        edits = self._edits.get(row)
        if edits is not None:
            for token_id in token_ids:
                edits.history.add_known(token_id)

    def sample(
        self,
        logits: Tensor,
        samples: Samples,
        masks: StepMasks | None = None,
        num_taken_back: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Sample one token for each row of float32 `logits` [S, V]; returns int64 [S] on the device, and the
        log-probabilities (before penalties, masks and temperature) of the samples that asked for them, by index in S.
        The sample of a request whose mask is late is invalid, and does not change the request's state.
        `num_taken_back`, int64 [S] on the device, says by how many tokens each position lies before the position that
        the host expects."""
        late = masks.late if masks is not None else frozenset()
        logprobs = (
            {
                i: torch.log_softmax(logits[i], dim=-1)
                for i, row in enumerate(samples.rows)
                if int(row) in self._logprobs
            }
            if self._logprobs
            else {}
        )
        edited = self._edit(logits, samples, masks) if self._edits else []
        if masks is not None and masks.masked:
            forbid(logits, masks.masked, masks.words)
        if edited:
            self._truncate(logits, samples)
        batch = self._batch(samples)
        if num_taken_back is not None:
            batch.position.sub_(num_taken_back)
        token_ids = self._draw(logits, batch)
        for i, index, history in edited:
            if index not in late and index not in samples.drafts:
                history.add(token_ids[i : i + 1])
        self.note_drawn(samples, late)
        return token_ids, logprobs

    def _edit(
        self, logits: Tensor, samples: Samples, masks: StepMasks | None
    ) -> list[tuple[int, int, History]]:
        """Apply the requests' edits. Returns the requests with edits: the index in S of the first sample, the index
        in N, the history."""
        must_end = masks.must_end if masks is not None else frozenset()
        edited = []
        for index, (row, first) in enumerate(
            zip(samples.request_rows.tolist(), samples.firsts(), strict=True)
        ):
            edits = self._edits.get(row)
            if edits is None:
                continue
            history, position = edits.history, int(self._positions[row])
            edited.append((first, index, history))
            edits.apply(logits[first], position, history, must_end=first in must_end)
            for offset, draft in enumerate(samples.drafts.get(index, ()), 1):
                if history.is_used:
                    history = history.followed_by(draft)
                i = first + offset
                edits.apply(logits[i], position + offset, history, must_end=i in must_end)
        return edited

    def _truncate(self, logits: Tensor, samples: Samples) -> None:
        """Let the requests that ask for it forbid tokens by their probability, once masks are applied."""
        for i, row in enumerate(samples.rows.tolist()):
            edits = self._edits.get(row)
            if edits is not None and edits.truncates:
                offset = 0 if samples.offsets is None else int(samples.offsets[i])
                edits.truncate(logits[i], int(self._positions[row]) + offset)

    def report(
        self,
        samples: Samples,
        token_ids: Sequence[int],
        logprobs: dict[int, Tensor],
        masks: StepMasks | None = None,
    ) -> tuple[SampledToken, ...]:
        if masks is None and not logprobs and not samples.drafts and min(token_ids, default=0) >= 0:
            return tuple(map(SampledToken, samples.request_ids, token_ids))
        late = masks.late if masks is not None else frozenset()
        failed = masks.failed if masks is not None else {}
        sampled = []
        for index, (request_id, first) in enumerate(zip(samples.request_ids, samples.firsts(), strict=True)):
            if index in late:
                sampled.append(SampledToken(request_id, 0, is_postponed=True))
                continue
            drafts = samples.drafts.get(index, ())
            verified = self._verified(index, token_ids[first : first + len(drafts) + 1], drafts, masks)
            if not verified:
                edits = self._edits.get(int(samples.request_rows[index]))
                reason = failed.get(index) or (NO_TOKEN_LEFT if edits is not None and edits.forbids else None)
                sampled.append(
                    SampledToken(
                        request_id, 0, error=reason or NOT_A_NUMBER, is_callers_fault=reason is not None
                    )
                )
                continue
            alternatives: tuple[TokenLogprobs, ...] = ()
            if first in logprobs:
                wanted = self._logprobs.get(int(samples.rows[first]), 0)
                alternatives = tuple(
                    _token_logprobs(logprobs[first + offset], token_id, wanted)
                    for offset, token_id in enumerate(verified)
                )
            sampled.append(
                SampledToken(
                    request_id,
                    verified[-1],
                    alternatives[-1] if alternatives else None,
                    completes=masks is not None
                    and index in masks.num_masked
                    and verified[-1] in self._eos_token_ids,
                    accepted=tuple(verified[:-1]),
                    accepted_logprobs=alternatives[:-1],
                )
            )
        return tuple(sampled)

    def _verified(
        self, index: int, token_ids: Sequence[int], drafts: tuple[int, ...], masks: StepMasks | None
    ) -> list[int]:
        """Return the samples that become part of the answer: all samples up to and including the first one that
        differs from its draft. The list stops before a position that could not be sampled, which the next step
        samples again, and after an end token of a constrained request. It is empty if the first position could not
        be sampled."""
        num_usable, ends = len(drafts) + 1, tuple[int, ...]()
        if masks is not None and (index in masks.num_masked or index in masks.failed):
            num_usable, ends = masks.num_masked.get(index, 0), self._eos_token_ids
        verified: list[int] = []
        for offset, token_id in enumerate(token_ids[:num_usable]):
            if token_id < 0:
                break
            verified.append(token_id)
            if token_id in ends or token_id != (*drafts, None)[offset]:
                break
        return verified

    def _draw(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Draw samples. Each row needs scratch memory of the vocabulary's size; if there is too little, the rows are
        sampled in halves."""
        try:
            return self._ops.sample(logits, batch)
        except torch.OutOfMemoryError:
            if len(logits) == 1:
                raise
        middle = len(logits) // 2
        parts = (slice(0, middle), slice(middle, len(logits)))
        return torch.cat([self._draw(logits[part], batch.rows(part)) for part in parts])

    def _batch(self, samples: Samples) -> SamplingBatch:
        rows, positions = samples.rows, self._positions[samples.rows]
        if self._uncommitted:
            waits = np.isin(rows, samples.request_rows[list(samples.in_flight)])
            positions += np.where(waits, self._most_uncommitted[rows], 0)
        if samples.offsets is not None:
            positions += samples.offsets
        key = self._num_begun, rows.tobytes()
        if self._settings is None or self._settings[0] != key:
            self._settings = key, self._settings_of(rows)
        return replace(self._settings[1], position=self._staging.to_device(positions))

    def _settings_of(self, rows: Int64Array) -> SamplingBatch:
        """Return all that stays the same from step to step, for as long as the same requests are sampled."""
        temperature, top_k = self._temperature[rows], self._top_k[rows]
        top_p, min_p = self._top_p[rows], self._min_p[rows]
        heat, most, share, floor, seeds = self._staging.all_to_device(
            temperature, top_k, top_p, min_p, self._seeds[rows]
        )
        return SamplingBatch(
            temperature=heat,
            top_k=most,
            top_p=share,
            min_p=floor,
            seed=seeds,
            position=seeds,
            all_greedy=not temperature.any(),
            whole_vocabulary=not top_k.any() and not min_p.any() and bool((top_p >= 1).all()),
        )

    def _drawn_seed(self, request_id: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _token_logprobs(logprobs: Tensor, token_id: int, num_alternatives: int) -> TokenLogprobs:
    own = float(logprobs[token_id])
    if num_alternatives == 0:
        return TokenLogprobs(own)
    values, indices = torch.topk(logprobs, min(num_alternatives, logprobs.shape[0]))
    return TokenLogprobs(own, tuple(indices.tolist()), tuple(values.tolist()))
