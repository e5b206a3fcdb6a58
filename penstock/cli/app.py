"""The command `penstock` and its subcommands, all of which are imported here and therefore light."""

from __future__ import annotations

import click

from penstock.cli.bench import bench
from penstock.cli.chat import chat
from penstock.cli.commands import PenstockCommand, PenstockGroup
from penstock.cli.doctor import doctor
from penstock.cli.generate import generate
from penstock.cli.keys import keys
from penstock.cli.pull import pull
from penstock.cli.quantize import quantize
from penstock.cli.release import release
from penstock.cli.serve import serve
from penstock.cli.top import top
from penstock.cli.usage import usage
from penstock.cli.workspaces import audit, organizations, workspaces
from penstock.version import __version__


@click.group(
    cls=PenstockGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
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


for command in (
    serve,
    top,
    release,
    pull,
    chat,
    generate,
    quantize,
    keys,
    workspaces,
    organizations,
    audit,
    usage,
    bench,
    doctor,
    version,
):
    penstock.add_command(command)
