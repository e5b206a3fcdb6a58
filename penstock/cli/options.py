"""Flags and TOML keys, both generated from the structs of core/config.py.

A field `max_num_seqs` of SchedulerConfig is the flag `--max-num-seqs`, and in a file the key `max_num_seqs`,
either at the top or in the table `[scheduler]`. Flags win over environment variables, those over the file,
and the file over the defaults. Knows no command, and of settings by name only the model and the key.
"""

from __future__ import annotations

import functools
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import inspect as types

from penstock.cli.commands import did_you_mean
from penstock.cli.environment import (
    API_KEY_VARIABLE,
    CONFIG_VARIABLE,
    DATA_DIR_VARIABLE,
    DATABASE_URL_VARIABLE,
    OTLP_ENDPOINT_VARIABLE,
    REDIS_URL_VARIABLE,
)
from penstock.core.config import (
    CacheConfig,
    EngineConfig,
    GatewayConfig,
    LedgerConfig,
    ModelConfig,
    OidcConfig,
    SchedulerConfig,
    ServeConfig,
    ServerConfig,
    StoreConfig,
    TelemetryConfig,
    TenantsConfig,
)
from penstock.core.errors import ConfigError

_ENVIRONMENT = {
    "api_key": API_KEY_VARIABLE,
    "otlp_endpoint": OTLP_ENDPOINT_VARIABLE,
    "data_dir": DATA_DIR_VARIABLE,
    "database_url": DATABASE_URL_VARIABLE,
    "redis_url": REDIS_URL_VARIABLE,
}

# Its own name keeps it apart from --model, with which config_options unites it.
model_argument = click.argument("positional_model", metavar="[MODEL]", required=False)


@dataclass(frozen=True, slots=True)
class Section:
    """One struct of settings: a table in the file, a heading in `--help`."""

    table: str
    title: str
    struct: type[msgspec.Struct]


ENGINE_SECTIONS = (
    Section("model", "Model", ModelConfig),
    Section("cache", "KV cache", CacheConfig),
    Section("scheduler", "Scheduler", SchedulerConfig),
    Section("engine", "Engine", EngineConfig),
)
STORE_SECTIONS = (Section("store", "Storage", StoreConfig),)
SERVE_SECTIONS = (
    *ENGINE_SECTIONS,
    Section("gateway", "Gateway", GatewayConfig),
    *STORE_SECTIONS,
    Section("ledger", "Usage", LedgerConfig),
    Section("tenants", "Keys", TenantsConfig),
    Section("server", "Server", ServerConfig),
    Section("telemetry", "Logs and traces", TelemetryConfig),
)
# Tables that only a file can hold, each read as a whole.
FILE_TABLES: dict[str, type[msgspec.Struct]] = {"oidc": OidcConfig}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    section: Section
    annotation: Any  # what msgspec.convert checks a value against
    value_type: types.Type  # the same without None and metadata
    description: str
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def expectation(self) -> str:
        """What a value must be, as the end of a sentence that begins `--flag must be`."""
        match self.value_type:
            case types.LiteralType(values=values):
                return str(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, values))}"
            case types.BoolType():
                return "true or false"
            case types.IntType() | types.FloatType() as number:
                noun = "a whole number" if isinstance(number, types.IntType) else "a number"
                return f"{noun}{_bounds(number)}"
            case _:
                return "a text"

    @property
    def metavar(self) -> str:
        match self.value_type:
            case types.LiteralType(values=values):
                return "|".join(map(str, values))
            case types.IntType():
                return "N"
            case types.FloatType():
                return "NUMBER"
            case _:
                return "TEXT"

    def check(self, value: Any, label: str, *, from_text: bool) -> Any:
        """`value` in the type of the setting, or a ConfigError that calls it `label`."""
        try:
            return msgspec.convert(value, self.annotation, strict=not from_text)
        except msgspec.ValidationError:
            raise ConfigError(
                f"{label} must be {self.expectation}, not {value!r}.", hint=self.description
            ) from None


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by name. Names are unique across sections, because flags share one space."""
    found: dict[str, Setting] = {}
    for section in SERVE_SECTIONS:
        hints = typing.get_type_hints(section.struct, include_extras=True)
        info = types.type_info(section.struct)
        assert isinstance(info, types.StructType)
        for field in info.fields:
            value_type, description = _unwrap(field.type)
            if isinstance(value_type, types.StructType):
                continue
            assert field.name not in found, f"two settings are called {field.name}"
            found[field.name] = Setting(
                field.name, section, hints[field.name], value_type, description, field.default
            )
    return found


def _unwrap(declared: types.Type) -> tuple[types.Type, str]:
    """The type of a value that is not None, and its description."""
    if isinstance(declared, types.UnionType):
        declared = next(member for member in declared.types if not isinstance(member, types.NoneType))
    description = ""
    while isinstance(declared, types.Metadata):
        description = (declared.extra_json_schema or {}).get("description", description)
        declared = declared.type
    return declared, description


def _bounds(number: types.IntType | types.FloatType) -> str:
    """` from 0 to 1`, ` above 0`, or nothing."""
    if number.ge is not None and number.le is not None:
        return f" from {number.ge:,} to {number.le:,}"
    limits = (("above", number.gt), ("of at least", number.ge), ("below", number.lt), ("at most", number.le))
    words = [f"{word} {limit:,}" for word, limit in limits if limit is not None]
    return " " + " and ".join(words) if words else ""


class SettingOption(click.Option):
    """A flag made from a Setting. It stays None unless the user gives it, so that the file can speak."""

    def __init__(self, setting: Setting) -> None:
        is_switch = isinstance(setting.value_type, types.BoolType)
        declaration = setting.flag + (f"/--no-{setting.flag[2:]}" if is_switch else "")
        described_default = "" if setting.default is None else f"  [default: {_shown(setting.default)}]"
        super().__init__(
            [declaration, setting.name],
            default=None,
            is_flag=is_switch,
            type=click.BOOL if is_switch else click.STRING,
            metavar=None if is_switch else setting.metavar,
            envvar=_ENVIRONMENT.get(setting.name),
            show_envvar=True,
            help=setting.description + described_default,
        )
        self.section = setting.section.title


def _shown(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else f"{default}"


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
            if "model" in flags:
                flags["model"] = _model_given_once(flags["model"], given.pop("positional_model", None))
            resolved = resolve(read_config_file(config_file) if config_file else {}, flags)
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
        # click keeps parameters in reverse, as decorators run from the bottom up.
        with_config.__click_params__ = [*reversed(generated), config_file, *own]  # type: ignore[attr-defined]
        return with_config

    return decorate


def _model_given_once(flag: str | None, positional: str | None) -> str | None:
    """The model as an argument and as a flag are the same thing."""
    if flag is not None and positional is not None and flag != positional:
        raise ConfigError(
            f"Two models were given, '{positional}' and '{flag}'.",
            hint="Name the model once, as an argument or with --model.",
        )
    return flag if positional is None else positional


def resolve(file_values: Mapping[str, Any], flags: Mapping[str, Any]) -> ServeConfig:
    """Lay checked file values and raw flags over the defaults. A flag that is None was not given."""
    values = dict(file_values)
    for name, value in flags.items():
        if value is not None:
            setting = settings()[name]
            values[name] = setting.check(value, setting.flag, from_text=True)
    whole_tables = {table: values.pop(table, None) for table in FILE_TABLES}
    tables: dict[str, dict[str, Any]] = {section.table: {} for section in SERVE_SECTIONS}
    for name, value in values.items():
        tables[settings()[name].section.table][name] = value
    return ServeConfig(
        engine=EngineConfig(
            model=ModelConfig(**tables["model"]),
            cache=CacheConfig(**tables["cache"]),
            scheduler=SchedulerConfig(**tables["scheduler"]),
            **tables["engine"],
        ),
        gateway=GatewayConfig(**tables["gateway"]),
        store=StoreConfig(**tables["store"]),
        ledger=LedgerConfig(**tables["ledger"]),
        tenants=TenantsConfig(**tables["tenants"], oidc=whole_tables["oidc"]),
        server=ServerConfig(**tables["server"]),
        telemetry=TelemetryConfig(**tables["telemetry"]),
    )


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML file by name, each checked."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} is not valid TOML: {error}.") from error

    tables = {section.table for section in SERVE_SECTIONS}
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key in tables and isinstance(value, dict):
            for name, nested in value.items():
                _take(values, path, key, name, nested)
        elif key in FILE_TABLES:
            values[key] = _take_whole(path, key, value)
        else:
            _take(values, path, None, key, value)
    return values


def _take_whole(path: Path, table: str, value: Any) -> msgspec.Struct:
    try:
        return msgspec.convert(value, FILE_TABLES[table])
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{table}] of {path} is wrong: {error}.") from None


def _take(values: dict[str, Any], path: Path, table: str | None, name: str, value: Any) -> None:
    setting = settings().get(name)
    place = f"[{table}] of {path}" if table else str(path)
    if setting is None:
        tables = [] if table else [*FILE_TABLES, *(section.table for section in SERVE_SECTIONS)]
        near = did_you_mean(name.replace("-", "_"), [*settings(), *tables]).strip()
        raise ConfigError(f"There is no setting '{name}', which {place} has.", hint=near or None)
    if table is not None and setting.section.table != table:
        raise ConfigError(
            f"The setting '{name}' does not belong in {place}.",
            hint=f"Move it to [{setting.section.table}], or to the top of the file.",
        )
    if name in values:
        raise ConfigError(f"The setting '{name}' is in {path} twice.")
    values[name] = setting.check(value, f"{name} in {path}", from_text=False)
