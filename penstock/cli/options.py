"""Flags of commands: one for each setting of `serve.config`, and those that name a running server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import inspect as types

from penstock.core.config import ServeConfig
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import StoreConfig
from penstock.serve.config import (
    ENGINE_SECTIONS,
    SERVE_SECTIONS,
    STORE_SECTIONS,
    Section,
    Setting,
    read_config_file,
    resolve,
    settings,
)
from penstock.serve.environment import (
    API_KEY_VARIABLE,
    CONFIG_VARIABLE,
    DATA_DIR_VARIABLE,
    DATABASE_URL_VARIABLE,
    FILES_URL_VARIABLE,
    JOIN_TOKEN_VARIABLE,
    OTLP_ENDPOINT_VARIABLE,
    RAY_ADDRESS_VARIABLE,
    REDIS_URL_VARIABLE,
    REGISTRY_VARIABLE,
    URL_VARIABLE,
)

DEFAULT_URL = "http://127.0.0.1:8000"

_ENVIRONMENT = {
    "api_key": API_KEY_VARIABLE,
    "otlp_endpoint": OTLP_ENDPOINT_VARIABLE,
    "data_dir": DATA_DIR_VARIABLE,
    "database_url": DATABASE_URL_VARIABLE,
    "files_url": FILES_URL_VARIABLE,
    "redis_url": REDIS_URL_VARIABLE,
    "ray_address": RAY_ADDRESS_VARIABLE,
    "registry": REGISTRY_VARIABLE,
    "join_token": JOIN_TOKEN_VARIABLE,
}
# Names of the same settings in other servers.
_ALIASES = {
    "data_parallel_size": "-dp",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
}

_REPEATED = ("served_model_name", "api_key")  # settings that are one text, whose flags can be repeated

# The parameter has a name of its own, because config_options unites it with --model.
model_argument = click.argument("positional_model", metavar="[MODEL]", required=False)

_SECTIONS: dict[type[msgspec.Struct], tuple[Section, ...]] = {
    ServeConfig: SERVE_SECTIONS,
    EngineConfig: ENGINE_SECTIONS,
    StoreConfig: STORE_SECTIONS,
}


def config_options(
    kind: type[ServeConfig] | type[EngineConfig] | type[StoreConfig],
) -> Callable[[Callable[..., Any]], Any]:
    """Give a command the flags of `kind` and `--config`; the function gets the result as `config`."""
    sections = _SECTIONS[kind]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_config(*args: Any, config_file: Path | None, **given: Any) -> Any:
            flags = {
                name: given.pop(name)
                for name, setting in settings().items()
                if setting.section in sections and name in given
            }
            if "api_key" in flags:
                flags["api_key"] = _key_given_once(flags["api_key"])
            if flags.get("served_model_name"):
                flags["served_model_name"] = ",".join(flags["served_model_name"])
            if "model" in flags:
                flags["model"] = _model_given_once(flags["model"], given.pop("positional_model", None))
            resolved = resolve(read_config_file(config_file) if config_file else {}, flags)
            if kind is EngineConfig and resolved.cluster.replicas > 1 and flags.get("data_parallel_size"):
                raise ConfigError(
                    "This command runs one engine, and --data-parallel-size without --enable-expert-parallel asks "
                    "for several.",
                    hint="Add --enable-expert-parallel, for a mixture of experts, or leave the flag out.",
                )
            parts = {ServeConfig: resolved, EngineConfig: resolved.engine, StoreConfig: resolved.store}
            return function(*args, config=parts[kind], **given)

        own = list(getattr(function, "__click_params__", []))
        config_file = click.Option(
            ["--config", "config_file"],
            type=click.Path(path_type=Path),
            envvar=CONFIG_VARIABLE,
            show_envvar=True,
            metavar="FILE",
            help="TOML file with any of the settings below; flags win over it.",
        )
        generated = [SettingOption(setting) for setting in settings().values() if setting.section in sections]
        # click expects parameters in reverse, because decorators run from the bottom up.
        with_config.__click_params__ = [*reversed(generated), config_file, *own]  # type: ignore[attr-defined]
        return with_config

    return decorate


def _model_given_once(flag: str | None, positional: str | None) -> str | None:
    """Return the model, which may be given as an argument or as --model, but not as both."""
    if flag is not None and positional is not None and flag != positional:
        raise ConfigError(
            f"Two models were given, '{positional}' and '{flag}'.",
            hint="Name the model once, as an argument or with --model, and repeat a flag to give it more values.",
        )
    return flag if positional is None else positional


def _key_given_once(keys: Sequence[str]) -> str | None:
    """Return the key. Raises ConfigError for several: taking the last one would refuse callers with the others."""
    if len(set(keys)) > 1:
        raise ConfigError("--api-key takes one key.", hint="Make more keys with 'penstock keys create'.")
    return keys[0] if keys else None


class SettingOption(click.Option):
    """A flag made from a Setting. Its value is None unless the user gives it, so that the file's value counts."""

    def __init__(self, setting: Setting) -> None:
        is_switch = isinstance(setting.value_type, types.BoolType)
        declaration = setting.flag + (f"/--no-{setting.flag[2:]}" if is_switch else "")
        described_default = f"  [default: {_shown(setting.default)}]" if setting.has_default else ""
        super().__init__(
            [declaration, *_ALIASES.get(setting.name, "").split(), setting.name],
            default=None,
            is_flag=is_switch,
            multiple=setting.is_list or setting.name in _REPEATED,
            type=click.BOOL if is_switch else click.STRING,
            metavar=None if is_switch else setting.metavar,
            envvar=_ENVIRONMENT.get(setting.name),
            show_envvar=True,
            help=setting.description + described_default,
        )
        self.section = setting.section.title

    def value_from_envvar(self, ctx: click.Context) -> Any:
        value = self.resolve_envvar_value(ctx)
        return (value,) if self.multiple and value is not None else super().value_from_envvar(ctx)


def _shown(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else f"{default}"


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --url and --api-key to a command, which gets a client of that running server as `client`."""

    @functools.wraps(command)
    def with_client(*args: Any, url: str, api_key: str | None, **given: Any) -> Any:
        from penstock.cli.clients import AdminClient  # an import that other commands need not wait for

        with closing(AdminClient(url, api_key)) as client:
            return command(*args, client=client, **given)

    with_key = click.option(
        "--api-key",
        envvar=API_KEY_VARIABLE,
        show_envvar=True,
        metavar="TEXT",
        help="Key with the scope admin, if the server asks for keys.",
    )(with_client)
    return click.option(
        "--url",
        default=DEFAULT_URL,
        envvar=URL_VARIABLE,
        show_envvar=True,
        show_default=True,
        metavar="URL",
        help="URL of the server.",
    )(with_key)
