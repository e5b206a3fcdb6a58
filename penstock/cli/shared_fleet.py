"""`penstock engine`, `penstock gateway` and `penstock control`: the roles of a fleet on several machines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import msgspec

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import fetch_drafter, fetch_model
from penstock.cli.options import config_options, model_argument
from penstock.cli.serve import check_exposure, keys_were_made, load_progress, print_banner
from penstock.core.config import ServeConfig
from penstock.core.errors import ConfigError
from penstock.core.messages import EngineReady
from penstock.serve.running import announced

logger = logging.getLogger(__name__)


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
