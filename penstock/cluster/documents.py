"""The documents that the leader of a shared fleet writes into the registry, and the rule that fences off old leaders.

Every document carries the epoch of its leader. A reader that has seen an epoch refuses documents of all earlier ones,
whatever the registry says: a leader that was paused and wakes up after another took over can change nothing. Within
one epoch, documents of one name are numbered, and none is taken twice or out of order.

    leader       which process leads, and where it listens
    host/NAME    what one host of engines runs
    directive    which revision answers which share of requests, for gateways
    serving      the revisions that releases promoted, for hosts that start
    scaling      the state of the autoscaler between two decisions
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from penstock.cluster.host_record import decode_known, without_defaults
from penstock.cluster.join_tokens import JoinTokens
from penstock.cluster.replica import ReplicaSpec
from penstock.control.autoscaler import AutoscalerState
from penstock.core.messages import WIRE_VERSION

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
    """The state of one pool's autoscaler. Its times are Unix seconds."""

    state: AutoscalerState = AutoscalerState()
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
