"""Drafts with a smaller model, or with heads on the served model's hidden states.

`draft_kv.py` says where the drafter's own KV lies and which part of it is valid.

Work is done when drafts are asked for: first the tokens that are new since the last time, for all requests in one
pass, then one pass for each further drafted token. A drafter that follows steps does this work after the step in
front (`following.py`), for all requests whose KV it has.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.core.clock import Clock
from penstock.core.plan import ON_DEVICE, Chunk, Draft
from penstock.core.request import Request
from penstock.engine.batch import DEVICE_DRAFTS, BatchRows, HostStep
from penstock.engine.drafters.choice import DraftChoice, Wanted
from penstock.engine.drafters.draft_kv import DraftChunk, DraftKV, FollowedRequest
from penstock.engine.drafters.following import (
    DraftSteps,
    Newest,
    OnTheWay,
    followed_chunks,
    recorded_event,
    send,
    verified,
)
from penstock.engine.drafters.guessers import Guesser, TreeGuesser
from penstock.engine.drafters.hidden_states import NOTHING, HiddenStates
from penstock.engine.drafters.trees import TREE_DEPTH, Tree, TreeSteps, num_nodes, num_places
from penstock.engine.staging import Staging
from penstock.kernels.interface import KVStore

logger = logging.getLogger(__name__)

MAX_TOKENS = 8  # of a draft
NO_DRAFTS = Wanted(0)
CATCH_UP_TOKENS = 1024  # most known tokens in one call; requests with more wait for the next call
MOST_UNASKED = 32  # steps without a question for drafts, after which prompts are not followed any more


class ModelDrafter:
    def __init__(
        self,
        name: str,
        guesser: Guesser,
        kv: KVStore,
        rows: BatchRows,
        clock: Clock,
        *,
        device: torch.device,
        vocab_size: int,
        max_positions: int,
        states: HiddenStates | None = None,
        follows_steps: bool = False,
        grows_trees: bool = False,
    ) -> None:
        """`kv` has SCRATCH_BLOCKS blocks for each row after the blocks of the served model, and a spare block. With
        `grows_trees`, which needs `follows_steps` and a guesser that ranks guesses, it may draft trees behind
        steps."""
        self._name, self._guesser, self._rows = name, guesser, rows
        self._kv = DraftKV(kv, rows, guesser.lag)
        self._staging = Staging(device, 1 << 20)
        self._vocab_size, self._max_positions = vocab_size, max_positions
        self.states = states
        self._choice = DraftChoice(clock, MAX_TOKENS, TREE_DEPTH if grows_trees else 0)
        records_graphs = device.type == "cuda" and guesser.records_graphs
        self._steps = DraftSteps(guesser, kv, rows.max_rows, max_positions, records_graphs=records_graphs)
        self._trees: TreeSteps | None = None
        if grows_trees:
            assert isinstance(guesser, TreeGuesser)
            self._trees = TreeSteps(guesser, kv, self._steps)
        self.follows_steps = follows_steps
        self._wanted = NO_DRAFTS  # after the next step
        self._num_unasked = 0  # steps since drafts were last asked for
        self._on_the_way: OnTheWay | None = None
        self._is_latest = False  # no step has been submitted since
        self.in_use: OnTheWay | None = None
        self._error: Exception | None = None

    def add(self, request: Request) -> None: ...

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None:
        self._choice.note_tokens(len(token_ids))
        followed = self._kv.get(request_id)
        if followed is None or not followed.draft:
            return
        draft, followed.draft = followed.draft, ()
        if followed.tree_depth is not None:
            self._note_tree(followed, token_ids, num_verified)
            return
        if ON_DEVICE in draft:
            assert self.in_use is not None
            draft = self.in_use.of(request_id)[: len(draft)]
        # The scheduler takes the first tokens of a draft, or none. The answer tells of the next one too.
        agreed, num_compared = 0, min(len(draft), len(token_ids))
        while agreed < num_compared and draft[agreed] == token_ids[agreed]:
            agreed += 1
        # The last draft was never an input, so its KV is not there.
        kept = followed.num_known - self._guesser.lag + min(agreed, len(draft) - 1)
        followed.num_computed = min(followed.num_computed, kept)
        self._choice.chains.observe(len(draft), num_verified, num_compared, agreed)

    def _note_tree(self, followed: FollowedRequest, token_ids: tuple[int, ...], num_verified: int) -> None:
        depth, followed.tree_depth = followed.tree_depth or 0, None
        # KV of nodes lies in other places than that of the answer.
        followed.num_computed = min(followed.num_computed, followed.num_known - self._guesser.lag)
        if self._choice.trees is not None:
            num_known = min(depth, len(token_ids)) if num_verified else 0
            taken = depth if num_verified else 0
            self._choice.trees.observe(depth, taken, num_known, len(token_ids) - 1)

    def remove(self, request_id: str) -> None:
        self._kv.forget(request_id)
        if self.states is not None:
            self.states.forget(request_id)

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        if self._error is not None:
            raise self._error
        try:
            return self._propose(wanted)
        except Exception as error:  # nothing more is drafted after steps
            self._error = error
            raise

    def _propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        drafting_s = self.in_use.elapsed_s if self.in_use is not None else None
        asked = self._choice.begin(
            drafting_s or 0.0, self._num_unasked, len(wanted), was_tree=self._round_had_trees()
        )
        most = min(asked.count, max(wanted.values()))
        self._num_unasked = 0
        if self.in_use is not None and drafting_s is not None and not self.in_use.has_recorded:
            if self.in_use.tree_depth is None:
                self._choice.chains.note_seconds(drafting_s / self.in_use.length)
            elif self._choice.trees is not None:
                self._choice.trees.note_seconds(drafting_s / self.in_use.tree_depth)
        self.in_use = None
        found = self._take_followed(wanted)
        self._wanted = replace(asked, count=most) if self.follows_steps else NO_DRAFTS
        rest = [each for each in wanted if each in self._rows and each not in found] if most > 0 else []
        if rest:
            self._staging.next_step()
            with torch.inference_mode():
                request_ids, drafted, num_tokens = self._draft(rest, most)
            is_usual = not self._steps.take_has_recorded()
            self._choice.chains.end(most, num_tokens, len(request_ids) if is_usual else 0)
            found.update(zip(request_ids, drafted, strict=True))
        elif found:
            self._choice.chains.end(0, 0, 0)
        drafts: dict[str, Draft] = {}
        for request_id, token_ids in found.items():
            tree_depth = self._kv[request_id].tree_depth
            # The scheduler cuts a tree, which has more nodes than levels.
            draft = tuple(token_ids if tree_depth is not None else token_ids[: wanted[request_id]])
            unknown = next((at for at, token_id in enumerate(draft) if token_id >= self._vocab_size), None)
            if draft := draft[:unknown]:
                self._kv[request_id].draft = draft
                drafts[request_id] = Draft(draft, self._name, tree_depth=tree_depth)
        return drafts

    def _round_had_trees(self) -> bool | None:
        """Return whether the step since the last call verified trees and was followed by the growth of trees; None if
        only one is true, or graphs were recorded."""
        kinds = set()
        for each in (self.in_use, self._on_the_way):
            if each is not None and each.has_recorded:
                return None
            kinds.add(each is not None and each.tree_depth is not None)
        return kinds.pop() if len(kinds) == 1 else None

    def follow(
        self,
        chunks: Sequence[Chunk],
        step: HostStep,
        sampled: Tensor,
        states: Tensor | None,
        blind: Collection[str],
    ) -> Mapping[str, int]:
        """Draft after a step, without waiting for it, if the next call of `propose` is likely to ask for drafts.
        `sampled` are its samples, int64 [S], and `states` its hidden states for a head, [T, ...]. The host can do
        without the drafts of `blind` requests. Returns how many states of a request are no longer needed."""
        self._is_latest = False
        self._num_unasked += 1
        asked, self._wanted = self._wanted, NO_DRAFTS
        most = min(asked.count, DEVICE_DRAFTS)
        if self._error is not None or (states is None) != (self.states is None):
            return NOTHING
        try:
            self._staging.next_step()
            read = self._follow_prompts(chunks, step, states) if self._num_unasked < MOST_UNASKED else {}
            if most <= 0:
                return read
            reach = max(most, num_places(most) if asked.is_tree else 0)
            ready = {
                request_id: chunk
                for request_id, chunk in followed_chunks(chunks).items()
                if self._is_ready(chunk, reach)
            }
            began = recorded_event(sampled.device)
            found = verified(ready, step, sampled, self._rows.draft_tokens, self._staging)
            if found is None:
                return read
            context = max(chunk.start + chunk.num_tokens for chunk in ready.values()) + reach + 1
            tables = self._kv.tables(found.request_ids, self._steps.width(context))
            inputs = None
            if self.states is not None and states is not None:
                inputs = self.states.features(states[found.at.view(-1)])
            rows = [self._kv[each].row for each in found.request_ids]
            # The host knows no tokens of trees, which others than blind requests need.
            trees = self._trees if asked.is_tree and all(each in blind for each in ready) else None
            count = most if trees is None else num_nodes(most)
            places = np.array(rows, dtype=np.int64)[:, None] * DEVICE_DRAFTS + np.arange(count)
            placed, at = self._staging.all_to_device(tables.astype(np.int32), places)
            newest = self._steps.catch_up(found, inputs, placed, context)
            tree = None if trees is None else self._grown(trees, newest, placed, context, most)
            if tree is None:
                first, at = self._guesser.argmax(newest.states), at[:, :most]
                drafted = self._steps.extend(first, newest.states, newest.positions, placed, context, most)
            else:
                drafted = tree.tokens
                self._rows.draft_lags[at] = tree.lags.to(torch.int32)
                self._rows.draft_ancestors[at] = tree.ancestors.to(torch.int32)
            self._rows.draft_tokens[at] = drafted.to(torch.int32)
            has_recorded = self._steps.take_has_recorded()
            tree_depth = None if tree is None else most
            self._on_the_way = send(
                found, drafted, blind, began, has_recorded=has_recorded, tree_depth=tree_depth
            )
            self._is_latest = True
        except Exception as error:  # the next call of `propose` reports the error
            self._error = error
            return NOTHING
        return read | {request_id: chunk.num_tokens for request_id, chunk in ready.items()}

    def take_recording_s(self) -> float:
        return self._steps.take_recording_s()

    def _grown(
        self, trees: TreeSteps, newest: Newest, tables: Tensor, context: int, depth: int
    ) -> Tree | None:
        """Grow trees. After an error, such as too little memory for a graph, there are no trees any more."""
        try:
            return trees.grow(newest, tables, context, depth)
        except Exception:
            self._trees = self._choice.trees = None
            logger.warning("trees of drafts have failed; drafts are chains from now on", exc_info=True)
            return None

    def _follow_prompts(
        self, chunks: Sequence[Chunk], step: HostStep, states: Tensor | None
    ) -> dict[str, int]:
        """Compute the drafter's KV of a step's prompts. Returns how many tokens of each were computed."""
        found = []
        for chunk, begin in zip(chunks, step.chunk_starts, strict=False):
            # The head's input at the last position of a prompt is a token that is not sampled yet.
            known = self._rows.num_tokens(chunk.request_id) - self._guesser.lag - chunk.start
            count = min(chunk.num_tokens, known)
            if chunk.in_flight or chunk.drafts or chunk.num_tokens < 2 or count <= 0:
                continue
            num_computed = self._kv.follow(chunk.request_id).num_computed
            if self.states is None and num_computed < chunk.start:
                continue  # blocks that came from elsewhere have no KV of this model: `propose` catches up
            if num_computed < chunk.start + count <= self._max_positions:
                inputs = None
                if self.states is not None and states is not None:
                    inputs = self.states.features(states[begin : begin + count])
                found.append(DraftChunk(chunk.request_id, chunk.start, count, inputs))
        if found:
            found.sort(key=lambda chunk: chunk.count)
            self._run(found)
            for each in found:
                self._kv.note(each)
        return {each.request_id: each.count for each in found}

    def _is_ready(self, chunk: Chunk, most: int) -> bool:
        """Return whether all positions before a chunk have been computed."""
        if chunk.request_id not in self._kv:
            return False
        followed = self._kv.follow(chunk.request_id)
        self._kv.forget_after_noted(followed)  # drafts are written there
        end = chunk.start + chunk.num_tokens + most + 1
        return followed.num_computed >= chunk.start and end <= self._max_positions

    def _take_followed(self, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Return the drafts that were made after the last step, of requests that got the tokens that were seen
        then."""
        sent, self._on_the_way = self._on_the_way, None
        found: dict[str, list[int]] = {}
        if sent is None:
            return found
        lag, self.in_use = self._guesser.lag, sent
        made: list[list[int]] | None = None
        for index, (request_id, start) in enumerate(zip(sent.request_ids, sent.starts, strict=True)):
            followed = self._kv.get(request_id)
            if followed is None or request_id not in self._rows or self._rows.row(request_id) != followed.row:
                continue
            num_seen = num_known = self._rows.num_tokens(request_id)
            drafted = [ON_DEVICE] * sent.length
            if not self._is_latest or request_id not in sent.blind:
                made = made if made is not None else sent.read()
                num_accepted, *drafted = made[index]
                num_seen = start + num_accepted + 2
            end = min(num_seen, num_known) - lag
            self._kv.note(DraftChunk(request_id, start, end - start))
            if sent.tree_depth is not None and not self._is_latest:
                continue  # only the device knows them
            if num_seen == num_known and request_id in wanted:  # else cut short, or more steps have followed
                followed.num_known, followed.tree_depth = num_known, sent.tree_depth
                found[request_id] = drafted
        return found

    def _draft(self, request_ids: list[str], most: int) -> tuple[list[str], list[list[int]], int]:
        """Return the requests for which there was time to draft, their drafts, and the known tokens computed."""
        chunks = self._missing(request_ids, most)
        if not chunks:
            return [], [], 0
        hidden = self._run(chunks)
        for chunk in chunks:
            self._kv.note(chunk)
        lag, rows, num_tokens = self._guesser.lag, self._rows, len(hidden)
        ends = np.cumsum([chunk.count for chunk in chunks]) - 1
        ready = [
            (at, chunk)
            for at, chunk in zip(ends, chunks, strict=True)
            if chunk.start + chunk.count == rows.num_tokens(chunk.request_id) - lag
        ]
        if not ready:
            return [], [], num_tokens
        states = hidden[self._staging.to_device(np.array([at for at, _ in ready], dtype=np.int64))]
        ends = np.array([chunk.start + chunk.count for _, chunk in ready], dtype=np.int64)
        context = int(ends.max()) + most
        tables = self._kv.tables([chunk.request_id for _, chunk in ready], self._steps.width(context))
        positions, placed = self._staging.all_to_device(ends, tables.astype(np.int32))
        drafted = self._steps.extend(
            self._guesser.argmax(states), states, positions, placed, context, most
        ).tolist()
        for _, chunk in ready:
            followed = self._kv[chunk.request_id]
            followed.num_computed = chunk.start + chunk.count + most - 1
            followed.num_known = chunk.start + chunk.count + lag
            followed.tree_depth = None
        return [each.request_id for _, each in ready], drafted, num_tokens

    def _missing(self, request_ids: list[str], most: int) -> list[DraftChunk]:
        """Return the positions to compute: of requests with the fewest first, as many as there is time for."""
        missing = []
        for request_id in request_ids:
            followed, end = self._kv.follow(request_id), self._rows.num_tokens(request_id) - self._guesser.lag
            start = min(followed.num_computed, end - 1)
            if start >= 0 and end + most <= self._max_positions:
                missing.append((end - start, start, request_id))
        missing.sort()
        chunks, left = [], CATCH_UP_TOKENS
        for count, start, request_id in missing:
            if left <= 0:
                break
            states = None
            if self.states is not None:  # they are there once, so all are read; what is missing is skipped
                start, states = self.states.take(request_id, start, end := start + count)
                if states is None:
                    continue
                count = end - start
            elif count > left:
                count = left
            chunks.append(DraftChunk(request_id, start, count, states))
            left -= count
        return sorted(chunks, key=lambda chunk: chunk.count)

    def _run(self, chunks: Sequence[DraftChunk]) -> Tensor:
        lag = self._guesser.lag
        ids = [
            self._rows.tokens(each.request_id)[each.start + lag : each.start + each.count + lag]
            for each in chunks
        ]
        states = [each.states for each in chunks if each.states is not None]
        return self._guesser.forward(
            self._staging.to_device(np.concatenate(ids)),
            torch.cat(states) if states else None,
            self._kv.batch(chunks, self._staging),
            self._kv.store,
        )
