"""Beam search: the most probable answers to a prompt, instead of sampled ones.

A search keeps the most probable beginnings of an answer, its beams. A step asks the engine for one token after each
beam and reads the most probable tokens from the log-probabilities. The beam's tokens are the beginning of that
request's output, so the engine's prefix cache has all of them but the last block.

`BeamSearch` decides and does no I/O: the definitions come from transformers' `generate(num_beams=…)`.
`BeamGeneration` asks the engine, and hands the best beams to the choices of the request, which treat them like any
other answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from penstock.core.errors import InvalidRequest
from penstock.core.plan import TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.gateway.accounts import Account
from penstock.gateway.answers.choice import Choice
from penstock.gateway.answers.generation import Generation
from penstock.gateway.answers.stream import MeteredAnswer, StreamContext
from penstock.gateway.prompts import BeamOptions, Usage
from penstock.gateway.text.detokenizer import StopWatch


class Beam(msgspec.Struct, frozen=True):
    """The beginning of an answer, or a whole one. `total` is the sum of the log-probabilities of its tokens."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # only where the client asked for them
    total: float = 0.0
    watch: StopWatch | None = None  # only where there are stop strings
    score: float = 0.0  # of a finished beam, and the reason for its end:
    reason: FinishReason | None = None


class _Candidate(msgspec.Struct, frozen=True):
    total: float
    beam: Beam
    found: TokenLogprobs  # after the beam
    rank: int  # of the token among those found


class BeamSearch:
    """The beams of one prompt. Call `advance` with the tokens found after each of the `live` beams, until
    `is_over`."""

    def __init__(
        self,
        options: BeamOptions,
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        watch: StopWatch | None = None,
    ) -> None:
        self._options = options
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._num_shown = sampling.logprobs  # alternatives, for the client
        self._stop_ids = stop_ids
        self._finished: list[Beam] = []  # at most `width`, the best first
        self.live = [Beam(watch=watch)]  # the most probable first
        self.num_steps = 0
        self.is_over = False

    @property
    def num_wanted(self) -> int:
        """Return how many of the most probable tokens after each beam a step needs. Some of them may end the answer,
        so more than `width` tokens are needed."""
        num_live_and_ended = self._options.width + max(self._options.width, len(self._stop_ids))
        return max(num_live_and_ended, self._num_shown or 0)

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """Take one step. A candidate that ends its answer is finished if fewer than `width` candidates are more
        probable. The other candidates continue."""
        self.num_steps += 1
        width = self._options.width
        live: list[Beam] = []
        for place, candidate in enumerate(self._candidates(found)):
            if place >= width <= len(live):
                break
            beam = self._extended(candidate)
            if beam.reason is None:
                live.append(beam)
            elif place < width:
                self._finished.append(beam)
        self.live = live[:width]
        self._finished = sorted(self._finished, key=attrgetter("score"), reverse=True)[:width]
        self.is_over = not self.live or not self._may_improve()

    def best(self, n: int) -> list[Beam]:
        """Return the best beams. Unfinished beams of a search that was cut short compete as if their answers had
        ended."""
        cut = [replace(beam, score=self._score(beam)) for beam in self.live if not self.is_over]
        ranked = sorted((*self._finished, *cut), key=attrgetter("score"), reverse=True)
        return ranked[:n]

    def _candidates(self, found: Sequence[TokenLogprobs]) -> list[_Candidate]:
        """Return all beams with one more token each, the most probable first."""
        may_end = self.num_steps > self._min_tokens
        candidates = [
            _Candidate(beam.total + logprob, beam, after, rank)
            for beam, after in zip(self.live, found, strict=True)
            for rank, (token_id, logprob) in enumerate(
                zip(after.top_token_ids, after.top_logprobs, strict=True)
            )
            if may_end or token_id not in self._stop_ids
        ]
        return sorted(candidates, key=attrgetter("total"), reverse=True)

    def _extended(self, candidate: _Candidate) -> Beam:
        beam, found, rank = candidate.beam, candidate.found, candidate.rank
        token_id = found.top_token_ids[rank]
        logprobs = beam.logprobs
        if self._num_shown is not None:
            tops = found.top_token_ids[: self._num_shown], found.top_logprobs[: self._num_shown]
            logprobs = (*logprobs, TokenLogprobs(found.top_logprobs[rank], *tops))
        watch = None if beam.watch is None else beam.watch.after(token_id)
        reason = None
        if token_id in self._stop_ids or (watch is not None and watch.is_stopped):
            reason = FinishReason.STOP
        elif self.num_steps == self._max_tokens:
            reason = FinishReason.LENGTH
        extended = Beam((*beam.token_ids, token_id), logprobs, candidate.total, watch, reason=reason)
        return extended if reason is None else replace(extended, score=self._score(extended))

    def _score(self, beam: Beam) -> float:
        return self._penalised(beam.total, len(beam.token_ids))

    def _penalised(self, total: float, num_tokens: int) -> float:
        return float(total / num_tokens**self._options.length_penalty)

    def _may_improve(self) -> bool:
        """Return whether a live beam may become better than the worst finished one. Except with "never", that is
        guessed from the score that the best live beam would have now."""
        options = self._options
        if len(self._finished) < options.width:
            return True
        if options.early_stopping is True:
            return False
        longest = options.early_stopping == "never" and options.length_penalty > 0
        length = self._max_tokens if longest else self.num_steps
        return self._penalised(self.live[0].total, length) > self._finished[-1].score


class _PromptSearch:
    """The search for one prompt, and the tokens that its running step has found so far."""

    def __init__(self, search: BeamSearch, request: Request, choices: Sequence[Choice]) -> None:
        self.search = search
        self.choices = choices
        self.first: TokenEvent | None = None  # the first event, which has the queue time and the cache use
        self.asked: set[str] = set()  # the ids of requests that the engine has not answered yet
        self._request = request
        self._found: list[TokenLogprobs | None] = []

    @property
    def waits(self) -> bool:
        return None in self._found

    def requests(self) -> list[Request]:
        """One request for the token after each live beam, by its place among them."""
        self._found = [None] * len(self.search.live)
        return [self._request_after(beam, place) for place, beam in enumerate(self.search.live)]

    def note(self, place: int, found: TokenLogprobs) -> None:
        self._found[place] = found

    def advance(self) -> None:
        self.search.advance([found for found in self._found if found is not None])

    def _request_after(self, beam: Beam, place: int) -> Request:
        num_steps = self.search.num_steps
        sampling = SamplingParams(
            max_tokens=num_steps + 1, temperature=0.0, ignore_eos=True, logprobs=self.search.num_wanted
        )
        breakpoints = self._request.cache_breakpoints if not num_steps else ()
        return replace(
            self._request,
            id=f"{self._request.id}-{num_steps}-{place}",
            sampling=sampling,
            output_token_ids=beam.token_ids,
            affinity_key=self._request.affinity_key
            or self._request.id,  # beams share the prompt's cached blocks
            cache_breakpoints=breakpoints,
            min_cacheable_tokens=self._request.min_cacheable_tokens if breakpoints else None,
            prediction=(),
        )


class BeamGeneration(Generation):
    """The best `n` beams for each prompt. Nothing is shown before the end of a search. A step uses one token for each
    beam that the search may keep, so that a request uses at most what was reserved for it."""

    def __init__(
        self,
        options: BeamOptions,
        account: Account,
        choices: Sequence[Choice],
        n: int,
        context: StreamContext,
        on_end: Callable[[MeteredAnswer[Choice]], None],
    ) -> None:
        super().__init__(account, choices, n, context, on_end)
        self._options = options
        self._searches: list[_PromptSearch] = []
        self._ends_at: float | None = None

    def start(self, requests: Sequence[Request], timeout_s: float | None) -> None:
        """Begin one search for each prompt."""
        self._limit_time(timeout_s)
        if timeout_s is not None:
            self._ends_at = self._context.clock.now() + timeout_s
        for place in range(0, len(requests), self._n):
            request, choices = requests[place], self._choices[place : place + self._n]
            watch = choices[0].stop_watch()
            search = BeamSearch(self._options, request.sampling, choices[0].stop_ids, watch)
            self._searches.append(_PromptSearch(search, request, choices))
        first, *others = self._searches
        self._ask(first)
        for searched in others:
            self._in_turn(partial(self._ask, searched))

    @property
    def usage(self) -> Usage:
        num_steps = sum(searched.search.num_steps for searched in self._searches)
        return replace(super().usage, completion_tokens=self._options.width * num_steps)

    def _abandon(self, choices: Sequence[Choice]) -> None:
        for searched in self._searches:
            self._abort(searched.asked)

    def _abort(self, request_ids: set[str]) -> None:
        while request_ids:
            self._context.engine.abort(request_ids.pop())

    def _ask(self, searched: _PromptSearch) -> None:
        now = self._context.clock.now()
        timeout_s = None if self._ends_at is None else max(0.0, self._ends_at - now)
        for place, request in enumerate(searched.requests()):
            if self._error is not None:  # an engine may refuse before `add` returns
                return
            searched.asked.add(request.id)
            self._context.engine.add(
                request,
                timeout_s=timeout_s,
                on_event=partial(self._on_found, searched, place),
                on_error=self.fail,
            )

    def _on_found(self, searched: _PromptSearch, place: int, event: TokenEvent) -> None:
        if self._error is not None or event.request_id not in searched.asked:
            return
        searched.first = searched.first or event
        if event.logprobs:
            searched.note(place, event.logprobs[0])
        if event.finish_reason is None:
            return
        searched.asked.discard(event.request_id)
        if event.finish_reason is not FinishReason.LENGTH:
            self._end_step_early(searched, event)
        elif not event.logprobs:  # the search would wait for them forever
            self.fail(InvalidRequest("This model has no log-probabilities, which a beam search needs."))
        elif not searched.waits:
            searched.advance()
            if searched.search.is_over:
                self._show(searched)
            elif len(self._searches) == 1:
                self._ask(searched)
            else:
                self._in_turn(partial(self._ask, searched))

    def _end_step_early(self, searched: _PromptSearch, event: TokenEvent) -> None:
        """End the search at a deadline: the beams so far are the answers, if there are any."""
        if event.finish_reason is FinishReason.DEADLINE and searched.search.num_steps:
            self._abort(searched.asked)
            self._show(searched)
        elif (error := self._early_end(event, searched.choices[0])) is not None:
            self.fail(error)

    def _show(self, searched: _PromptSearch) -> None:
        first = searched.first
        assert first is not None
        for choice, beam in zip(searched.choices, searched.search.best(self._n), strict=True):
            event = replace(
                first,
                request_id=choice.request_id,
                token_ids=beam.token_ids,
                logprobs=beam.logprobs,
                finish_reason=beam.reason or FinishReason.DEADLINE,
            )
            self._on_event(choice, event)
