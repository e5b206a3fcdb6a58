"""Penalties that search the last tokens of prompt and answer for repetitions. Everything stays on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.core.request import Dry

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
