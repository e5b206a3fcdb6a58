"""The actions that the dispatcher asks of its driver, and its reports for metrics and releases. Frozen data only.

Send              give a request to a replica
Cancel            tell a replica to forget a request
Deliver           give events to the clients of their requests
Fail              end a request with an error
WakeAt            call `tick` at this time; replaces the time asked for before
SubscribeKVEvents ask a replica for its KV events from now on
ResyncKVEvents    ask a replica to send its KV events from the start, because some were lost
Waits, Arrived, FirstToken, AttemptEnded, Eject    reports; the driver passes them on or ignores them
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to answer a request on one replica, after the attempt ended. A request that was retried on another
    replica has several attempts."""

    request: Request
    replica_id: str
    revision: str
    ttft_s: float | None  # None: no token came
    itl_s: float | None  # mean time between tokens; None: there were fewer than two
    output_token_ids: tuple[int, ...]  # of this attempt
    finish_reason: FinishReason | None = None
    error: PenstockError | None = None


class Send(msgspec.Struct, frozen=True, tag_field="action", tag="send"):
    """Sends a request to a replica. `request` holds the tokens that the client already has; `timeout_s` is the rest
    of the request's time."""

    replica_id: str
    request: Request
    timeout_s: float | None
    kv_source: KVSource | None  # another replica that has, or computes, the KV of the prompt
    reason: str = ""  # why the router chose this replica
    matched_tokens: int = 0  # of the prompt, expected in the replica's cache


class Cancel(msgspec.Struct, frozen=True, tag_field="action", tag="cancel"):
    replica_id: str
    request_id: str


class Deliver(msgspec.Struct, frozen=True, tag_field="action", tag="deliver"):
    """Delivers the events of one step, for any number of requests: an action for each event would cost too much."""

    events: tuple[TokenEvent, ...]


class Fail(msgspec.Struct, frozen=True, tag_field="action", tag="fail"):
    request_id: str
    error: PenstockError


class WakeAt(msgspec.Struct, frozen=True, tag_field="action", tag="wake_at"):
    at_s: float


class SubscribeKVEvents(msgspec.Struct, frozen=True, tag_field="action", tag="subscribe_kv_events"):
    replica_id: str


class ResyncKVEvents(msgspec.Struct, frozen=True, tag_field="action", tag="resync_kv_events"):
    replica_id: str


class Waits(msgspec.Struct, frozen=True, tag_field="action", tag="waits"):
    """A request entered the waiting room. A driver that can start replicas may want to start one."""

    request_id: str


class Arrived(msgspec.Struct, frozen=True, tag_field="action", tag="arrived"):
    """A request was routed for the first time, or entered the waiting room before that. Reported once for each
    request."""

    request: Request
    uncached_tokens: int  # of the prompt


class FirstToken(msgspec.Struct, frozen=True, tag_field="action", tag="first_token"):
    """The first token of an answer. Not reported for an answer that another replica began."""

    request: Request
    replica_id: str
    revision: str
    ttft_s: float


class AttemptEnded(msgspec.Struct, frozen=True, tag_field="action", tag="attempt_ended"):
    """Reported once for every attempt: also for a failed attempt that is made again on another replica, and for a
    request that its client aborted (its finish_reason is then ABORT)."""

    attempt: Attempt


class Eject(msgspec.Struct, frozen=True, tag_field="action", tag="eject"):
    """A replica is much slower than its peers and gets no new requests, or (`is_slow` false) gets requests again."""

    replica_id: str
    is_slow: bool


Action: TypeAlias = (
    Send
    | Cancel
    | Deliver
    | Fail
    | WakeAt
    | SubscribeKVEvents
    | ResyncKVEvents
    | Waits
    | Arrived
    | FirstToken
    | AttemptEnded
    | Eject
)
