"""Where requests wait for their grammar, before any scheduler knows of them. Knows no model and no mask.

Nobody else waits with them: the loop asks between steps who is ready. A request that waits can be aborted and has its
deadline, like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PenstockError
from penstock.core.request import Request
from penstock.engine.grammar import CompiledGrammar, GrammarCompiler


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    compiled: Future[CompiledGrammar]
    gives_up_s: float


class GrammarDesk:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request: Request, now: float) -> None:
        """Raises InvalidRequest or Overloaded, and then leaves no trace."""
        grammar = request.sampling.grammar
        assert grammar is not None
        if request.id in self._waiting:
            raise InvalidRequest(f"A request with the id {request.id!r} is already being served.")
        compiled = self._compiler.compile(grammar)
        gives_up_s = now + self._compiler.limits.compile_timeout_s
        self._waiting[request.id] = _Waiting(request, compiled, gives_up_s)

    def leave(self, request_id: str) -> None:
        """The compilation goes on: another request may want the same grammar."""
        self._waiting.pop(request_id, None)

    def served(self, now: float) -> Iterator[tuple[Request, CompiledGrammar | PenstockError]]:
        """Everyone whose wait is over, in order of arrival: with a grammar, or with what went wrong."""
        for request_id, waiting in tuple(self._waiting.items()):
            outcome = self._outcome(waiting, now)
            if outcome is not None:
                del self._waiting[request_id]
                yield waiting.request, outcome

    def pause(self, timeout_s: float) -> None:
        """For a driver that has nothing else to do."""
        wait([each.compiled for each in self._waiting.values()], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        self._waiting.clear()
        self._compiler.close()

    def _outcome(self, waiting: _Waiting, now: float) -> CompiledGrammar | PenstockError | None:
        deadline_s = waiting.request.deadline_s
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
