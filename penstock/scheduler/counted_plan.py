"""The data of `counted`: plans in which decodes are two numbers, and what is known of each request that decodes."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.plan import Chunk, TokenEvent
from penstock.core.request import Request
from penstock.scheduler.sequence import Sequence
from penstock.scheduler.step_builder import StepLoad


class Answers(Protocol):
    """The answers of a model that is not run."""

    def length(self, request_id: str) -> int:
        """Return the number of tokens after which the model ends this answer."""
        ...

    def tokens(self, request_id: str, start: int, stop: int) -> TokenIds[int]:
        """Return tokens of an answer."""
        ...


@dataclass(slots=True, eq=False)
class CountedPlan:
    """One step: prompts as chunks, and decodes as two numbers."""

    index: int  # among counted plans; commits have the same index
    load: StepLoad
    num_decodes: int
    num_entries: int  # KV entries that decodes read
    chunks: TokenIds[Chunk] = ()
    sampling: dict[str, Sequence] = field(default_factory=dict)  # prompts that end in this step
    rows: list[Sequence] | None = None  # the decodes, once they are no longer counted

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class Told:
    """An event for a client. `times_s` are the times of its first tokens; the others came now."""

    event: TokenEvent
    times_s: TokenIds[float] = ()


class Decode:
    """One request that decodes from the plan `first` to the plan `last`. Its counts are as they were before
    `first` was planned, once all steps before it are committed."""

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
        self.expected = sequence.num_expected  # and known, by then
        self.last = first + sequence.length_limit - sequence.num_expected - 1
        num_tokens = min(answer_length, sequence.length_limit - sequence.num_prompt)
        self.num_told = sequence.num_expected - sequence.num_prompt  # tokens of the answer
        self.num_served = self.num_told  # tokens that the tenant's account knows of
        self.end = first + num_tokens - self.num_told - 1  # the commit of the last token
        self.has_left = False  # plans no longer have it


def is_countable(request: Request) -> bool:
    """Say whether an answer ends by its length, or where the model ends it, and nowhere else."""
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
