"""A server's settings, from the config file and from flags, laid over the defaults of core/config.py.

A field `max_num_seqs` of SchedulerConfig is the key `max_num_seqs` of the file, either at the top or in the table
`[scheduler]`. Flags win over environment variables, environment variables over the file, and the file over the
defaults. A `Setting` knows its type, its description, and the sentence that explains a wrong value.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from penstock.core.config import (
    ClusterConfig,
    ExternalServerConfig,
    ScalingConfig,
    ServeConfig,
    ServingConfig,
)
from penstock.core.engine_config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    parse_hf_overrides,
    parse_sampling_override,
    parse_speculate,
    read_chat_template,
)
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import (
    GatewayConfig,
    LedgerConfig,
    OidcConfig,
    ServerConfig,
    StoreConfig,
    TelemetryConfig,
    TenantsConfig,
)
from penstock.serve.tables import (
    DescribedModel,
    ModelTable,
    also_served,
    external_servers,
    extra_models,
    names_of,
    read_external_tables,
    read_model_tables,
    served_names,
)


@dataclass(frozen=True, slots=True)
class Section:
    """One struct of settings: a table in the file, a heading in `--help`."""

    table: str
    title: str
    struct: type[msgspec.Struct]


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    section: Section
    annotation: Any  # the type that msgspec.convert checks a value against
    value_type: types.Type  # the same without None and metadata
    description: str
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def has_default(self) -> bool:
        """Return whether there is a default to show in `--help`."""
        return self.default not in (None, ())

    @property
    def is_list(self) -> bool:
        """Return whether the flag can be repeated."""
        return isinstance(self.value_type, types.VarTupleType)

    @property
    def expectation(self) -> str:
        """Describe valid values, as the end of a sentence that begins `--flag must be`."""
        match self.value_type:
            case types.LiteralType(values=values):
                return str(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, values))}"
            case types.BoolType():
                return "true or false"
            case types.IntType() | types.FloatType() as number:
                noun = "a whole number" if isinstance(number, types.IntType) else "a number"
                return f"{noun}{_bounds(number)}"
            case types.VarTupleType():
                return "a list of texts"
            case types.StrType(pattern=str()):
                return "a text of the form that its description shows"
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
        """Return `value` in the type of the setting. Raises a ConfigError that calls the value `label`."""
        try:
            return msgspec.convert(value, self.annotation, strict=not from_text)
        except msgspec.ValidationError:
            raise ConfigError(
                f"{label} must be {self.expectation}, not {value!r}.", hint=self.description
            ) from None


def _unwrapped(declared: types.Type) -> types.Type:
    """Return the declared type without None and metadata."""
    if isinstance(declared, types.UnionType):
        declared = next(member for member in declared.types if not isinstance(member, types.NoneType))
    while isinstance(declared, types.Metadata):
        declared = declared.type
    return declared


def _bounds(number: types.IntType | types.FloatType) -> str:
    """Return ` from 0 to 1`, ` above 0`, or an empty string."""
    if number.ge is not None and number.le is not None:
        return f" from {number.ge:,} to {number.le:,}"
    limits = (("above", number.gt), ("of at least", number.ge), ("below", number.lt), ("at most", number.le))
    words = [f"{word} {limit:,}" for word, limit in limits if limit is not None]
    return " " + " and ".join(words) if words else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or an empty string if no choice is similar."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


ENGINE_SECTIONS = (
    Section("model", "Model", ModelConfig),
    Section("cache", "KV cache", CacheConfig),
    Section("scheduler", "Scheduler", SchedulerConfig),
    Section("lora", "LoRA adapters", LoRAConfig),
    Section("parallel", "Parallel ranks", ParallelConfig),
    Section("engine", "Engine", EngineConfig),
)
STORE_SECTIONS = (Section("store", "Storage", StoreConfig),)
SERVE_SECTIONS = (
    *ENGINE_SECTIONS,
    Section("serving", "More models", ServingConfig),
    Section("cluster", "Replicas", ClusterConfig),
    Section("scaling", "Autoscaling", ScalingConfig),
    Section("gateway", "Gateway", GatewayConfig),
    *STORE_SECTIONS,
    Section("ledger", "Usage", LedgerConfig),
    Section("tenants", "Keys", TenantsConfig),
    Section("server", "Server", ServerConfig),
    Section("telemetry", "Logs and traces", TelemetryConfig),
)
# Tables that have no flags. Each is read as a whole.
FILE_TABLES: dict[str, type[msgspec.Struct]] = {"oidc": OidcConfig}
MODEL_TABLES = "models"  # a file may have several
EXTERNAL_FILE = "file of [[external]]"
EXTERNAL_TABLES = "[[external]]"  # a file may have several; "external" without brackets is a setting


@functools.cache
def settings() -> dict[str, Setting]:
    """Return every setting by name. Names are unique across sections, because flags have no sections."""
    found: dict[str, Setting] = {}
    for section in SERVE_SECTIONS:
        hints = typing.get_type_hints(section.struct, include_extras=True)
        info = types.type_info(section.struct)
        assert isinstance(info, types.StructType)
        for field in info.fields:
            hint, value_type = hints[field.name], _unwrapped(field.type)
            if isinstance(value_type, types.StructType):
                continue
            assert field.name not in found, f"two settings are called {field.name}"
            description = next(each for each in hint.__metadata__ if isinstance(each, str))
            found[field.name] = Setting(field.name, section, hint, value_type, description, field.default)
    return found


def resolve(file_values: Mapping[str, Any], flags: Mapping[str, Any]) -> ServeConfig:
    """Combine checked file values, raw flags and defaults. A flag that is None or an empty tuple was not given."""
    given = {
        name: settings()[name].check(value, settings()[name].flag, from_text=True)
        for name, value in flags.items()
        if value not in (None, ())
    }
    values = dict(file_values)
    described: tuple[DescribedModel, ...] = values.pop(MODEL_TABLES, ())
    elsewhere = values.pop(EXTERNAL_TABLES, ())
    external_file: str | None = values.pop(EXTERNAL_FILE, None)
    extra = described
    if described and "model" not in {**values, **given}:  # the first table is the first model
        values = {**values, **described[0].first_settings()}
        extra = described[1:]
    values = _with_replicas({**values, **given})
    external = external_servers(elsewhere, values.get("external", ()))
    whole_tables = {table: values.pop(table, None) for table in FILE_TABLES}
    own_names = served_names(values.pop("served_model_name", None))
    if own_names:
        values["served_model_name"] = own_names[0]
    also = also_served(values.get("also_serve", ()))
    tables = _by_table(values)
    engine = _engine_config(values)
    names = names_of(
        [engine.model.served_model_name or engine.model.model, *own_names[1:]],
        [*described, *also],
        [*extra, *also],
        values.get("lora_modules", ()),
    )
    return ServeConfig(
        engine=engine,
        serving=ServingConfig(**tables["serving"]),
        models=extra_models([*extra, *also], values, _engine_config),
        external=external,
        external_file=external_file,
        external_urls=tuple(values.get("external", ())),
        # External servers without a model mean a gateway without engines.
        runs_engines=not external or "model" in values or bool(also),
        cluster=ClusterConfig(**tables["cluster"]),
        scaling=ScalingConfig(**tables["scaling"]),
        gateway=GatewayConfig(**tables["gateway"], names=names),
        store=StoreConfig(**tables["store"]),
        ledger=LedgerConfig(**tables["ledger"]),
        tenants=TenantsConfig(**tables["tenants"], oidc=whole_tables["oidc"]),
        server=ServerConfig(**tables["server"]),
        telemetry=TelemetryConfig(**tables["telemetry"]),
    )


def external_servers_of(config: ServeConfig) -> tuple[ExternalServerConfig, ...]:
    """Return the external servers, as the file with their tables has them now. Raises ConfigError."""
    if config.external_file is None:
        return config.external
    tables = read_config_file(Path(config.external_file)).get(EXTERNAL_TABLES, ())
    return external_servers(tables, config.external_urls)


def _with_replicas(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with as many replicas as --data-parallel-size says, where it does not say how many ranks
    share experts."""
    size = values.get("data_parallel_size", 1)
    if size == 1 or values.get("enable_expert_parallel"):
        return values
    if values.get("replicas", size) != size:
        raise ConfigError(
            "Without --enable-expert-parallel, --data-parallel-size is another name for --replicas, and the two "
            "differ.",
            hint="Leave one of them out.",
        )
    return {**values, "data_parallel_size": 1, "replicas": size}


def _engine_config(values: Mapping[str, Any]) -> EngineConfig:
    tables = _by_table(values)
    parse_speculate(tables["engine"].get("speculate", EngineConfig().speculate))
    parse_sampling_override(tables["model"].get("override_generation_config", "{}"))
    if (template := tables["model"].get("chat_template")) is not None:
        tables["model"]["chat_template"] = read_chat_template(template)  # engines may run on another machine
    parse_hf_overrides(tables["model"].get("hf_overrides", "{}"))
    return EngineConfig(
        model=ModelConfig(**tables["model"]),
        cache=CacheConfig(**tables["cache"]),
        scheduler=SchedulerConfig(**tables["scheduler"]),
        lora=LoRAConfig(**tables["lora"]),
        parallel=ParallelConfig(**tables["parallel"]),
        **tables["engine"],
    )


def _by_table(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {section.table: {} for section in SERVE_SECTIONS}
    for name, value in values.items():
        tables[settings()[name].section.table][name] = value
    return tables


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the checked settings of a TOML file by name."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
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
        elif key == "external" and isinstance(value, list) and any(isinstance(each, dict) for each in value):
            values[EXTERNAL_TABLES] = read_external_tables(value, str(path))
            values[EXTERNAL_FILE] = str(path)
        elif key == MODEL_TABLES:
            values[key] = read_model_tables(value, str(path), _checked_engine_setting)
        else:
            _take(values, path, None, key, value)
    return values


def _take_whole(path: Path, table: str, value: Any) -> msgspec.Struct:
    try:
        return msgspec.convert(value, FILE_TABLES[table])
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{table}] of {path} is wrong: {error}.") from None


def _checked_engine_setting(name: str, value: Any, place: str) -> Any:
    setting = settings().get(name)
    if setting is None or setting.section not in ENGINE_SECTIONS:
        known = [name for name, setting in settings().items() if setting.section in ENGINE_SECTIONS]
        near = did_you_mean(name.replace("-", "_"), [*known, *ModelTable.__struct_fields__]).strip()
        raise ConfigError(f"A model has no setting '{name}', which {place} has.", hint=near or None)
    return setting.check(value, f"{name} in {place}", from_text=False)


def _take(values: dict[str, Any], path: Path, table: str | None, name: str, value: Any) -> None:
    setting = settings().get(name)
    place = f"[{table}] of {path}" if table else str(path)
    if setting is None:
        tables = [] if table else [*FILE_TABLES, MODEL_TABLES, *(section.table for section in SERVE_SECTIONS)]
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
