"""Checks on single requests, and invariants over all records of a scheduler. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.errors import ContextLengthExceeded, InvalidRequest
from penstock.core.request import Request
from penstock.scheduler.queue import WaitingQueue
from penstock.scheduler.running import RunningSet
from penstock.scheduler.sequence import Sequence, State


def check_request(request: Request, max_length: int, max_model_len: int) -> None:
    """Raise InvalidRequest unless it could be served alone. `max_length` is what the cache and the model allow."""
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if request.sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
    if num_prompt + 1 > max_length:
        is_cache_small = max_length < max_model_len
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt} tokens, and this server takes at most {max_length - 1}.",
            param="prompt",
            hint="The KV cache is smaller than the model's context." if is_cache_small else None,
        )


def check_records(sequences: Mapping[str, Sequence], running: RunningSet, queue: WaitingQueue) -> None:
    """Raise AssertionError unless every request is in one place, in a state that fits it."""
    running.check_integrity()
    queue.check_integrity()
    assert len(running) + len(queue) == len(sequences)
    assert all(sequences[s.request_id] is s and s.state is State.RUNNING for s in running.sequences)
    for sequence in queue.members:
        assert sequences[sequence.request_id] is sequence
        assert sequence.table is None
        assert not sequence.num_computed
        assert not sequence.followers
        assert (sequence.state is State.SETTLING) == (sequence.num_in_flight > 0)
        assert (sequence.state is State.HELD) == (sequence.leader is not None)
