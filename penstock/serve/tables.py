"""Reads further models and external servers from the tables of the config file and from flags.

Further models: the tables `[[models]]`, `--also-serve`, and adapters by `--lora-modules`.

    [[models]]
    name = "coder"
    path = "qwen2.5-coder-1.5b"
    aliases = ["gpt-4o-mini"]
    adapters = { sql = "/models/sql-lora" }
    max_num_seqs = 64

Each model has its own engines. An engine setting that a table leaves out has the value of the file or the flags,
except for the settings that belong to one model only.

External servers: the tables `[[external]]` and `--external URL`, and their keys.

    [[external]]
    url = "http://gpu-1:8000"
    models = ["llama-70b"]                # or { ours = "theirs" }; without the key, all models that the server lists
    region = "eu"
    api_key_variable = "GPU_1_KEY"        # the environment variable that holds the key

Servers given with `--external` get the key in PENSTOCK_EXTERNAL_API_KEY, if it is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
from msgspec import Meta

from penstock.cluster.external.wire import server_name
from penstock.core.config import Dialect, Discover, ExternalServerConfig, ExtraModelConfig
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError
from penstock.core.figures import Count, NotNegative
from penstock.core.gateway_config import NamesConfig
from penstock.serve.environment import EXTERNAL_API_KEY_VARIABLE, secret_in

# Settings of one model, which other models do not inherit.
_OWN_SETTINGS = frozenset(
    {
        "model",
        "served_model_name",
        "max_model_len",
        "quantization",
        "load_format",
        "model_implementation",
        "trust_remote_code",
        "mmproj",
        "chat_template",
        "generation_config",
        "override_generation_config",
        "hf_overrides",
    }
)

# Builds an EngineConfig from engine settings by name, with defaults for the rest.
BuildEngine: TypeAlias = Callable[[Mapping[str, Any]], EngineConfig]


class ModelTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[models]]` table, without its engine settings."""

    path: str
    name: str | None = None  # None: the same as `path`
    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1
    region: str = ""
    aliases: tuple[str, ...] = ()
    adapters: dict[str, str] = {}  # folders of LoRA adapters, by name


class DescribedModel(msgspec.Struct, frozen=True):
    table: ModelTable
    settings: Mapping[str, Any]  # the checked settings of the model's engines

    @property
    def name(self) -> str:
        return self.table.name or self.table.path

    def first_settings(self) -> dict[str, Any]:
        """Return the settings of a server that has this model as its first."""
        own = {"model": self.table.path, "served_model_name": self.name, "replicas": self.table.replicas}
        return {**self.settings, **own, **({"region": self.table.region} if self.table.region else {})}

    def engine_settings(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of this model's engines. `shared` may hold settings of other parts, too."""
        inherited = {name: value for name, value in shared.items() if name not in _OWN_SETTINGS}
        return {**inherited, **self.settings, "model": self.table.path, "served_model_name": self.name}


def read_model_tables(
    value: Any, place: str, check_setting: Callable[[str, Any, str], Any]
) -> tuple[DescribedModel, ...]:
    """Read all `[[models]]` tables. `check_setting(name, value, place)` returns an engine setting's checked value, or
    raises ConfigError."""
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ConfigError(f"models in {place} must be tables, each begun with [[models]].")
    described = []
    for number, table in enumerate(value, start=1):
        where = f"[[models]] number {number} of {place}"
        own = {name: given for name, given in table.items() if name in ModelTable.__struct_fields__}
        rest = {name: given for name, given in table.items() if name not in own}
        try:
            known = msgspec.convert(own, ModelTable)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where} is wrong: {error}.") from None
        checked = {name: check_setting(name, given, where) for name, given in rest.items()}
        if _OWN_SETTINGS & {"model", "served_model_name"} & checked.keys():
            raise ConfigError(f"{where} is wrong: a model's path is called 'path' here, and its name 'name'.")
        described.append(DescribedModel(known, checked))
    return tuple(described)


def also_served(models: Sequence[str]) -> list[DescribedModel]:
    """Read the values of `--also-serve`: MODEL, or NAME=MODEL."""
    described = []
    for given in models:
        name, separator, path = given.partition("=")
        table = ModelTable(path=path, name=name) if separator else ModelTable(path=given)
        described.append(DescribedModel(table, {}))
    return described


def extra_models(
    models: Sequence[DescribedModel], shared: Mapping[str, Any], build: BuildEngine
) -> tuple[ExtraModelConfig, ...]:
    return tuple(
        ExtraModelConfig(
            engine=build(model.engine_settings(shared)),
            replicas=model.table.replicas,
            region=model.table.region,
        )
        for model in models
    )


def served_names(given: str | None) -> list[str]:
    """Read `--served-model-name`: the model's name, and aliases behind commas."""
    names = [name.strip() for name in (given or "").split(",")]
    if given is not None and not all(names):
        raise ConfigError(f"--served-model-name must be names with commas between them, not {given!r}.")
    return [name for name in names if name]


def names_of(
    own: Sequence[str],
    models: Sequence[DescribedModel],
    extra: Sequence[DescribedModel],
    lora_modules: Sequence[str],
) -> NamesConfig:
    """Return all names that clients may use: the first model's `own`, the `extra` models, aliases and adapters.
    Raises ConfigError for a name with two meanings."""
    first, *others = own
    aliases = dict.fromkeys(others, first)
    adapters: list[tuple[str, str, str | None]] = [(*_adapter(given), None) for given in lora_modules]
    taken = [*own, *(model.name for model in extra), *(name for name, _, _ in adapters)]
    for model in models:
        for alias in model.table.aliases:
            aliases[alias] = model.name
            taken.append(alias)
        for name, folder in model.table.adapters.items():
            adapters.append((name, folder, model.name))
            taken.append(name)
    for name in taken:
        if taken.count(name) > 1:
            raise ConfigError(f"Two models, aliases or adapters are called '{name}'.")
    return NamesConfig(first=first if models else "", aliases=aliases, adapters=tuple(adapters))


def _adapter(given: str) -> tuple[str, str]:
    name, separator, folder = given.partition("=")
    if not (name and separator and folder):
        raise ConfigError(f"--lora-modules must be NAME=FOLDER, not '{given}'.")
    return name, folder


class ExternalTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[external]]` table."""

    url: str
    name: str = ""
    models: dict[str, str] | tuple[str, ...] = ()
    discover: Discover | None = None
    region: str = ""
    cost: NotNegative = 0.0
    max_concurrent: Count | None = None
    continues: bool | None = None
    shows_cached_tokens: bool = False
    api_key_variable: str | None = None
    api_key_header: str = ""
    dialect: Dialect = "openai"
    api_version: str = ""
    takes_cache_control: bool = False

    def to_config(self) -> ExternalServerConfig:
        models = self.models if isinstance(self.models, dict) else {name: name for name in self.models}
        key = None if self.api_key_variable is None else secret_in(self.api_key_variable)
        if self.api_key_variable is not None and key is None:
            raise ConfigError(
                f"The key for {self.url} should be in the environment variable {self.api_key_variable}, which is "
                "not set."
            )
        return ExternalServerConfig(
            url=self.url,
            name=self.name,
            models=models,
            discover=self.discover,
            region=self.region,
            cost=self.cost,
            max_concurrent=self.max_concurrent,
            continues=self.continues,
            shows_cached_tokens=self.shows_cached_tokens,
            api_key=key,
            api_key_header=self.api_key_header,
            dialect=self.dialect,
            api_version=self.api_version,
            takes_cache_control=self.takes_cache_control,
        )


def read_external_tables(value: Any, place: str) -> tuple[ExternalTable, ...]:
    tables = []
    for number, table in enumerate(value, start=1):
        try:
            tables.append(msgspec.convert(table, ExternalTable))
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"[[external]] number {number} of {place} is wrong: {error}{_accepted(table)}."
            ) from None
    return tuple(tables)


def _accepted(table: Any) -> str:
    """Return the end of an error sentence: the accepted values of a setting, if the table has another value."""
    for name, kind in (("discover", Discover), ("dialect", Dialect)):
        values = get_args(kind)
        if isinstance(table, dict) and table.get(name, values[0]) not in values:
            return f" (it takes {', '.join(map(repr, values[:-1]))} or {values[-1]!r})"
    return ""


def external_servers(
    tables: Sequence[ExternalTable], urls: Sequence[str]
) -> tuple[ExternalServerConfig, ...]:
    """Return all external servers with their keys. Raises ConfigError if two servers have the same name."""
    by_url = [ExternalServerConfig(url=url, api_key=secret_in(EXTERNAL_API_KEY_VARIABLE)) for url in urls]
    servers = (*(table.to_config() for table in tables), *by_url)
    names: set[str] = set()
    for server in servers:
        name = server_name(server)
        if name in names:
            raise ConfigError(
                f"Two external servers are called {name!r}.", hint="Give one of them another name."
            )
        names.add(name)
    return servers
