"""Terminal output of the commands: consoles, tables, progress bars, logging.

Results go to standard output. Progress, banners, logs and errors go to standard error, so that output can be piped.
rich is imported only when something is drawn.
"""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.core.engine_config import OWN_HEADS, EngineConfig, parse_speculate
from penstock.core.log_format import TextFormatter
from penstock.serve.environment import model_hub

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.models.hub import PullProgress

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

_NOISY_LIBRARIES = (
    "uvicorn",
    "uvicorn.access",
    "uvicorn.error",
    "httpx",
    "httpcore",
    "asyncio",
    "matplotlib",
)


def stdout_console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def configure_logging(*, debug: bool) -> None:
    """Log one line per event to standard error. Libraries log warnings and errors only."""
    handler = logging.StreamHandler()
    origin = "%(name)s: " if debug else ""
    handler.setFormatter(TextFormatter(f"%(asctime)s %(levelname)s {origin}%(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
    for library in _NOISY_LIBRARIES:
        logging.getLogger(library).setLevel(logging.INFO if debug else logging.WARNING)


@contextmanager
def pull_progress(model_name: str) -> Iterator[Callable[[PullProgress], None]]:
    """Show a progress bar for one model's download. Nothing is drawn before the first report."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=stderr_console(),
    )
    task = bar.add_task(f"Fetching {model_name}", total=None)

    def report(progress: PullProgress) -> None:
        bar.start()
        if progress.stage == "waiting":
            bar.update(task, description=f"Waiting for another process that fetches {model_name}")
        else:
            bar.update(
                task,
                description=f"Fetching {model_name}",
                completed=progress.done_bytes,
                total=progress.total_bytes,
            )

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def count_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar up to `total`. Call the yielded function with the number of newly finished items."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr_console()
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda more: bar.advance(task, more)


@contextmanager
def stages() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar for each stage, or print a line for every tenth if standard error is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = stderr_console()
    if not console.is_terminal:
        tenths: dict[str, int] = {}

        def print_line(title: str, done: float) -> None:
            tenth = min(10, int(10 * done))
            if tenth > tenths.get(title, -1):
                tenths[title] = tenth
                click.echo(f"{title}: {10 * tenth} %", err=True)

        yield print_line
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        tasks = {}

        def on_stage(title: str, done: float) -> None:
            if title not in tasks:
                tasks[title] = bar.add_task(title, total=1.0)
            bar.update(tasks[title], completed=done)

        yield on_stage


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner while the block runs, if standard error is a terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def fetch_model(name_or_path: str, *, force: bool = False) -> Path:
    """Return the model's path. A known model that is not in the cache is fetched, with a progress bar."""
    hub = model_hub()
    with sigterm_unwinds(), pull_progress(name_or_path) as report:
        if force:
            return hub.pull(name_or_path, report, force=True)
        return hub.ensure(name_or_path, report)


def fetch_drafter(engine: EngineConfig) -> EngineConfig:
    """Return the settings with the path of the draft model, which is fetched if necessary, or of the heads."""
    speculate = parse_speculate(engine.speculate)
    if speculate.kind == "draft":
        path = fetch_model(speculate.argument)
    elif speculate.kind == "heads" and speculate.argument != OWN_HEADS:
        path = Path(speculate.argument).absolute()
    else:
        return engine
    return msgspec.structs.replace(engine, speculate=f"{speculate.kind}={path}")


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that temporary files and child processes are removed.

    The block ends with exit code 143 in every case, also if the interrupted code fails while cleaning up, or ends
    before the signal is noticed.
    """
    exit_code = 128 + signal.SIGTERM
    received = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(on_ctrl_c) and on_ctrl_c is not signal.default_int_handler:
            # Of `asyncio.run`: the handler cancels the main task. An exception that is raised here instead could tear
            # a callback of the event loop, which then waits for ever.
            on_ctrl_c(number, frame)
        else:
            raise SystemExit(exit_code)

    with _asyncio_handles_ctrl_c():
        previous = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)
            if received:
                raise SystemExit(exit_code)


@contextmanager
def _asyncio_handles_ctrl_c() -> Iterator[None]:
    """Let `asyncio.run` set its handler of SIGINT, also if SIGINT is ignored, as in a script's background jobs.

    `asyncio.run` only replaces Python's own handler. An ignored SIGINT is blocked instead meanwhile.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def print_json(value: Any) -> None:
    written = json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False)
    # JSON escapes the other control characters by itself; these too may come from clients' names.
    click.echo(_CONTROLS_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", written))


def print_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns that are as wide as their longest cell, also into a pipe."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name.ljust(width)}  {printable(value)}")


# And marks that turn the direction of a line around.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_CONTROLS_IN_JSON = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str, keeps: str = "") -> str:
    """Return a text with its control characters spelled out, for a terminal, which would obey them: clients choose
    some names, and models write what they read."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in keeps else repr(found[0])[1:-1], text)


def shown_time(unix_s: float | None, absent: str = "–") -> str:
    return absent if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
