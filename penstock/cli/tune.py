"""`penstock tune`: search policy sets in the simulator for the best objective on a load."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import json_option, print_json, stderr_console
from penstock.cli.simulations import SimulationRuns, duration
from penstock.core.errors import UsageError

if TYPE_CHECKING:
    from penstock.planner.tune import Check, Evaluation
    from penstock.simulator import SimulationConfig

_LONG_S = 60.0


@click.command(cls=PenstockCommand, short_help="Search for better scheduling policies, in virtual time.")
@click.argument("scenario", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--evaluations", "max_evaluations", type=click.IntRange(2, 100_000), default=60, show_default=True,
    metavar="N", help="Most policy sets to simulate.",
)  # fmt: skip
@click.option("--only", "only", multiple=True, metavar="SETTING",
              help="A setting to change; may be given several times. Default: all that can matter.")  # fmt: skip
@click.option("--name", default="tuned", show_default=True, metavar="NAME", help="Name of the proposed set.")
@json_option
def tune(scenario: Path, max_evaluations: int, only: tuple[str, ...], name: str, as_json: bool) -> None:
    """Search policy sets for the smallest objective on the load of SCENARIO, a TOML file of `penstock simulate`.

    The load may be recorded: `traffic.trace` in the scenario names the file. The best set is compared with the
    settings in use on requests that the search has not seen, and is printed as a table for the settings file. Ctrl-C
    ends the search; the best set so far is printed.

    \b
      penstock tune fleet.toml >> settings.toml
      penstock experiment start default tuned
    """
    from penstock.core.policy import check_names
    from penstock.planner.scenario import read_scenario
    from penstock.planner.tune import SPACE, check, mean_gain, split

    unknown = [each for each in only if each.replace("-", "_") not in SPACE]
    if unknown:
        raise UsageError(f"{unknown[0]} is no setting to tune.", hint=f"There are: {', '.join(SPACE)}.")
    settings = tuple(each.replace("-", "_") for each in only)
    config = read_scenario(scenario)
    load, checks = split(config)
    evaluations = _search(load, max_evaluations, settings)
    best = next(each for each in reversed(evaluations) if each.is_best)
    check_names({name: best.policy})
    compared: tuple[Check, ...] = ()
    if best.number > 1 and checks:
        compared = check(checks, best.policy, SimulationRuns("check", checks[0], 2 * len(checks)).simulate)
    if as_json:
        print_json({"name": name, "evaluations": evaluations, "policy": best.policy, "checks": compared})
        return
    console = stderr_console()
    if best.number == 1:
        console.print(
            f"None of {len(evaluations)} policy sets is better than the settings in use on this load."
        )
        return
    before, after = evaluations[0].objective.total, best.objective.total
    console.print(
        f"objective {before:.4f} → {after:.4f} on the load of the search ({1 - after / before:.1%} less)"
    )
    if compared and mean_gain(compared) <= 0.0:
        console.print(f"{_shown(compared)}: the gain does not hold. Search with a longer load.")
        return
    if compared:
        console.print(f"{_shown(compared)} ({mean_gain(compared):.1%} less)")
    click.echo(best.policy.to_toml(name), nl=False)
    console.print(f"Try it on live traffic: penstock experiment start default {name} --share 0.5")


def _shown(checks: tuple[Check, ...]) -> str:
    pairs = ", ".join(f"{each.before:.4f} → {each.after:.4f}" for each in checks)
    return f"objective {pairs} on requests that the search has not seen"


def _search(load: SimulationConfig, max_evaluations: int, settings: tuple[str, ...]) -> list[Evaluation]:
    """Run the search. Prints an estimate of the time if the search takes long."""
    from penstock.planner.tune import search

    console, evaluations, began_s = stderr_console(), [], time.monotonic()
    runs = SimulationRuns("search", load, max_evaluations)
    try:
        for each in search(load, runs.simulate, max_evaluations=max_evaluations, settings=settings):
            evaluations.append(each)
            if each.number == 1:
                each_s = time.monotonic() - began_s
                if each_s * max_evaluations > _LONG_S:
                    total = duration(each_s * max_evaluations)
                    console.print(
                        f"{max_evaluations} simulations take up to {total}. Ctrl-C ends the search; --evaluations "
                        "and a shorter load make it quicker."
                    )
            if each.is_best:
                console.print(f"{each.number:>4}  objective {each.objective.total:.4f}  {each.change}")
    except KeyboardInterrupt:
        if not evaluations:
            raise
        console.print(f"Ended after {len(evaluations)} simulations.")
    return evaluations
