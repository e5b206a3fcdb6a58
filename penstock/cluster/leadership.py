"""The lease by which one control process decides for a shared fleet, and the documents that this leader writes.

A leader renews its lease. A leader that could not renew it in time, because the registry is away or because the
process was paused, stops by its own clock before another may take over. A pause between that check and an order is
what epochs are for. Every document carries the epoch of its leader; the registry and all readers that have seen an
epoch refuse documents of earlier ones. Within one epoch, documents of one name are numbered, and none is taken twice
or out of order.

    leader       which process leads, and where it listens
    host/NAME    what one host of engines runs
    directive    which revision answers which share of requests, for gateways
    serving      the revisions that releases promoted, for hosts that start
    scaling      the state of the autoscaler between two decisions
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from penstock.cluster.host_record import JoinTokens, decode_known, decode_record, without_defaults
from penstock.cluster.registry import Registry, RegistryError
from penstock.cluster.replica import ReplicaSpec
from penstock.control.autoscaler import AutoscalerState
from penstock.core.errors import StoreUnavailable, Superseded
from penstock.core.messages import WIRE_VERSION
from penstock.core.tasks import end_task

logger = logging.getLogger(__name__)


LEADER = "leader"
DIRECTIVE = "directive"
SERVING = "serving"
SCALING = "scaling"
HOST_PREFIX = "host/"
OWN_PREFIX = "own-"  # of the slots that a host's own settings ask for
_PURPOSE = "penstock document of the leader"
Body = TypeVar("Body")


class LeaderDocument(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    endpoint: str  # for gateways, with the public key
    version: str = ""
    since: float = 0.0  # Unix seconds


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that a host runs, or shall no longer run. A replica that dies is replaced in its slot."""

    name: str
    spec: ReplicaSpec
    want: Literal["serve", "leave"] = "serve"
    drain_timeout_s: float = 60.0  # for the requests of a replica that leaves
    is_by_operator: bool = False  # leaves because an operator drains its host


class HostOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas that one host shall run. Slots of the host's own settings serve unless they are named here; of all
    others, the host runs exactly those that are named here."""

    host: str
    slots: tuple[Slot, ...] = ()
    is_cordoned: bool = False  # no replica is placed here
    is_draining: bool = False  # the leader moves its replicas to other hosts


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The spec to start instead of the spec of a host's own settings. By model, role and revision of the own
    spec."""

    specs: dict[str, ReplicaSpec] = {}

    @staticmethod
    def key(spec: ReplicaSpec) -> str:
        return f"{spec.model}/{spec.role}/{spec.revision}"


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one pool's autoscaler. Its times are Unix seconds by the clock of the leader that wrote them."""

    state: AutoscalerState = AutoscalerState()
    written_at: float | None = None  # earlier versions do not say
    num_scale_ups: int = 0
    num_scale_downs: int = 0
    last_decision: str = ""
    last_decision_at: float | None = None


class ScalingDocument(msgspec.Struct, frozen=True):
    pools: dict[str, PoolState] = {}  # by model and role


class Document(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    epoch: int
    number: int  # rises with every writing of this name, in one epoch
    body: msgspec.Raw
    wire_version: int = WIRE_VERSION

    def read(self, shape: type[Body]) -> Body | None:
        """Return the body; None, after a warning, if this version does not understand it."""
        try:
            body: Body = decode_known(self.body, shape)
        except msgspec.MsgspecError as error:
            logger.warning("the document %s is not understood: %s", self.name, error)
            return None
        return body


_decode = msgspec.json.Decoder(Document).decode


def sealed(name: str, epoch: int, number: int, body: Any, tokens: JoinTokens) -> bytes:
    document = Document(
        name=name, epoch=epoch, number=number, body=msgspec.Raw(msgspec.json.encode(without_defaults(body)))
    )
    return tokens.sign(msgspec.json.encode(document), _PURPOSE)


def opened(name: str, data: bytes, tokens: JoinTokens) -> Document:
    """Raises ValueError, with the rest of a sentence, for a document that cannot be used."""
    body = tokens.verified(data, _PURPOSE)
    if body is None:
        raise ValueError("was not signed with this fleet's join token")
    try:
        document = _decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"is not understood: {error}") from error
    if document.name != name:
        raise ValueError(f"is that of {document.name!r}")
    if document.wire_version != WIRE_VERSION:
        raise ValueError(f"has version {document.wire_version} of the messages, not {WIRE_VERSION}")
    return document


class DocumentReader:
    """Takes documents in the order of epochs. One per process, so that one document fences off the others."""

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens
        self.epoch = 0  # the latest that was seen
        self._taken: dict[str, tuple[int, int]] = {}  # epoch and number, by name
        self._seen: dict[str, bytes] = {}

    def take(self, documents: Mapping[str, bytes]) -> dict[str, Document]:
        """Return the documents that are new and may be followed, by name."""
        changed = {name: data for name, data in documents.items() if self._seen.get(name) != data}
        self._seen = dict(documents)
        usable: dict[str, Document] = {}
        for name, data in changed.items():
            try:
                usable[name] = opened(name, data, self._tokens)
            except ValueError as error:
                logger.warning("the document %s is left out: it %s", name, error)
        self.epoch = max([self.epoch, *(document.epoch for document in usable.values())])
        return {name: document for name, document in usable.items() if self._is_next(document)}

    def _is_next(self, document: Document) -> bool:
        if document.epoch < self.epoch:
            logger.warning(
                "the document %s of leader %d is refused: leader %d has taken over",
                document.name,
                document.epoch,
                self.epoch,
            )
            return False
        order = document.epoch, document.number
        if order <= self._taken.get(document.name, (0, -1)):
            return False
        self._taken[document.name] = order
        return True


_SUPERSEDED = "Another control process leads this fleet now."
_OVER = "The lease of this control process ended before the registry renewed it."
LEADER_LEASE_S = 5.0
RENEW_SHARE = 0.25  # of the lease, from one renewal to the next, and from one try of a candidate to the next
LEAST_PAUSE_SHARE = 0.02  # of the lease, behind an answer of the registry that took as long
SAFETY_SHARE = 0.2  # of the lease: how long before its end a leader stops


class Leadership:
    """One candidate. `epoch` is None unless this process leads now. With `tokens`, the candidate stands back while
    most hosts have other tokens: they would not follow. A candidate that starts with an empty registry waits for
    `hosts_return_s`: the registry may have lost its memory, and hosts tell the epoch that they obeyed."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        *,
        tokens: JoinTokens | None = None,
        lease_s: float = LEADER_LEASE_S,
        hosts_return_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self.name = name
        self._waits_until_s = now() + hosts_return_s
        self._tokens = tokens
        self._lease_s = lease_s
        self._now = now
        self._epoch: int | None = None
        self._valid_until_s = 0.0
        self._known_epoch = 0
        self._changed = asyncio.Event()
        self._is_away = False
        self._is_standing_back = False
        self._read: frozenset[bytes] = frozenset()  # the records that were there last

    @property
    def epoch(self) -> int | None:
        return self._epoch if self._now() < self._valid_until_s else None

    @property
    def latest_epoch(self) -> int:
        """Return the latest epoch that this process knows of, whether it leads or not; 0 before the first."""
        return self._known_epoch

    def know(self, epoch: int) -> None:
        """Learn of an epoch that a host has obeyed. The next lease must have a greater one."""
        self._known_epoch = max(self._known_epoch, epoch)
        if self._epoch is not None and epoch > self._epoch:
            self._lose("another leader has taken over")

    async def until_leads(self) -> int:
        while (epoch := self.epoch) is None:
            await self._changed.wait()
        return epoch

    async def until_lost(self, epoch: int) -> None:
        """Wait until the lease of this epoch is over."""
        while self.epoch == epoch:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._valid_until_s - self._now())):
                    await self._changed.wait()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Campaign until the context ends, and then resign. A registry that cannot be used is waited for."""
        campaigning = asyncio.create_task(self._campaign())
        try:
            yield
        finally:
            await end_task(campaigning)
            self._lose("this process ends")
            with contextlib.suppress(RegistryError):
                await self._registry.resign(self.name)

    async def give_up(self, epoch: int) -> None:
        """End a term. The next one of this process gets another epoch: documents of one epoch come from one term."""
        if self._epoch == epoch:
            self._lose("the term is over")
            with contextlib.suppress(RegistryError):
                await self._registry.resign(self.name)

    async def _campaign(self) -> None:
        while True:
            began_s = self._now()
            try:
                await self.try_once()
                self._is_away = False
            except RegistryError as error:
                if not self._is_away:
                    logger.warning("the registry cannot be used, so no process can lead: %s", error)
                self._is_away = True
            except Exception:  # a lease that is not renewed ends by itself
                logger.exception("the lease of the leader could not be asked for; it is asked for again")
            left_s = self._lease_s * RENEW_SHARE - (
                self._now() - began_s
            )  # a slow answer must not delay the next
            await asyncio.sleep(max(self._lease_s * LEAST_PAUSE_SHARE, left_s))

    async def try_once(self) -> None:
        """Take the lease, or renew it. Raises RegistryError."""
        if self._epoch is not None and self.epoch is None:
            await self.give_up(self._epoch)
        if self._epoch is None:
            if await self._must_stand_back():
                return
            if self._read or self._known_epoch or self._now() >= self._waits_until_s:
                await self._ask_for_lease()
            return
        # Together, because both answers may be slow.
        must_stand_back, _ = await asyncio.gather(self._must_stand_back(), self._ask_for_lease())
        if must_stand_back and self._epoch is not None:
            await self.give_up(self._epoch)

    async def _must_stand_back(self) -> bool:
        """Return whether most hosts have other join tokens, and complain when that begins."""
        if self._tokens is None:
            return False
        records = await self._registry.records()
        if self._epoch is None:
            self._learn(records)
        num_strangers = sum(self._tokens.verified(record) is None for record in records.values())
        must_stand_back = 2 * num_strangers > len(records)
        if must_stand_back and not self._is_standing_back:
            logger.error(
                "%d of the %d hosts in the registry have another join token than this process, which therefore does "
                "not lead the fleet",
                num_strangers,
                len(records),
            )
        self._is_standing_back = must_stand_back
        return must_stand_back

    def _learn(self, records: Mapping[str, bytes]) -> None:
        """Learn of the epochs that hosts have obeyed. The registry may lose its memory together with the leader: the
        next lease would then get the number of an earlier one, and nobody would take its documents for new."""
        assert self._tokens is not None
        before, self._read = self._read, frozenset(records.values())
        for record in self._read - before:
            with contextlib.suppress(ValueError):  # of another version, or with another token
                self.know(decode_record(record, self._tokens).epoch)

    async def _ask_for_lease(self) -> None:
        asked_s = self._now()  # the lease begins later than this
        epoch = await self._registry.lead(self.name, self._lease_s, self._known_epoch)
        if epoch is None or epoch < self._known_epoch:
            self._lose("another process leads")
            return
        self._known_epoch = max(self._known_epoch, epoch)
        self._valid_until_s = asked_s + self._lease_s * (1.0 - SAFETY_SHARE)
        if epoch != self._epoch:
            self._epoch = epoch
            self._tell()

    def _lose(self, why: str) -> None:
        if self._epoch is not None:
            logger.info("leader %d steps down: %s", self._epoch, why)
            self._epoch = None
            self._valid_until_s = 0.0
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Writer:
    """Writes the documents of one leader, in one epoch."""

    def __init__(self, registry: Registry, tokens: JoinTokens, leadership: Leadership, epoch: int) -> None:
        self._registry = registry
        self._tokens = tokens
        self._leadership = leadership
        self.epoch = epoch
        self._number = 0

    async def write(self, name: str, body: Any) -> None:
        """Write a document; None removes it. Raises Superseded when this process no longer leads, and
        StoreUnavailable when the registry does not answer."""
        if (latest := self._leadership.epoch) != self.epoch:
            raise Superseded(_OVER if latest is None else _SUPERSEDED)
        self._number += 1
        data = None if body is None else sealed(name, self.epoch, self._number, body, self._tokens)
        try:
            is_written = await self._registry.write(name, data, self.epoch)
        except RegistryError as error:
            raise StoreUnavailable(f"The registry does not answer: {error}.", retry_after_s=1.0) from error
        if not is_written:
            raise Superseded(_SUPERSEDED)
