"""Runs the fault search of `penstock simulate`, in this process or in several, and single cases from files.

Each fleet is defined by its seed alone. Several processes therefore find what one process finds, and the search
reports the broken promise with the lowest seed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.cli.console import stderr_console
from penstock.cli.simulations import PROGRESS_S, GatewayLimits
from penstock.core.errors import UsageError

if TYPE_CHECKING:
    from penstock.simulator.search import FaultCase

_SEEDS_PER_TASK = 8  # about a second of work


def run_case(path: Path) -> None:
    """Run the case in a file. Raises an error if the case breaks a promise."""
    from penstock.simulator.search import CASE_DECODER

    try:
        case = CASE_DECODER.decode(path.read_bytes())
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} holds no case: {error}.") from error
    broken = _violation(case)
    if broken is not None:
        raise UsageError(f"{broken}, with {case.num_requests} requests and {case.num_faults} faults.")
    click.echo(f"{case.num_requests} requests and {case.num_faults} faults: no promise was broken.")


def search(num_cases: int, first_seed: int, num_requests: int, num_workers: int) -> None:
    """Run the fleets of `num_cases` seeds. Raises an error for the first seed that breaks a promise, with a smaller
    case in a file."""
    seeds = range(first_seed, first_seed + num_cases)
    tasks = [seeds[begin : begin + _SEEDS_PER_TASK] for begin in range(0, num_cases, _SEEDS_PER_TASK)]
    console, shown_s, num_done = stderr_console(), time.monotonic(), 0
    with _outcomes(tasks, num_requests, min(num_workers, len(tasks))) as outcomes:
        for task, failing_seed in zip(tasks, outcomes, strict=True):
            if failing_seed is not None:
                break
            num_done += len(task)
            if time.monotonic() - shown_s >= PROGRESS_S:
                shown_s = time.monotonic()
                console.print(f"{num_done:,} of {num_cases:,} fleets, {num_done * num_requests:,} requests")
    if failing_seed is not None:
        _report_failure(failing_seed, num_requests)
    click.echo(
        f"{num_cases:,} fleets and {num_cases * num_requests:,} requests, seeds {seeds[0]} to {seeds[-1]}: "
        "no promise was broken."
    )


@contextmanager
def _outcomes(tasks: Sequence[range], num_requests: int, num_workers: int) -> Iterator[Iterator[int | None]]:
    """Yield the first failing seed of each task, in the order of the tasks. Tasks that are not needed any more are
    dropped at the end of the context."""
    if num_workers == 1:
        yield (_first_failure(task, num_requests) for task in tasks)
        return
    executor = ProcessPoolExecutor(num_workers, get_context("spawn"), _follow_parent)
    try:
        yield executor.map(_first_failure, tasks, [num_requests] * len(tasks))
    except BrokenProcessPool as error:
        raise UsageError(
            "A process of the search was killed.", hint="Is there enough memory for --workers?"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end with the parent, however the parent ends."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow, daemon=True).start()


def _first_failure(seeds: range, num_requests: int) -> int | None:
    """Return the first of the seeds whose fleet breaks a promise."""
    from penstock.simulator.search import random_case

    return next((seed for seed in seeds if _violation(random_case(seed, num_requests)) is not None), None)


def _violation(case: FaultCase) -> str | None:
    """Run a case with the limits of the gateway that serves."""
    from penstock.simulator.search import violation

    return violation(
        case, lambda limits: GatewayLimits({"workspace": msgspec.to_builtins(limits)}, "the case")
    )


def _report_failure(seed: int, num_requests: int) -> None:
    """Make a failing case smaller, write the case to a file, and raise an error."""
    from penstock.simulator.search import random_case, shrink

    case = random_case(seed, num_requests)
    stderr_console().print(f"Seed {seed} broke a promise ({_violation(case)}); making the case smaller.")
    smallest = shrink(case, lambda each: _violation(each) is not None)
    path = Path(f"fault-case-{seed}.json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(smallest)))
    raise UsageError(
        f"Seed {seed}: {_violation(smallest)}, with {smallest.num_requests} requests, {smallest.num_replicas} "
        f"replicas and {smallest.num_faults} faults.",
        hint=f"Run it again: penstock simulate --fault-case {path}",
    )
