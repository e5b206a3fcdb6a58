"""Holds the changing state of one request: known tokens, computed tokens, and the blocks that hold their KV.

Knows no queue and no budget. Only the scheduler room writes to it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from penstock.core.hashing import BlockHash, chain_hashes, root_hash
from penstock.core.plan import Draft, SampledToken
from penstock.core.request import CacheBreakpoint, Request, Tier
from penstock.kvcache.table import BlockTable
from penstock.scheduler.acceptance import Drafting
from penstock.scheduler.tenants import OutputLengthEstimator, TenantAccount

TIER_RANK: dict[Tier, int] = {Tier.PRIORITY: 0, Tier.DEFAULT: 1, Tier.BATCH: 2}
BATCH_RANK = TIER_RANK[Tier.BATCH]


class State(enum.Enum):
    WAITING = enum.auto()  # in the queue
    HELD = enum.auto()  # in the queue, until another request has computed the prefix that both share
    SETTLING = enum.auto()  # preempted, while tokens sampled before that are still in flight
    RUNNING = enum.auto()  # holds blocks, and a row in the executor
    ENDED = enum.auto()


class Marks:
    """Holds the breakpoints of one request, in blocks: 0 for a prefix that is too short to be kept."""

    __slots__ = (
        "breakpoints",
        "ends",
        "num_kept",
        "num_kept_before",
        "num_read_blocks",
        "written_tokens",
    )

    def __init__(self, breakpoints: tuple[CacheBreakpoint, ...], ends: tuple[int, ...]) -> None:
        self.breakpoints = breakpoints
        self.ends = ends
        self.num_kept_before = 0  # blocks of the kept prefix that was found
        self.num_read_blocks = 0  # reused blocks among them
        self.num_kept = 0  # breakpoints handled so far, in ascending order
        self.written_tokens = [0] * len(ends)

    @property
    def are_kept(self) -> bool:
        return self.num_kept == len(self.ends)


@dataclass(slots=True, eq=False)
class Drafted:
    """Tokens of a draft that a step verifies: `count` of them from the `first` on. They are `void` if they continue
    tokens that turned out otherwise."""

    draft: Draft
    first: int
    count: int
    is_void: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.draft.token_ids[self.first : self.first + self.count]

    def continues(self, sampled: SampledToken) -> bool:
        """Return whether a sample is what the draft's later tokens follow: every token as drafted, and the one
        after."""
        end = self.first + self.count
        return (
            not self.is_void
            and len(sampled.accepted) == self.count
            and self.draft.token_ids[end : end + 1] == (sampled.token_id,)
        )


class Sequence:
    """Holds the state of one request. Three counts tell its progress; num_computed and num_known never exceed
    num_expected.

    num_known     tokens whose ids are known: the prompt and every committed sample
    num_expected  num_known plus the samples that are still in flight, as if every draft were accepted
    num_computed  tokens whose KV is written once all steps planned so far have run
    """

    __slots__ = (
        "account",
        "admitted_s",
        "ahead_from",
        "arrival_s",
        "drafted",
        "drafting",
        "first_planned_s",
        "followers",
        "frontier",
        "growth_blocks",
        "has_row",
        "hashes",
        "is_prefilling",
        "key_token_ids",
        "leader",
        "length_limit",
        "marks",
        "may_start_late",
        "min_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_drafted",
        "num_expected",
        "num_known",
        "num_prompt",
        "num_published",
        "num_scored",
        "number",
        "output_token_ids",
        "own_blocks",
        "predicted_length",
        "prefill_chunks",
        "publish_at",
        "queued_s",
        "rank",
        "reads_every_token",
        "request",
        "request_id",
        "root_hash",
        "smallest_step",
        "snapshot_ends",
        "state",
        "stop_token_ids",
        "table",
        "turn",
        "waited_for",
        "waited_s",
        "was_held",
    )

    def __init__(
        self, request: Request, number: int, arrival_s: float, *, length_limit: int, account: TenantAccount
    ) -> None:
        self.request = request
        self.request_id = request.id
        self.number = number  # the order of arrival; never changes
        self.account = account
        self.state = State.WAITING
        self.rank = TIER_RANK[request.tier]  # 0 is the most urgent; aging lowers the rank, nothing raises it
        self.min_tokens = request.sampling.min_tokens
        # The request is planned ahead of a commit while it has at least this many known tokens. A grammar allows a
        # next token only when the last one is known, which not every executor learns before it samples.
        self.ahead_from = 0
        # An average over the prompt needs the hidden states of all its tokens, and the cache holds none.
        self.reads_every_token = request.pooling is not None and request.pooling != "last"
        # Leading tokens that were planned with the log-probability of the next token, where a request asks for these.
        asks_for_scores = request.sampling.prompt_logprobs is not None and not request.output_token_ids
        self.num_scored = 0 if asks_for_scores else len(request.prompt_token_ids)
        self.stop_token_ids: frozenset[int] = frozenset(request.sampling.stop_token_ids)

        self.arrival_s = arrival_s
        self.queued_s = arrival_s  # when the request last entered the queue
        self.waited_s = 0.0  # seconds in the queue, without the current wait
        self.waited_for: str | None = None  # what the request waited for last, before it began to run
        self.first_planned_s: float | None = None
        self.prefill_chunks: list[tuple[float, int]] = []  # for operators; see `Prefill`
        self.admitted_s = arrival_s  # when the request last began to run

        self.num_prompt = len(request.prompt_token_ids)
        self.smallest_step = smallest_step(request)
        self.length_limit = length_limit  # prompt and answer together
        self.predicted_length = length_limit  # predicted by the length estimator; prompt and answer together
        self.output_token_ids: list[int] = list(request.output_token_ids)
        self.num_known = self.num_prompt + len(self.output_token_ids)
        self.num_expected = self.num_known
        self.num_computed = 0
        self.is_prefilling = False  # running, and tokens known at admission are not all computed
        self.num_cached_tokens: int | None = None  # found in the cache at first admission

        self.drafted: Drafted | None = None  # of the latest step, while that is in flight
        self.num_drafted = 0  # drafted tokens in flight
        # A step may be planned while drafts are in flight. A grammar and penalties need to know the tokens before.
        self.may_start_late = not request.images and not request.sampling.depends_on_answer
        self.drafting = Drafting()

        self.table: BlockTable | None = None  # set exactly while running
        self.turn = 0  # the order in which requests last began to run
        self.has_row = False  # running, and a chunk was planned: the executor knows the table
        # Written by Headroom, while running: blocks that the table is predicted to need besides its current ones, and
        # blocks that are freed when the request ends.
        self.growth_blocks = 0
        self.own_blocks = 0

        self.marks: Marks | None = None  # of a request with cache breakpoints; kept by Breakpoints

        # Kept by PrefixSharing.
        self.key_token_ids = request.key_token_ids  # the prompt, as block hashes see it
        self.root_hash = root_hash(request.prefix_salt)
        self.hashes: list[BlockHash] = []  # of leading full blocks, as far as they were needed
        self.num_published = 0  # leading blocks whose hashes were published, while running
        self.publish_at: int | None = None  # tokens that must be known and computed to publish the next block
        # Ends of prefixes, in blocks and in ascending order, at which a chunk ends and a snapshot of the state is
        # taken; while running, for models with states.
        self.snapshot_ends: list[int] | None = None
        self.frontier: BlockHash | None = None  # the next block to be published by a running prefill
        self.leader: Sequence | None = None  # the request whose prefix this one waits for, while HELD
        self.followers: dict[
            int, tuple[Sequence, int]
        ] = {}  # by number: a held request, and the blocks it waits for
        self.was_held = False

    @property
    def has_started(self) -> bool:
        return self.first_planned_s is not None

    @property
    def num_sampled(self) -> int:
        """Count committed samples, without the samples of another engine."""
        return len(self.output_token_ids) - len(self.request.output_token_ids)

    @property
    def num_in_flight(self) -> int:
        return self.num_expected - self.num_known

    @property
    def num_reusable_tokens(self) -> int:
        """Return the number of leading tokens whose KV may come from the cache, because no other result of their
        computation is needed. The last known token never counts: its logits are needed."""
        if self.reads_every_token:
            return 0
        return self.num_scored if self.num_scored < self.num_prompt - 1 else self.num_known - 1

    @property
    def blocks(self) -> BlockTable:
        """Return the block table of a running request."""
        assert self.table is not None, "only running requests have blocks"
        return self.table

    @property
    def num_filled_slots(self) -> int:
        """Count the slots that hold a token, or will hold a known token."""
        return self.num_known if self.is_prefilling else self.num_computed

    def predict_length(self, estimator: OutputLengthEstimator) -> None:
        num_output = self.num_expected - self.num_prompt
        limit = self.length_limit - self.num_prompt
        self.predicted_length = self.num_prompt + estimator.predict(self.request, num_output, limit)

    def hash_blocks(self, count: int, block_size: int) -> list[BlockHash]:
        """Return the hashes of at least `count` leading blocks. All their tokens must be known."""
        hashes = self.hashes
        if len(hashes) < count:
            tokens = self._tokens(len(hashes) * block_size, count * block_size)
            hashes += chain_hashes(hashes[-1] if hashes else self.root_hash, tokens, block_size)
        return hashes

    def _tokens(self, start: int, stop: int) -> TokenIds[int]:
        num_prompt = self.num_prompt
        if stop <= num_prompt:
            return self.key_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return (*self.key_token_ids[start:], *self.output_token_ids[: stop - num_prompt])


def smallest_step(request: Request) -> int:
    """Return the fewest tokens that a step can compute: all tokens of an image that is computed as a whole, else
    one."""
    return max((image.num_tokens for image in request.images if image.is_whole), default=1)


def seniority(sequence: Sequence) -> tuple[int, int]:
    """Return a key by which requests are ordered, the most senior first."""
    return sequence.rank, sequence.number
