"""Says how an attempt counts in the objective: as served, as dropped, or not at all."""

from __future__ import annotations

from penstock.cluster.release_traffic import is_mirrored
from penstock.core.errors import InvalidRequest, RateLimited, ShuttingDown
from penstock.core.request import FinishReason
from penstock.dispatch import Attempt

# Errors that the caller or an operator caused.
_NOT_OURS = (InvalidRequest, RateLimited, ShuttingDown)


def is_dropped(attempt: Attempt) -> bool | None:
    """Say whether an attempt counts as a dropped request; None: it does not count, because its client has left, its
    error or its grammar is the caller's, or it is a mirrored copy. A request that was too late counts as dropped: the
    scheduler decides how long requests wait. So does an attempt that another replica then answered."""
    error, reason = attempt.error, attempt.finish_reason
    if is_mirrored(attempt.request) or isinstance(error, _NOT_OURS):
        return None
    if error is None and reason in (None, FinishReason.ABORT, FinishReason.INVALID):
        return None
    return error is not None or reason in (FinishReason.ERROR, FinishReason.DEADLINE)
