"""Processes that wait for functions to run in step, started once for many tests: starting one takes seconds."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.copies import CONTEXT


class RankPool:
    def __init__(self, num_ranks: int) -> None:
        self._ranks = []
        for _ in range(num_ranks):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(rank, *arguments)` in the first ranks at the same time; what each of them returned."""
        connections = [connection for _, connection in self._ranks[:num_ranks]]
        for rank, connection in enumerate(connections):
            connection.send((function, (rank, *arguments)))
        outcomes = [connection.recv() for connection in connections]
        for outcome in outcomes:
            if isinstance(outcome, str):
                raise AssertionError(outcome)
        return [outcome[0] for outcome in outcomes]

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()  # the interpreter takes its time to leave by itself
            process.join()


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(*arguments),))
        except Exception:
            connection.send(traceback.format_exc())
