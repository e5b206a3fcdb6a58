"""Every message between the first rank of an engine and the others, and nothing else."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.core.engine_config import EngineConfig, Rendezvous
from penstock.core.plan import SampledToken, ScoredChunk, StepPlan, StepResult
from penstock.core.request import Adapter, Request


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message, once."""

    rank: int
    config: EngineConfig
    model_path: str
    store_file: str  # a file; empty where the ranks are on several nodes
    log_level: int
    log_format: str
    # Of ranks on several nodes; the address is that of the first rank's node.
    rendezvous: Rendezvous | None = None


class Added(msgspec.Struct, frozen=True, tag="added"):
    request: Request


class Appended(msgspec.Struct, frozen=True, tag="appended"):
    request_id: str
    token_ids: tuple[int, ...]


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    request_id: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag="adapter_loaded"):
    adapter: Adapter


class AdapterDropped(msgspec.Struct, frozen=True, tag="adapter_dropped"):
    digest: str


class ExpertsPlaced(msgspec.Struct, frozen=True, tag="experts_placed"):
    """The experts of all slots of a layer from the next plan on. `layer` counts the layers with experts."""

    layer: int
    experts: tuple[int, ...]


News: TypeAlias = Added | Appended | Removed | AdapterLoaded | AdapterDropped | ExpertsPlaced


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Apply the updates, in order, then run the plan. `in_flight` holds tokens that the plan needs and that no update
    has delivered yet, by request. `others_compute`: with data-parallel attention, other ranks have tokens, whose
    experts this rank may hold."""

    news: tuple[News, ...]
    plan: StepPlan
    in_flight: dict[str, int] = {}
    others_compute: bool = False


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Send the result of the oldest step that was not reported: a rank with requests of its own samples for them."""


class CountExperts(msgspec.Struct, frozen=True, tag="count_experts"):
    """Add up the tokens of experts, together with all ranks, and count from 0 again."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """There will be no more steps."""


ToRank: TypeAlias = Begin | Step | Report | CountExperts | Leave


class Present(msgspec.Struct, frozen=True, tag="present"):
    """The rank has started and is about to join the others."""

    weights_id: str = ""  # of a rank on several nodes, which must have the same weights


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """The samples of a rank for one plan, and its scores of prompt tokens: of the last stage of a pipeline, or of a
    rank with requests of its own."""

    sampled: tuple[SampledToken, ...]
    scored: tuple[ScoredChunk, ...] = ()
    elapsed_s: float = 0.0
    encoder_s: float = 0.0
    preparation_s: float = 0.0

    @classmethod
    def of(cls, result: StepResult) -> Sampled:
        return cls(result.sampled, result.scored, result.elapsed_s, result.encoder_s, result.preparation_s)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot continue, and ends after this."""

    code: str
    message: str
    hint: str | None = None


FromRank: TypeAlias = Present | Sampled | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
