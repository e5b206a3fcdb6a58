"""Samplers that keep some tokens by a look at all probabilities, and forbid the others. They change the logits of one
position, after everything that forbids tokens for other reasons, so that a token is always left.
"""

from __future__ import annotations

import hashlib
from math import inf

import torch
from torch import Tensor

from penstock.core.request import SamplingParams


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
