"""Compiles grammars in threads, each at most once, and caches them for the next request. Knows no logits.

The matcher is llguidance. It lets other threads run while it works, and its own limits ("fuel", states, symbols)
bound every call, so a malicious grammar is refused or ends its own request only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PenstockError
from penstock.core.grammar_text import grammar_text, token_ids_by_number
from penstock.core.messages import ModelCard
from penstock.core.request import Grammar
from penstock.core.shares import Shares
from penstock.engine.collaborator import Arrival, Collaborator
from penstock.engine.grammar_masks import CompiledGrammar, GrammarLimits, Words, first_line

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.002  # for a grammar, when the engine has nothing else to do


class GrammarCompiler:
    """Compiles grammars. Owns the matchers' tokenizer, which is built while the engine starts, because no other
    thread runs meanwhile."""

    def __init__(self, card: ModelCard) -> None:
        self.limits = GrammarLimits()
        self._special_token_ids = token_ids_by_number(card.tokenizer_json)
        self._tokenizer = _tokenizer(card)
        self._parser_limits = _parser_limits(self.limits)
        self._executor = LLExecutor(self.limits.mask_threads)
        self._end_words = _words_of(card.eos_token_ids, self._tokenizer.vocab_size)
        self._pool = ThreadPoolExecutor(self.limits.compile_threads, thread_name_prefix="grammar")
        # Least recently used first, with unfinished compilations, so that requests with one grammar share them.
        # Tenants share no compilations.
        self._compiled: OrderedDict[tuple[str, Grammar], Future[CompiledGrammar]] = OrderedDict()

    def compile(self, grammar: Grammar, tenant: str = "") -> Future[CompiledGrammar]:
        """Compile a grammar, or return the tenant's known compilation. Raises Overloaded when too many grammars are
        being compiled, in all or of the tenant. The future raises InvalidRequest."""
        key = grammar.owner(tenant), grammar
        known = self._compiled.get(key)
        if known is not None and not _failed(known):
            self._compiled.move_to_end(key)
            return known
        compiling = Shares(self.limits.max_compiling)
        for (owner, _), future in self._compiled.items():
            if not future.done():
                compiling.add(owner)
        if compiling.used >= compiling.capacity or compiling.is_full_for(tenant):
            raise Overloaded("Too many grammars are being compiled.", retry_after_s=1.0)
        future = self._pool.submit(self._compile, grammar)
        self._compiled[key] = future
        self._compiled.move_to_end(key)
        self._forget_oldest()
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        text = grammar_text(grammar, self._special_token_ids)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._parser_limits)
        if matcher.is_error():
            reason = first_line(matcher.get_error())
            raise InvalidRequest(f"The grammar cannot be compiled: {reason}.")
        return CompiledGrammar(matcher, self._executor, self._end_words)

    def _forget_oldest(self) -> None:
        excess = len(self._compiled) - self.limits.max_cached
        for key in [known for known, future in self._compiled.items() if future.done()][: max(0, excess)]:
            del self._compiled[key]


def build_compiler(card: ModelCard) -> GrammarCompiler | None:
    """Build a compiler. Returns None, and logs the reason, if answers cannot be constrained."""
    try:
        return GrammarCompiler(card)
    except ValueError as error:
        logger.info("no structured output with this model's tokenizer: %s", error)
    return None


def _failed(future: Future[CompiledGrammar]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _tokenizer(card: ModelCard) -> LLTokenizer:
    tokenizer_json = with_unspellable_tokens(card.tokenizer_json)
    return LLTokenizer(tokenizer_json, n_vocab=card.vocab_size, eos_token=list(card.eos_token_ids))


def _parser_limits(limits: GrammarLimits) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=limits.compile_fuel,
        step_lexer_fuel=limits.step_fuel,
        max_lexer_states=limits.max_states,
        max_grammar_size=limits.max_symbols,
        verbose_errors=False,
    )


def _words_of(token_ids: Sequence[int], vocab_size: int) -> Words:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(frozen=True, slots=True)
class _Waiting:
    arrival: Arrival
    compiled: Future[CompiledGrammar]
    gives_up_s: float


class GrammarQueue(Collaborator):
    """Holds the requests that wait for their grammar. Other requests do not wait with them. A waiting request can be
    aborted and has its deadline, like any other."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def must_wait(self, arrival: Arrival) -> bool:
        return arrival.request.sampling.grammar is not None

    def enter(self, arrival: Arrival, now: float) -> None:
        request = arrival.request
        grammar = request.sampling.grammar
        assert grammar is not None
        if request.id in self._waiting:
            raise InvalidRequest(f"A request with the id {request.id!r} is already being served.")
        compiled = self._compiler.compile(grammar, request.tenant)
        gives_up_s = now + self._compiler.limits.compile_timeout_s
        self._waiting[request.id] = _Waiting(arrival, compiled, gives_up_s)

    def forget(self, request_id: str) -> None:
        """Forget a request. Its compilation continues: another request may need the same grammar."""
        self._waiting.pop(request_id, None)

    def ready(self, now: float, *, is_idle: bool) -> Iterator[tuple[Arrival, PenstockError | None]]:
        """Return the requests that can continue, in order of arrival."""
        if is_idle and self._waiting:
            wait([each.compiled for each in self._waiting.values()], _IDLE_WAIT_S, FIRST_COMPLETED)
        for request_id, waiting in tuple(self._waiting.items()):
            outcome = self._outcome(waiting, now)
            if outcome is None:
                continue
            del self._waiting[request_id]
            if isinstance(outcome, PenstockError):
                yield waiting.arrival, outcome
            else:
                yield replace(waiting.arrival, grammar=outcome), None

    def close(self) -> None:
        self._waiting.clear()
        self._compiler.close()

    def _outcome(self, waiting: _Waiting, now: float) -> CompiledGrammar | PenstockError | None:
        deadline_s = waiting.arrival.request.deadline_s
        if deadline_s is not None and deadline_s <= now:
            return DeadlineExceeded("The request's deadline passed while its grammar was compiled.")
        if waiting.compiled.done():
            error = waiting.compiled.exception()
            if error is None:
                return waiting.compiled.result()
            if isinstance(error, PenstockError):
                return error
            return PenstockError(f"The grammar's compiler failed: {type(error).__name__}.")
        if waiting.gives_up_s <= now and not waiting.compiled.running():
            return Overloaded("Too many grammars are being compiled.", retry_after_s=1.0)
        if waiting.gives_up_s <= now:
            limit_s = self._compiler.limits.compile_timeout_s
            return InvalidRequest(f"The grammar takes more than {limit_s:g} s to compile.")
        return None


def with_unspellable_tokens(tokenizer_json: bytes) -> str:
    """Return the `tokenizers` file with other names for tokens that no text may spell. Ids do not change."""
    names = {
        name: f"\ue000{token_id}\ue001" for name, token_id in token_ids_by_number(tokenizer_json).items()
    }
    file: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    for token in file.get("added_tokens") or ():
        if token["content"] in names:
            token["content"] = names[token["content"]]
            token["special"] = True
            token["normalized"] = False
    vocabulary = file["model"].get("vocab")
    if isinstance(vocabulary, dict):
        file["model"]["vocab"] = {names.get(name, name): token_id for name, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):  # pieces with their scores, in the order of their ids
        file["model"]["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    unknown = file["model"].get("unk_token")
    if unknown in names:
        file["model"]["unk_token"] = names[unknown]
    # A post-processor would put special tokens around a whole text, which no grammar asks for.
    file["post_processor"] = None
    return msgspec.json.encode(file).decode()
