"""The command `penstock`. It imports only the subcommand that is called."""

from __future__ import annotations

from importlib import import_module

import click

from penstock import __version__
from penstock.cli.commands import PenstockCommand, PenstockGroup

# Each subcommand and the module of this room that defines it, in the order that a newcomer needs them in.
MODULES = {
    "serve": "serve",
    "engine": "serve",
    "gateway": "serve",
    "control": "serve",
    "top": "cluster",
    "release": "release",
    "experiment": "release",
    "settings": "database",
    "cluster": "cluster",
    "pull": "models",
    "list": "models",
    "show": "models",
    "rm": "models",
    "ps": "models",
    "chat": "chat",
    "generate": "chat",
    "quantize": "models",
    "draft": "draft",
    "keys": "keys",
    "workspaces": "tenants",
    "organizations": "tenants",
    "audit": "tenants",
    "usage": "database",
    "database": "database",
    "bench": "bench",
    "plan": "plan",
    "simulate": "simulate",
    "tune": "simulate",
    "doctor": "doctor",
    "version": "app",
}


_NAMES = {"list": "list_models"}  # functions whose commands have the name of a Python built-in


class LazyGroup(PenstockGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        module = import_module(f"penstock.cli.{MODULES[cmd_name]}")
        command: click.Command = getattr(module, _NAMES.get(cmd_name, cmd_name))
        return command


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="penstock", message="%(prog)s %(version)s")
def penstock() -> None:
    """Penstock serves large language models to many people at once.

    Start with `penstock serve`, which fetches a small model and serves it on http://127.0.0.1:8000, or with
    `penstock chat`.
    """


@click.command(cls=PenstockCommand, short_help="Print the version.")
def version() -> None:
    """Print the version."""
    click.echo(__version__)
