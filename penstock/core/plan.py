"""The data between a scheduler and the executor of its steps.

A plan is frozen: it can be printed, logged and replayed. The executor needs nothing else from the scheduler, and
the scheduler needs nothing from the executor but a `StepResult`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from penstock.core.request import FinishReason


class WindowGroup(msgspec.Struct, frozen=True):
    """Layers in which each token sees only the newest `window` tokens, itself included; or, with `in_chunks`, the
    tokens of its own chunk of `window` tokens. The keys and values of one block of tokens take `num_parts` blocks of
    memory."""

    window: int
    num_parts: int = 1
    in_chunks: bool = False

    def first_seen(self, position: int) -> int:
        """Return the first token that the token at `position` sees."""
        if self.in_chunks:
            return position - position % self.window
        return max(0, position - self.window + 1)


class WindowLayout(msgspec.Struct, frozen=True):
    """The groups of layers with a window, and the memory that they use: `num_blocks` blocks of their own, or the
    blocks of the layers that see everything. A step computes at most `step_tokens` tokens."""

    groups: tuple[WindowGroup, ...]
    step_tokens: int
    num_blocks: int | None = None


class WindowBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group of layers with a window, from the `first`-th block of a request on: the ids of the parts of
    one block after the other."""

    group: int
    first: int
    block_ids: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens `[start, start + num_tokens)` of one request in this step.

    `new_block_ids` are the request's block table from the block of token `start` on; when `begins` is set (first
    chunk after admission or resumption) they are the whole table, cached prefix included. The tokens of the last
    block begin at its slot `tail_offset`: the rest of that block is another request's. `in_flight` counts the last
    tokens of the chunk before its drafts whose ids an earlier step, not committed yet, is still sampling. The
    executor takes these ids from its own last output. `samples` asks for one sampled token from the chunk's last
    position. `scores_from` asks for the log-probability of each prompt token that follows a position of the chunk,
    from this position on. `state_slot` comes with `begins`, for models with states: the slot of the request's state,
    which the plan's `copies` have filled. `window_blocks` are blocks of layers with a window that the executor does
    not know yet.

    `drafts` are guesses of the tokens that follow the known ones. They are the last tokens of the chunk and count in
    `num_tokens`. The chunk then samples at the last known token and at each draft: every sample up to the first one
    that differs from the draft after it is part of the answer. Drafts may be ON_DEVICE.

    `unsettled` counts the drafts of the request that the step before verifies, where that step is not committed yet.
    `start` is where the chunk starts if all of them are accepted. The executor starts the chunk earlier, by one token
    for each that is rejected. `in_flight` is 1 then.

    With `tree_depth`, the drafts are the nodes of a tree of this depth, all of them ON_DEVICE. A node lies behind its
    parent, which comes before the node. The answer follows a path of nodes from the first level on.
    """

    request_id: str
    start: int
    num_tokens: int
    samples: bool
    new_block_ids: tuple[int, ...]
    begins: bool = False
    in_flight: int = 0
    tail_offset: int = 0
    scores_from: int | None = None
    drafts: tuple[int, ...] = ()
    state_slot: int | None = None
    window_blocks: tuple[WindowBlocks, ...] = ()
    unsettled: int = 0
    tree_depth: int | None = None


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a drafter expects next. `grade` is a class of confidence that the drafter defines: drafts of one
    drafter and one grade are accepted about equally often.

    With `tree_depth`, they are the nodes of a tree of this depth, the most likely ones first: any number of the first
    ones is a tree too."""

    token_ids: tuple[int, ...]
    drafter: str
    grade: int = 0
    tree_depth: int | None = None


ON_DEVICE = -1  # stands for a drafted token whose id only the executor's device knows so far
PREDICTION = "prediction"  # the drafter of tokens from an answer that the client has predicted
NO_DRAFTS: Mapping[str, Draft] = MappingProxyType({})


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """Copy the KV of one block between the device and a slot of host memory."""

    block_id: int
    host_slot: int
    to_host: bool


class HalfCopy(msgspec.Struct, frozen=True, array_like=True, tag="half"):
    """Copy the KV of half a block, from slot `offset` on, to the first half of a block."""

    block_id: int
    offset: int
    to_block_id: int


class StateCopy(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Copy the state of all layers into a slot: from another slot, or zeros without `from_slot`. `from_host` and
    `to_host` say which of the two is a slot of host memory."""

    slot: int
    from_slot: int | None = None
    from_host: bool = False
    to_host: bool = False


class StateSlots(msgspec.Struct, frozen=True):
    """The number of slots for the states of requests and their snapshots, of a model whose layers have a fixed state
    beside or instead of keys and values."""

    num_slots: int
    num_host_slots: int = 0


KVCopy: TypeAlias = BlockCopy | HalfCopy | StateCopy


class Encoding(msgspec.Struct, frozen=True, array_like=True):
    """Encode tiles `[first_tile, first_tile + num_tiles)` of an image of a request. The result is kept by the digest
    of the image, and serves all requests with the same image until a plan drops it."""

    request_id: str
    image: int  # index in Request.images
    first_tile: int
    num_tiles: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass. `released` names requests that ended or were preempted since the previous plan: the
    executor drops their rows before it looks at `chunks` (a resumed request may appear in both). `copies` are made
    one after the other, in this order, after all earlier steps and before `chunks` are computed: a block or slot may
    appear several times. Slots of states follow the same rule.

    First of all the executor forgets the results of `dropped_images`, then it computes `encodings`, whose results the
    chunks may need. A plan may have encodings and no chunks.

    With data-parallel attention, `ranks` has the plan of each rank, or None for a rank that has nothing to compute,
    and all other fields are empty. Each of these plans has a step id of its own."""

    step_id: int
    chunks: tuple[Chunk, ...]
    released: tuple[str, ...] = ()
    copies: tuple[KVCopy, ...] = ()
    encodings: tuple[Encoding, ...] = ()
    dropped_images: tuple[bytes, ...] = ()  # digests
    ranks: tuple[StepPlan | None, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all ranks."""
        if self.ranks:
            return sum(self.rank_tokens)
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def rank_tokens(self) -> tuple[int, ...]:
        """Return the number of tokens of each rank, which is the number of its rows."""
        return tuple(0 if plan is None else plan.num_tokens for plan in self.ranks)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the sampled token's, and the most likely alternatives."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


# Errors of samples and chunks.
NOT_A_NUMBER = "The model produced values that are not numbers for this request."
NO_TOKEN_LEFT = "The request's allowed tokens, bad words and grammar contradict: no token may come next."
OUT_OF_MEMORY = "There was not enough memory to compute this request."


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of `num_tokens` consecutive prompt tokens, of which the first is at position `start`.

    They are packed, because a long prompt has too many for an object each: rows of `1 + num_top` little-endian
    numbers. A row of `values` (float32) has the token's own log-probability and those of the most likely tokens; a
    row of `ids` (int32) has the token's rank, 1 for the most likely one, and the ids of the most likely tokens."""

    start: int
    num_tokens: int
    num_top: int
    values: bytes
    ids: bytes


class ScoredChunk(msgspec.Struct, frozen=True, array_like=True):
    """The executor's result for one chunk with `scores_from`, or for a part of that chunk. `error` replaces the
    log-probabilities if the logits are NaN; the request then finishes with FinishReason.ERROR."""

    request_id: str
    logprobs: PromptLogprobs | None
    error: str | None = None


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """The executor's sample for one chunk with `samples`. `error` replaces the token when the position could
    not be sampled (NaN logits, say); the request then finishes with FinishReason.ERROR, or with FinishReason.INVALID
    where `is_callers_fault`: the request's own grammar or options allow no token.

    `accepted` are the tokens in front of `token_id`, for a chunk with drafts: the leading drafts that were sampled.
    `accepted_logprobs` has an entry for each of them when the request asks for log-probabilities.

    Two outcomes belong to requests with a grammar. `is_postponed`: the tokens that may come next were not known in
    time, so there is no token, and the position is to be planned again. `completes`: the token ends the answer
    whatever else the request says, because the grammar allows no more."""

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    is_postponed: bool = False
    completes: bool = False
    embedding: bytes | None = None  # in place of a token, for a request with pooling: float32, little-endian
    accepted: tuple[int, ...] = ()
    accepted_logprobs: tuple[TokenLogprobs, ...] = ()
    is_callers_fault: bool = False
    nodes: tuple[int, ...] = ()  # of `accepted`, where the drafts are a tree: their indices in it


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of one plan. `elapsed_s` is the time for which the step occupied the executor: it feeds the
    step-time predictor, which therefore never reads a clock."""

    step_id: int
    sampled: tuple[SampledToken, ...]
    elapsed_s: float
    scored: tuple[ScoredChunk, ...] = ()
    encoder_s: float = 0.0  # of the elapsed time: for encoding images
    # Later steps like it take another time: this one recorded a graph, or lacked one.
    is_unusual: bool = False


class CacheUse(msgspec.Struct, frozen=True, array_like=True):
    """The effect of a request's breakpoints, in prompt tokens: how many were read from kept prefixes, and how many
    were newly kept, with one count for each of `Request.cache_breakpoints`."""

    read_tokens: int
    written_tokens: tuple[int, ...]

    def reading(self, num_tokens: int) -> CacheUse:
        """Return the same use with writes within the first `num_tokens` counted as reads: the prefix was kept
        elsewhere, and the client has paid for it."""
        start, num_moved = self.read_tokens, 0
        written = []
        for num_written in self.written_tokens:
            moved = max(0, min(start + num_written, num_tokens) - start)
            written.append(num_written - moved)
            num_moved += moved
            start += num_written
        return CacheUse(self.read_tokens + num_moved, tuple(written)) if num_moved else self


class DraftUse(msgspec.Struct, frozen=True, array_like=True):
    """The drafted tokens of one request that one step verified, and how many of them became part of the answer."""

    drafter: str
    num_drafted: int
    num_accepted: int


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """The history of a request's first token, for operators who look for the cause of a long wait."""

    seconds: float  # from the first planned chunk to the first token
    # Seconds after the first planned chunk, and tokens; the first ones only.
    chunks: tuple[tuple[float, int], ...]
    waited_for: str | None = None  # why the request stayed in the queue: seats, tokens, blocks or prefix


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An event of one request after a commit: new tokens, the end, or both; before them, log-probabilities of the
    prompt.

    A step that verified drafts gives several tokens at once, and no token after the end of the answer. `logprobs`
    has an entry for each token, or none at all. `num_cached_tokens` is set on the first event with a token or an end
    only: how many prompt tokens were reused. `cache_use` comes with it when the request has breakpoints.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    queue_s: float | None = None  # set on the first event: time from arrival to first planned chunk
    error: str | None = None
    cache_use: CacheUse | None = None
    embedding: bytes | None = None  # the whole answer to a request with pooling
    prompt_logprobs: PromptLogprobs | None = None  # of one chunk, in the order of the prompt
    draft_use: DraftUse | None = None  # of a step that verified drafts
    prefill: Prefill | None = None  # set on the first event with a token
