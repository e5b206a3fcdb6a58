"""`penstock bench`: measure a server, compare servers, or measure the engine without a server."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.bench.load import STANDARD_WORKLOADS, ClosedLoop, IntRange, PoissonArrivals, Workload
from penstock.cli.bench_gpu import bench_gpu
from penstock.cli.commands import PenstockGroup
from penstock.cli.console import count_progress, fetch_drafter, fetch_model, spinner, stdout_console
from penstock.cli.options import config_options
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import PenstockError, UsageError
from penstock.serve.environment import API_KEY_VARIABLE

if TYPE_CHECKING:
    from penstock.bench.load import LoadResult, Target
    from penstock.bench.summary import Summary


T = TypeVar("T")


@click.group(cls=PenstockGroup, short_help="Measure the speed of servers or of the engine.")
def bench() -> None:
    """Measure latency and throughput. Prompts are random token ids of exact lengths, and so are answers."""


bench.add_command(bench_gpu)


def _options(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_server_options = _options(
    click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server to measure."),
    click.option("--model", help="Model to ask for. Default: the first that the server lists."),
    click.option("--api-key", envvar=API_KEY_VARIABLE, show_envvar=True, help="API key of the server."),
)
_measurement_options = _options(
    click.option("--warmup", type=click.IntRange(min=0), default=2, show_default=True,
                 help="Requests to send before each measurement, not counted."),
    click.option("--seed", type=int, default=lambda: random.randrange(1 << 31),
                 help="Seed of prompts and arrivals. Default: a new one each time, so that no prompt is in a "
                 "server's cache."),
    click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=600.0,
                 show_default=True, help="Seconds until an unfinished answer counts as an error."),
)  # fmt: skip
_output_options = _options(
    click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write figures here."),
    click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE",
                 help="Draw a picture here (.png, .svg, .pdf); needs the extra `plot`."),
)  # fmt: skip
_length_help = "{}: a number, or a range such as 100:1024."


@bench.command("serve", short_help="Put load on one server.")
@_server_options
@click.option("--concurrency", type=click.IntRange(min=1), default=8, show_default=True,
              help="Clients, each of which sends its next request when the last is answered.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(min=0, min_open=True),
              help="Requests per second with Poisson arrivals, instead of --concurrency.")  # fmt: skip
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=32, show_default=True,
              help="Requests to send.")  # fmt: skip
@click.option("--input-len", default="128", show_default=True, help=_length_help.format("Prompt tokens"))
@click.option("--output-len", default="64", show_default=True, help=_length_help.format("Answer tokens"))
@click.option("--shared-prefix", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens of a prefix that all prompts share, in addition to --input-len.")  # fmt: skip
@click.option(
    "--vocabulary", default="1000:39999", show_default=True, help="Range of token ids to draw from."
)
@click.option("--speculate-report", "reports_drafts", is_flag=True,
              help="Also report drafted and accepted tokens by drafter and position, from the server's /metrics. "
              "Other load on the server counts too.")  # fmt: skip
@_measurement_options
@_output_options
def bench_serve(
    url: str,
    model: str | None,
    api_key: str | None,
    reports_drafts: bool,
    json_file: Path | None,
    plot_file: Path | None,
    **load: Any,
) -> None:
    """Put load on one OpenAI-compatible server, and report latencies and throughput.

    \b
      penstock bench serve --concurrency 32 --requests 96
      penstock bench serve --rate 4 --input-len 100:1024 --json report.json --plot report.png
      penstock bench serve --concurrency 1 --speculate-report
    """
    import msgspec

    from penstock.bench.load import find_target
    from penstock.bench.summary import (
        check_plot,
        drafts_table,
        plot_latencies,
        read_drafters,
        reports_since,
        serve_table,
        summarize,
        totals_line,
        write_json,
    )

    if plot_file:
        check_plot(plot_file)
    workload = _workload(**{name: load[name] for name in load if name not in ("warmup", "timeout_s")})
    target = _run(find_target(None, url, model, api_key))
    if reports_drafts:
        _run(read_drafters(target))  # refuses a server without these counts before the load
    _warm_up(target, workload, load["warmup"], load["timeout_s"])
    before = _run(read_drafters(target, settles=True)) if reports_drafts else {}
    result = _put_load(target, workload, load["timeout_s"])
    summary = summarize(target, workload, result)
    if reports_drafts:
        drafters = reports_since(before, _run(read_drafters(target, settles=True)))
        summary = msgspec.structs.replace(summary, drafters=drafters)
    if json_file:
        write_json(json_file, summary)
    if plot_file and summary.num_completed:
        plot_latencies(plot_file, summary, result)
    console = stdout_console()
    console.print(serve_table(summary))
    if summary.drafters is not None:
        console.print(drafts_table(summary.drafters))
    console.print(totals_line(summary))
    _fail_on_errors([summary])


@bench.command("compare", short_help="Compare servers in one run.")
@_server_options
@click.option("--peer", "peers", multiple=True, required=True, metavar="[NAME=]URL",
              help="Another OpenAI-compatible server; may be given several times.")  # fmt: skip
@click.option("--workload", "names", multiple=True, type=click.Choice(list(STANDARD_WORKLOADS)),
              help="Workload to run; may be given several times. Default: all.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True,
              help="Rounds of each workload; the median round by throughput is reported.")  # fmt: skip
@_measurement_options
@_output_options
def bench_compare(
    url: str,
    model: str | None,
    api_key: str | None,
    peers: tuple[str, ...],
    names: tuple[str, ...],
    repeat: int,
    warmup: int,
    seed: int,
    timeout_s: float,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure several servers side by side, and print how many times better the one at --url is.

    Within every round the servers take turns with the same prompts, so that all run on the machine in the same state.
    --api-key and --model apply to --url; a peer is measured with the first model that it lists.

    \b
      penstock bench compare --peer llama.cpp=http://127.0.0.1:8080
    """
    from penstock.bench.load import find_target
    from penstock.bench.summary import (
        check_plot,
        compare,
        comparison_table,
        median_run,
        plot_comparison,
        summarize,
        write_json,
    )

    if plot_file:
        check_plot(plot_file)
    targets = [_run(find_target("penstock", url, model, api_key))]
    for peer in peers:
        name, has_name, address = peer.rpartition("=")
        targets.append(_run(find_target(name if has_name else None, address, None, None)))

    runs: list[list[Summary]] = []
    for name in names or STANDARD_WORKLOADS:
        rounds: list[list[Summary]] = [[] for _ in targets]
        for number in range(repeat):
            workload = replace(STANDARD_WORKLOADS[name], seed=seed + number)
            for target, of_target in zip(targets, rounds, strict=True):
                result = _measure(target, workload, warmup, timeout_s)
                of_target.append(summarize(target, workload, result))
        runs.append([median_run(of_target) for of_target in rounds])
    if json_file:
        ratios = [[compare(servers[0], peer) for peer in servers[1:]] for servers in runs]
        write_json(json_file, {"runs": runs, "ratios": ratios})
    if plot_file:
        plot_comparison(plot_file, runs)
    stdout_console().print(comparison_table(runs))
    _fail_on_errors([summary for servers in runs for summary in servers])


@bench.command("offline", short_help="Throughput of the engine in this process.")
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=256, show_default=True,
              help="Number of prompts, all submitted at once.")  # fmt: skip
@click.option("--input-len", default="100:1024", show_default=True, help=_length_help.format("Prompt tokens"))
@click.option(
    "--output-len", default="100:1024", show_default=True, help=_length_help.format("Answer tokens")
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.6, show_default=True,
              help="0 is greedy.")  # fmt: skip
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write figures here."
)
@config_options(EngineConfig)
def bench_offline(
    num_requests: int,
    input_len: str,
    output_len: str,
    temperature: float,
    json_file: Path | None,
    config: EngineConfig,
) -> None:
    """Measure the engine in this process, without a server, on many prompts at once.

    With `--load-format random --model FOLDER` only the config.json of the model is needed.

    \b
      penstock bench offline --requests 32 --input-len 128 --output-len 64
    """
    from penstock.bench.load import measure_offline
    from penstock.bench.summary import offline_table, write_json
    from penstock.core.clock import SystemClock

    lengths = IntRange.parse(input_len), IntRange.parse(output_len)
    path = fetch_model(config.model.model)
    with spinner(f"Loading {config.model.model}"):
        from penstock.engine.offline import OfflineEngine

        engine = OfflineEngine(fetch_drafter(config), path)
    workload = Workload(
        arrivals=ClosedLoop(num_requests),
        num_requests=num_requests,
        input_len=lengths[0],
        output_len=lengths[1],
        vocabulary=IntRange(min(1000, engine.card.vocab_size - 1), engine.card.vocab_size - 1),
        seed=config.model.seed,
    )

    def generate(prompts: Any, sampling: Any) -> list[int]:
        return [len(completion.token_ids) for completion in engine.generate(prompts, sampling)]

    try:
        with spinner(f"Generating {num_requests} answers"):
            # The first call allocates memory and compiles code, and is not measured.
            warm = workload.warm_up(1).prompts()
            measure_offline(engine.card.name, warm, temperature, generate, SystemClock())
            summary = measure_offline(
                engine.card.name, workload.prompts(), temperature, generate, SystemClock()
            )
    finally:
        engine.close()
    if json_file:
        write_json(json_file, summary)
    stdout_console().print(offline_table(summary))


def _workload(
    *,
    concurrency: int,
    rate: float | None,
    num_requests: int,
    input_len: str,
    output_len: str,
    shared_prefix: int,
    vocabulary: str,
    seed: int,
) -> Workload:
    return Workload(
        arrivals=PoissonArrivals(rate) if rate else ClosedLoop(concurrency),
        num_requests=num_requests,
        input_len=IntRange.parse(input_len),
        output_len=IntRange.parse(output_len),
        shared_prefix_len=shared_prefix,
        vocabulary=IntRange.parse(vocabulary, minimum=0),
        seed=seed,
    )


def _measure(target: Target, workload: Workload, num_warmup: int, timeout_s: float) -> LoadResult:
    """Warm up, then measure."""
    _warm_up(target, workload, num_warmup, timeout_s)
    return _put_load(target, workload, timeout_s)


def _warm_up(target: Target, workload: Workload, num_warmup: int, timeout_s: float) -> None:
    """Send requests that are not measured. Raises UsageError if all of them fail."""
    from penstock.bench.load import run_load

    if num_warmup:
        with count_progress(f"Warming up {target.name}", num_warmup) as done:
            warm = _run(run_load(target, workload.warm_up(num_warmup), timeout_s=timeout_s, on_done=done))
        if all(outcome.error is not None for outcome in warm.outcomes):
            raise UsageError(f"{target.name} answers no request: {warm.outcomes[0].error}.")


def _put_load(target: Target, workload: Workload, timeout_s: float) -> LoadResult:
    from penstock.bench.load import run_load

    with count_progress(f"{target.name}: {workload}", workload.num_requests) as done:
        return _run(run_load(target, workload, timeout_s=timeout_s, on_done=done))


def _run(work: Coroutine[Any, Any, T]) -> T:
    import uvloop

    return uvloop.run(work)


def _fail_on_errors(summaries: list[Summary]) -> None:
    for summary in summaries:
        if summary.num_errors:
            message, count = next(iter(summary.errors.items()))
            raise PenstockError(
                f"{summary.num_errors} requests to {summary.server} failed, {count} of them with: {message}."
            )
