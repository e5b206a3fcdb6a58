"""`penstock serve`: settle the configuration, have the model on disk, then hand over to the composition root."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import stderr_console
from penstock.cli.models import fetch_model
from penstock.cli.options import config_options, model_argument
from penstock.core.config import ServeConfig, ServerConfig
from penstock.core.errors import ConfigError
from penstock.core.messages import EngineReady, LoadProgress
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger(__name__)


@click.command(cls=PenstockCommand, short_help="Serve a model over an OpenAI-compatible API.")
@model_argument
@config_options(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API, with a chat page at /.

    MODEL is a known name (see `penstock pull --list`), a Hugging Face id, a folder with safetensors, or a .gguf
    file; without one it is smollm2-135m. A known model that is not on disk yet is fetched first.

    \b
      penstock serve
      penstock serve qwen2.5-coder-1.5b --port 9000
      penstock serve ./my-model.gguf --max-model-len 4096
    """
    check_exposure(config.server)
    path = fetch_model(config.engine.model.model)

    from penstock.cli import serve_app

    with _load_progress(config.engine.model.model) as (on_progress, stop_progress):

        def on_ready(ready: EngineReady, url: str) -> None:
            stop_progress()
            print_banner(ready, url)

        level = logging.getLevelName(logging.getLogger().level)
        serve_app.run(config, path, on_progress=on_progress, on_ready=on_ready, log_level=level)
    logger.info("stopped")


def check_exposure(server: ServerConfig) -> None:
    """Refuse to be reachable by strangers by accident."""
    if server.api_key == "":
        raise ConfigError(
            "An empty API key protects nothing.", hint="Give --api-key a value, or leave it out."
        )
    if server.api_key is None and not server.allow_open and not _is_loopback(server.host):
        raise ConfigError(
            f"Listening on {server.host} without a key would let anyone who reaches the port use this server.",
            hint="Set PENSTOCK_API_KEY or --api-key; or say --allow-open if that is what you want.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def print_banner(ready: EngineReady, url: str) -> None:
    card = ready.model
    weights = (
        "none"
        if not card.num_parameters
        else f"{card.num_parameters / 1e6:,.0f} M parameters, {card.quantization or card.dtype}"
    )
    console = stderr_console()
    console.print(
        f"\n[bold]Penstock {__version__}[/bold] serves [bold]{card.name}[/bold] at {url}", soft_wrap=True
    )
    rows = (
        ("API", f"{url}/v1"),
        ("Chat page", f"{url}/"),
        ("Model", weights),
        ("Context", f"{card.max_model_len:,} tokens"),
        ("KV cache", f"{ready.num_kv_blocks * ready.block_size:,} tokens"),
        ("Stop", "Ctrl-C lets running answers finish; twice cuts them short"),
    )
    for name, value in rows:
        console.print(f"  [dim]{name:<10}[/dim] {value}", soft_wrap=True)
    console.print()


@contextmanager
def _load_progress(model_name: str) -> Iterator[tuple[Callable[[LoadProgress], None], Callable[[], None]]]:
    """A bar while the engine loads, and how to take it down before the banner is drawn."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = stderr_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Loading {model_name}", total=1.0)

        def report(progress: LoadProgress) -> None:
            bar.update(task, description=progress.stage, completed=progress.fraction)

        yield report, bar.stop
