"""Changes of one request's logits before sampling: penalties, biases, forbidden tokens, and samplers that need a look
at all probabilities. Everything depends on the request, its tokens and the position alone, so that drafts and a
resumption change no sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from penstock.core.request import Dry, Request, SamplingParams

# A longer repetition is penalised as one of this length, as in the sampler's first publication.
LONGEST_MATCH = 50
# More changes no probability, and less than infinity leaves a token that a grammar forces.
MAX_PENALTY = 1e4


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    dry: Dry
    breakers: Tensor  # bool [V]

    def apply(self, logits: Tensor, context: Tensor) -> None:
        """Penalise the tokens that would lengthen a repetition. `context`: int64 [W], -1 where it is shorter."""
        dry = self.dry
        lengths = match_lengths(context, self.breakers).to(torch.float32)
        grown = (lengths - dry.allowed_length).clamp_min(0)
        penalty = (dry.multiplier * torch.pow(dry.base, grown)).clamp_max(MAX_PENALTY)
        logits.sub_(torch.where(lengths >= dry.allowed_length, penalty, 0.0))


def match_lengths(context: Tensor, breakers: Tensor) -> Tensor:
    """For each token of the vocabulary, the length of the longest end of the context, without a breaker, that stands
    earlier in it with this token behind: int64 [W] → int64 [V]. Breakers have no such length."""
    lengths = torch.zeros(len(breakers), dtype=torch.int64, device=context.device)
    if len(context) < 2:
        return lengths
    before = context.new_full((LONGEST_MATCH - 1,), -1)
    ends = torch.cat([before, context]).unfold(0, LONGEST_MATCH, 1)  # [W, L]: the tokens up to each place
    last = ends[-1]
    stops = (last < 0) | breakers[last.clamp_min(0)]
    equal = ((ends[:-1] == last) & ~stops).to(torch.uint8)
    runs = equal.flip(1).cumprod(1, dtype=torch.uint8).sum(1)
    lengths.scatter_reduce_(0, context[1:].clamp_min(0), runs, "amax")
    return lengths.masked_fill_(breakers, 0)


def recent_counts(context: Tensor, num_last: int, vocab_size: int) -> Tensor:
    """Return how often each token stands among the last ones of the context: int64 [W] → float32 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.float32, device=context.device)
    recent = context[max(0, len(context) - num_last) :]
    return counts.index_add_(0, recent.clamp_min(0), (recent >= 0).to(torch.float32))


def make_penalty(dry: Dry, vocab_size: int, device: torch.device) -> RepetitionPenalty:
    bits = np.unpackbits(np.frombuffer(dry.breakers, dtype=np.uint8), bitorder="little")[:vocab_size]
    breakers = np.zeros(vocab_size, dtype=np.bool_)
    breakers[: len(bits)] = bits
    return RepetitionPenalty(dry, torch.from_numpy(breakers).to(device))


def context_window(
    dry: Dry | None, repeat_last_n: int | None, prompt: tuple[int, ...], output: list[int], max_tokens: int
) -> list[int] | None:
    """Return the last tokens that these options look at, with -1 in front where there are fewer yet; None: they look
    at none. The window is as long as it will ever have to be."""
    if dry is None and not repeat_last_n:
        return None
    longest = len(prompt) + max_tokens
    searched = 0 if dry is None else longest if dry.last_n is None else dry.last_n
    size = max(1, min(longest, max(searched, repeat_last_n or 0)))
    last = [*prompt, *output][-size:]
    return [-1] * (size - len(last)) + last


def truncates(params: SamplingParams) -> bool:
    return params.typical_p < 1 or params.xtc_probability > 0 or params.top_n_sigma > 0


def truncate(logits: Tensor, params: SamplingParams, seed: int, position: int) -> None:
    if params.top_n_sigma > 0:
        keep_near_top(logits, params.top_n_sigma)
    if params.typical_p < 1:
        keep_typical(logits, params.typical_p)
    if params.xtc_probability and _chance(seed, position) < params.xtc_probability:
        exclude_top(logits, params.xtc_threshold)


def keep_near_top(logits: Tensor, num_sigmas: float) -> None:
    """Forbid the tokens whose logits are more than this many standard deviations below the highest logit. Tokens that
    are forbidden already do not count."""
    allowed = logits > -inf
    count = allowed.sum()
    mean = torch.where(allowed, logits, 0.0).sum() / count
    variance = torch.where(allowed, logits - mean, 0.0).square().sum() / count
    logits.masked_fill_(logits < logits.amax() - num_sigmas * variance.sqrt(), -inf)


def keep_typical(logits: Tensor, share: float) -> None:
    """Forbid all tokens but those whose information is nearest to the entropy, up to `share` of the probability."""
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs.clamp_min(-1e30)).sum()
    order = torch.argsort((-logprobs - entropy).abs(), stable=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    dropped = before >= share
    dropped[0] = False
    logits[order] = torch.where(dropped, -inf, logits[order])


def exclude_top(logits: Tensor, threshold: float) -> None:
    """Forbid the tokens of at least `threshold` probability, except for the least probable of them."""
    probabilities = torch.softmax(logits, dim=-1)
    order = torch.argsort(probabilities, descending=True, stable=True)
    above = (probabilities[order] >= threshold) & (probabilities[order] > 0)
    above = above & above.roll(-1)  # the next one is above as well, so this one is not the last
    above[-1] = False
    logits[order] = torch.where(above, -inf, logits[order])


def _chance(seed: int, position: int) -> float:
    """Return a number from 0 to 1 that depends on a request's seed and the position alone, apart from the sampled
    one."""
    digest = hashlib.blake2b(f"xtc/{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


@dataclass(slots=True)
class History:
    """The text so far, as logit edits need it, on the device: the count of each token of the answer, its last tokens,
    and the last tokens of prompt and answer together."""

    counts: Tensor | None  # float32 [V]
    tail: Tensor | None  # int64 [L], -1 where the answer is shorter
    context: Tensor | None  # int64 [W], -1 where the text is shorter

    @property
    def is_used(self) -> bool:
        return self.counts is not None or self.tail is not None or self.context is not None

    def followed_by(self, token_id: int) -> History:
        """Return a copy with one more token."""
        copies = (None if each is None else each.clone() for each in (self.counts, self.tail, self.context))
        after = History(*copies)
        after.add_known(token_id)
        return after

    def add_known(self, token_id: int) -> None:
        if self.counts is not None:
            self.counts[token_id] += 1
        for last in (self.tail, self.context):
            if last is not None and len(last):
                last.copy_(torch.cat([last[1:], last.new_tensor([token_id])]))

    def add(self, token: Tensor) -> None:
        """Add a token: int64 [1]. A sample that is not a number is -1."""
        if self.counts is not None:
            one = torch.ones(1, dtype=self.counts.dtype, device=self.counts.device)
            self.counts.index_add_(0, token.clamp_min(0), one)
        for last in (self.tail, self.context):
            if last is not None and len(last):
                last.copy_(torch.cat([last[1:], token.to(last.dtype)]))


@dataclass(slots=True)
class BannedSequences:
    """Sequences of tokens whose last token is forbidden after the others."""

    last_ids: Tensor  # int64 [W]
    prefixes: Tensor  # int64 [W, L], right-aligned, -1 where a sequence is shorter

    def apply(self, logits: Tensor, tail: Tensor) -> None:
        matches = ((self.prefixes == tail) | (self.prefixes < 0)).all(dim=1)
        logits.index_add_(0, self.last_ids, torch.where(matches, -inf, 0.0).to(logits.dtype))


@dataclass(slots=True)
class LogitEdits:
    """The changes of one request's logits before sampling. They live on the device."""

    params: SamplingParams
    bias_ids: Tensor | None
    bias_values: Tensor | None
    banned_early: Tensor | None  # end tokens ...
    banned_until: float  # ... and the position from which they may be sampled
    prompt_mask: Tensor | None  # bool [V], for the repetition penalty
    forbidden: Tensor | None  # bool [V], for the allowed tokens
    banned: BannedSequences | None
    repetitions: RepetitionPenalty | None
    history: History
    seed: int
    truncates: bool

    @property
    def forbids(self) -> bool:
        """Return whether tokens are forbidden at every position, so that none may be left."""
        return self.forbidden is not None or self.banned is not None

    def apply(self, logits: Tensor, position: int, history: History, *, must_end: bool) -> None:
        """Change the logits of one position. `history` is of the tokens before it. `must_end`: a grammar
        allows nothing but the end, which outranks a request for a longer answer."""
        params, counts = self.params, history.counts
        if params.repeat_last_n and history.context is not None:
            counts = recent_counts(history.context, params.repeat_last_n, len(logits))
        if counts is not None:
            penalty = params.repetition_penalty
            if penalty != 1:
                seen = counts > 0 if self.prompt_mask is None else self.prompt_mask | (counts > 0)
                penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
                logits.copy_(torch.where(seen, penalised, logits))
            logits.sub_(counts, alpha=params.frequency_penalty)
            logits.sub_((counts > 0).to(logits.dtype), alpha=params.presence_penalty)
        if self.repetitions is not None and history.context is not None:
            self.repetitions.apply(logits, history.context)
        if self.bias_ids is not None and self.bias_values is not None:
            logits.index_add_(0, self.bias_ids, self.bias_values)
        if self.forbidden is not None:
            logits.masked_fill_(self.forbidden, -inf)
        if self.banned is not None and history.tail is not None:
            self.banned.apply(logits, history.tail)
        if self.banned_early is not None and position < self.banned_until and not must_end:
            logits[self.banned_early] = -inf

    def truncate(self, logits: Tensor, position: int) -> None:
        """Forbid tokens by their probability. The tokens that a grammar forbids are masked already."""
        truncate(logits, self.params, self.seed, position)


def make_edits(
    request: Request,
    output_token_ids: Sequence[int],
    eos_token_ids: tuple[int, ...],
    seed: int,
    vocab_size: int,
    device: torch.device,
) -> LogitEdits | None:
    """Return the edits that a request asks for; None for a request that does not change its logits."""
    params = request.sampling
    repeats = params.repetition_penalty != 1.0
    counted = repeats or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    last_n = params.repeat_last_n if counted else None
    is_windowed = last_n is not None
    ends = params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)
    banned_until: float = params.min_tokens
    if params.grammar is not None and params.ignore_eos:
        # A grammar's end token ends the answer, even for a request that ignores end tokens elsewhere.
        ends, banned_until = params.stop_token_ids + eos_token_ids, inf
    delayed = banned_until > 0 and bool(ends)
    changed = params.logit_bias or params.allowed_token_ids or params.bad_words
    counted = counted and last_n != 0
    if not (counted or delayed or changed or params.dry or truncates(params)):
        return None

    def ids(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def mask(values: Sequence[int], others: bool) -> Tensor:
        chosen = torch.full((vocab_size,), others, dtype=torch.bool, device=device)
        chosen[ids(values)] = not others
        return chosen

    counts = tail = None
    if counted and not is_windowed:
        counts = torch.bincount(ids(output_token_ids), minlength=vocab_size).to(torch.float32)
    longest = max(map(len, params.bad_words), default=1) - 1
    if params.bad_words:
        tail = ids(([-1] * longest + list(output_token_ids))[len(output_token_ids) :])
    window = context_window(
        params.dry, last_n, request.prompt_token_ids, list(output_token_ids), params.max_tokens
    )
    return LogitEdits(
        params=params,
        bias_ids=ids(list(params.logit_bias)) if params.logit_bias else None,
        bias_values=torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        if params.logit_bias
        else None,
        banned_early=ids(ends) if delayed else None,
        banned_until=banned_until,
        prompt_mask=mask(request.prompt_token_ids, False) if repeats and not is_windowed else None,
        forbidden=mask(params.allowed_token_ids, True) if params.allowed_token_ids else None,
        banned=_banned(params.bad_words, longest, device) if params.bad_words else None,
        repetitions=make_penalty(params.dry, vocab_size, device) if params.dry else None,
        history=History(counts, tail, None if window is None else ids(window)),
        seed=seed,
        truncates=truncates(params),
    )


def _banned(sequences: Sequence[Sequence[int]], longest: int, device: torch.device) -> BannedSequences:
    rows = [[-1] * (longest - len(sequence) + 1) + list(sequence[:-1]) for sequence in sequences]
    last = torch.tensor([sequence[-1] for sequence in sequences], dtype=torch.int64, device=device)
    prefixes = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), longest)
    return BannedSequences(last, prefixes)
