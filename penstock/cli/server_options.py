"""Flags of commands that speak to a running server. Light: `penstock --help` imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from penstock.cli.environment import API_KEY_VARIABLE, URL_VARIABLE

DEFAULT_URL = "http://127.0.0.1:8000"
Command = TypeVar("Command", bound=Callable[..., Any])


def server_options(command: Command) -> Command:
    """--url and --api-key, for commands that speak to a running server."""
    command = click.option(
        "--api-key",
        envvar=API_KEY_VARIABLE,
        show_envvar=True,
        metavar="TEXT",
        help="Key with the scope admin, where the server asks for keys.",
    )(command)
    return click.option(
        "--url",
        default=DEFAULT_URL,
        envvar=URL_VARIABLE,
        show_envvar=True,
        show_default=True,
        metavar="URL",
        help="The server.",
    )(command)
