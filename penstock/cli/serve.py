"""`penstock serve`: check the configuration, fetch the model, run the server, and show its progress and banner.
`penstock engine`, `gateway` and `control`: the roles of a fleet on several machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from penstock import __version__
from penstock.cli.commands import PenstockCommand
from penstock.cli.console import fetch_drafter, fetch_model, stderr_console
from penstock.cli.options import config_options, model_argument
from penstock.core.config import ServeConfig
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import ServerConfig, TenantsConfig
from penstock.core.machine import is_loopback
from penstock.core.messages import EngineReady, LoadProgress, ModelCard
from penstock.models.catalog import BUILT_IN_MODELS
from penstock.serve.environment import announced, bytecode_dir, open_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cluster.early import EarlyProcess

logger = logging.getLogger(__name__)

_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


@click.command(cls=PenstockCommand, short_help="Serve a model over an OpenAI-compatible API.")
@model_argument
@config_options(ServeConfig)
def serve(config: ServeConfig) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API, with a chat page at /.

    MODEL is a known name (see `penstock pull --list`), a Hugging Face id, a name of Ollama's such as
    llama3.2:3b, a folder with safetensors, or a .gguf file; without one it is smollm2-135m. A known model that is not
    on disk yet is fetched first.

    \b
      penstock serve
      penstock serve qwen2.5-coder-1.5b --port 9000
      penstock serve ./my-model.gguf --max-model-len 4096
      penstock serve --external http://gpu-1:8000
    """
    with _early_process(config) as early:
        _serve(config, early)


def _serve(config: ServeConfig, early: EarlyProcess | None) -> None:
    has_keys = keys_were_made(config)
    is_open = check_exposure(config.server, config.tenants, has_keys=has_keys)
    if config.cluster.registry is not None:
        logger.warning("penstock serve joins no shared fleet; penstock engine and penstock gateway do")
    if config.runs_engines:
        more = [msgspec.structs.replace(each, engine=fetch_drafter(each.engine)) for each in config.models]
        config = msgspec.structs.replace(config, engine=fetch_drafter(config.engine), models=tuple(more))
    models = [config.engine, *(more.engine for more in config.models)] if config.runs_engines else []
    paths = [fetch_model(engine.model.model) for engine in models]

    from penstock.serve import server
    from penstock.serve.api_workers import with_api_workers
    from penstock.serve.control import planned_replicas

    config = with_api_workers(config, has_keys=has_keys)
    specs = planned_replicas(config, paths[0], paths[1:]) if paths else []

    with load_progress(config.engine.model.model) as (on_progress, stop_progress), announced() as announce:

        def on_ready(ready: EngineReady | None, url: str) -> None:
            stop_progress()
            announce(url, sorted({spec.model for spec in specs}))
            if ready is None:
                print_gateway_banner([server.url for server in config.external], url, is_open=is_open)
                return
            num_replicas = sum(spec.model == ready.model.name for spec in specs)
            others = sorted({spec.model for spec in specs} - {ready.model.name})
            print_banner(ready, url, is_open=is_open, num_replicas=num_replicas, others=others)

        level = logging.getLevelName(logging.getLogger().level)
        server.run(
            config,
            specs,
            is_open=is_open,
            on_progress=on_progress,
            on_ready=on_ready,
            log_level=level,
            early=early,
        )
    logger.info("stopped")


@contextmanager
def _early_process(config: ServeConfig) -> Iterator[EarlyProcess | None]:
    """Start a process that imports torch while this one prepares. Yields None if no local engine will need it."""
    is_local = config.runs_engines and config.cluster.cluster == "local"
    if not is_local or config.engine.model.model in BUILT_IN_MODELS:
        yield None
        return
    from penstock.cluster.early import EarlyProcess

    with contextlib.closing(EarlyProcess(bytecode_dir())) as early:
        yield early


def check_exposure(server: ServerConfig, tenants: TenantsConfig, *, has_keys: bool) -> bool:
    """Return whether callers need no key. Raises ConfigError for a public address without keys or --allow-open."""
    if server.api_key == "":
        raise ConfigError(
            "An empty API key protects nothing.", hint="Give --api-key a value, or leave it out."
        )
    has_other_ways = server.api_key is not None or tenants.oidc is not None
    if has_other_ways or (has_keys if tenants.require_keys is None else tenants.require_keys):
        if not has_keys and not has_other_ways:
            logger.warning(
                "no key exists yet, so every request is refused; make a key with: penstock keys create"
            )
        return False
    if not is_loopback(server.host):
        if not server.allow_open:
            raise ConfigError(
                f"Listening on {server.host} without a key would let anyone who reaches the port use this server.",
                hint="Make a key with 'penstock keys create', or set PENSTOCK_API_KEY or --api-key; "
                "or say --allow-open if that is what you want.",
            )
        logger.warning(
            "WARNING: this server listens on %s and asks for no key: anyone who reaches the port can use it, "
            "administer it and read everyone's data",
            server.host,
        )
    return True


def keys_were_made(config: ServeConfig) -> bool:
    from penstock.gateway.tenants.directory import Directory

    async def were_made(directory: Directory) -> bool:
        """Return whether keys were ever made. Expired and revoked keys count: a server that once asked for keys never
        opens by itself."""
        was_made = await directory.has_keys()
        if was_made and not await directory.has_keys(only_live=True):
            logger.warning("every key has expired or was revoked; make one with: penstock keys create")
        return was_made

    database = open_database(config.store)
    try:
        return asyncio.run(were_made(Directory(database)))
    finally:
        database.close()


def print_banner(
    ready: EngineReady, url: str, *, is_open: bool, num_replicas: int = 1, others: Sequence[str] = ()
) -> None:
    """Print the address, the model and the limits of a server. `others` are the further models."""
    card = ready.model
    each = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
    rows = [
        ("Chat page", f"{url}/"),
        ("Model", describe_weights(card)),
        *([("Also", ", ".join(others))] if others else []),
        *([("Embeddings", describe_vectors(card))] if card.embedding_size else []),
        *([("GPU", card.device)] if card.device else []),
        ("Context", f"{card.max_model_len:,} tokens"),
        ("KV cache", f"{describe_kv_cache(ready)}{each}"),
    ]
    _print_banner(f"serves [bold]{card.name}[/bold] at {url}", url, rows, is_open=is_open)


def describe_kv_cache(ready: EngineReady) -> str:
    """Return how many tokens the KV cache holds, and how many requests of the longest context."""
    longest = ready.model.max_model_len
    contexts = ready.num_contexts or ready.num_kv_blocks * ready.block_size / longest
    return f"{int(contexts * longest):,} tokens ({contexts:,.1f} contexts of {longest:,})"


def describe_weights(card: ModelCard) -> str:
    """Return the number of parameters, the precision in which the weights are kept and computed, and what is
    rounded."""
    if not card.num_parameters:
        return "none"
    units = ((1e9, " B"), (1e6, " M"), (1e3, " K"), (1, ""))
    unit, word = next((unit, word) for unit, word in units if card.num_parameters >= unit)
    number = card.num_parameters / unit
    count = f"{number:,.1f}" if word == " B" and number < 100 else f"{number:,.0f}"
    kept_bits = 8 * card.weight_bytes / card.num_parameters
    precision = card.dtype
    if card.quantization or kept_bits < 0.9 * _DTYPE_BITS.get(card.dtype, 0):
        method = f"{card.quantization}, " if card.quantization else ""
        precision = f"{method}{kept_bits:.1f} bits per weight, computed in {card.dtype}"
    rounding = f"; {card.rounding}" if card.rounding else ""
    code = "; run by the code of transformers" if card.implementation == "transformers" else ""
    return f"{count}{word} parameters, {precision}{rounding}{code}"


def describe_vectors(card: ModelCard) -> str:
    """Describe the model's vectors, scores or labels, the pooling, and the file that sets the pooling."""
    pooler = card.pooler
    pooling = f"pooling {card.pooling!r}, {f'from {pooler.source}' if pooler.source else 'by default'}"
    if pooler.scores_pairs:
        return f"a score for each pair of texts; {pooling}"
    if pooler.labels:
        return f"{len(pooler.labels)} labels; {pooling}"
    return f"{card.embedding_size:,} dimensions{'' if pooler.normalizes else ', not normalized'}; {pooling}"


def print_gateway_banner(servers: Sequence[str], url: str, *, is_open: bool) -> None:
    """Print the address of a server that has no engines and forwards requests to `servers`."""
    _print_banner(f"at {url} passes requests on", url, [("Servers", ", ".join(servers))], is_open=is_open)


def _print_banner(title: str, url: str, rows: Sequence[tuple[str, str]], *, is_open: bool) -> None:
    console = stderr_console()
    console.print(f"\n[bold]Penstock {__version__}[/bold] {title}", soft_wrap=True)
    keys = "not required" if is_open else "required; see penstock keys"
    stop = "Ctrl-C lets running responses finish; a second Ctrl-C ends them"
    for name, value in (("API", f"{url}/v1"), *rows, ("Keys", keys), ("Stop", stop)):
        console.print(f"  [dim]{name:<10}[/dim] {value}", soft_wrap=True)
    console.print()


@contextmanager
def load_progress(model_name: str) -> Iterator[tuple[Callable[[LoadProgress], None], Callable[[], None]]]:
    """Show a progress bar while the engine loads. Yields the functions that report progress and remove the bar."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = stderr_console()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Loading {model_name}", total=1.0)

        def report(progress: LoadProgress) -> None:
            bar.update(task, description=progress.stage, completed=progress.fraction)

        yield report, bar.stop


@click.command(cls=PenstockCommand, short_help="Run engines of a shared fleet on this machine.")
@model_argument
@config_options(ServeConfig)
def engine(config: ServeConfig) -> None:
    """Run engines for MODEL, and let the gateways of a shared fleet use them.

    Engines listen on --engine-host and answer only to machines with the fleet's join token. They take no HTTP
    requests: `penstock gateway` does, on this machine or others. SIGTERM lets running answers finish.

    \b
      export PENSTOCK_REGISTRY=redis://10.0.0.2:6379/0 PENSTOCK_JOIN_TOKEN=…
      penstock engine --engine-host 10.0.0.5
      penstock engine qwen2.5-coder-1.5b --engine-host 10.0.0.6 --replicas 2
    """
    from penstock.serve import shared_fleet
    from penstock.serve.control import planned_replicas

    shared_fleet.check_role(config, "engine")
    more = [msgspec.structs.replace(each, engine=fetch_drafter(each.engine)) for each in config.models]
    config = msgspec.structs.replace(config, engine=fetch_drafter(config.engine), models=tuple(more))
    models = [config.engine, *(each.engine for each in config.models)]
    paths = [fetch_model(each.model.model) for each in models]
    specs = planned_replicas(config, paths[0], paths[1:], is_shared=True)
    with (
        load_progress(config.engine.model.model) as (on_progress, stop_progress),
        ready_file(config) as touch,
    ):

        def on_ready(ready: EngineReady, host: str) -> None:
            stop_progress()
            touch()
            names = ", ".join(sorted({spec.model for spec in specs}))
            what = "1 engine serves" if len(specs) == 1 else f"{len(specs)} engines serve"
            click.echo(f"{host}: {what} {names} to the gateways of the fleet.")

        level = logging.getLevelName(logging.getLogger().level)
        shared_fleet.run_engines(config, specs, on_progress=on_progress, on_ready=on_ready, log_level=level)
    logger.info("stopped")


@contextmanager
def ready_file(config: ServeConfig) -> Iterator[Callable[[], None]]:
    """Yield a function that makes the file of --ready-file. The file of an earlier process is removed, and this
    process's own at its end."""
    if config.cluster.ready_file is None:
        yield lambda: None
        return
    path = Path(config.cluster.ready_file)
    try:
        path.touch()  # now, and not after minutes of loading
        path.unlink()
    except OSError as error:
        raise ConfigError(
            f"The file {path} cannot be written: {error.strerror}.",
            hint="Name another one with --ready-file.",
        ) from error
    try:
        yield path.touch
    finally:
        with suppress(OSError):
            path.unlink()


@click.command(cls=PenstockCommand, short_help="Serve a shared fleet over an OpenAI-compatible API.")
@config_options(ServeConfig)
def gateway(config: ServeConfig) -> None:
    """Serve the engines of a shared fleet over an OpenAI-compatible HTTP API.

    Any number of gateways may serve one fleet. Give all of them one database (PENSTOCK_DATABASE_URL) for keys, usage
    and stored responses, and one Redis (PENSTOCK_REDIS_URL) for limits.

    \b
      export PENSTOCK_REGISTRY=redis://10.0.0.2:6379/0 PENSTOCK_JOIN_TOKEN=…
      penstock gateway --port 8000
    """
    from penstock.serve import shared_fleet

    shared_fleet.check_role(config, "gateway")
    is_open = check_exposure(config.server, config.tenants, has_keys=keys_were_made(config))
    if config.store.database_url is None:
        logger.warning(
            "this gateway keeps keys and usage in a file of its own; --database-url names a database to share"
        )
    with announced() as announce:

        def on_ready(ready: EngineReady, url: str) -> None:
            announce(url, [ready.model.name])
            print_banner(ready, url, is_open=is_open)

        shared_fleet.run_gateway(config, is_open=is_open, on_ready=on_ready)
    logger.info("stopped")


@click.command(cls=PenstockCommand, short_help="Lead a shared fleet: scaling, releases, hosts.")
@config_options(ServeConfig)
def control(config: ServeConfig) -> None:
    """Lead a shared fleet: decide how many replicas there are, on which hosts, and which revision answers.

    Start it on several machines. One process leads, and the others stand by: when the leader is lost, another
    continues within 10 s. Hosts start more replicas than their own if `penstock engine` has --max-replicas. Without
    bounds here, the number of replicas moves between the replicas that hosts started and those that hosts have room
    for.

    \b
      export PENSTOCK_REGISTRY=redis://10.0.0.2:6379/0 PENSTOCK_JOIN_TOKEN=…
      penstock control --control-host 10.0.0.7 --min-replicas 2 --max-replicas 8
    """
    from penstock.serve import shared_fleet

    shared_fleet.check_role(config, "control")
    if config.store.database_url is None:
        logger.warning(
            "this process keeps releases in a file of its own; --database-url names a database to share"
        )

    with ready_file(config) as touch:

        def on_ready(name: str) -> None:
            touch()
            click.echo(f"{name}: ready to lead the fleet.")

        shared_fleet.run_control(config, on_ready=on_ready)
    logger.info("stopped")
