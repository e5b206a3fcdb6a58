"""The answers of our own engines to one request: their events in, deltas for the reader out (`stream`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from penstock.core.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PenstockError,
)
from penstock.core.plan import PREDICTION, DraftUse, TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.gateway.accounts import Outcome
from penstock.gateway.answers.choice import Choice
from penstock.gateway.answers.stream import ENGINE_GRACE_S, MeteredAnswer
from penstock.gateway.prompts import Usage
from penstock.gateway.text.caching import written_by_ttl
from penstock.gateway.turns import SLICE


class Generation(MeteredAnswer[Choice]):
    """The answers of our engines to one request. Call `start` once."""

    _num_drafted = _num_accepted = 0  # tokens of drafts that engines have verified for this request
    _num_predicted = _num_predicted_right = 0  # tokens that came from the client's prediction

    def start(self, requests: Sequence[Request], timeout_s: float | None) -> None:
        """Send one request per choice to the engine, many of them in turns with other requests. One large request is
        sent after the other: where many arrive together, the queue would have room for a part of each and for none as
        a whole."""
        self._limit_time(timeout_s)
        if len(requests) <= SLICE:
            self._send(requests, timeout_s)
        else:
            self._in_turn(partial(self._send, requests, timeout_s))

    def _send(self, requests: Sequence[Request], timeout_s: float | None, first: int = 0) -> None:
        """Send the requests from place `first` on."""
        end = first + SLICE
        for choice, request in zip(self._choices[first:end], requests[first:end], strict=True):
            if self._error is not None:  # an engine may refuse before `add` returns
                return
            self._context.engine.add(
                request, timeout_s=timeout_s, on_event=partial(self._on_event, choice), on_error=self.fail
            )
        if end < len(requests):
            self._in_turn(partial(self._send, requests, timeout_s, end), is_next=True)

    def _in_turn(self, work: Callable[[], None], *, is_next: bool = False) -> None:
        """Do the work in a later turn of the event loop, if the answer has not ended by then."""

        def go_on() -> None:
            if self._error is not None:
                return
            try:
                work()
            except PenstockError as error:
                self.fail(error)
            except BaseException:
                self.fail(PenstockError("The request could not be sent to an engine."))
                raise

        self._context.turns.wait(go_on, is_next=is_next)

    def _limit_time(self, timeout_s: float | None) -> None:
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_s + ENGINE_GRACE_S, self._time_out)

    @property
    def usage(self) -> Usage:
        prompt = completion = cached = read = written_5m = written_1h = reasoning = 0
        for choice in self._choices:
            completion += choice.num_tokens
            reasoning += choice.num_reasoning_tokens
        for leader in self._choices[:: self._n]:
            prompt += leader.num_prompt_tokens
            cached += leader.num_cached_tokens
            read += leader.cache_use.read_tokens
            short, long = written_by_ttl(leader.cache_breakpoints, leader.cache_use)
            written_5m += short
            written_1h += long
        return Usage(
            *(prompt, completion, cached, read, written_5m, written_1h, reasoning),
            accepted_prediction_tokens=self._num_predicted_right,
            rejected_prediction_tokens=self._num_predicted - self._num_predicted_right,
        )

    def _abandon(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._context.engine.abort(choice.request_id)

    def _on_event(self, choice: Choice, event: TokenEvent) -> None:
        if self._error is not None or choice.finish_reason is not None:
            return
        is_beginning = choice.first_token_at is None
        if (is_beginning or event.finish_reason is not None) and not self._note_beginning_or_end(
            choice, event
        ):
            return
        num_tokens, num_bytes = -choice.num_tokens, -choice.buffered_bytes
        choice.push(event)
        num_tokens += choice.num_tokens
        num_bytes += choice.buffered_bytes
        if event.logprobs:
            self._count_logprobs(num_tokens * (1 + len(event.logprobs[0].top_token_ids)))
        if num_tokens or (is_beginning and event.finish_reason is FinishReason.LENGTH):  # the prompt alone
            self._time_tokens(choice, event, num_tokens)
        if event.draft_use is not None:
            self._count_drafts(event.draft_use, num_tokens)
        if choice.prompt_scores is not None:
            self._end_scores(choice)
        self._num_unread_bytes += num_bytes
        if choice.finish_reason is not None:
            if event.finish_reason is None:  # a stop string: the engine does not know yet
                self._context.engine.abort(choice.request_id)
            self._close(choice, choice.finish_reason)
        elif self._num_unread_bytes > self._unchecked_bytes and not self._may_wait():
            return
        if choice.has_news:
            self._tell(choice)

    def _note_beginning_or_end(self, choice: Choice, event: TokenEvent) -> bool:
        """Record the facts that only the first and the last event of an answer have. Returns whether the event is
        shown."""
        self._context.metrics.observe_engines(self._context.engine)
        if event.prompt_logprobs is not None and choice.prompt_scores is not None:
            choice.prompt_scores.add(event.prompt_logprobs)
            self._show_prompt_scores(choice)
            return False
        if event.num_cached_tokens is not None:
            choice.num_cached_tokens = event.num_cached_tokens
            if choice.index % self._n == 0:  # siblings share the prompt
                self.account.note_cached(event.num_cached_tokens)
            if event.cache_use is not None:
                choice.cache_use = event.cache_use
        if event.finish_reason is not None and (error := self._early_end(event, choice)):
            self.fail(error)
            return False
        return True

    def _end_scores(self, choice: Choice) -> None:
        """End the scores of a prompt: they come before the first token of its first answer, or not at all."""
        scores = choice.prompt_scores
        if scores is not None and not scores.is_over and choice.index % self._n == 0:
            scores.is_over = True
            self._show_prompt_scores(choice)

    def _show_prompt_scores(self, leader: Choice) -> None:
        """Show the answers to a prompt, whose scores are complete."""
        for choice in self._choices[leader.index : leader.index + self._n]:
            if choice.has_news:
                self._tell(choice)

    def _time_tokens(self, choice: Choice, event: TokenEvent, num_tokens: int) -> None:
        """Note when tokens came. Tokens that came together share the time since the tokens before them."""
        now = self._context.clock.now()
        metrics, latencies = self._metrics, self._latencies
        metrics.generation_tokens += num_tokens
        latencies.output_tokens += num_tokens
        if choice.first_token_at is None:
            choice.first_token_at = now
            waited_s = now - self._arrived_at
            metrics.prompt_tokens += choice.num_prompt_tokens
            latencies.prompt_tokens += choice.num_prompt_tokens
            latencies.first_token_s.observe(waited_s)
            if event.queue_s is not None:
                if self._queue_s is None:
                    self._queue_s, self._prefill = event.queue_s, event.prefill
                latencies.queue_s.observe(event.queue_s)
                latencies.prefill_s.observe(max(0.0, waited_s - event.queue_s))
        else:
            latencies.inter_token_s.observe((now - choice.last_token_at) / num_tokens, num_tokens)
        choice.last_token_at = now

    def _count_drafts(self, use: DraftUse, num_tokens: int) -> None:
        num_accepted = min(use.num_accepted, num_tokens)  # a stop string may have ended the answer before
        self._num_drafted += use.num_drafted
        self._num_accepted += num_accepted
        if use.drafter == PREDICTION:
            self._num_predicted += use.num_drafted
            self._num_predicted_right += num_accepted

    def _outcome(self) -> Outcome:
        outcome = super()._outcome()
        if not self._num_drafted:
            return outcome
        return replace(outcome, draft_tokens=self._num_drafted, accepted_draft_tokens=self._num_accepted)

    def _early_end(self, event: TokenEvent, choice: Choice) -> PenstockError | None:
        """Return the error that a last event stands for; None when it is an ordinary end, such as a deadline with an
        answer to show for it."""
        match event.finish_reason:
            case FinishReason.ERROR if (
                not choice.num_tokens and event.queue_s is None
            ):  # the request never left the queue
                return Overloaded(
                    event.error or "The request was never started.",
                    retry_after_s=self._context.queue_drain_s(),
                )
            case FinishReason.ERROR:
                return PenstockError(event.error or "The engine could not go on with this request.")
            case FinishReason.INVALID:
                return InvalidRequest(event.error or "The engine could not go on with this request.")
            case FinishReason.ABORT:
                return EngineUnavailable("The engine ended this request early.", hint="Try again.")
            case FinishReason.DEADLINE if not choice.num_tokens and not event.token_ids:
                return DeadlineExceeded("The request's deadline passed before its first token.")
        return None

    def _time_out(self) -> None:
        self.fail(DeadlineExceeded("The request's deadline passed, and the engine did not end it."))
