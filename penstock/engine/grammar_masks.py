"""Computes the tokens that constrained requests may sample next, in threads, while the model runs. Knows no logits.

A request's matcher follows the tokens that the scheduler committed, so preemption and resumption change nothing. Its
next mask is begun as soon as its newest token is known and is needed only after the forward pass. One task per
grammar and step: requests with the same grammar are masked in one call, and different grammars never wait for each
other.

The masks after a request's drafts are computed in the same task, with a copy of the matcher. A task also finds the
tokens that the grammar forces, which are drafts themselves.

A step may be planned before the newest token of a request is known. Its masks are taken when that token is.

A step hardly waits for a slow mask. The first time a mask is late, the step waits a short moment. After that the row
is sampled without the mask, the sample is dropped, and the scheduler plans the row again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest
from penstock.core.plan import Chunk
from penstock.engine.batch import Samples

# A step that has only late rows delays no known request, but a new request may arrive at any moment.
_ALONE_WAIT_S = 0.01
# So many requests have a task of their own for each committed token, so that forced tokens are known a step earlier.
_MOST_STARTED_ALONE = 4
# Forced tokens are worth a wait that is short compared with a step, unless a request's tasks often take longer.
_FORCED_WAIT_S = 0.0005
_MOST_FAILED_WAITS = 4  # in a row, for a request

# A step that is sampled later waits for masks while the device computes, and not longer than this.
_BUSY_WAIT_S = 0.02
_POLL_S = 0.0005

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of grammars. A matcher's fuel counts its operations, so a refusal does not depend on how busy the
    machine is."""

    max_cached: int = 64  # compiled grammars
    compile_threads: int = 2
    max_compiling: int = 256  # requests that wait for a grammar
    compile_timeout_s: float = 10.0
    mask_threads: int = 4
    mask_grace_s: float = 0.002  # how long a step waits for a mask that is late for the first time
    mask_timeout_s: float = 5.0  # a request whose mask takes longer is ended
    compile_fuel: int = 1_000_000
    step_fuel: int = 200_000
    max_states: int = 50_000  # 1 to 2 kB each
    max_symbols: int = 300_000


@dataclass(frozen=True, slots=True)
class Mask:
    """The tokens that may come next: bit i % 32 of word i // 32."""

    words: Words
    must_end: bool  # only an end token may come next

    def allows(self, token_id: int) -> bool:
        return token_id < 32 * self.words.size and bool(self.words[token_id // 32] >> (token_id % 32) & 1)


class CompiledGrammar:
    """The state before the first token, from which every request starts its own matcher. Two matchers of one grammar
    share tables, so their masks are computed in one call."""

    def __init__(self, matcher: LLMatcher, executor: LLExecutor, end_words: Words) -> None:
        self._prototype = matcher
        self._executor = executor
        self._text_words = ~end_words
        self.first_mask = self._next_mask(matcher)
        self.first_forced = tuple(matcher.compute_ff_tokens())
        if self.first_forced:
            # A very long forced text is too much for the matcher only after its first token. The refusal comes
            # before a stream has begun.
            behind = self.start()
            behind.consume_token(self.first_forced[0])
            self._next_mask(behind)

    def start(self) -> LLMatcher:
        return self._prototype.deep_copy()

    def advance(self, matcher: Any, token_ids: Sequence[int]) -> None:
        """Advance a matcher. A failure is reported by the next mask."""
        matcher.consume_tokens(list(token_ids))

    def masks(self, matchers: Sequence[Any]) -> list[Mask | str]:
        """Return the mask of each matcher's next token, or a sentence if a mask cannot be computed."""
        words = np.empty((len(matchers), self._text_words.size), dtype=np.int32)
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        else:
            numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(
                numbered, words.ctypes.data, words.shape[1] * 4, len(matchers)
            )
        goes_on = np.any(words & self._text_words, axis=1).tolist()
        return [
            first_line(matcher.get_error()) if matcher.is_error() else Mask(words[index], not goes_on[index])
            for index, matcher in enumerate(matchers)
        ]

    def _next_mask(self, matcher: LLMatcher) -> Mask:
        (mask,) = self.masks([matcher])
        if isinstance(mask, str):
            raise InvalidRequest(f"The grammar allows no answer, or is too complex: {mask}.")
        return mask

    def masks_behind(
        self, matchers: Sequence[Any], masks: Sequence[Mask], drafts: Sequence[Sequence[int]]
    ) -> list[list[Mask]]:
        """Return the masks after each draft of each matcher, up to a draft that the grammar forbids. `masks` are
        those before the first drafts. The matchers stay as they are: copies follow the drafts, because a matcher
        cannot be used after a failure."""
        copies = [matcher.deep_copy() for matcher in matchers]
        behind: list[list[Mask]] = [[] for _ in copies]
        going = list(range(len(copies)))
        for offset in range(max(map(len, drafts))):
            going = [
                index
                for index in going
                if offset < len(drafts[index])
                and (behind[index] or masks[index : index + 1])[-1].allows(drafts[index][offset])
                and copies[index].consume_token(drafts[index][offset])
            ]
            made = self.masks([copies[index] for index in going]) if going else []
            for index, mask in zip(going, made, strict=True):
                if isinstance(mask, Mask):
                    behind[index].append(mask)
            going = [index for index in going if len(behind[index]) > offset]
        return behind


def first_line(error: str) -> str:
    """Return the first line of an error. The matcher's state follows it."""
    return next(iter(error.strip().splitlines()), "the matcher gave up").rstrip(" .:")


@dataclass(slots=True, eq=False)
class _Constraint:
    """A constrained request. Threads write the fields `mask`, `behind` and `forced`, of a state that some committed
    tokens lead to."""

    grammar: CompiledGrammar
    matcher: Any
    mask: Mask | str  # of the next token; a sentence when the matcher failed
    forced: tuple[int, tuple[int, ...]]  # this many tokens were committed, and these had to follow
    behind: list[Mask] = field(default_factory=list)  # after each of `drafts` that the grammar allows
    drafts: tuple[int, ...] = ()  # given to the threads since the newest token
    token_ids: list[int] = field(default_factory=list)  # committed
    num_given: int = 0  # of them to the threads
    pending: Future[None] | None = None
    pending_since_s: float = 0.0
    is_late: bool = False
    num_failed_waits: int = 0  # for forced tokens, in a row

    @property
    def is_busy(self) -> bool:
        return self.pending is not None and not self.pending.done()

    def next_forced(self) -> tuple[int, ...]:
        """Return the forced tokens that are not committed yet."""
        num_tokens, forced = self.forced
        since = tuple(self.token_ids[num_tokens:])
        return forced[len(since) :] if forced[: len(since)] == since else ()


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The constrained requests of one step. `masked` and `must_end` are indices among its samples; the other indices
    are those of requests that sample."""

    masked: list[int]
    words: Words  # [len(masked), W]
    must_end: frozenset[int]
    num_masked: dict[int, int]  # this many of a request's samples, from its first on, have a mask
    late: frozenset[int]
    failed: dict[int, str]


class GrammarMasks:
    def __init__(self, limits: GrammarLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._constraints: dict[str, _Constraint] = {}
        self._advanced: dict[str, _Constraint] = {}  # have new tokens
        self._pool = ThreadPoolExecutor(limits.mask_threads, thread_name_prefix="mask")
        self.finds_forced = False  # whether tasks look for forced tokens

    def begin(self, request_id: str, grammar: CompiledGrammar) -> None:
        self._constraints[request_id] = _Constraint(
            grammar, grammar.start(), grammar.first_mask, (0, grammar.first_forced)
        )

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Note committed tokens. Requests without a grammar are ignored."""
        constraint = self._constraints.get(request_id)
        if constraint is not None:
            constraint.token_ids.extend(token_ids)
            self._advanced[request_id] = constraint
            if self.finds_forced and len(self._constraints) <= _MOST_STARTED_ALONE:
                self.start()

    def end(self, request_id: str) -> None:
        self._constraints.pop(request_id, None)
        self._advanced.pop(request_id, None)

    def constrained(self, request_ids: Sequence[str]) -> list[str]:
        """Return the requests that have a grammar."""
        return [each for each in request_ids if each in self._constraints] if self._constraints else []

    def forced(self, request_ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the tokens that grammars force next, as far as the threads know, for requests that have any. Waits
        for at most half a millisecond, and not for a request whose tasks are slow."""
        if not self._constraints:
            return {}
        found = {each: self._constraints[each] for each in request_ids if each in self._constraints}
        awaited = [
            each for each in found.values() if each.is_busy and each.num_failed_waits < _MOST_FAILED_WAITS
        ]
        if awaited:
            wait([each.pending for each in awaited if each.pending is not None], _FORCED_WAIT_S)
            for constraint in awaited:
                constraint.num_failed_waits = constraint.num_failed_waits + 1 if constraint.is_busy else 0
        forced = {request_id: constraint.next_forced() for request_id, constraint in found.items()}
        return {request_id: token_ids for request_id, token_ids in forced.items() if token_ids}

    def start(self, chunks: Sequence[Chunk] = ()) -> None:
        """Give the tokens committed since the last call, and the drafts of a step, to the threads."""
        if not self._constraints:
            return
        by_grammar: dict[int, list[_Constraint]] = {}
        for constraint in self._advanced.values():
            constraint.drafts = ()
            by_grammar.setdefault(id(constraint.grammar), []).append(constraint)
        for chunk in chunks:
            drafted = self._constraints.get(chunk.request_id) if chunk.drafts else None
            # Drafts that replace others of a late request have no masks: the request would never cease to be late.
            if drafted is None or drafted.drafts or (drafted.is_late and drafted.is_busy):
                continue
            drafted.drafts = chunk.drafts
            if chunk.request_id not in self._advanced:
                by_grammar.setdefault(id(drafted.grammar), []).append(drafted)
        self._advanced.clear()
        for constraints in by_grammar.values():
            if free := [each for each in constraints if not each.is_busy]:
                self._give(free)
            for busy in constraints:
                if busy not in free:
                    self._give([busy], after=busy.pending)

    def _give(self, constraints: list[_Constraint], after: Future[None] | None = None) -> None:
        """Give new tokens and drafts of constraints with one grammar to the threads."""
        now = self._clock.now()
        jobs = [
            _Job(each, each.token_ids[each.num_given :], len(each.token_ids), each.drafts)
            for each in constraints
        ]
        if after is None:
            future = self._pool.submit(_compute, jobs, finds_forced=self.finds_forced)
        else:
            future = _submit_after(self._pool, after, jobs, finds_forced=self.finds_forced)
        for constraint in constraints:
            constraint.num_given = len(constraint.token_ids)
            constraint.pending, constraint.pending_since_s = future, now

    def take(self, samples: Samples, num_chunks: int, void: frozenset[str] = frozenset()) -> StepMasks | None:
        """Return the masks of the samples of a step of `num_chunks` chunks; None when no request is constrained.
        The samples of requests in `void` count as late, whatever is known."""
        if not self._constraints:
            return None
        constrained = {
            index: self._constraints[request_id]
            for index, request_id in enumerate(samples.request_ids)
            if request_id in self._constraints
        }
        if not constrained:
            return None
        late = {index for index in constrained if samples.request_ids[index] in void}
        for index in late:
            del constrained[index]
        self._wait_a_little(list(constrained.values()), num_chunks)
        firsts = samples.firsts()
        ready: list[tuple[int, Mask]] = []
        num_masked: dict[int, int] = {}
        failed: dict[int, str] = {}
        for index, constraint in constrained.items():
            outcome = self._outcome(constraint)
            if outcome is None:
                late.add(index)
            elif isinstance(outcome, str):
                failed[index] = outcome
            else:
                drafts = samples.drafts.get(index, ())
                same = takewhile(
                    lambda pair: pair[0] == pair[1], zip(drafts, constraint.drafts, strict=False)
                )
                masks = [outcome, *(mask for mask, _ in zip(constraint.behind, same, strict=False))]
                ready += enumerate(masks, firsts[index])
                num_masked[index] = len(masks)
        return StepMasks(
            masked=[index for index, _ in ready],
            words=np.stack([mask.words for _, mask in ready]) if ready else np.empty((0, 0), np.int32),
            must_end=frozenset(index for index, mask in ready if mask.must_end),
            num_masked=num_masked,
            late=frozenset(late),
            failed=failed,
        )

    def wait_while(self, is_busy: Callable[[], bool]) -> None:
        """Wait for the masks that are being computed as long as the device is busy, which delays nothing."""
        gives_up_s = self._clock.now() + _BUSY_WAIT_S
        pending = {each.pending for each in self._constraints.values() if each.pending and each.is_busy}
        while pending and is_busy() and self._clock.now() < gives_up_s:
            pending = wait(pending, _POLL_S).not_done

    def _wait_a_little(self, constraints: list[_Constraint], num_chunks: int) -> None:
        waiting = [each for each in constraints if each.is_busy]
        if not waiting:
            return
        if len(waiting) == num_chunks:
            wait([each.pending for each in waiting if each.pending], _ALONE_WAIT_S, FIRST_COMPLETED)
        elif fresh := {each.pending for each in waiting if each.pending and not each.is_late}:
            wait(fresh, self._limits.mask_grace_s)

    def _outcome(self, constraint: _Constraint) -> Mask | str | None:
        """Return the mask, or a sentence if it failed; None while the mask is being computed."""
        pending = constraint.pending
        if pending is None:
            return _sentence(constraint.mask)
        if not pending.done():
            constraint.is_late = True
            waited_s = self._clock.now() - constraint.pending_since_s
            if waited_s > self._limits.mask_timeout_s:
                return f"The grammar's next step took more than {self._limits.mask_timeout_s:g} s."
            return None
        constraint.pending, constraint.is_late = None, False
        error = pending.exception()
        return _sentence(constraint.mask) if error is None else f"The grammar's matcher failed: {error}."


@dataclass(frozen=True, slots=True)
class _Job:
    constraint: _Constraint
    new_token_ids: list[int]
    num_tokens: int  # with the new ones
    drafts: tuple[int, ...]


def _submit_after(
    pool: ThreadPoolExecutor, before: Future[None], jobs: list[_Job], *, finds_forced: bool
) -> Future[None]:
    """Begin a task when another one is done. No thread waits for that: slow tasks would occupy two."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            before.result()
            _compute(jobs, finds_forced=finds_forced)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def begin(_: Future[None]) -> None:
        with suppress(RuntimeError):  # the process is ending
            pool.submit(run)

    before.add_done_callback(begin)
    return future


def _compute(jobs: list[_Job], *, finds_forced: bool) -> None:
    """Compute the masks of one grammar in a thread. The loop does not touch a constraint's mask or matcher
    meanwhile."""
    grammar = jobs[0].constraint.grammar
    advanced = [job for job in jobs if job.new_token_ids]
    for job in advanced:
        grammar.advance(job.constraint.matcher, job.new_token_ids)
    masks = grammar.masks([job.constraint.matcher for job in advanced]) if advanced else []
    for job, mask in zip(advanced, masks, strict=True):
        job.constraint.mask = mask
        if finds_forced and isinstance(mask, Mask):
            forced = tuple(job.constraint.matcher.compute_ff_tokens())
            job.constraint.forced = job.num_tokens, forced
    drafted = [job for job in jobs if job.drafts and isinstance(job.constraint.mask, Mask)]
    if not drafted:
        return
    behind = grammar.masks_behind(
        [job.constraint.matcher for job in drafted],
        [job.constraint.mask for job in drafted if isinstance(job.constraint.mask, Mask)],
        [job.drafts for job in drafted],
    )
    for job, masks_behind in zip(drafted, behind, strict=True):
        job.constraint.behind = masks_behind


def _sentence(mask: Mask | str) -> Mask | str:
    """Put a failure into a sentence: the grammar grew too complex, or needs a byte that the tokenizer has no token
    for."""
    return f"This answer cannot follow its grammar any further: {mask}." if isinstance(mask, str) else mask
