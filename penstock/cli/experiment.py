"""`penstock experiment`: compare two policy sets on the live traffic of a running server."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import PenstockGroup
from penstock.cli.console import json_option, print_facts, print_json, shown_time
from penstock.cli.options import connect, server_options

if TYPE_CHECKING:
    from penstock.cli.clients import AdminClient
    from penstock.core.cluster_view import ArmView, ExperimentView

WATCH_INTERVAL_S = 2.0

_model_option = click.option("--model", metavar="NAME", help="The model, if several are served.")
_watch_option = click.option("--watch", is_flag=True, help="Follow the experiment until it is over.")


@click.group(cls=PenstockGroup, short_help="Compare two policy sets on live traffic.")
def experiment() -> None:
    """Experiments on a running server.

    Two policy sets of the settings file serve at the same time, each with replicas of its own and its share of
    requests. The experiment ends by itself: when the confidence interval of the difference between their objectives
    excludes zero, when a guard rail is broken, or when its time is over. The server then continues as before.

    \b
      penstock experiment start default small-chunks --share 0.5 --watch
      penstock experiment status
      penstock experiment stop
    """


@experiment.command(short_help="Start an experiment.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--share",
    type=float,
    default=0.5,
    show_default=True,
    metavar="SHARE",
    help="Share of requests, and of replicas, for B.",
)
@click.option("--window-s", type=float, metavar="SECONDS", help="Length of a window.  [default: 10]")
@click.option("--min-windows", type=int, metavar="N", help="Windows before a verdict.  [default: 20]")
@click.option("--hours", type=float, metavar="HOURS", help="Longest time of the experiment.  [default: 1]")
@click.option("--confidence", type=float, metavar="SHARE", help="Confidence of the verdict.  [default: 0.95]")
@_model_option
@_watch_option
@json_option
@server_options
def start(
    first: str,
    second: str,
    share: float,
    window_s: float | None,
    min_windows: int | None,
    hours: float | None,
    confidence: float | None,
    model: str | None,
    watch: bool,
    as_json: bool,
    url: str,
    api_key: str | None,
) -> None:
    """Compare the policy sets A and B, named in the settings. The set `default` is how the server was started."""
    order = {
        "a": first,
        "b": second,
        "share": share,
        "model": model,
        "window_s": window_s,
        "min_windows": min_windows,
        "max_duration_s": None if hours is None else hours * 3600.0,
        "confidence": confidence,
    }
    with closing(connect(url, api_key)) as client:
        view = client.start_experiment(order)
        if watch:
            view = _watch(client, view)
        _show(view, as_json=as_json)


@experiment.command(short_help="Show the current or last experiment.")
@_model_option
@_watch_option
@json_option
@server_options
def status(model: str | None, watch: bool, as_json: bool, url: str, api_key: str | None) -> None:
    """Show the current or last experiment, with its interval, its guard rails and its verdict."""
    with closing(connect(url, api_key)) as client:
        found = [view for view in client.experiments() if model in (None, view.model)]
        if not found:
            click.echo("There was no experiment.", err=True)
        for number, view in enumerate(found):
            if number and not as_json:
                click.echo()
            _show(_watch(client, view) if watch else view, as_json=as_json)


@experiment.command(short_help="End the experiment now.")
@_model_option
@json_option
@server_options
def stop(model: str | None, as_json: bool, url: str, api_key: str | None) -> None:
    """End the experiment. The replicas from before come back first, and no request is lost."""
    with closing(connect(url, api_key)) as client:
        _show(client.stop_experiment(model), as_json=as_json)


def _watch(client: AdminClient, view: ExperimentView) -> ExperimentView:
    """Print one line for every stage and window until the experiment is over."""
    seen = None
    while True:
        view = next((each for each in client.experiments() if each.id == view.id), view)
        state = (view.stage, view.num_windows)
        if state != seen:
            seen = state
            click.echo(f"{shown_time(time.time())}  {view.stage}, {_progress(view)}", err=True)
        if view.is_over:
            return view
        time.sleep(WATCH_INTERVAL_S)


def _progress(view: ExperimentView) -> str:
    counts = f"{view.a.num_requests} and {view.b.num_requests} requests"
    return f"{counts}, {view.num_windows} windows, difference {_difference(view)}"


def _difference(view: ExperimentView) -> str:
    found = view.difference
    if found is None:
        return "unknown"
    return f"{found.mean:+.3f} ({view.confidence:.0%}: {found.low:+.3f} to {found.high:+.3f})"


def _show(view: ExperimentView, *, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    facts = [
        ("experiment", f"{view.id} of {view.model}"),
        ("stage", view.stage),
        ("a", _arm(view.a)),
        ("b", _arm(view.b)),
        ("difference b − a", _difference(view)),
        ("windows", f"{view.num_windows}, of at least {view.min_windows} for a verdict"),
    ]
    facts += [(f"guard {guard.gate}", f"{guard.result}: {guard.sentence}") for guard in view.guards]
    if view.verdict is not None:
        names = {"a is better": f"{view.a.policy} is better", "b is better": f"{view.b.policy} is better"}
        facts.append(("verdict", f"{names.get(view.verdict, view.verdict)}: {view.reason}"))
    else:
        facts.append(("ends", f"{shown_time(view.ends_at)} at the latest"))
    print_facts(facts)


def _arm(arm: ArmView) -> str:
    terms = arm.objective.overall
    return (
        f"{arm.policy}: objective {terms.total:.3f} (first token {terms.ttft:.3f}, between tokens {terms.itl:.3f}, "
        f"idle {terms.idle:.3f}, drops {terms.drops:.3f}), {arm.num_requests} requests, {arm.num_replicas} replicas"
    )
