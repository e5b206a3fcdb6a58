"""An executor that trusts nothing, and a driver around it.

KV is simulated by content: a slot holds a digest of its token and of everything before it, under the tenant's name.
A sampled token is a function of the slot it is computed from. So wrong context, a block reused too early or shared
wrongly, a lost or doubled token: each shows as a failed assertion or as an answer other than the expected one.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from zlib import crc32

import msgspec

from penstock.core.engine_config import SchedulerConfig
from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.plan import (
    Chunk,
    Draft,
    HalfCopy,
    KVCopy,
    PromptLogprobs,
    SampledToken,
    ScoredChunk,
    StateCopy,
    StateSlots,
    StepPlan,
    StepResult,
    TokenEvent,
    WindowGroup,
    WindowLayout,
)
from penstock.core.request import CacheBreakpoint, FinishReason, Request, SamplingParams, Tier
from penstock.kvcache.cache import KVCache
from penstock.scheduler import Scheduler
from penstock.scheduler.exchange import BlockExport, BlockImport

VOCABULARY = 50
EOS = VOCABULARY  # never drawn unless a test wants it
_MODULUS = (1 << 61) - 1


def extend(digest: int, token_id: int) -> int:
    return (digest * 1_000_003 + token_id + 7) % _MODULUS


def root(tenant: str) -> int:
    return extend(len(tenant) + 1, sum(tenant.encode()))


def sample(digest: int) -> int:
    return (digest >> 7) % VOCABULARY


def score(digest: int, token_id: int) -> bytes:
    """What this executor says of a prompt token that follows a slot, in place of a log-probability."""
    return extend(digest, token_id).to_bytes(8, "little")


def expected_scores(request: Request) -> list[bytes]:
    digest = root(request.tenant)
    scores = []
    for token_id, following in pairwise(request.prompt_token_ids):
        digest = extend(digest, token_id)
        scores.append(score(digest, following))
    return scores


def expected_answer(request: Request, count: int) -> list[int]:
    """What the model of this executor says, computed without any scheduler."""
    digest = root(request.tenant)
    for token_id in request.prompt_token_ids:
        digest = extend(digest, token_id)
    answer = []
    for _ in range(count):
        answer.append(sample(digest))
        digest = extend(digest, answer[-1])
    return answer


@dataclass
class Row:
    """What the executor knows of a running request."""

    root_digest: int
    tokens: list[int]  # ids delivered by commits
    table: list[int] = field(default_factory=list)
    tail_offset: int = 0  # where the tokens of the last block begin
    num_computed: int = 0
    digests: list[int] = field(default_factory=list)  # of the tokens computed or reused
    last_sample: tuple[int, int] | None = None  # position, token
    num_unsettled: int = 0  # drafts of the latest step
    state_slot: int | None = None
    windows: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # by group and block index
    void_from: int | None = None  # positions from here on were computed in vain: a sample was postponed


@dataclass
class Faults:
    """What goes wrong or differently in an execution, as chance has it. By default nothing does."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    late_share: float = 0.0  # samples of constrained requests whose mask is late
    end_share: float = 0.0  # samples that complete the answer of a constrained request
    error_share: float = 0.0  # samples that fail
    random_times: bool = False
    constrained: set[str] = field(default_factory=set)  # ids of requests with a grammar

    def happens(self, share: float) -> bool:
        return share > 0.0 and self.rng.random() < share

    def step_s(self, num_tokens: int) -> float:
        if self.random_times:
            return self.rng.choice((0.0, 1e-6, 0.01, 1.0, 100.0)) * self.rng.random()
        return 0.01 + 1e-4 * num_tokens


class StrictExecutor:
    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        states: StateSlots | None = None,
        windows: WindowLayout | None = None,
    ) -> None:
        self._windows = windows
        self._config = config
        self._block_size = block_size
        self._kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._host_kv: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        # Blocks of windows lie in the memory of all blocks, or in their own.
        self._window_kv = self._kv
        if windows is not None and windows.num_blocks is not None:
            self._window_kv = [[None] * block_size for _ in range(windows.num_blocks)]
        # A state is the digest of all tokens that it has seen; 0 before the first one.
        self._has_states = states is not None
        self._states: list[int | None] = [None] * (states.num_slots if states else 0)
        self._host_states: list[int | None] = [None] * (states.num_host_slots if states else 0)
        self.num_states_restored = 0
        self.rows: dict[str, Row] = {}
        self.num_tokens_computed = 0
        self.num_halves_copied = 0
        self.last_step_id = 0
        self.masks_late = False
        self.starts_late = False
        self.faults = Faults()
        self.prompts: dict[str, tuple[int, ...]] = {}

    def execute(self, plan: StepPlan, tokens: dict[str, list[int]], tenants: dict[str, str]) -> StepResult:
        assert plan.step_id == self.last_step_id + 1
        self.last_step_id = plan.step_id
        assert plan.chunks or plan.copies
        assert plan.num_tokens <= self._config.max_num_batched_tokens
        plan = msgspec.structs.replace(plan, chunks=tuple(map(self._started, plan.chunks)))
        assert len({chunk.request_id for chunk in plan.chunks}) == len(plan.chunks)
        for request_id in plan.released:
            del self.rows[request_id]
        for copy in plan.copies:
            self._copy(copy)
        for chunk in plan.chunks:
            self._begin_or_extend(chunk, tokens, tenants)
        assert len(self.rows) <= self._config.max_num_seqs
        self._write(plan)
        self._read(plan)
        self._check_contexts()
        scored = tuple(self._score(chunk) for chunk in plan.chunks if chunk.scores_from is not None)
        sampled = []
        for chunk in plan.chunks:
            if chunk.samples:
                sampled.append(self._sample(chunk))
        self.num_tokens_computed += plan.num_tokens
        return StepResult(plan.step_id, tuple(sampled), self.faults.step_s(plan.num_tokens), scored)

    def _started(self, chunk: Chunk) -> Chunk:
        """Let a chunk start where the drafts in front of it have been accepted up to."""
        if not chunk.unsettled:
            return chunk
        assert self.starts_late
        assert chunk.in_flight == 1
        row = self.rows[chunk.request_id]
        assert 0 <= chunk.start - row.num_computed <= chunk.unsettled == row.num_unsettled
        # Blocks from that of `start` on are new.
        if chunk.new_block_ids:
            row.table[chunk.start // self._block_size :] = chunk.new_block_ids
            row.tail_offset = chunk.tail_offset
        return msgspec.structs.replace(chunk, start=row.num_computed, new_block_ids=())

    def _score(self, chunk: Chunk) -> ScoredChunk:
        assert chunk.scores_from is not None
        prompt, digests = self.prompts[chunk.request_id], self.rows[chunk.request_id].digests
        end = min(chunk.start + chunk.num_tokens, len(prompt) - 1)
        assert chunk.start <= chunk.scores_from < end, "there is nothing to score"
        positions = range(chunk.scores_from, end)
        scores = b"".join(score(digests[position], prompt[position + 1]) for position in positions)
        logprobs = PromptLogprobs(chunk.scores_from + 1, len(positions), 0, scores, b"")
        if self.faults.happens(self.faults.error_share):
            return ScoredChunk(chunk.request_id, None, "not a number")
        return ScoredChunk(chunk.request_id, logprobs)

    def _sample(self, chunk: Chunk) -> SampledToken:
        request_id = chunk.request_id
        row = self.rows[request_id]
        is_constrained = request_id in self.faults.constrained
        assert self.masks_late or not (chunk.in_flight and is_constrained), "planned ahead of its own sample"
        is_late = is_constrained and self.faults.happens(self.faults.late_share)
        if is_late or row.void_from is not None:
            if row.void_from is None:
                row.void_from = row.num_computed - 1 - len(chunk.drafts)
            row.last_sample = (row.num_computed, 0)
            return SampledToken(request_id, 0, is_postponed=True)
        accepted: list[int] = []
        row.num_unsettled = len(chunk.drafts)
        for draft in chunk.drafts:
            if sample(row.digests[chunk.start + len(accepted)]) != draft:
                break
            accepted.append(draft)
        self._take_back(row, chunk.start + chunk.num_tokens - len(chunk.drafts) + len(accepted))
        token_id = sample(row.digests[-1])
        row.last_sample = (row.num_computed, token_id)
        if self.faults.happens(self.faults.error_share):
            return SampledToken(request_id, 0, error="not a number")
        completes = is_constrained and self.faults.happens(self.faults.end_share)
        return SampledToken(request_id, token_id, completes=completes, accepted=tuple(accepted))

    @staticmethod
    def _take_back(row: Row, num_computed: int) -> None:
        """What was computed beyond this position does not count."""
        del row.digests[num_computed:]
        row.num_computed = num_computed

    def contents_of(self, request: Request, num_blocks: int) -> list[list[int]]:
        """What the first blocks of a request hold once they are computed."""
        digest = root(request.tenant)
        digests = []
        for token_id in request.prompt_token_ids[: num_blocks * self._block_size]:
            digest = extend(digest, token_id)
            digests.append(digest)
        return [digests[at : at + self._block_size] for at in range(0, len(digests), self._block_size)]

    def read(self, block_ids: tuple[int, ...]) -> list[list[int | None]]:
        return [list(self._kv[block_id]) for block_id in block_ids]

    def spoil(self, chunk: Chunk) -> None:
        """What the latest step wrote for this chunk was never written."""
        row = self.rows[chunk.request_id]
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            block, offset = self._place(row, position)
            self._kv[block][offset] = None
            for block, offset, _ in self._window_slots(row, position):
                self._window_kv[block][offset] = None
        if row.state_slot is not None:
            self._states[row.state_slot] = None

    def overwrite(self, block_id: int, contents: list[int]) -> None:
        self._kv[block_id] = list(contents)

    def deliver(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        if request_id in self.rows:
            self.rows[request_id].tokens.extend(token_ids)

    def _begin_or_extend(self, chunk: Chunk, tokens: dict[str, list[int]], tenants: dict[str, str]) -> None:
        if chunk.begins:
            assert chunk.request_id not in self.rows, "begins twice without having been released"
            row = Row(root(tenants[chunk.request_id]), list(tokens[chunk.request_id]))
            row.num_computed = chunk.start  # a reused prefix; its contents are verified by _read
            assert chunk.start % self._block_size == 0
            assert (chunk.state_slot is not None) == self._has_states
            row.state_slot = chunk.state_slot
            slots = [each.state_slot for each in self.rows.values() if self._has_states]
            assert chunk.state_slot is None or chunk.state_slot not in slots, "two requests have one state"
            self.rows[chunk.request_id] = row
        row = self.rows[chunk.request_id]
        if row.void_from is not None and not chunk.in_flight:
            self._take_back(row, row.void_from)
            row.void_from = row.last_sample = None
        if chunk.new_block_ids:
            row.table[0 if chunk.begins else chunk.start // self._block_size :] = chunk.new_block_ids
            row.tail_offset = chunk.tail_offset
        self._place_windows(chunk, row)
        assert len(set(row.table)) == len(row.table)
        assert chunk.num_tokens >= 1
        assert chunk.start == row.num_computed
        assert chunk.start + chunk.num_tokens <= len(row.table) * self._block_size - row.tail_offset
        if chunk.drafts:
            num_drafts = len(chunk.drafts)
            assert (chunk.num_tokens, chunk.samples) == (1 + num_drafts, True)
            assert num_drafts <= self._config.max_draft_tokens
            assert chunk.in_flight or chunk.start + 1 == len(row.tokens), (
                "drafts follow the newest known token"
            )
            assert chunk.in_flight in (0, 1)
        if chunk.in_flight and chunk.drafts:
            assert chunk.unsettled, "drafts follow a token that nobody knows"
            assert row.last_sample is not None
            assert row.last_sample[0] == chunk.start, "the token in flight belongs elsewhere"
        elif chunk.drafts:
            pass
        elif chunk.in_flight:
            assert (chunk.in_flight, chunk.num_tokens, chunk.samples) == (1, 1, True)
            assert row.last_sample is not None
            assert row.last_sample[0] == chunk.start, "the token in flight belongs elsewhere"
            assert chunk.start >= len(row.tokens), "in flight, but already delivered"
        else:
            assert chunk.start + chunk.num_tokens <= len(row.tokens), "tokens that nobody knows"
            assert chunk.samples == (chunk.start + chunk.num_tokens == len(row.tokens))

    def _place_windows(self, chunk: Chunk, row: Row) -> None:
        for each in chunk.window_blocks:
            assert self._windows is not None
            parts = self._windows.groups[each.group].num_parts
            assert len(each.block_ids) % parts == 0
            for at in range(0, len(each.block_ids), parts):
                row.windows[each.group, each.first + at // parts] = each.block_ids[at : at + parts]

    def _window_slots(self, row: Row, position: int) -> list[tuple[int, int, int]]:
        """Where the token at a position lies in the layers with windows, and what makes its contents differ."""
        index, offset = divmod(position, self._block_size)
        groups = () if self._windows is None else self._windows.groups
        return [
            (block, offset, 1 + part + 100 * group)
            for group in range(len(groups))
            for part, block in enumerate(row.windows[group, index])
        ]

    def _check_windows(self, request_id: str, row: Row, start: int) -> None:
        """The tokens that are in sight of the token at `start` and of those behind it are there."""
        for group, each in enumerate(() if self._windows is None else self._windows.groups):
            for position in range(each.first_seen(start), row.num_computed):
                index, offset = divmod(position, self._block_size)
                for part, block in enumerate(row.windows[group, index]):
                    expected = row.digests[position] + 1 + part + 100 * group
                    assert self._window_kv[block][offset] == expected, f"{request_id}: window at {position}"

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._block_size)
        return row.table[index], offset + (row.tail_offset if index == len(row.table) - 1 else 0)

    def _copy(self, copy: KVCopy) -> None:
        if isinstance(copy, HalfCopy):
            half = self._block_size // 2
            contents = self._kv[copy.block_id][copy.offset :][:half]
            self._kv[copy.to_block_id][:half] = contents
            self.num_halves_copied += 1
        elif isinstance(copy, StateCopy):
            self._copy_state(copy)
        elif copy.to_host:
            contents = self._kv[copy.block_id]
            assert None not in contents, "a block goes to host memory before it is full"
            self._host_kv[copy.host_slot] = list(contents)
        else:
            self._kv[copy.block_id] = list(self._host_kv[copy.host_slot])

    def _copy_state(self, copy: StateCopy) -> None:
        source = self._host_states if copy.from_host else self._states
        state = 0 if copy.from_slot is None else source[copy.from_slot]
        assert state is not None, "a state is copied that is not there"
        (self._host_states if copy.to_host else self._states)[copy.slot] = state
        self.num_states_restored += copy.from_host

    def _advance_state(self, row: Row, start: int) -> None:
        """Let the state of a request see its tokens from `start` on."""
        if row.state_slot is not None:
            before = row.digests[start - 1] if start else 0
            assert self._states[row.state_slot] == before, "the state has seen other tokens"
            self._states[row.state_slot] = row.digests[-1]

    def _write(self, plan: StepPlan) -> None:
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            row = self.rows[chunk.request_id]
            while len(row.digests) < chunk.start:  # the reused prefix
                previous = row.digests[-1] if row.digests else row.root_digest
                row.digests.append(extend(previous, row.tokens[len(row.digests)]))
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                if position >= chunk.start + chunk.num_tokens - len(chunk.drafts):
                    token_id = chunk.drafts[position - chunk.start - chunk.num_tokens]
                elif chunk.in_flight:
                    assert row.last_sample is not None
                    token_id = row.last_sample[1]
                else:
                    token_id = row.tokens[position]
                previous = row.digests[-1] if row.digests else row.root_digest
                row.digests.append(extend(previous, token_id))
                block, offset = self._place(row, position)
                assert (block, offset) not in written, "two requests write to one slot in one step"
                written.add((block, offset))
                self._kv[block][offset] = row.digests[-1]
                for block, offset, tag in self._window_slots(row, position):
                    if self._window_kv is self._kv:
                        assert (block, offset) not in written, "a window shares its memory"
                        written.add((block, offset))
                    self._window_kv[block][offset] = row.digests[-1] + tag
            row.num_computed = chunk.start + chunk.num_tokens
            self._advance_state(row, chunk.start)

    def _read(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            row = self.rows[chunk.request_id]
            for position in range(row.num_computed):
                self._check_slot(chunk.request_id, row, position)
            self._check_windows(chunk.request_id, row, chunk.start)

    def _check_contexts(self) -> None:
        """Nobody's context was overwritten, also of those who had no chunk in this step."""
        for request_id, row in self.rows.items():
            for position in range(row.num_computed):
                self._check_slot(request_id, row, position)
            self._check_windows(request_id, row, row.num_computed)

    def _check_slot(self, request_id: str, row: Row, position: int) -> None:
        block, offset = self._place(row, position)
        assert self._kv[block][offset] == row.digests[position], (
            f"{request_id} reads foreign KV at {position}"
        )


def chunks_of(plan: StepPlan) -> tuple[Chunk, ...]:
    """The chunks of all ranks."""
    return plan.chunks + tuple(chunk for each in plan.ranks if each is not None for chunk in each.chunks)


class Driver:
    """Runs a scheduler against the strict executor, `depth` plans ahead, and checks every answer."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        depth: int = 1,
        max_model_len: int = 200,
        prefix_caching: bool = True,
        max_pinned_fraction: float = 0.5,
        num_host_blocks: int = 0,
        block_copy_s: float | None = None,
        halves_blocks: bool = False,
        num_spare_states: int | None = None,
        num_host_states: int = 0,
        windows: tuple[WindowGroup, ...] = (),
        num_window_blocks: int | None = None,
        draft_share: float = 0.0,
        spoiled_share: float = 0.0,
        masks_late: bool = False,
        starts_late: bool = False,
        late_share: float | None = None,
        **config: object,
    ) -> None:
        self.draft_share = draft_share  # of the drafts that the scheduler could use
        self.spoiled_share = spoiled_share  # of drafted tokens
        settings: dict[str, object] = {
            "itl_target_ms": None,
            "min_cacheable_tokens": 1,
            "max_draft_tokens": 0,
            **config,
        }
        states = None
        if num_spare_states is not None:  # the model has states, and slots beside those of running requests
            settings["max_draft_tokens"] = 0
            num_running = SchedulerConfig(**settings).max_num_seqs  # type: ignore[arg-type]
            states = StateSlots(num_running + num_spare_states, num_host_states)
        self.config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        layout = None
        if windows:
            layout = WindowLayout(windows, self.config.max_num_batched_tokens, num_window_blocks)
        self.cache = KVCache(
            num_blocks,
            block_size=block_size,
            enable_prefix_caching=prefix_caching,
            max_pinned_fraction=max_pinned_fraction,
            num_host_blocks=num_host_blocks,
            halves_blocks=halves_blocks,
            states=states,
            windows=layout,
        )
        self.scheduler = Scheduler(
            self.config,
            self.cache,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            block_copy_s=block_copy_s,
            masks_late=masks_late,
            starts_late=starts_late,
        )
        self.executor = StrictExecutor(self.config, num_blocks, block_size, num_host_blocks, states, layout)
        self.executor.masks_late, self.executor.starts_late = masks_late, starts_late
        self.num_late = 0  # plans that started late
        if late_share is not None:  # of the plans that could start late, whether that pays or not
            rng = self.executor.faults.rng
            speculation = self.scheduler._speculation
            speculation._pays_late = lambda choice: rng.random() < late_share  # type: ignore[method-assign]
        self.depth = depth
        self.max_model_len = max_model_len
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.scores: dict[str, list[bytes]] = {}  # of prompt tokens, from the second on
        self.finished: dict[str, TokenEvent] = {}
        self.first_events: dict[str, TokenEvent] = {}
        self.plans: list[StepPlan] = []
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.aborted: set[str] = set()
        self.imports: deque[tuple[BlockImport, Request]] = deque()
        self.exports: deque[tuple[BlockExport, Request]] = deque()

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        self.scheduler.check_integrity()
        self.requests[request.id] = request
        constrained = self.executor.faults.constrained
        (constrained.add if request.sampling.grammar else constrained.discard)(request.id)
        self.answers[request.id] = list(request.output_token_ids)
        self.scores[request.id] = []
        self.executor.prompts[request.id] = request.prompt_token_ids
        self.finished.pop(request.id, None)
        self.first_events.pop(request.id, None)
        self.aborted.discard(request.id)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id, self.now)
        self.scheduler.check_integrity()
        if request_id in self.requests and request_id not in self.finished:
            self.aborted.add(request_id)

    def fail_latest_plan(self, index: int) -> None:
        """The executor had no memory for a chunk of the plan that was made last."""
        plan, _ = self._in_flight[-1]
        chunks = chunks_of(plan)
        chunk = chunks[index % len(chunks)]
        self.executor.spoil(chunk)
        self.scheduler.fail(chunk, "no memory", self.now)
        self.scheduler.check_integrity()
        self._take(self.scheduler.take_events())

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def begin_import(self, request: Request) -> None:
        """Room for KV of a request from another engine."""
        begun = self.scheduler.exchange.begin_import(request)
        self.scheduler.check_integrity()
        if begun is not None:
            self.imports.append((begun, request))

    def finish_import(self, num_filled: int) -> None:
        """The oldest begun ends: some of its blocks are filled, and rubbish is written to the others."""
        begun, request = self.imports.popleft()
        num_filled = min(num_filled, len(begun.block_ids))
        first = begun.num_found
        contents = self.executor.contents_of(request, first + num_filled)[first:]
        rubbish: list[list[int]] = [[-1] * self.cache.block_size] * (len(begun.block_ids) - num_filled)
        for block_id, content in zip(begun.block_ids, [*contents, *rubbish], strict=True):
            self.executor.overwrite(block_id, content)
        self.scheduler.exchange.finish_import(begun.number, num_filled)
        self.scheduler.check_integrity()

    def export(self, request: Request) -> None:
        """Another engine reads what is cached of a request."""
        export = self.scheduler.exchange.export_prefix(request)
        self.exports.append((export, request))
        self.scheduler.check_integrity()

    def finish_export(self) -> None:
        """The oldest export ends: what was offered is still what it was."""
        export, request = self.exports.popleft()
        assert self.executor.read(export.block_ids) == self.executor.contents_of(
            request, len(export.block_ids)
        )
        self.scheduler.exchange.finish_export(export.number)
        self.scheduler.check_integrity()

    def pin(self, prompt: tuple[int, ...], seconds: float = 1.0) -> None:
        hashes = chain_hashes(root_hash(""), prompt, self.cache.block_size)
        self.cache.retention.retain(hashes, self.now + seconds, self.now)

    def expect_short_answers(self) -> None:
        """Teach the forecast wrongly, so that more is admitted than will fit."""
        for _ in range(8):
            self.scheduler._lengths.observe(make_request("short", 4), 1)

    def plan(self) -> StepPlan | None:
        """Ask for one more plan and execute it; its result waits for `commit`."""
        plan = self.scheduler.plan(self.now, self._drafts())
        self.scheduler.check_integrity()
        self._take(self.scheduler.take_events())
        if plan is not None:
            self.num_late += any(chunk.unsettled for chunk in chunks_of(plan))
            self.plans.append(plan)
            tokens = {
                chunk.request_id: [
                    *self.requests[chunk.request_id].prompt_token_ids,
                    *self.answers[chunk.request_id],
                ]
                for chunk in chunks_of(plan)
                if chunk.begins
            }
            tenants = {request_id: self.requests[request_id].tenant for request_id in tokens}
            self._in_flight.append((plan, self.executor.execute(plan, tokens, tenants)))
        return plan

    def _drafts(self) -> dict[str, Draft]:
        """Draft the right tokens, each spoiled by chance, and one too many, for some of the requests that could use
        drafts."""
        rng, drafts = self.executor.faults.rng, {}
        for request_id, most in self.scheduler.wants_drafts().items():
            assert most > 0
            if rng.random() < self.draft_share:
                request, answer = self.requests[request_id], self.answers[request_id]
                right = expected_answer(request, len(answer) + most + 1)[len(answer) :]
                tokens = tuple((token + (rng.random() < self.spoiled_share)) % VOCABULARY for token in right)
                drafts[request_id] = Draft(tokens, "test", rng.randrange(2))
        return drafts

    def commit(self) -> list[TokenEvent]:
        plan, result = self._in_flight.popleft()
        events = self.scheduler.commit(plan, result, self.now)
        self.scheduler.check_integrity()
        self._take(events)
        return events

    def step(self, seconds: float = 0.01) -> StepPlan | None:
        """Fill the pipeline, then commit its oldest step; returns the last plan made."""
        plan = None
        while len(self._in_flight) < self.depth:
            plan = self.plan()
            if plan is None:
                break
        if self._in_flight:
            self.commit()
        self.now += seconds
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left, and check that everything came out right."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self._in_flight:
                break
            self.step()
        else:
            raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.stats()}")
        if self.cache.windows is None:
            assert self.cache.pool.num_active == 0
        assert self.scheduler.stats().num_running == self.scheduler.stats().num_waiting == 0
        for request_id in self.requests:
            assert request_id in self.finished or request_id in self.aborted

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            request_id = event.request_id
            assert request_id not in self.finished, "news of a request that ended"
            assert request_id not in self.aborted, "news of a request that was aborted"
            if event.prompt_logprobs is not None:
                self._take_scores(event, event.prompt_logprobs)
                continue
            answer = self.answers[request_id]
            if request_id not in self.first_events:
                self.first_events[request_id] = event
            else:
                assert event.num_cached_tokens is None
                assert event.queue_s is None
                assert event.cache_use is None
            if event.token_ids or event.finish_reason is FinishReason.LENGTH:
                self._check_scores(self.requests[request_id])
            answer.extend(event.token_ids)
            self.executor.deliver(request_id, event.token_ids)
            assert answer == expected_answer(self.requests[request_id], len(answer))
            if event.finish_reason is not None:
                self.finished[request_id] = event
            if event.finish_reason is FinishReason.LENGTH:
                assert len(answer) == self.length_of(self.requests[request_id])

    def _take_scores(self, event: TokenEvent, piece: PromptLogprobs) -> None:
        scores = self.scores[event.request_id]
        assert not self.answers[event.request_id], "scores after the first token"
        assert piece.start == len(scores) + 1, "scores are lost, doubled or out of order"
        scores += [piece.values[at : at + 8] for at in range(0, len(piece.values), 8)]
        assert scores == expected_scores(self.requests[event.request_id])[: len(scores)]

    def _check_scores(self, request: Request) -> None:
        """Before its first token, a request has got the scores of its whole prompt, if it asked for them."""
        is_asked = request.sampling.prompt_logprobs is not None and not request.output_token_ids
        assert self.scores[request.id] == (expected_scores(request) if is_asked else [])

    def length_of(self, request: Request) -> int:
        """Tokens that a request gets if nothing ends it before its limit."""
        room = min(self.max_model_len, self.cache.longest_context()) - len(request.prompt_token_ids)
        return min(request.sampling.max_tokens, self.config.max_output_tokens or room, room)


def make_request(
    request_id: str,
    prompt: tuple[int, ...] | int = 5,
    max_tokens: int = 4,
    *,
    tenant: str = "",
    tier: Tier = Tier.DEFAULT,
    deadline_s: float | None = None,
    breakpoints: tuple[CacheBreakpoint, ...] = (),
    **sampling: object,
) -> Request:
    """A request; a number for a prompt means that many tokens which no other request id shares."""
    if isinstance(prompt, int):
        prompt = tuple(crc32(f"{request_id} {index}".encode()) % VOCABULARY for index in range(prompt))
    return Request(
        id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        tenant=tenant,
        tier=tier,
        deadline_s=deadline_s,
        cache_breakpoints=breakpoints,
    )
