"""`penstock release`: release a new revision of a served model, watch the release, or roll it back. `penstock
experiment`: compare two policy sets on the live traffic of a running server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.commands import PenstockGroup
from penstock.cli.console import json_option, print_facts, print_json, shown_time
from penstock.cli.options import server_options
from penstock.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from penstock.cli.clients import AdminClient
    from penstock.core.cluster_view import ArmView, ExperimentView, ReleaseView

WATCH_INTERVAL_S = 1.0
# Flags of `start` that are fields of the release policy, and the part of the policy that has the field.
_GATE_FLAGS = (
    "min_requests",
    "min_compared",
    "max_divergence",
    "max_ttft_ratio",
    "max_itl_ratio",
    "max_false_alarms",
)

_model_option = click.option("--model", metavar="NAME", help="The model, if several are served.")


def _number(
    flag: str, kind: click.IntRange | click.FloatRange, metavar: str, description: str
) -> Callable[[Any], Any]:
    return click.option(flag, type=kind, metavar=metavar, help=description)


_watch_option = click.option("--watch", is_flag=True, help="Follow the release until it is over.")


@click.group(cls=PenstockGroup, short_help="Release new revisions of a model, and roll them back.")
def release() -> None:
    """Releases on a running server.

    A new revision (other weights, other engine settings) warms up, gets mirrored requests whose answers are compared
    and dropped, then a growing share of real requests. The server compares it with the revision in service, and
    promotes it or rolls it back.

    \b
      penstock release start --weights ./finetuned.gguf --watch
      penstock release start --set max_num_seqs=64
      penstock release status
      penstock release rollback
    """


@release.command(short_help="Start a release.")
@_model_option
@click.option("--weights", metavar="MODEL", help="New weights, as `penstock serve MODEL` takes them.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="An engine setting that changes, such as max_num_seqs=64; may be given several times.",
)
@click.option(
    "--revision", metavar="NAME", help="A name for the revision.  [default: a hash of its settings]"
)
@click.option(
    "--steps",
    metavar="SHARES",
    help="Growing shares of requests for the new revision, separated by commas.  [default: 0.01,0.05,0.25,0.5]",
)
@_number("--mirror", click.FloatRange(0, 1), "SHARE", "Share of requests to mirror at first.  [default: 0.1]")
@_number("--stage-s", click.FloatRange(0), "SECONDS", "Shortest time for each step.  [default: 60]")
@_number(
    "--min-requests", click.IntRange(1), "N", "Requests of each revision that a step needs.  [default: 200]"
)
@_number(
    "--min-compared", click.IntRange(0), "N", "Mirrored answers that must have been compared.  [default: 50]"
)
@_number(
    "--max-divergence", click.FloatRange(0, 1), "SHARE", "Compared answers that may differ.  [default: 0.2]"
)
@_number(
    "--max-ttft-ratio",
    click.FloatRange(0),
    "RATIO",
    "Allowed ratio of the p95 time to first token, new to old.  [default: 1.25]",
)
@_number(
    "--max-itl-ratio",
    click.FloatRange(0),
    "RATIO",
    "Allowed ratio of the p95 time between tokens, new to old.  [default: 1.25]",
)
@_number(
    "--max-false-alarms",
    click.FloatRange(0, 1, min_open=True, max_open=True),
    "SHARE",
    "Chance that a revision within all limits is rolled back.  [default: 0.05]",
)
@_watch_option
@json_option
@server_options
def start(
    model: str | None,
    weights: str | None,
    settings: tuple[str, ...],
    revision: str | None,
    watch: bool,
    as_json: bool,
    client: AdminClient,
    **policy: Any,
) -> None:
    """Start a release. The server continues by itself: it promotes the new revision, or rolls it back."""
    if weights is None and not settings:
        raise ConfigError("Nothing would change.", hint="Give --weights, or --set NAME=VALUE, or both.")
    order = {
        "model": model,
        "revision": revision,
        "weights": weights,
        "settings": _settings(settings),
        "policy": _policy(**policy),
    }
    _show(client.start_release(order), as_json=as_json)
    if watch:
        _watch(client, model)


@release.command(short_help="Show the current or last release.")
@_model_option
@_watch_option
@json_option
@server_options
def status(model: str | None, watch: bool, as_json: bool, client: AdminClient) -> None:
    """Show the current or last release, with the results of its gates."""
    found = _find(client, model)
    if not found:
        click.echo("There was no release.", err=True)
    for number, view in enumerate(found):
        if number and not as_json:
            click.echo()
        _show(view, as_json=as_json)
    if watch and found:
        _watch(client, model)


@release.command(short_help="Give all traffic to the new revision now.")
@_model_option
@json_option
@server_options
def promote(model: str | None, as_json: bool, client: AdminClient) -> None:
    """Give all traffic to the new revision now, whatever the gates say. The old revision finishes its requests."""
    _show(client.promote_release(model), as_json=as_json)


@release.command(short_help="Take the new revision out of service.")
@_model_option
@json_option
@server_options
def rollback(model: str | None, as_json: bool, client: AdminClient) -> None:
    """Take the new revision out of service. It finishes its requests first."""
    _show(client.roll_back_release(model), as_json=as_json)


def _settings(pairs: tuple[str, ...]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f"--set wants NAME=VALUE, not '{pair}'.")
        settings[name.strip().replace("-", "_")] = value.strip()
    return settings


def _policy(
    *, steps: str | None, mirror: float | None, stage_s: float | None, **gates: Any
) -> dict[str, Any]:
    policy: dict[str, Any] = {}
    if steps is not None:
        try:
            policy["canary_shares"] = [float(share) for share in steps.split(",")]
        except ValueError:
            raise ConfigError(f"--steps wants numbers such as 0.05,0.5, not '{steps}'.") from None
    if mirror is not None:
        policy["mirrored_share"] = mirror
    if stage_s is not None:
        policy["min_stage_s"] = stage_s
    given = {name: gates[name] for name in _GATE_FLAGS if gates[name] is not None}
    return policy | ({"gates": given} if given else {})


def _find(client: AdminClient, model: str | None) -> list[ReleaseView]:
    return [view for view in client.cluster().releases if model in (None, view.model)]


def _watch(client: AdminClient, model: str | None) -> None:
    """Print one line for every change until all releases are over. Fails if a release was rolled back."""
    seen: dict[str, tuple[str, int]] = {}
    while True:
        views = _find(client, model)
        for view in views:
            stage = (view.stage, view.step)
            if seen.get(view.id) != stage:
                seen[view.id] = stage
                click.echo(f"{shown_time(view.since)}  {_stage(view)}: {view.reason.replace('_', ' ')}")
        if all(view.is_over for view in views):
            break
        time.sleep(WATCH_INTERVAL_S)
    for view in views:
        if view.stage == "rolled_back":
            raise UsageError(f"The release {view.id} was rolled back.")


def _show(view: ReleaseView, *, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    facts = [
        ("release", f"{view.id} of {view.model}"),
        ("revisions", f"{view.stable} → {view.candidate}"),
        ("stage", _stage(view)),
        ("since", shown_time(view.since)),
    ]
    if view.reason:
        facts.append(("reason", view.reason.replace("_", " ")))
    facts += [(f"gate {gate.gate}", f"{gate.result}: {gate.sentence}") for gate in view.gates]
    print_facts(facts)


def _stage(view: ReleaseView) -> str:
    name = view.stage.replace("_", " ")
    if view.stage == "canary":
        return f"canary, {view.candidate_share:.0%} of requests"
    if view.stage == "shadow":
        return f"shadow, {view.mirrored_share:.0%} of requests mirrored"
    return name


WATCH_EXPERIMENT_S = 2.0

_watch_experiment_option = click.option(
    "--watch", is_flag=True, help="Follow the experiment until it is over."
)


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


@experiment.command("start", short_help="Start an experiment.")
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
@_watch_experiment_option
@json_option
@server_options
def start_experiment(
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
    client: AdminClient,
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
    view = client.start_experiment(order)
    if watch:
        view = _watch_experiment(client, view)
    _show_experiment(view, as_json=as_json)


@experiment.command("status", short_help="Show the current or last experiment.")
@_model_option
@_watch_experiment_option
@json_option
@server_options
def experiment_status(model: str | None, watch: bool, as_json: bool, client: AdminClient) -> None:
    """Show the current or last experiment, with its interval, its guard rails and its verdict."""
    found = [view for view in client.experiments() if model in (None, view.model)]
    if not found:
        click.echo("There was no experiment.", err=True)
    for number, view in enumerate(found):
        if number and not as_json:
            click.echo()
        _show_experiment(_watch_experiment(client, view) if watch else view, as_json=as_json)


@experiment.command("stop", short_help="End the experiment now.")
@_model_option
@json_option
@server_options
def stop_experiment(model: str | None, as_json: bool, client: AdminClient) -> None:
    """End the experiment. The replicas from before come back first, and no request is lost."""
    _show_experiment(client.stop_experiment(model), as_json=as_json)


def _watch_experiment(client: AdminClient, view: ExperimentView) -> ExperimentView:
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
        time.sleep(WATCH_EXPERIMENT_S)


def _progress(view: ExperimentView) -> str:
    counts = f"{view.a.num_requests} and {view.b.num_requests} requests"
    return f"{counts}, {view.num_windows} windows, difference {_difference(view)}"


def _difference(view: ExperimentView) -> str:
    found = view.difference
    if found is None:
        return "unknown"
    return f"{found.mean:+.3f} ({view.confidence:.0%}: {found.low:+.3f} to {found.high:+.3f})"


def _show_experiment(view: ExperimentView, *, as_json: bool) -> None:
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
