"""Every message between a gateway process and an engine process, and the KV events that these messages carry.

Applying the KV events of one replica in order to an empty set gives exactly the hashes that replica can reuse.
`sequence` starts at 0 and rises by one per event: a reader that sees a gap has missed events and must ask for a
restart.

Messages are encoded with msgspec as tagged MessagePack; one engine→gateway message carries all events of a step.
Times never cross as absolute values, because two processes need not share a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Literal, Protocol, TypeAlias

import msgspec

from penstock.core.image_layout import VisionCard
from penstock.core.kv_transfer import KVSource
from penstock.core.plan import TokenEvent
from penstock.core.request import Pooling, Request, SamplingDefaults


class KeptEntry(msgspec.Struct, frozen=True, array_like=True):
    """A prefix that a client asked to keep, with `cache_control`."""

    block_hash: bytes  # of the last block in front of the breakpoint
    num_blocks: int  # kept: all blocks up to that one, or fewer where there was no room
    left_s: float  # until the entry ends, unless it is prolonged


class KVStored(msgspec.Struct, frozen=True, tag="stored", omit_defaults=True):
    """A run of one chain became reusable: `block_hashes[0]` follows `parent`, every other hash follows
    the one before. Or no block did, and prefixes are kept from now on, or for longer."""

    sequence: int
    block_hashes: tuple[bytes, ...]
    parent: bytes
    kept: tuple[KeptEntry, ...] = ()


class KVRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """These hashes can no longer be reused. The end of a chain comes before its beginning."""

    sequence: int
    block_hashes: tuple[bytes, ...]


class KVCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing of this replica can be reused any more; later events start from an empty set."""

    sequence: int


KVEvent: TypeAlias = KVStored | KVRemoved | KVCleared


HEARTBEAT_INTERVAL_S = 0.25


# Raised whenever engines and gateways of two versions would misunderstand each other. New fields with defaults do not
# raise it.
WIRE_VERSION = 1


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: Request
    timeout_s: float | None = None  # becomes Request.deadline_s on the engine's clock
    kv_source: KVSource | None = None  # another engine, which has or computes the KV of its first tokens


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: tuple[str, ...]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A gateway introduces itself and asks for EngineReady. With `wants_kv_events` it gets the engine's KV events
    from now on, which start with the whole index."""

    wants_kv_events: bool = False


class RestartKVEvents(msgspec.Struct, frozen=True, tag="restart_kv_events"):
    """A gateway has missed KV events: start the stream again, for all readers."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave after the current step. The gateway drains first, and sends this when nothing runs."""


ToEngine: TypeAlias = AddRequest | AbortRequests | Hello | RestartKVEvents | Shutdown


class PoolerCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings by which a model turns texts into vectors or scores, from its own files."""

    source: str = ""  # the file that names the pooling; empty when no file does
    normalizes: bool = True  # whether embeddings are scaled to length 1
    # Sizes that vectors may be truncated to; empty: any size; None: no truncation.
    matryoshka: tuple[int, ...] | None = None
    cut_to: int | None = None  # the size to which the model's files truncate vectors
    prompts: dict[str, str] = {}  # texts to put before an input, by name
    default_prompt: str = ""  # the name of the prompt of inputs that name none
    lower_cases: bool = False
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"
    labels: tuple[str, ...] = ()  # of a classifier, whose vectors are logits
    is_multi_label: bool = False  # whether several labels may apply to one text
    scores_pairs: bool = False  # whether the model reads a query and a document together, and gives one score
    score_activation: Literal["sigmoid", "none"] = "sigmoid"  # that turns the logit of a pair into its score
    asks_yes_or_no: bool = False  # a language model that is asked whether the document fits the query


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a served model that a gateway needs. The card is sent with EngineReady, so that a gateway needs
    no model files, no torch, and may run on another machine."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    tokenizer_json: bytes  # a Hugging Face `tokenizers` file
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, … as chat templates name them
    bos_token_id: int | None
    add_bos_token: bool  # whether a plain-text prompt gets bos_token_id in front
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    num_parameters: int
    dtype: str
    quantization: str | None
    rounding: str = ""  # what the kernels round besides: see Ops.rounding
    embedding_size: int = 0  # of embedding vectors; 0 without embeddings
    pooling: Pooling = "mean"  # of embeddings, unless the request says otherwise
    pooler: PoolerCard = PoolerCard()
    is_encoder: bool = False  # every token sees the whole text: no tokens are generated, and no KV is kept
    generates: bool = True  # whether the model has a head for tokens
    named_templates: dict[str, str] = {}  # further chat templates by name, such as tool_use
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # for requests without these settings
    implementation: str = "native"  # whose code runs the model: native or transformers
    device: str = ""  # the GPU that the model runs on, and what it can and cannot do
    weights_id: str = ""  # differs between weights of the same shape, so that caches do not mix their results
    vision: VisionCard | None = None  # how images are placed in prompts; None for a text-only model
    images_hint: str = ""  # how a text-only model could take images, if its files may be only a part of it


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    model: ModelCard
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_output_tokens: int  # server cap on max_tokens
    max_lora_rank: int = 0  # of requests' adapters; 0: none are allowed
    kv_endpoint: str = ""  # for other engines that read KV; empty: none can
    kv_bytes_per_token: int = 0  # moved by such a transfer
    num_contexts: float = 0.0  # requests of the longest context that the KV cache holds at once
    max_requests: int = 0  # that run or wait at once; 0: not known
    max_queue_tokens: int | None = None  # of prompts that wait; None: not known


class RequestRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine did not take a request; `code` is one of core.errors."""

    request_id: str
    code: str
    message: str
    retry_after_s: float | None = None


class DrafterStats(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one drafter's tokens since the engine started, by their position in a draft."""

    drafter: str
    drafted: tuple[int, ...]  # verified by the model; the first entry is the number of drafts
    accepted: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        return self.drafted[0] if self.drafted else 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Current gauges, and counters since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_prefill_tokens: int = 0  # of prompts that run: still to be computed, or in a step that is not done
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0  # active or pinned
    kv_fragmentation: float = 0.0  # share of allocated token slots of running requests that hold nothing
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    num_preemptions: int = 0
    num_swapped: int = 0  # preemptions whose KV may go to host memory instead of being computed again
    num_pinned_blocks: int = 0  # held for cache breakpoints, in use or not
    num_pins_demoted: int = 0  # blocks whose pin was given up before its time, to make room
    num_host_blocks: int = 0  # slots in host memory
    num_host_blocks_used: int = 0
    num_blocks_to_host: int = 0  # copied out so far
    num_blocks_from_host: int = 0
    num_kept_blocks_lost: int = 0  # dropped before their time: neither tier had room
    num_disk_blocks: int = 0  # of this model, in files
    num_disk_bytes: int = 0  # of all files of KV blocks
    num_blocks_to_disk: int = 0  # written so far
    num_blocks_from_disk: int = 0
    cache_read_tokens: int = 0  # reused because a breakpoint had asked to keep them
    cache_write_tokens: int = 0  # newly kept at breakpoints
    num_steps: int = 0
    step_tokens: int = 0  # tokens computed in the latest step
    tokens_computed: int = 0
    step_s: float = 0.0  # duration of the latest step
    busy_s: float = 0.0  # seconds of all steps
    plan_s: float = 0.0  # seconds spent in scheduler.plan and commit for the latest step
    kv_fetches: int = 0  # requests whose KV was to come from another engine
    kv_fetches_failed: int = 0  # fetches that delivered too few blocks
    kv_fetched_tokens: int = 0
    kv_read_bytes: int = 0  # of blocks that another engine had cached
    kv_read_s: float = 0.0  # seconds that reading them took
    num_nan_logits: int = 0  # requests that ended because of NaN logits
    num_out_of_memory: int = 0  # requests ended because a step had no memory for them
    drafters: tuple[DrafterStats, ...] = ()  # in the order in which they first drafted
    num_images: int = 0  # in requests that began to run
    num_images_encoded: int = 0
    image_encoder_s: float = 0.0  # seconds spent on encoding images
    image_cache_queries: int = 0  # images whose encoder output a prompt needed
    image_cache_hits: int = 0  # of them, images that were encoded already
    image_cache_tokens: int = 0  # whose encoder output is kept now
    gpu_memory_bytes: int = 0  # of the first rank's device; 0 without a GPU
    gpu_memory_used_bytes: int = 0  # of that, taken by this process and others
    # With --enable-eplb: the tokens for the busiest rank's experts, relative to the mean of all ranks; mean of all
    # layers, when they were last counted. Then the same with the experts as they were placed for these counts.
    expert_imbalance: float = 0.0
    expert_imbalance_placed: float = 0.0
    num_experts_moved: int = 0  # to another slot, in all layers

    @property
    def num_drafts(self) -> int:
        return sum(each.num_drafts for each in self.drafters)

    @property
    def num_draft_tokens(self) -> int:
        return sum(sum(each.drafted) for each in self.drafters)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(sum(each.accepted) for each in self.drafters)


class StepOutputs(msgspec.Struct, frozen=True, tag="step", omit_defaults=True):
    """The events since the last message. An engine without events sends its stats every HEARTBEAT_INTERVAL_S: silence
    means a long step, or trouble."""

    events: tuple[TokenEvent, ...]
    stats: EngineStats | None = None
    kv_events: tuple[KVEvent, ...] = ()  # for gateways that asked for them


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot serve; the process ends after sending this."""

    code: str
    message: str
    hint: str | None = None


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    stage: str
    fraction: float


FromEngine: TypeAlias = EngineReady | RequestRejected | StepOutputs | EngineFailed | LoadProgress


class Codec:
    """Encoders and decoders for both directions, created once."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def encode(self, message: ToEngine | FromEngine) -> bytes:
        return self._encoder.encode(message)

    def decode_to_engine(self, data: bytes) -> ToEngine:
        return self._to_engine.decode(data)

    def decode_from_engine(self, data: bytes) -> FromEngine:
        return self._from_engine.decode(data)


# Figures of the latest step: the slowest engine's count. All other figures but fragmentation are added up, and
# drafters by name and position.
LATEST = frozenset({"step_s", "plan_s", "expert_imbalance", "expert_imbalance_placed"})
_SUMMED = tuple(
    name
    for name in EngineStats.__struct_fields__
    if name not in LATEST and name not in ("kv_fragmentation", "drafters")
)


def added_up(stats: Sequence[EngineStats]) -> EngineStats:
    if len(stats) == 1:
        return stats[0]
    figures = {name: sum(getattr(each, name) for each in stats) for name in _SUMMED}
    figures |= {name: max((getattr(each, name) for each in stats), default=0.0) for name in LATEST}
    used = figures["num_kv_blocks_used"]
    if used:
        wasted = sum(each.kv_fragmentation * each.num_kv_blocks_used for each in stats)
        figures["kv_fragmentation"] = wasted / used
    return EngineStats(**figures, drafters=_drafters([each.drafters for each in stats]))


def _drafters(stats: Sequence[tuple[DrafterStats, ...]]) -> tuple[DrafterStats, ...]:
    """Add up the counts of each drafter by position. Engines may have drafts of different lengths."""
    found: dict[str, DrafterStats] = {}
    for each in chain.from_iterable(stats):
        known = found.get(each.drafter, DrafterStats(each.drafter, (), ()))
        drafted = tuple(map(sum, zip_longest(known.drafted, each.drafted, fillvalue=0)))
        accepted = tuple(map(sum, zip_longest(known.accepted, each.accepted, fillvalue=0)))
        found[each.drafter] = DrafterStats(each.drafter, drafted, accepted)
    return tuple(found.values())


class _Encoding(Protocol):
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def special_tokens_mask(self) -> Sequence[int]: ...


class _Tokenizer(Protocol):
    def encode(self, text: str, /) -> _Encoding: ...


def first_of_template(tokenizer: _Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer's own template writes before a text."""
    encoding = tokenizer.encode("a")
    is_special = (*encoding.special_tokens_mask, 0)
    return tuple(encoding.ids[: is_special.index(0)])


def first_of_prompt(card: ModelCard, of_template: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens before a plain-text prompt. Some models have several of them, or call none of them the
    beginning of a sequence: their template writes them."""
    if card.add_bos_token and card.bos_token_id is not None:
        return of_template if of_template[:1] == (card.bos_token_id,) else (card.bos_token_id,)
    is_denied = of_template[:1] == (card.bos_token_id,)
    return () if card.is_encoder or is_denied else of_template
