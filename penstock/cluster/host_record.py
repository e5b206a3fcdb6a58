"""The record that a host of engines publishes in the registry: its replicas, and further replicas that it could
start.

Hosts, gateways and leaders of different versions read each other's records. A reader leaves out fields that it does
not know; a change that would be misunderstood raises `WIRE_VERSION`.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from msgspec import inspect as types
from zmq.utils import z85

from penstock.cluster.replica import Member, ReplicaSpec
from penstock.cluster.transport import KeyPair
from penstock.core.errors import ConfigError
from penstock.core.messages import WIRE_VERSION
from penstock.dispatch import Role

MIN_TOKEN_CHARS = 20
HOST_RECORD = "penstock host record"  # what a signature is for


@dataclass(frozen=True, slots=True)
class JoinTokens:
    """The secrets that the machines of a fleet share. The first token signs; each of them is accepted. A new token
    is rolled out behind the old one, then in front of it, and then alone.

    They sign the records of the registry, and open the way to engines.
    """

    tokens: tuple[str, ...] = field(repr=False)

    @staticmethod
    def parse(text: str) -> JoinTokens:
        """Read tokens that are separated by commas."""
        tokens = tuple(token.strip() for token in text.split(",") if token.strip())
        if not tokens or any(len(token) < MIN_TOKEN_CHARS for token in tokens):
            split = " Commas separate tokens, of which one is shorter." if "," in text else ""
            raise ConfigError(
                f"A join token has at least {MIN_TOKEN_CHARS} characters.{split}",
                hint="Make one with: openssl rand -hex 32, and give the same one to every machine of the fleet.",
            )
        return JoinTokens(tokens)

    def client_keys(self) -> KeyPair:
        """Return the CURVE keys that a machine with the first token connects with."""
        return _client_keys(self.tokens[0])

    def accepted_clients(self) -> tuple[str, ...]:
        """Return the public keys of all machines that may connect to an engine."""
        return tuple(_client_keys(token).public for token in self.tokens)

    def sign(self, body: bytes, purpose: str = HOST_RECORD) -> bytes:
        return _mac(self.tokens[0], purpose, body).encode() + b"\n" + body

    def verified(self, record: bytes, purpose: str = HOST_RECORD) -> bytes | None:
        """Return the body of a record, or None if no token signed it for this purpose."""
        mac, _, body = record.partition(b"\n")
        is_signed = any(
            hmac.compare_digest(mac, _mac(token, purpose, body).encode()) for token in self.tokens
        )
        return body if is_signed else None


def _client_keys(token: str) -> KeyPair:
    secret = z85.encode(hashlib.sha256(b"penstock client of engines\0" + token.encode()).digest())
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


def _mac(token: str, purpose: str, body: bytes) -> str:
    return hmac.new(token.encode(), purpose.encode() + b"\0" + body, hashlib.sha256).hexdigest()


def is_signed(record: bytes) -> bool:
    """Return whether a record has the shape of one that some join token signed."""
    mac, separator, _ = record.partition(b"\n")
    return bool(separator) and len(mac) == 64 and mac.isalnum()


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that a host can run. Its own settings made the spec."""

    spec: ReplicaSpec
    replicas: int  # that the host starts by itself
    max_replicas: int  # of one revision; prefill and decode replicas of a model share the room of the host


class HostRecord(msgspec.Struct, frozen=True):
    """The replicas of one machine that runs engines."""

    host: str
    members: tuple[Member, ...]
    offers: tuple[Offer, ...] = ()
    slots: dict[str, str] = {}  # by the id of a member: the slot that it fills
    failures: dict[str, str] = {}  # by slot: why its replica could not be started
    epoch: int = 0  # of the latest leader that this host obeyed
    is_leaving: bool = False  # no replica can be started here any more
    version: str = ""  # of Penstock
    converts: bool = False  # follows orders that change the role of a replica

    def room(self, model: str, role: Role) -> int:
        """Return how many replicas of one revision this host may have, in this role and in all with which the role
        shares the room; 0 without an offer."""
        offers = [
            offer for offer in self.offers if offer.spec.model == model and shares_room(offer.spec.role, role)
        ]
        started = sum(offer.replicas for offer in offers)
        return max([started, *(offer.max_replicas for offer in offers)])


def shares_room(role: Role, other: Role) -> bool:
    """Return whether a replica in one role takes room from replicas in the other, because it may work in both."""
    return (role == "both") is (other == "both")


class _Envelope(msgspec.Struct, frozen=True):
    """A host's record with the version of the messages that its engines understand. The version can be read even if
    the record itself belongs to another version."""

    wire_version: int
    record: msgspec.Raw


_decode_envelope = msgspec.json.Decoder(_Envelope).decode


def encode_record(record: HostRecord, tokens: JoinTokens) -> bytes:
    body = msgspec.Raw(msgspec.json.encode(without_defaults(record)))
    return tokens.sign(msgspec.json.encode(_Envelope(WIRE_VERSION, body)))


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
        record: HostRecord = decode_known(envelope.record, HostRecord)
        return record
    except msgspec.MsgspecError as error:
        raise ValueError(f"is not understood: {error}") from error


def wire_version_of(body: bytes) -> int | None:
    """Return the version of the messages that a record's host speaks; None if the record does not tell."""
    try:
        return _decode_envelope(body).wire_version
    except msgspec.MsgspecError:
        return None


def without_defaults(value: Any) -> Any:
    """Return a struct as plain data without the fields that have their default values. An earlier version then reads
    it as long as no setting is used that the version does not know: settings of engines refuse unknown fields."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        return {
            field.encode_name: without_defaults(getattr(value, field.name))
            for field in fields
            if field.required or getattr(value, field.name) != field.default
        }
    if isinstance(value, (tuple, list)):
        return [without_defaults(each) for each in value]
    if isinstance(value, dict):
        return {key: without_defaults(each) for key, each in value.items()}
    return value


def decode_known(data: bytes | msgspec.Raw, shape: type[Any]) -> Any:
    """Decode JSON of another version, without the fields that this version does not know. Raises MsgspecError."""
    return msgspec.convert(_known(msgspec.json.decode(data), types.type_info(shape)), shape)


def _known(value: Any, declared: types.Type) -> Any:
    match declared:
        case types.Metadata(type=inner):
            return _known(value, inner)
        case types.UnionType(types=members):
            structs = [member for member in members if isinstance(member, types.StructType)]
            return _known(value, structs[0]) if len(structs) == 1 else value
        case types.StructType(fields=fields) if isinstance(value, dict):
            return {
                field.encode_name: _known(value[field.encode_name], field.type)
                for field in fields
                if field.encode_name in value
            }
        case types.VarTupleType(item_type=item) if isinstance(value, list):
            return [_known(each, item) for each in value]
        case types.DictType(value_type=item) if isinstance(value, dict):
            return {key: _known(each, item) for key, each in value.items()}
        case _:
            return value
