"""Feeds the recorded calls of a live fleet to a fresh dispatcher and compares actions: the proof that a dispatcher
depends on its calls alone. Knows the log's format from `dispatch.log`; runs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from penstock.dispatch import Dispatcher
from penstock.dispatch.log import LogRecord, encode_actions, make_call, read_dispatch_log


@dataclass(frozen=True, slots=True)
class DispatchMismatch:
    """The fresh dispatcher returned other actions than the recorded one."""

    record: LogRecord
    replayed: bytes  # actions, as `dispatch.log.encode_actions` writes them


@dataclass(frozen=True, slots=True)
class DispatchReplay:
    """How far the two agree: up to the first difference, if there is one."""

    num_calls: int
    num_actions: int
    mismatch: DispatchMismatch | None


def replay_dispatch(lines: Iterable[bytes]) -> DispatchReplay:
    """`lines` may be a log file opened in binary mode."""
    header, records = read_dispatch_log(lines)
    dispatcher = Dispatcher(header.config, Random(header.seed), header.now)
    num_calls = num_actions = 0
    for record in records:
        actions = make_call(dispatcher, record)
        replayed = encode_actions(actions)
        if replayed != bytes(record.actions):
            return DispatchReplay(num_calls, num_actions, DispatchMismatch(record, replayed))
        num_calls += 1
        num_actions += len(actions)
    return DispatchReplay(num_calls, num_actions, None)
