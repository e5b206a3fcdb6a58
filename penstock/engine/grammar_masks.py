"""Computes the tokens that constrained requests may sample next, in threads, while the model runs. Knows no logits.

A request's matcher follows the tokens that the scheduler committed, so preemption and resumption change nothing. Its
next mask is begun as soon as its newest token is known and is needed only after the forward pass. One task per
grammar and step: requests with the same grammar are masked in one call, and different grammars never wait for each
other.

A step hardly waits for a slow mask. The first time a mask is late, the step waits a short moment; after that the row
is sampled without the mask, the sample is thrown away, and the scheduler plans the row again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest

# A step that has only late rows delays no known request, but a new request may arrive at any moment.
_ALONE_WAIT_S = 0.01


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


class CompiledGrammar:
    """The state before the first token, from which every request starts its own matcher. Two matchers of one grammar
    share tables, so their masks are computed in one call."""

    def __init__(self, matcher: LLMatcher, executor: LLExecutor, end_words: Words) -> None:
        self._prototype = matcher
        self._executor = executor
        self._text_words = ~end_words
        (first,) = self.masks([matcher])
        if isinstance(first, str):
            raise InvalidRequest(f"The grammar is too complex: {first}.")
        self.first_mask = first

    def start(self) -> LLMatcher:
        return self._prototype.deep_copy()

    def advance(self, matcher: Any, token_ids: Sequence[int]) -> None:
        """Advance a matcher. A failure shows in the next mask."""
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


def first_line(error: str) -> str:
    """Return the first line of an error. The matcher's state follows it."""
    return next(iter(error.strip().splitlines()), "the matcher gave up").rstrip(" .:")


@dataclass(slots=True)
class _Constraint:
    grammar: CompiledGrammar
    matcher: Any
    mask: Mask | str  # of the newest token that was computed; a sentence when the matcher failed
    new_token_ids: list[int] = field(default_factory=list)  # not yet given to the threads
    pending: Future[None] | None = None
    pending_since_s: float = 0.0
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The constrained rows of one step, by index among its sampled rows."""

    masked: list[int]
    words: Words  # [len(masked), W]
    must_end: frozenset[int]
    late: frozenset[int]
    failed: dict[int, str]


class GrammarMasks:
    def __init__(self, limits: GrammarLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._constraints: dict[str, _Constraint] = {}
        self._advanced: dict[str, _Constraint] = {}  # have new tokens
        self._pool = ThreadPoolExecutor(limits.mask_threads, thread_name_prefix="mask")

    def begin(self, request_id: str, grammar: CompiledGrammar) -> None:
        self._constraints[request_id] = _Constraint(grammar, grammar.start(), grammar.first_mask)

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Note committed tokens. Requests without a grammar are ignored."""
        constraint = self._constraints.get(request_id)
        if constraint is not None:
            constraint.new_token_ids.extend(token_ids)
            self._advanced[request_id] = constraint

    def end(self, request_id: str) -> None:
        self._constraints.pop(request_id, None)
        self._advanced.pop(request_id, None)

    def any_of(self, request_ids: Sequence[str]) -> bool:
        return bool(self._constraints) and any(request_id in self._constraints for request_id in request_ids)

    def start(self) -> None:
        """Give the tokens committed since the last call to the threads."""
        if not self._advanced:
            return
        now = self._clock.now()
        by_grammar: dict[int, list[_Constraint]] = {}
        for constraint in self._advanced.values():
            by_grammar.setdefault(id(constraint.grammar), []).append(constraint)
        self._advanced.clear()
        for constraints in by_grammar.values():
            tokens = [constraint.new_token_ids for constraint in constraints]
            future = self._pool.submit(_compute, constraints, tokens)
            for constraint in constraints:
                constraint.new_token_ids = []
                constraint.pending, constraint.pending_since_s = future, now

    def take(self, request_ids: Sequence[str], num_chunks: int) -> StepMasks | None:
        """Return the masks of the rows that a step of `num_chunks` chunks samples, in order; None when no row is
        constrained."""
        if not self._constraints:
            return None
        constrained = {
            index: self._constraints[request_id]
            for index, request_id in enumerate(request_ids)
            if request_id in self._constraints
        }
        if not constrained:
            return None
        self._wait_a_little(list(constrained.values()), num_chunks)
        ready: list[tuple[int, Mask]] = []
        late: set[int] = set()
        failed: dict[int, str] = {}
        for index, constraint in constrained.items():
            outcome = self._outcome(constraint)
            if outcome is None:
                late.add(index)
            elif isinstance(outcome, str):
                failed[index] = outcome
            else:
                ready.append((index, outcome))
        return StepMasks(
            masked=[index for index, _ in ready],
            words=np.stack([mask.words for _, mask in ready]) if ready else np.empty((0, 0), np.int32),
            must_end=frozenset(index for index, mask in ready if mask.must_end),
            late=frozenset(late),
            failed=failed,
        )

    def _wait_a_little(self, constraints: list[_Constraint], num_chunks: int) -> None:
        waiting = [each for each in constraints if each.pending is not None and not each.pending.done()]
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


def _compute(constraints: list[_Constraint], token_ids: list[list[int]]) -> None:
    """Compute masks in a thread. The loop does not touch a constraint's mask or matcher meanwhile."""
    grammar = constraints[0].grammar
    for constraint, new in zip(constraints, token_ids, strict=True):
        grammar.advance(constraint.matcher, new)
    masks = grammar.masks([constraint.matcher for constraint in constraints])
    for constraint, mask in zip(constraints, masks, strict=True):
        constraint.mask = mask


def _sentence(mask: Mask | str) -> Mask | str:
    """Put a failure into a sentence: the grammar grew too complex, or needs a byte that the tokenizer has no token
    for."""
    return f"This answer cannot follow its grammar any further: {mask}." if isinstance(mask, str) else mask
