"""A shared fleet: the hosts of engines publish their replicas in a registry, and any number of gateways follow it.

A host publishes one record, which it renews while it lives. A gateway drops the replicas of a host whose record no
longer names them, or was not renewed for `LEASE_S`. A gateway that cannot read the registry keeps the replicas that
it knows: engines and gateways talk to each other directly, so requests go on.

Hosts and gateways share a join token. A record without a valid signature is ignored, so that only a holder of the
token can add an engine to the fleet. Engines answer only to clients whose CURVE key was derived from the token, so
that reading the registry is not enough to reach an engine. Knows no particular registry: `redis_registry` and
`serve.database_registry` implement `Registry`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq
from zmq.utils import z85

from penstock.cluster.replica import Member
from penstock.cluster.transport import KeyPair
from penstock.core.errors import ConfigError
from penstock.core.messages import WIRE_VERSION

logger = logging.getLogger(__name__)

LEASE_S = 10.0  # how long a host counts as alive after it renewed its record
RENEW_S = 3.0
RETRY_S = 1.0
POLL_S = 0.5  # between two readings of a registry that cannot tell of changes
MIN_TOKEN_CHARS = 20


class RegistryError(Exception):
    """The registry does not answer, or its answer makes no sense."""


class Registry(Protocol):
    """Records by name, each with a lease. Every method may raise RegistryError."""

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        """Store a record, or renew its lease."""
        ...

    async def records(self) -> dict[str, bytes]:
        """Return the records whose lease has not ended."""
        ...

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return soon after a record has changed, and at the latest after `timeout_s`."""
        ...

    async def close(self) -> None: ...


class MemoryRegistry:
    """A registry for the roles of one process."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[bytes, float]] = {}
        self._changed = asyncio.Event()

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        self._records[name] = record, time.monotonic() + lease_s
        self._changed.set()

    async def records(self) -> dict[str, bytes]:
        now = time.monotonic()
        return {name: record for name, (record, end_s) in self._records.items() if end_s > now}

    async def wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class JoinTokens:
    """The secrets that the machines of a fleet share. The first token signs; each of them is accepted, so that a new
    token can be rolled out before the old one is taken away."""

    tokens: tuple[str, ...] = field(repr=False)

    @staticmethod
    def parse(text: str) -> JoinTokens:
        """Read tokens that are separated by commas."""
        tokens = tuple(token.strip() for token in text.split(",") if token.strip())
        if not tokens or any(len(token) < MIN_TOKEN_CHARS for token in tokens):
            raise ConfigError(
                f"A join token has at least {MIN_TOKEN_CHARS} characters.",
                hint="Make one with: openssl rand -hex 32, and give the same one to every machine of the fleet.",
            )
        return JoinTokens(tokens)

    def client_keys(self) -> KeyPair:
        """Return the CURVE keys that a machine with the first token connects with."""
        return _client_keys(self.tokens[0])

    def accepted_clients(self) -> tuple[str, ...]:
        """Return the public keys of all machines that may connect to an engine."""
        return tuple(_client_keys(token).public for token in self.tokens)

    def sign(self, body: bytes) -> bytes:
        return _mac(self.tokens[0], body).encode() + b"\n" + body

    def verified(self, record: bytes) -> bytes | None:
        """Return the body of a record, or None if no token signed it."""
        mac, _, body = record.partition(b"\n")
        is_signed = any(hmac.compare_digest(mac, _mac(token, body).encode()) for token in self.tokens)
        return body if is_signed else None


def _client_keys(token: str) -> KeyPair:
    secret = z85.encode(hashlib.sha256(b"penstock client of engines\0" + token.encode()).digest())
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


def _mac(token: str, body: bytes) -> str:
    return hmac.new(token.encode(), b"penstock host record\0" + body, hashlib.sha256).hexdigest()


class HostRecord(msgspec.Struct, frozen=True):
    """The replicas of one machine that runs engines."""

    host: str
    members: tuple[Member, ...]


class _Envelope(msgspec.Struct, frozen=True):
    """A host's record with the version of the messages that its engines understand. The version can be read even if
    the record itself belongs to another version."""

    wire_version: int
    record: msgspec.Raw


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_record = msgspec.json.Decoder(HostRecord).decode


def encode_record(record: HostRecord, tokens: JoinTokens) -> bytes:
    return tokens.sign(msgspec.json.encode(_Envelope(WIRE_VERSION, msgspec.Raw(msgspec.json.encode(record)))))


def decode_record(data: bytes, tokens: JoinTokens) -> HostRecord:
    """Raises ValueError, with the rest of a sentence about the host, for a record that cannot be used."""
    body = tokens.verified(data)
    if body is None:
        raise ValueError("was not signed with this fleet's join token")
    try:
        envelope = _decode_envelope(body)
        if envelope.wire_version != WIRE_VERSION:
            raise ValueError(
                f"speaks version {envelope.wire_version} of the messages, and this machine speaks {WIRE_VERSION}"
            )
        return _decode_record(envelope.record)
    except msgspec.MsgspecError as error:
        raise ValueError(f"is not understood: {error}") from error


class Publisher:
    """Keeps the record of one host in the registry. Call `tell` whenever the host's replicas change."""

    def __init__(self, registry: Registry, tokens: JoinTokens, host: str) -> None:
        self._registry = registry
        self._tokens = tokens
        self.host = host
        self._members: tuple[Member, ...] = ()
        self._changed = asyncio.Event()
        self._is_away = False

    def tell(self, members: tuple[Member, ...]) -> None:
        self._members = members
        self._changed.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Publish until the context ends. The last record names no replica, and ends with its lease."""
        publishing = asyncio.create_task(self._keep_publishing())
        try:
            yield
        finally:
            publishing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await publishing
            with contextlib.suppress(RegistryError):
                await self._publish(())

    async def _publish(self, members: tuple[Member, ...]) -> None:
        await self._registry.publish(
            self.host, encode_record(HostRecord(self.host, members), self._tokens), LEASE_S
        )

    async def _keep_publishing(self) -> None:
        while True:
            self._changed.clear()
            pause_s = RENEW_S
            try:
                await self._publish(self._members)
                if self._is_away:
                    logger.info("the registry answers again")
                self._is_away = False
            except RegistryError as error:
                if not self._is_away:
                    logger.warning("the registry does not answer, and engines go on without it: %s", error)
                self._is_away = True
                pause_s = RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()


@dataclass(slots=True)
class _KnownHost:
    data: bytes
    members: tuple[Member, ...]
    seen_s: float


class Follower:
    """Tells a gateway which replicas the hosts of the fleet have. `on_change` gets all of them."""

    def __init__(
        self,
        registry: Registry,
        tokens: JoinTokens,
        on_change: Callable[[tuple[Member, ...]], None],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._tokens = tokens
        self._on_change = on_change
        self._now = now
        self._hosts: dict[str, _KnownHost] = {}
        self._refused: dict[str, bytes] = {}  # records that were complained about
        self._is_away = False

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(member for name in sorted(self._hosts) for member in self._hosts[name].members)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the registry until the context ends. The first reading has succeeded when this yields, so that a
        wrong address is reported at once: raises ConfigError."""
        try:
            self._take(await self._registry.records())
        except RegistryError as error:
            raise ConfigError(f"The registry does not answer: {str(error).rstrip('.')}.") from error
        following = asyncio.create_task(self._keep_following())
        try:
            yield
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    async def _keep_following(self) -> None:
        while True:
            try:
                await self._registry.wait_for_change(POLL_S)
                self._take(await self._registry.records())
                if self._is_away:
                    logger.info("the registry answers again")
                self._is_away = False
            except RegistryError as error:
                if not self._is_away:
                    logger.warning("the registry does not answer, and known replicas stay: %s", error)
                self._is_away = True
                # Hosts cannot renew their records now either, so their time does not run.
                for host in self._hosts.values():
                    host.seen_s = self._now()
                await asyncio.sleep(RETRY_S)

    def _take(self, records: dict[str, bytes]) -> None:
        """Take over one reading of the registry."""
        now = self._now()
        before = self.members
        for name, data in records.items():
            known = self._hosts.get(name)
            if known is not None and known.data == data:
                known.seen_s = now
            elif (members := self._members_of(name, data)) is not None:
                self._hosts[name] = _KnownHost(data, members, now)
        # A registry that lost its records gets them again from living hosts, within the lease.
        for name in [name for name, host in self._hosts.items() if now - host.seen_s > LEASE_S]:
            logger.warning("the host %s has not renewed its record for %.0f s", name, LEASE_S)
            del self._hosts[name]
        if self.members != before:
            self._on_change(self.members)

    def _members_of(self, name: str, data: bytes) -> tuple[Member, ...] | None:
        """Return the replicas of a host, or None after complaining once about a record that cannot be used."""
        try:
            record = decode_record(data, self._tokens)
        except ValueError as error:
            if self._refused.get(name) != data:
                logger.warning("the host %s is left out: its record %s", name, error)
            self._refused[name] = data
            return None
        return record.members if record.host == name else None
