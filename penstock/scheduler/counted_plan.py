"""The data of `counted`: plans in which decodes are two numbers, and the counts of each request that decodes."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import Protocol

from penstock.core.plan import Chunk, TokenEvent
from penstock.core.request import Request
from penstock.scheduler.sequence import Sequence
from penstock.scheduler.step_builder import StepLoad
from penstock.scheduler.tenants import OUTPUT_TOKEN_WEIGHT


class Answers(Protocol):
    """Knows the answers of a model that is not run."""

    def length(self, request_id: str) -> int:
        """Return the number of tokens after which the model ends this answer."""
        ...

    def tokens(self, request_id: str, start: int, stop: int) -> TokenIds[int]:
        """Return tokens of an answer."""
        ...


class CountedPlan:
    """One step: prompts as chunks, and decodes as two numbers."""

    __slots__ = ("chunks", "index", "load", "num_decodes", "num_entries", "rows", "sampling")

    def __init__(
        self,
        index: int,
        load: StepLoad,
        chunks: TokenIds[Chunk] = (),
        sampling: dict[str, Sequence] | None = None,
    ) -> None:
        self.index = index  # among counted plans; commits have the same index
        self.load = load
        self.num_decodes = load.decode_sequences
        self.num_entries = load.decode_context_tokens  # KV entries that decodes read
        self.chunks = chunks
        self.sampling = sampling  # prompts that end in this step
        self.rows: list[Sequence] | None = None  # the decodes, after counting has stopped

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(chunk.num_tokens for chunk in self.chunks)


class Told:
    """An event for a client. `times_s` are the commit times of the first tokens; the other tokens were committed
    now."""

    __slots__ = ("event", "times_s")

    def __init__(self, event: TokenEvent, times_s: TokenIds[float] = ()) -> None:
        self.event = event
        self.times_s = times_s


class Decode:
    """One request that decodes from the plan `first` to the plan `last`. `computed` and `expected` are the counts of
    the request before the plan `first`, once all earlier steps are committed."""

    __slots__ = (
        "computed",
        "end",
        "expected",
        "first",
        "has_left",
        "last",
        "num_served",
        "num_told",
        "sequence",
    )

    def __init__(self, sequence: Sequence, first: int, answer_length: int) -> None:
        self.sequence = sequence
        self.first = first
        self.computed = sequence.num_computed
        self.expected = sequence.num_expected  # all of them known when the plan `first` is committed
        self.last = first + sequence.length_limit - sequence.num_expected - 1
        num_tokens = min(answer_length, sequence.length_limit - sequence.num_prompt)
        self.num_told = sequence.num_expected - sequence.num_prompt  # tokens of the answer
        self.num_served = self.num_told  # tokens that the tenant's account knows of
        self.end = first + num_tokens - self.num_told - 1  # the commit of the last token
        self.has_left = False  # whether the next plan leaves the request out

    @property
    def first_untold(self) -> int:
        """Return the commit of the first token that was not told yet."""
        return self.first + self.num_told - (self.expected - self.sequence.num_prompt)

    def update_planned(self, num_planned: int) -> None:
        """Bring the counts of the request up to date with this many plans."""
        count = (num_planned if num_planned < self.last else self.last) - self.first + 1
        if count > 0:
            self.sequence.num_computed = self.computed + count
            self.sequence.num_expected = self.expected + count

    def update_committed(self, num_committed: int, answers: Answers) -> None:
        """Bring the tokens of the request up to date with this many commits."""
        if num_committed < self.first:
            return
        sequence, last = self.sequence, self.last
        num_known = self.expected + (num_committed if num_committed < last else last) - self.first + 1
        sequence.num_known = num_known
        output = sequence.output_token_ids
        count = num_known - sequence.num_prompt
        if count > len(output):
            output += answers.tokens(sequence.request_id, len(output), count)
        if count > self.num_served:
            sequence.account.service += OUTPUT_TOKEN_WEIGHT * (count - self.num_served)
            self.num_served = count

    def update_service(self, num_committed: int) -> None:
        """Bring the account of the tenant up to date with this many commits."""
        last = self.last
        since = (num_committed if num_committed < last else last) - self.first + 1
        if since > 0:
            count = self.expected + since - self.sequence.num_prompt
            if count > self.num_served:
                self.sequence.account.service += OUTPUT_TOKEN_WEIGHT * (count - self.num_served)
                self.num_served = count


def is_countable(request: Request) -> bool:
    """Return whether only the length limit or the model's end token can end an answer."""
    sampling = request.sampling
    return (
        request.deadline_s is None
        and request.pooling is None
        and not request.images
        and sampling.max_tokens > 0
        and sampling.grammar is None
        and sampling.prompt_logprobs is None
        and not sampling.stop_token_ids
        and not sampling.min_tokens
        and not sampling.ignore_eos
    )
