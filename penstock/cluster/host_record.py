"""The record that a host of engines publishes in the registry: its replicas, and further replicas that it could
start.

Hosts, gateways and leaders of different versions read each other's records. A reader leaves out fields that it does
not know; a change that would be misunderstood raises `WIRE_VERSION`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect as types

from penstock.cluster.join_tokens import JoinTokens
from penstock.cluster.replica import Member, ReplicaSpec
from penstock.core.messages import WIRE_VERSION
from penstock.dispatch import Role


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
    """Say whether a replica in one role takes room from replicas in the other, because it may work in both."""
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
