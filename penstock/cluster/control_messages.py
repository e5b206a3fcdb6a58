"""The messages between gateways and the control plane: JSON lines over a private socket.

A gateway reports what happened since its last report and gets the directive in return. The control plane adds the
reports up; a gateway that restarts only reports less.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.control.release import ReleaseConfig, ReleaseState
from penstock.core.cluster_view import ClusterView, PoolView, ReleaseOrder, ReleaseView


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One attempt that ended."""

    replica_id: str
    model: str
    revision: str
    stage_number: int | None  # of the release of its model when it began; None: there was none
    ttft_s: float | None
    itl_s: float | None
    has_failed: bool


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway's report about one model."""

    arrived_tokens: int = 0  # uncached, of prompts that came since the last report
    held_requests: int = 0  # now
    held_tokens: int = 0
    stage_number: int | None = None  # that the two counts below were made in
    num_compared: int = 0  # mirrored answers, since the last report
    num_diverged: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    directive_number: int  # of the directive that this gateway follows
    samples: tuple[Sample, ...] = ()
    models: dict[str, ModelReport] = {}
    token_s: dict[str, float] = {}  # by replica id: seconds that one more uncached prompt token takes there
    reasons: dict[str, int] = {}  # requests routed since the last report, by what decided
    num_prompt_tokens: int = 0
    num_matched_tokens: int = 0


class ShowCluster(msgspec.Struct, frozen=True, tag="show"):
    pass


class StartRelease(msgspec.Struct, frozen=True, tag="start_release"):
    order: ReleaseOrder


class PromoteRelease(msgspec.Struct, frozen=True, tag="promote_release"):
    model: str | None  # None: the only one


class RollBackRelease(msgspec.Struct, frozen=True, tag="roll_back_release"):
    model: str | None


ToControl: TypeAlias = Report | ShowCluster | StartRelease | PromoteRelease | RollBackRelease


class ActiveRelease(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    state: ReleaseState
    config: ReleaseConfig


class Directive(msgspec.Struct, frozen=True, kw_only=True, tag="directive"):
    """Tells a gateway what to do until the next directive. `number` rises when `releases` change."""

    number: int
    releases: tuple[ActiveRelease, ...] = ()
    pools: tuple[PoolView, ...] = ()  # for its metrics


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    view: ClusterView


class ReleaseShown(msgspec.Struct, frozen=True, tag="release_shown"):
    release: ReleaseView


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An order was refused. `code` is one of core.errors."""

    code: str
    message: str
    param: str | None = None
    hint: str | None = None


FromControl: TypeAlias = Directive | Shown | ReleaseShown | Refused


def encode_line(message: ToControl | FromControl) -> bytes:
    return msgspec.json.encode(message) + b"\n"


decode_to_control = msgspec.json.Decoder(ToControl).decode
decode_from_control = msgspec.json.Decoder(FromControl).decode
