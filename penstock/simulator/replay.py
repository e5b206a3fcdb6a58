"""Feeds recorded calls to a fresh scheduler or a fresh dispatcher and compares the results: the proof that both
depend on their calls alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from penstock.core.errors import UsageError
from penstock.core.plan import StepPlan
from penstock.core.plan_log import (
    AbortCall,
    AddCall,
    BeginExportCall,
    BeginImportCall,
    CommitCall,
    ExchangeCall,
    FailCall,
    FinishImportCall,
    PlanCall,
    SchedulerCall,
    read_plan_log,
)
from penstock.dispatch import Dispatcher
from penstock.dispatch.log import LogRecord, encode_actions, make_call, read_dispatch_log
from penstock.scheduler.build import build_scheduler
from penstock.scheduler.exchange import BlockExchange
from penstock.scheduler.ranks import RankSchedulers
from penstock.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The plan of the fresh scheduler differs from the recorded plan."""

    now: float
    recorded: StepPlan | None
    replayed: StepPlan | None


@dataclass(frozen=True, slots=True)
class Replay:
    """Tells how far the two schedulers agree. They are compared up to the first difference: past it, the recorded
    results belong to steps that the fresh scheduler never planned."""

    num_calls: int
    num_plans: int  # that were equal, not counting "nothing to do"
    mismatch: Mismatch | None


def replay(lines: Iterable[bytes]) -> Replay:
    """`lines` may be a log file opened in binary mode."""
    header, calls = read_plan_log(lines)
    return replay_calls(build_scheduler(header), calls)


def replay_calls(scheduler: Scheduler | RankSchedulers, calls: Iterable[SchedulerCall]) -> Replay:
    uncommitted: dict[int, StepPlan] = {}
    num_calls = num_plans = 0
    for call in calls:
        match call:
            case AddCall():
                scheduler.add(call.request, call.now)
            case AbortCall():
                scheduler.abort(call.request_id, call.now)
            case FailCall():
                scheduler.fail(call.chunk, call.error, call.now)
            case PlanCall():
                plan = scheduler.plan(call.now, call.drafts)
                if plan != call.plan:
                    return Replay(num_calls, num_plans, Mismatch(call.now, call.plan, plan))
                if plan is not None:
                    uncommitted[plan.step_id] = plan
                    num_plans += 1
            case CommitCall():
                plan = uncommitted.pop(call.result.step_id, None)
                if plan is None:
                    raise UsageError(
                        f"The plan log commits step {call.result.step_id}, which was not planned."
                    )
                scheduler.commit(plan, call.result, call.now)
            case _:
                assert isinstance(scheduler, Scheduler), "ranks with caches of their own exchange no blocks"
                _replay_exchange(scheduler.exchange, call)
        num_calls += 1
    return Replay(num_calls, num_plans, None)


def _replay_exchange(exchange: BlockExchange, call: ExchangeCall) -> None:
    match call:
        case BeginImportCall():
            exchange.begin_import(call.request)
        case FinishImportCall():
            exchange.finish_import(call.number, call.num_filled)
        case BeginExportCall():
            if call.request is not None:
                exchange.export_prefix(call.request)
            else:
                exchange.begin_export(call.block_ids)
        case _:
            exchange.finish_export(call.number)


@dataclass(frozen=True, slots=True)
class DispatchMismatch:
    """The fresh dispatcher returned other actions than the recorded one."""

    record: LogRecord
    replayed: bytes  # actions, as `dispatch.log.encode_actions` writes them


@dataclass(frozen=True, slots=True)
class DispatchReplay:
    """Tells how far the two dispatchers agree: up to the first difference, if there is one."""

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
