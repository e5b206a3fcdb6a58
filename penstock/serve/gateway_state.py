"""Builds the state of a gateway: the settings, the limiter, the usage ledger, and stored answers.

Two decisions are made here: whether limits are shared through Redis, and whether the server keeps a usage ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.routing import Route

from penstock.api.admin.fleet import UsageEndpoints
from penstock.api.admin.settings import SettingsEndpoints
from penstock.cluster.replica import EngineClient
from penstock.core.config import ServeConfig
from penstock.core.errors import ConfigError, StoreUnavailable
from penstock.core.gateway_config import GatewayConfig
from penstock.core.machine import install_command
from penstock.core.tasks import running
from penstock.gateway.accounts import Accounts, Observer
from penstock.gateway.gateway import Gateway
from penstock.gateway.ledger.journal import Journal
from penstock.gateway.ledger.ledger import JOURNAL_FOLDER, UsageLedger
from penstock.gateway.ledger.prices import PriceSettings, PriceTable
from penstock.gateway.ledger.spend import LedgerSpendTracker
from penstock.gateway.models.catalogue import KIND as ADAPTERS
from penstock.gateway.models.catalogue import AdapterRegistry
from penstock.gateway.ratelimits.local import LocalLimiter, MeterTable, RunningLimiter
from penstock.gateway.ratelimits.settings import LimitSettings
from penstock.gateway.ratelimits.spend import SpendTracker
from penstock.gateway.reuse.idempotency import IdempotentAnswers
from penstock.gateway.reuse.reuse import AnswerReuse
from penstock.gateway.reuse.shared_cache import SharedCaches
from penstock.gateway.settings.live import LiveSettings, SettingsFile, SharedSettings
from penstock.gateway.settings.settings import Settings
from penstock.gateway.settings.store import SettingsStore
from penstock.gateway.store.database import Database
from penstock.gateway.store.versions import Follower
from penstock.serve.environment import data_dir


def build_limiter(
    config: GatewayConfig,
    settings: LimitSettings | None = None,
    *,
    spending: SpendTracker | None = None,
    table: MeterTable | None = None,
) -> RunningLimiter:
    """Build the limiter. With Redis, all gateways share every limit. Without Redis, or while Redis is away, the
    processes of this server share limits through `table`; without one, this process is alone."""
    settings = settings or LimitSettings()
    local = LocalLimiter(settings, spending=spending, table=table)
    if config.redis_url is None:
        return local
    try:
        from penstock.gateway.ratelimits.shared import RedisLimiter
    except ImportError as error:
        raise ConfigError(
            "Limits shared through Redis need the redis package.", hint=f"Run: {install_command('redis')}"
        ) from error
    return RedisLimiter.at(config.redis_url, settings, local, policy=config.redis_policy)


@dataclass(frozen=True, slots=True)
class GatewayState:
    """`ledger` is None if usage is not recorded. `follower` reports changes of the database."""

    shared: SharedSettings
    follower: Follower
    ledger: UsageLedger | None
    reuse: AnswerReuse
    caches: SharedCaches | None = None  # in Redis

    @property
    def settings(self) -> LiveSettings:
        return self.shared.live

    def build_limiter(self, config: GatewayConfig, table: MeterTable | None = None) -> RunningLimiter:
        """Build the limiter, which follows the settings and enforces budgets if there is a ledger."""
        spending = self.ledger.spending if self.ledger else None
        limits = self.settings.current.limits
        limiter = build_limiter(config, limits, spending=spending, table=table)
        self.settings.attach(lambda settings: limiter.apply(settings.limits))
        return limiter

    def build_gateway(
        self,
        engine: EngineClient,
        config: GatewayConfig,
        limiter: RunningLimiter,
        observers: Sequence[Observer] = (),
    ) -> Gateway:
        """Build a gateway that uses this state, follows the settings and exports all metrics of both."""
        accounts = Accounts(limiter, self.ledger, observers)
        gateway = Gateway(engine, config, accounts=accounts, reuse=self.reuse)
        gateway.metrics.register(limiter.metrics)
        if self.ledger is not None:
            gateway.metrics.register(self.ledger.metrics)
        gateway.metrics.register(self.settings)
        gateway.shared_caches = self.caches
        if self.caches is not None:
            gateway.metrics.register(self.caches)
        self.settings.attach(lambda settings: _apply(gateway, settings))
        return gateway

    async def follow_adapters(self, adapters: AdapterRegistry) -> None:
        """Keep the adapters in step with the database."""
        self.follower.follow(ADAPTERS, adapters.load, seen=await adapters.load())

    def routes(self, database: Database) -> list[Route]:
        return [*UsageEndpoints(self.ledger).routes(), *SettingsEndpoints(self.shared, database).routes()]


def _apply(gateway: Gateway, settings: Settings) -> None:
    gateway.guards.apply(settings.guards)  # first, because it may raise ConfigError
    gateway.tiers = settings.tiers
    gateway.catalogue.apply(settings.models)
    gateway.prompt_cache = settings.prompt_cache
    gateway.embedding_cache = settings.embedding_cache


@contextlib.asynccontextmanager
async def open_gateway_state(
    config: ServeConfig, database: Database, *, is_open: bool
) -> AsyncIterator[GatewayState]:
    live, follower = LiveSettings(), Follower(database)
    file = SettingsFile(Path(config.gateway.settings).expanduser(), live) if config.gateway.settings else None
    shared = SharedSettings(SettingsStore(database), live, file)
    settings = await shared.start(follower, seeds=config.gateway.seed_settings)
    wants_ledger = config.ledger.usage_ledger
    if wants_ledger is None:
        # Usage is recorded by default if keys or tokens tell callers apart. One --api-key does not.
        has_tenants = not is_open and (database.exists or config.tenants.oidc is not None)
        wants_ledger = has_tenants or settings.prices != PriceSettings()
    async with contextlib.AsyncExitStack() as stack:
        ledger = None
        if wants_ledger:
            ledger = _make_ledger(config, database, PriceTable(settings.prices))
            await ledger.start()
            stack.push_async_callback(ledger.close)
        # Idempotency keys are stored in the database if usage is, or if several processes must share them.
        stores_keys = wants_ledger or config.server.num_api_workers > 1
        keys = IdempotentAnswers(settings.idempotency, database if stores_keys else None)
        caches = SharedCaches.at(config.gateway.redis_url) if config.gateway.redis_url else None
        if caches is not None:
            stack.push_async_callback(caches.close)
        reuse = AnswerReuse(settings.response_cache, keys, shared=caches)
        stack.push_async_callback(keys.close)
        await stack.enter_async_context(running(keys.run()))
        live.attach(lambda new: reuse.apply(new.response_cache, new.idempotency, new.semantic_cache))
        if ledger is not None:
            live.attach(lambda new: ledger.set_prices(PriceTable(new.prices)))
        await stack.enter_async_context(running(follower.run()))
        if file is not None:
            await stack.enter_async_context(_reloading(file, follower))
        yield GatewayState(shared, follower, ledger, reuse, caches)


def _make_ledger(config: ServeConfig, database: Database, prices: PriceTable) -> UsageLedger:
    folder = data_dir(config.store) / JOURNAL_FOLDER
    try:
        journal = Journal(folder)
    except OSError as error:
        raise ConfigError(
            f"The usage journal in {folder} cannot be written: {error.strerror}.",
            hint="Choose another folder with --data-dir.",
        ) from error
    return UsageLedger(
        journal,
        database,
        LedgerSpendTracker(prices),
        when_unrecorded=config.ledger.when_unrecorded,
        sync_interval_s=config.ledger.usage_sync_s,
    )


@contextlib.asynccontextmanager
async def _reloading(file: SettingsFile, follower: Follower) -> AsyncIterator[None]:
    """Reload the settings file when it changes, and on SIGHUP. Where the database has settings, look there."""
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        with contextlib.suppress(ConfigError, StoreUnavailable):  # both have been logged
            await (follower.look() if file.is_overruled else file.reload())

    def on_hangup() -> None:
        task = asyncio.create_task(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        async with running(file.watch()):
            yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
