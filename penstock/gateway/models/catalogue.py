"""Every name that a client may ask for, and the model behind it: models, adapters, aliases, and `auto`.

Models come from the engines and from external servers, adapters from their registry, aliases and permissions from
the settings. Knows no request that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
from sqlalchemy import Connection

from penstock.cluster.replica import EngineClient
from penstock.core.errors import (
    ConfigError,
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PenstockError,
    PermissionDenied,
    PreconditionFailed,
    quoted,
)
from penstock.core.gateway_config import GatewayConfig, NamesConfig
from penstock.core.hashing import adapter_digest
from penstock.core.identity import Principal
from penstock.core.messages import EngineReady
from penstock.core.plan import TokenEvent
from penstock.core.request import Adapter, Request, SamplingParams
from penstock.gateway.external.models import ExternalModel, ExternalModels
from penstock.gateway.models.served_model import ServedModel
from penstock.gateway.models.settings import AUTO, ModelSettings
from penstock.gateway.store.database import Database
from penstock.gateway.store.versions import DocumentVersion, append, lock_kind, read_latest

logger = logging.getLogger(__name__)


KIND = "adapters"  # of the document
FILE_NAME = "adapters.json"  # where an earlier release kept them
MAX_NAME_LENGTH = 256


class RegisteredAdapter(msgspec.Struct, frozen=True):
    adapter: Adapter
    base_model: str | None = None  # None: the first model that is served


_decode = msgspec.json.Decoder(list[RegisteredAdapter]).decode


class AdapterRegistry:
    """The LoRA adapters that clients can ask for by name: given at the start, or added and removed while serving.
    Used from one event loop.

    Added adapters are in the database, as a document with versions that every gateway follows, so that one that is
    added at one gateway can be asked for at all of them. Engines are told nothing; each request names its adapter,
    and an engine loads an adapter that it does not have. Without a database, what is added is forgotten with the
    process.
    """

    def __init__(self, given: Iterable[RegisteredAdapter] = (), database: Database | None = None) -> None:
        self._given = {entry.adapter.name: entry for entry in given}
        self._added: dict[str, RegisteredAdapter] = {}
        self._database = database

    @property
    def given(self) -> list[RegisteredAdapter]:
        """At the start."""
        return list(self._given.values())

    def find(self, name: str) -> RegisteredAdapter | None:
        return self._given.get(name) or self._added.get(name)

    def all(self) -> list[RegisteredAdapter]:
        return list({**self._added, **self._given}.values())

    async def add(self, entry: RegisteredAdapter, actor: str = "") -> None:
        """Add an adapter, or replace the adapter of the same name. Raises Conflict for a name that was given at the
        start."""
        self._check_not_given(entry.adapter.name)

        def change(adapters: dict[str, RegisteredAdapter]) -> None:
            adapters[entry.adapter.name] = entry

        await self._change(change, actor, f"added {entry.adapter.name}")

    async def remove(self, name: str, actor: str = "") -> RegisteredAdapter:
        self._check_not_given(name)
        entry = self._added.get(name)
        if entry is None:
            raise NotFound(f"There is no adapter {quoted(name)}.", param="lora_name")

        def change(adapters: dict[str, RegisteredAdapter]) -> None:
            adapters.pop(name, None)

        await self._change(change, actor, f"removed {name}")
        return entry

    async def load(self) -> int:
        """Take over the current version of the database, and return its number. A version that cannot be read leaves
        the adapters as they were."""
        if self._database is None or not self._database.exists:
            return 0
        latest = await self._database.run(lambda connection: read_latest(connection, KIND), reads_only=True)
        if latest is None:
            return 0
        try:
            self._added = _adapters(latest)
        except msgspec.DecodeError as error:
            logger.error(
                "the adapters stay as they are: version %d in the database cannot be read: %s",
                latest.version,
                error,
            )
        return latest.version

    async def seed(self, file: Path) -> None:
        """Bring in the adapters that an earlier release kept in a file, unless the database has some."""
        try:
            entries = _decode(await asyncio.to_thread(file.read_bytes))
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            logger.error("the adapters in %s are not used: %s", file, error)
            return
        assert self._database is not None
        body = msgspec.json.encode(entries)
        with contextlib.suppress(PreconditionFailed):
            await self._database.run(
                lambda connection: append(
                    connection, KIND, body, expected=0, actor="seed", note=f"from {file.name}"
                )
            )

    def _check_not_given(self, name: str) -> None:
        if name in self._given:
            raise Conflict(
                f"The adapter {quoted(name)} was given when the server started.",
                hint="Change --lora-modules and start the server again.",
            )

    async def _change(
        self, change: Callable[[dict[str, RegisteredAdapter]], None], actor: str, note: str
    ) -> None:
        if self._database is None:
            change(self._added)
            return

        def write(connection: Connection) -> dict[str, RegisteredAdapter]:
            lock_kind(connection, KIND)  # so that two gateways do not lose each other's changes
            latest = read_latest(connection, KIND)
            adapters = {} if latest is None else _adapters(latest)
            change(adapters)
            body = msgspec.json.encode(list(adapters.values()))
            append(connection, KIND, body, expected=None, actor=actor, note=note)
            return adapters

        self._added = await self._database.run(write)


async def register(name: str, folder: str, base_model: str | None = None) -> RegisteredAdapter:
    """Read an adapter from disk. Raises InvalidRequest when the folder holds no adapter. Only an engine can tell
    whether the adapter fits the model."""
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidRequest(
            f"The name of an adapter has 1 to {MAX_NAME_LENGTH} characters, all of them printable.",
            param="lora_name",
        )
    hint = "Give a folder as PEFT writes it."
    try:
        path = Path(folder).expanduser().resolve()
    except (
        ValueError,
        RuntimeError,
        OSError,
    ) as error:  # a NUL, the home of an unknown user, a loop of links
        raise InvalidRequest(
            f"{folder[:200]!r} is no path on this server.", hint=hint, param="lora_path"
        ) from error
    try:
        digest = await asyncio.to_thread(adapter_digest, path)
    except OSError as error:
        raise InvalidRequest(
            f"{path} is no LoRA adapter: its {Path(error.filename).name} cannot be read.",
            hint=hint,
            param="lora_path",
        ) from error
    return RegisteredAdapter(Adapter(name, str(path), digest), base_model)


async def open_adapters(names: NamesConfig, folder: Path, database: Database) -> AdapterRegistry:
    """Return the adapters given at the start, and those in the database. Raises ConfigError."""
    try:
        given = [await register(name, path, base_model) for name, path, base_model in names.adapters]
    except InvalidRequest as error:
        raise ConfigError(error.message, hint=error.hint) from error
    registry = AdapterRegistry(given, database)
    if not await registry.load():
        await registry.seed(folder / FILE_NAME)
        await registry.load()
    return registry


def _adapters(version: DocumentVersion) -> dict[str, RegisteredAdapter]:
    return {entry.adapter.name: entry for entry in _decode(version.body or b"[]")}


# The wait for an engine that starts or a server that drains, because neither has a queue to estimate from.
RETRY_AFTER_S = 5.0
_TRIAL_TIMEOUT_S = 60.0
_TRIAL_TENANT = "\x01adapter-trial"  # no workspace has this name, so that no cache is touched

# A model of our own engines, or of an external server.
AnsweringModel: TypeAlias = ServedModel | ExternalModel


@dataclass(frozen=True, slots=True)
class ListedModel:
    """`name` is what clients ask for. `parent` is the model that an adapter changes."""

    name: str
    model: AnsweringModel
    parent: str | None = None


class Catalogue:
    def __init__(self, engine: EngineClient, config: GatewayConfig) -> None:
        self.adapters = AdapterRegistry()
        self.settings = ModelSettings()
        self.external: ExternalModels | None = None  # set where there are external servers
        self._engine = engine
        self._config = config
        self._served: dict[str, ServedModel] = {}
        self._adapted: dict[tuple[str, str], ServedModel] = {}  # by name and digest

    @property
    def has_served(self) -> bool:
        """Return whether some engine was ready once."""
        return bool(self._served)

    @property
    def is_ready(self) -> bool:
        """Return whether any engine or external server could answer now."""
        return self._engine.ready is not None or (self.external is not None and self.external.is_ready)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that stand for models. Aliases of the settings file override those given at the start."""
        return {**self._config.names.aliases, **self.settings.aliases, **self._split_names()}

    def _meant_by(self, name: str) -> str:
        """Return the model that a name stands for, which may be the name itself."""
        settings = self.settings
        if not settings.aliases and not settings.splits:
            return self._config.names.aliases.get(name, name)
        return self.aliases.get(name, name)

    def _split_names(self) -> dict[str, str]:
        """Names that stand for several models by weight, each with its heaviest, which stands for it in lists."""
        splits = self.settings.splits.items()
        return {name: max(weights, key=lambda model: weights[model]) for name, weights in splits if weights}

    def apply(self, settings: ModelSettings) -> None:
        """Use new settings from now on."""
        self.settings = settings

    def is_auto(self, name: str | None) -> bool:
        return name == AUTO and self.settings.auto is not None and AUTO not in self._engine.models

    def find(self, name: str | None = None) -> ServedModel:
        """Return the model that serves requests for `name`; None stands for the first there is, `auto` for the
        smallest that it may choose. Raises ModelNotFound or EngineUnavailable."""
        if name is None:
            return self._first()
        models = self._engine.models
        if self.is_auto(name):
            name = self._smallest()
        if name not in models:
            name = self._meant_by(name)
        if (ready := models.get(name)) is not None:
            return self._of_engine(ready)
        if (entry := self.adapters.find(name)) is not None:
            return self._of_adapter(entry)
        if self.external is not None and (elsewhere := self.external.find(name)) is not None:
            raise elsewhere.refuse()
        only = "" if self.external is not None and not models else self._first().name
        if len(models) == 1 and self.external is None:
            raise ModelNotFound(f"The model {name[:200]!r} is not served here; {only!r} is.", param="model")
        raise ModelNotFound(
            f"The model {name[:200]!r} is not served here.",
            param="model",
            hint="GET /v1/models lists those that are.",
        )

    def answering(self, name: str | None, principal: Principal | None = None) -> AnsweringModel:
        """Return the model that answers requests for `name`, our own or external. With a principal, permission is
        checked."""
        model = self._elsewhere(name) or self.find(name)
        if principal is not None:
            self._check_permission(principal, model, name)
        return model

    def permitted(self, principal: Principal, name: str | None) -> ServedModel:
        """`find`, with a check of the caller's permission: for the model's own name, or for the alias that was asked
        for."""
        model = self.find(name)
        self._check_permission(principal, model, name)
        return model

    def allows(self, principal: Principal, model: AnsweringModel, asked: str | None = None) -> bool:
        names = (model.name,) if asked is None else (model.name, asked)
        return self.settings.allows(principal, names)

    def listed(self, principal: Principal) -> list[ListedModel]:
        """Return all that a caller may ask for: models, their adapters, aliases, and `auto`."""
        first = self._config.names.first
        readies = sorted(self._engine.models.values(), key=lambda ready: ready.model.name != first)
        models = [self._of_engine(ready) for ready in readies]
        entries = [ListedModel(model.card.name, model) for model in models]
        for entry in self.adapters.all():
            try:
                adapted = self._of_adapter(entry)
            except (ModelNotFound, EngineUnavailable):
                continue  # its base model is not there
            entries.append(ListedModel(adapted.card.name, adapted, parent=adapted.base_name))
        if self.external is not None:
            taken = {entry.name for entry in entries}
            entries += [
                ListedModel(model.name, model) for model in self.external.all() if model.name not in taken
            ]
        known: dict[str, AnsweringModel] = {entry.name: entry.model for entry in entries}
        for alias, name in self.aliases.items():
            if name in known and alias not in known:
                entries.append(ListedModel(alias, known[name]))
        known = {entry.name: entry.model for entry in entries}
        if self.settings.auto is not None and AUTO not in known:
            sizes = [known[name] for name in self.settings.auto.models if name in known]
            entries += [ListedModel(AUTO, model) for model in sizes[:1]]
        return [entry for entry in entries if self.allows(principal, entry.model, entry.name)]

    def base_of(self, entry: RegisteredAdapter) -> ServedModel:
        """Return the model that an adapter changes."""
        if entry.base_model is None:
            return self._first()
        ready = self._engine.models.get(entry.base_model)
        if ready is None:
            raise ModelNotFound(
                f"The adapter {entry.adapter.name!r} is for {entry.base_model!r}, which is not served here.",
                param="model",
            )
        return self._of_engine(ready)

    def check_free(self, entry: RegisteredAdapter) -> None:
        """Raises Conflict for a name that stands for something else."""
        name = entry.adapter.name
        if name in self._engine.models or name in self.aliases or name == AUTO:
            raise Conflict(f"The name {name!r} is taken by a model.", param="lora_name")

    def _check_permission(self, principal: Principal, model: AnsweringModel, asked: str | None) -> None:
        if not self.allows(principal, model, asked):
            raise PermissionDenied(f"This key may not use the model {model.name!r}.", param="model")

    def _elsewhere(self, name: str | None) -> ExternalModel | None:
        """Return the external model of this name. A model of our own engines with the name goes first."""
        if self.external is None or self.is_auto(name):
            return None
        models = self._engine.models
        if name is None:
            return None if models else self.external.first()
        if name not in models:
            name = self._meant_by(name)
        if name in models or self.adapters.find(name) is not None:
            return None
        return self.external.find(name)

    def _first(self) -> ServedModel:
        models = self._engine.models
        ready = (
            models.get(self._config.names.first) or self._engine.ready or next(iter(models.values()), None)
        )
        if ready is None:
            raise EngineUnavailable("No engine is ready to serve.", retry_after_s=RETRY_AFTER_S)
        return self._of_engine(ready)

    def _smallest(self) -> str:
        auto = self.settings.auto
        assert auto is not None
        models = self._engine.models
        return next((name for name in auto.models if name in models), auto.models[0])

    def _of_engine(self, ready: EngineReady) -> ServedModel:
        name = ready.model.name
        served = self._served.get(name)
        if served is not None and served.engine is ready:
            return served
        if served is None or served.engine.model != ready.model:
            served = self._served[name] = ServedModel(ready, self._config)
        else:  # another engine, with the same model
            served.engine = ready
        self._adapted.clear()
        return served

    def _of_adapter(self, entry: RegisteredAdapter) -> ServedModel:
        adapter = entry.adapter
        key = adapter.name, adapter.digest
        base = self.base_of(entry)
        adapted = self._adapted.get(key)
        if adapted is None:
            adapted = self._adapted[key] = base.adapted(adapter)
        return adapted


async def try_adapter(engine: EngineClient, catalogue: Catalogue, entry: RegisteredAdapter) -> None:
    """Generate one token with an adapter before clients may use it, because only an engine can tell whether the
    adapter fits the model. The token is charged to no workspace. Raises what is wrong with the adapter, or with the
    engine."""
    base = catalogue.base_of(entry)
    if not base.engine.max_lora_rank:
        raise InvalidRequest(f"The model {base.card.name!r} takes no LoRA adapters.", param="base_model_name")
    request = Request(
        id=f"adapter-{uuid.uuid4().hex}",
        prompt_token_ids=(base.card.bos_token_id or 0,),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        tenant=_TRIAL_TENANT,
        model=base.base_name,
        adapter=entry.adapter,
    )
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_event(event: TokenEvent) -> None:
        if event.error is not None:
            on_error(PenstockError(event.error))
        elif event.finish_reason is not None and not done.done():
            done.set_result(None)

    def on_error(error: PenstockError) -> None:
        if not done.done():
            done.set_exception(error)

    engine.add(request, timeout_s=_TRIAL_TIMEOUT_S, on_event=on_event, on_error=on_error)
    try:
        await done
    except asyncio.CancelledError:
        engine.abort(request.id)
        raise


async def try_given(engine: EngineClient, catalogue: Catalogue) -> None:
    """Try the adapters of the command line before the first client comes. An adapter that does not fit is logged, and
    requests for it are refused."""
    for entry in catalogue.adapters.given:
        try:
            await try_adapter(engine, catalogue, entry)
        except PenstockError as error:
            logger.error("the adapter %s cannot be used: %s", entry.adapter.name, error.message)
