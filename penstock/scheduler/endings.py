"""Decides when and why a request ends, and writes its events. Knows no blocks and no queue; the gateway, which sees
text, handles stop strings."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from penstock.core.plan import DraftUse, Prefill, SampledToken, TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason
from penstock.scheduler.keyed_heap import KeyedHeap
from penstock.scheduler.prefix import Breakpoints
from penstock.scheduler.sequence import Sequence
from penstock.scheduler.tenants import OUTPUT_TOKEN_WEIGHT


def finish_reason_of(sequence: Sequence, token_id: int, now: float) -> FinishReason | None:
    """Return the reason if the newest token, which is already counted, is the last one."""
    if (
        token_id in sequence.stop_token_ids
        and sequence.num_known - sequence.num_prompt >= sequence.min_tokens
    ):
        return FinishReason.STOP
    if sequence.num_known >= sequence.length_limit:
        return FinishReason.LENGTH
    deadline_s = sequence.request.deadline_s
    if deadline_s is not None and deadline_s <= now:
        return FinishReason.DEADLINE
    return None


def take_tokens(sequence: Sequence, sampled: SampledToken, now: float) -> tuple[int, FinishReason | None]:
    """Take the tokens of a sample up to the first one that ends the answer. Returns their number, and the reason of
    the end."""
    finish_reason = None
    num_taken = 0
    for token_id in (*sampled.accepted, sampled.token_id) if sampled.accepted else (sampled.token_id,):
        sequence.output_token_ids.append(token_id)
        sequence.num_known += 1
        sequence.account.service += OUTPUT_TOKEN_WEIGHT
        num_taken += 1
        finish_reason = finish_reason_of(sequence, token_id, now)
        if finish_reason is not None:
            break
    if sampled.completes and num_taken == 1 + len(sampled.accepted):
        finish_reason = FinishReason.STOP
    return num_taken, finish_reason


def token_event(
    sequence: Sequence,
    sampled: SampledToken,
    num_taken: int,
    reason: FinishReason | None,
    breakpoints: Breakpoints,
    now: float,
) -> TokenEvent:
    """Return the event of committed tokens: the first `num_taken` of a sample. The first event of a request also
    reports its cache use and its time in the queue."""
    token_ids: tuple[int, ...] = (sampled.token_id,)
    logprobs: tuple[TokenLogprobs, ...] = () if sampled.logprobs is None else (sampled.logprobs,)
    if sampled.accepted:
        token_ids = (*sampled.accepted, sampled.token_id)[:num_taken]
        logprobs = (*sampled.accepted_logprobs, *logprobs)[:num_taken]
    if sequence.num_sampled > num_taken:
        return TokenEvent(sequence.request_id, token_ids, logprobs, reason)
    return TokenEvent(
        sequence.request_id,
        token_ids,
        logprobs,
        reason,
        sequence.num_cached_tokens,
        queue_s(sequence),
        cache_use=breakpoints.use(sequence),
        prefill=_prefill(sequence, now),
    )


def with_draft_use(event: TokenEvent, use: DraftUse | None) -> TokenEvent:
    """Return an event that also reports the drafts that its step verified. Drafts after the end of the answer do not
    count as accepted."""
    if use is None:
        return event
    num_accepted = min(use.num_accepted, len(event.token_ids))
    return replace(event, draft_use=DraftUse(use.drafter, use.num_drafted, num_accepted))


def reason_without_token(sampled: SampledToken) -> FinishReason:
    """Return the reason why a request ends at a position that has no token."""
    if sampled.error is None:
        return FinishReason.STOP  # an embedding is the whole answer
    return FinishReason.INVALID if sampled.is_callers_fault else FinishReason.ERROR


def last_event(
    sequence: Sequence, reason: FinishReason, error: str | None, embedding: bytes | None = None
) -> TokenEvent:
    """Return the event that ends a request without another token."""
    is_first = not sequence.num_sampled
    return TokenEvent(
        sequence.request_id,
        finish_reason=reason,
        num_cached_tokens=sequence.num_cached_tokens if is_first else None,
        queue_s=queue_s(sequence) if is_first else None,
        error=error,
        embedding=embedding,
    )


def _prefill(sequence: Sequence, now: float) -> Prefill | None:
    planned_s = sequence.first_planned_s
    if planned_s is None:
        return None
    return Prefill(now - planned_s, tuple(sequence.prefill_chunks), sequence.waited_for)


def queue_s(sequence: Sequence) -> float | None:
    """Return the seconds from arrival to the first planned chunk, if there was one."""
    return None if sequence.first_planned_s is None else sequence.first_planned_s - sequence.arrival_s


class Deadlines:
    """Orders requests by the time at which they must end: their own deadline, or, before they start, also the
    queue's timeout."""

    def __init__(self, queue_timeout_s: float | None) -> None:
        self._queue_timeout_s = queue_timeout_s
        self._heap: KeyedHeap[Sequence] = KeyedHeap()

    def watch(self, sequence: Sequence) -> None:
        """Set the time of a request: on arrival, and again when the request has started."""
        deadline_s = sequence.request.deadline_s
        if self._queue_timeout_s is not None and not sequence.has_started:
            given_up_s = sequence.arrival_s + self._queue_timeout_s
            deadline_s = given_up_s if deadline_s is None else min(deadline_s, given_up_s)
        if deadline_s is None:
            self._heap.discard(sequence.number)
        else:
            self._heap.push(sequence.number, deadline_s, sequence)

    def forget(self, sequence: Sequence) -> None:
        self._heap.discard(sequence.number)

    def next_s(self) -> float | None:
        deadline_s: float | None = self._heap.first_key()
        return deadline_s

    def overdue(self, now: float) -> Iterator[Sequence]:
        """Yield the requests whose time is up. The caller must end each one before it asks for the next."""
        while (deadline_s := self._heap.first_key()) is not None and deadline_s <= now:
            sequence = self._heap.first()
            assert sequence is not None
            yield sequence

    def event_for(self, sequence: Sequence, now: float) -> TokenEvent:
        deadline_s = sequence.request.deadline_s
        if deadline_s is not None and deadline_s <= now:
            return last_event(sequence, FinishReason.DEADLINE, None)
        waited_s = now - sequence.arrival_s
        return last_event(
            sequence, FinishReason.ERROR, f"The request was given up after {waited_s:.0f} s in the queue."
        )
