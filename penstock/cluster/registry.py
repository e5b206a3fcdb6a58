"""A shared fleet: the hosts of engines publish their replicas in a registry, and any number of gateways follow it.

A host publishes one record, which it renews while it lives. A gateway drops the replicas of a host whose record no
longer names them, or was not renewed for `LEASE_S` while no engine of the host answers. A gateway that cannot read
the registry keeps the replicas that it knows: engines and gateways talk to each other directly, so requests continue,
also while the registry takes no writes, or a host does not reach the registry.

The registry also knows the leader, which decides for the fleet (`leadership`), and keeps the documents that the
leader has written (`documents`). Everything in it is signed with the join token. Knows no particular registry:
`redis_registry` and `serve.database_registry` implement `Registry`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from penstock.cluster.host_record import HostRecord, JoinTokens, decode_record, encode_record
from penstock.cluster.replica import Member
from penstock.core.errors import ConfigError
from penstock.core.tasks import end_task

logger = logging.getLogger(__name__)

LEASE_S = 10.0  # how long a host counts as alive after it renewed its record
RENEW_S = 3.0
RETRY_S = 1.0
# No lease is longer. One that seems to be was given before the clock of the registry was set back.
LONGEST_LEASE_S = 600.0
POLL_S = 0.5  # between two reads of a registry that cannot report changes


class RegistryError(Exception):
    """The registry does not answer, or its answer makes no sense."""


def unusable(error: RegistryError) -> ConfigError:
    """Return the error of a process that cannot begin without the registry."""
    return ConfigError(f"The registry cannot be used: {str(error).rstrip('.')}.")


class Registry(Protocol):
    """Records by name, each with a lease. Every method may raise RegistryError."""

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        """Store a record, or renew its lease."""
        ...

    async def records(self) -> dict[str, bytes]:
        """Return the records whose lease has not ended."""
        ...

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return soon after a record or a document has changed, and at the latest after `timeout_s`."""
        ...

    async def lead(self, candidate: str, lease_s: float, above: int) -> int | None:
        """Take the lease of the leader, or renew it. Returns the epoch of the lease; None while another candidate
        holds it. A new lease has an epoch greater than all before it and than `above`: a registry that has lost its
        memory is told of earlier epochs in this way."""
        ...

    async def resign(self, candidate: str) -> None:
        """End the lease of a leader, so that another need not wait."""
        ...

    async def write(self, name: str, document: bytes | None, epoch: int) -> bool:
        """Replace a document, which has no lease; None removes it. Returns False, and changes nothing, unless `epoch`
        is the epoch of the latest lease."""
        ...

    async def documents(self) -> dict[str, bytes]: ...

    async def close(self) -> None: ...


class Publisher:
    """Keeps the record of one host in the registry. Call `tell` whenever the host's replicas change, and
    `describe` for the rest of the record."""

    def __init__(self, registry: Registry, tokens: JoinTokens, host: str) -> None:
        self._registry = registry
        self._tokens = tokens
        self.host = host
        self._record = HostRecord(host, ())
        self._changed = asyncio.Event()
        self._is_away = False

    def tell(self, members: tuple[Member, ...]) -> None:
        self.describe(replace(self._record, members=members))

    @property
    def record(self) -> HostRecord:
        return self._record

    def describe(self, record: HostRecord) -> None:
        if record != self._record:
            self._record = record
            self._changed.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Publish until the context ends. The last record names no replica, and ends with its lease. The first one is
        written when this yields, so that missing rights are reported at once: raises ConfigError."""
        try:
            await self._publish(self._record)
        except RegistryError as error:
            raise unusable(error) from error
        publishing = asyncio.create_task(self._keep_publishing())
        try:
            yield
        finally:
            await end_task(publishing)
            with contextlib.suppress(RegistryError):
                await self._publish(HostRecord(self.host, (), is_leaving=True))

    async def _publish(self, record: HostRecord) -> None:
        await self._registry.publish(self.host, encode_record(record, self._tokens), LEASE_S)

    async def _keep_publishing(self) -> None:
        pause_s = RENEW_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            self._changed.clear()
            pause_s = RENEW_S
            try:
                await self._publish(self._record)
                if self._is_away:
                    logger.info("the registry can be used again")
                self._is_away = False
            except RegistryError as error:
                if not self._is_away:
                    logger.warning("the registry cannot be used, and engines go on without it: %s", error)
                self._is_away = True
                pause_s = RETRY_S
            except Exception:
                logger.exception("the record of this host could not be renewed; it is tried again")
                pause_s = RETRY_S


@dataclass(slots=True)
class _KnownHost:
    data: bytes
    record: HostRecord
    seen_s: float
    is_overdue: bool = False  # not renewed, and kept because its engines answer


class Follower:
    """Tells a gateway which replicas the hosts of the fleet have. `on_change` gets all of them, `on_records` the
    records of all hosts by name, and `on_documents` the documents of the leader, which are not verified yet.
    `answers` says whether an engine of a host answers, however long the record of the host was not renewed."""

    def __init__(
        self,
        registry: Registry,
        tokens: JoinTokens,
        on_change: Callable[[tuple[Member, ...]], None] | None = None,
        *,
        on_records: Callable[[Mapping[str, HostRecord]], None] | None = None,
        on_documents: Callable[[Mapping[str, bytes]], None] | None = None,
        answers: Callable[[HostRecord], bool] = lambda record: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._tokens = tokens
        self._answers = answers
        self._on_change = on_change
        self._on_records = on_records
        self._on_documents = on_documents
        self._now = now
        self._hosts: dict[str, _KnownHost] = {}
        self._refused: dict[str, bytes] = {}  # records that were complained about
        self._is_away = False

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(member for name in sorted(self._hosts) for member in self._hosts[name].record.members)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the registry until the context ends. The first reading has succeeded when this yields, so that a
        wrong address is reported at once: raises ConfigError."""
        try:
            await self._read()
        except RegistryError as error:
            raise unusable(error) from error
        following = asyncio.create_task(self._keep_following())
        try:
            yield
        finally:
            await end_task(following)

    async def _keep_following(self) -> None:
        while True:
            try:
                await self._registry.wait_for_change(POLL_S)
                await self._read()
                if self._is_away:
                    logger.info("the registry can be used again")
                self._is_away = False
            except RegistryError as error:
                if not self._is_away:
                    logger.warning("the registry cannot be used, and known replicas stay: %s", error)
                self._is_away = True
                # Hosts cannot renew their records now either, so their time does not run.
                for host in self._hosts.values():
                    host.seen_s = self._now()
                await asyncio.sleep(RETRY_S)
            except Exception:
                logger.exception("a change in the registry could not be followed; the registry is read again")
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        needs_records = self._on_change is not None or self._on_records is not None
        records = await self._registry.records() if needs_records else {}
        documents = None if self._on_documents is None else await self._registry.documents()
        self._take(records)
        if self._on_documents is not None and documents is not None:
            self._on_documents(documents)

    def _take(self, records: dict[str, bytes]) -> None:
        """Take over one reading of the registry."""
        now = self._now()
        before = {name: host.record for name, host in self._hosts.items()}
        members_before = self.members
        for name, data in records.items():
            known = self._hosts.get(name)
            if known is not None and known.data == data:
                known.seen_s = now
            elif (record := self._usable(name, data)) is not None:
                self._hosts[name] = _KnownHost(data, record, now)
        # A registry that lost its records gets them again from living hosts, within the lease.
        for name, host in tuple(self._hosts.items()):
            is_overdue, was_overdue = now - host.seen_s > LEASE_S, host.is_overdue
            host.is_overdue = is_overdue and self._answers(host.record)
            if host.is_overdue and not was_overdue:
                logger.warning(
                    "the host %s does not renew its record, and its engines answer: it stays", name
                )
            elif is_overdue and not host.is_overdue:
                logger.warning("the host %s has not renewed its record for %.0f s", name, LEASE_S)
                del self._hosts[name]
        if self._on_change is not None and self.members != members_before:
            self._on_change(self.members)
        after = {name: host.record for name, host in self._hosts.items()}
        if self._on_records is not None and after != before:
            self._on_records(after)

    def _usable(self, name: str, data: bytes) -> HostRecord | None:
        """Return the record of a host, or None after complaining once about a record that cannot be used."""
        try:
            record = decode_record(data, self._tokens)
        except ValueError as error:
            if self._refused.get(name) != data:
                logger.warning("the host %s is left out: its record %s", name, error)
            self._refused[name] = data
            return None
        return record if record.host == name else None
