"""The dispatch log holds every call to a dispatcher, with its time and the actions that it returned, so that a run of
a live fleet can be replayed and its actions compared.

JSON lines: a `LogHeader` with all that is needed to build the same dispatcher, then one `LogRecord` for every call,
in order. Prompts and answers are part of the log. Log-probabilities and embeddings are left out: no action depends on
them. Times are those of the recording clock; only their differences mean anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.messages import EngineStats, KVEvent
from penstock.core.objective import RoutingWeights
from penstock.core.plan import TokenEvent
from penstock.core.plan_log import LoggedError, encode_logged, log_line, read_log
from penstock.core.request import Request
from penstock.dispatch.actions import Action, Deliver
from penstock.dispatch.config import DispatchConfig
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.replicas import FleetStatus
from penstock.router import RandomSource


class LogHeader(msgspec.Struct, frozen=True, kw_only=True):
    config: DispatchConfig
    seed: int  # of the random numbers that the dispatcher draws
    now: float


class UpdateCall(msgspec.Struct, frozen=True, tag_field="call", tag="update"):
    status: FleetStatus


class RouteByCall(msgspec.Struct, frozen=True, tag_field="call", tag="route_by"):
    weights: dict[str, RoutingWeights]


class AddCall(msgspec.Struct, frozen=True, tag_field="call", tag="add"):
    request: Request
    timeout_s: float | None
    block_hashes: tuple[bytes, ...] | None = None


class AbortCall(msgspec.Struct, frozen=True, tag_field="call", tag="abort"):
    request_id: str


class NewsCall(msgspec.Struct, frozen=True, tag_field="call", tag="news"):
    replica_id: str
    events: tuple[TokenEvent, ...]


class FailedCall(msgspec.Struct, frozen=True, tag_field="call", tag="failed"):
    replica_id: str
    request_id: str
    error: LoggedError


class HeartbeatCall(msgspec.Struct, frozen=True, tag_field="call", tag="heartbeat"):
    replica_id: str
    stats: EngineStats


class KVEventsCall(msgspec.Struct, frozen=True, tag_field="call", tag="kv_events"):
    replica_id: str
    events: tuple[KVEvent, ...]


class TickCall(msgspec.Struct, frozen=True, tag_field="call", tag="tick"):
    pass


Call: TypeAlias = (
    UpdateCall
    | RouteByCall
    | AddCall
    | AbortCall
    | NewsCall
    | FailedCall
    | HeartbeatCall
    | KVEventsCall
    | TickCall
)


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    now: float
    call: Call
    revisions: tuple[str | None, ...] = ()  # that were chosen for attempts during the call, in order
    actions: msgspec.Raw  # as `encode_actions` writes them


class RecordingDispatcher(Dispatcher):
    """A dispatcher that writes every call and its actions to `write`, one line at a time."""

    def __init__(
        self,
        config: DispatchConfig,
        seed: int,
        rng: RandomSource,
        now: float,
        write: Callable[[bytes], object],
    ) -> None:
        super().__init__(config, rng, now)
        self._write = write
        self._revisions: list[str | None] = []
        write(log_line(LogHeader(config=config, seed=seed, now=now)))

    def update(self, status: FleetStatus, now: float) -> Sequence[Action]:
        return self._log(UpdateCall(status), super().update(status, now), now)

    def route_by(self, weights: Mapping[str, RoutingWeights], now: float) -> Sequence[Action]:
        return self._log(RouteByCall(dict(weights)), super().route_by(weights, now), now)

    def add(
        self,
        request: Request,
        now: float,
        *,
        timeout_s: float | None = None,
        block_hashes: Sequence[bytes] | None = None,
    ) -> Sequence[Action]:
        call = AddCall(
            request.without_image_data(), timeout_s, None if block_hashes is None else tuple(block_hashes)
        )
        return self._log(call, super().add(request, now, timeout_s=timeout_s, block_hashes=block_hashes), now)

    def abort(self, request_id: str, now: float) -> Sequence[Action]:
        return self._log(AbortCall(request_id), super().abort(request_id, now), now)

    def news(self, replica_id: str, events: Sequence[TokenEvent], now: float) -> Sequence[Action]:
        return self._log(NewsCall(replica_id, _plain(events)), super().news(replica_id, events, now), now)

    def failed(self, replica_id: str, request_id: str, error: PenstockError, now: float) -> Sequence[Action]:
        call = FailedCall(replica_id, request_id, LoggedError.of(error))
        return self._log(call, super().failed(replica_id, request_id, error, now), now)

    def heartbeat(self, replica_id: str, stats: EngineStats, now: float) -> Sequence[Action]:
        return self._log(HeartbeatCall(replica_id, stats), super().heartbeat(replica_id, stats, now), now)

    def kv_events(self, replica_id: str, events: tuple[KVEvent, ...], now: float) -> Sequence[Action]:
        return self._log(KVEventsCall(replica_id, events), super().kv_events(replica_id, events, now), now)

    def tick(self, now: float) -> Sequence[Action]:
        return self._log(TickCall(), super().tick(now), now)

    def _revision_for(self, request: Request) -> str | None:
        revision = super()._revision_for(request)
        self._revisions.append(revision)
        return revision

    def _log(self, call: Call, actions: Sequence[Action], now: float) -> Sequence[Action]:
        revisions, self._revisions = tuple(self._revisions), []
        written = msgspec.Raw(encode_actions(actions))
        record = LogRecord(now=now, call=call, revisions=revisions, actions=written)
        self._write(log_line(record))
        return actions


def make_call(dispatcher: Dispatcher, record: LogRecord) -> Sequence[Action]:
    """Make a recorded call on another dispatcher."""
    revisions = iter(record.revisions)
    dispatcher.choose_revision = lambda request: next(revisions, None)
    now = record.now
    match record.call:
        case UpdateCall(status):
            return dispatcher.update(status, now)
        case RouteByCall(weights):
            return dispatcher.route_by(weights, now)
        case AddCall(request, timeout_s, block_hashes):
            return dispatcher.add(request, now, timeout_s=timeout_s, block_hashes=block_hashes)
        case AbortCall(request_id):
            return dispatcher.abort(request_id, now)
        case NewsCall(replica_id, token_events):
            return dispatcher.news(replica_id, token_events, now)
        case FailedCall(replica_id, request_id, error):
            return dispatcher.failed(replica_id, request_id, error.rebuild(), now)
        case HeartbeatCall(replica_id, stats):
            return dispatcher.heartbeat(replica_id, stats, now)
        case KVEventsCall(replica_id, events):
            return dispatcher.kv_events(replica_id, events, now)
        case TickCall():
            return dispatcher.tick(now)


def encode_actions(actions: Sequence[Action]) -> bytes:
    """Return the JSON of actions. Equal actions have equal bytes."""
    return encode_logged(
        [Deliver(_plain(action.events)) if type(action) is Deliver else action for action in actions]
    )


def read_dispatch_log(lines: Iterable[bytes]) -> tuple[LogHeader, Iterator[LogRecord]]:
    """Return the header, and the records as they are read. `lines` may be a file opened in binary mode."""
    return read_log(lines, _DECODE_HEADER, _DECODE_RECORD, "dispatch log")


def _plain(events: Sequence[TokenEvent]) -> tuple[TokenEvent, ...]:
    """Return the events without log-probabilities and embeddings."""
    return tuple(
        event
        if event.embedding is None and event.prompt_logprobs is None and not event.logprobs
        else msgspec.structs.replace(
            event,
            logprobs=(),
            embedding=None if event.embedding is None else b"",
            prompt_logprobs=None,
        )
        for event in events
    )


_DECODE_HEADER = msgspec.json.Decoder(LogHeader).decode
_DECODE_RECORD = msgspec.json.Decoder(LogRecord).decode
