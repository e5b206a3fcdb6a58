"""A drafter that knows the answers, and engines that take every draft of it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.plan import Draft, StepPlan, TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request
from penstock.engine.build import Engine
from penstock.engine.drafters.interface import Drafter
from penstock.scheduler.ranks import RankSchedulers
from penstock.scheduler.speculation import _Choice

from .tiny import VOCAB_SIZE, run, tokens

Answer = tuple[list[int], list[TokenLogprobs], FinishReason | None, str | None]


class KnowingDrafter:
    """Drafts the tokens of known answers. Each token is replaced by another one with the chance `spoiled`."""

    def __init__(
        self,
        answers: Mapping[str, Sequence[int]],
        spoiled: float,
        seed: int = 0,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._spoiled = spoiled
        self._rng = random.Random(seed)
        self._num_known: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self._num_known[request.id] = len(request.output_token_ids)

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None:
        self._num_known[request_id] += len(token_ids)

    def remove(self, request_id: str) -> None:
        self._num_known.pop(request_id, None)

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        rng = self._rng
        drafts = {}
        for request_id, most in wanted.items():
            start = self._num_known[request_id]
            # Answers that end early have drafts behind their end, too.
            right = [*self._answers.get(request_id, ()), *(5, 6, 7, 8)][start : start + rng.randint(1, most)]
            token_ids = [
                (token_id + rng.randrange(1, self._vocab_size)) % self._vocab_size
                if rng.random() < self._spoiled
                else token_id
                for token_id in right
            ]
            drafts[request_id] = Draft(tuple(token_ids), "test")
        return drafts


def speculate(engine: Engine, drafter: Drafter, most: int = 4) -> Engine:
    """Let the engine take all drafts of a drafter, whether that pays or not."""
    engine.loop.drafter = drafter

    def take_all(offers: list[Any], load: object, max_tokens: int) -> list[int]:
        lengths = []
        for offer in offers:
            left = max(0, len(offer.draft.token_ids) - offer.first)
            lengths.append(min(left, offer.room, max(max_tokens, 0)))
            max_tokens -= lengths[-1]
        return lengths

    rng = random.Random(1)
    scheduler = engine.loop.scheduler
    for each in scheduler.schedulers if isinstance(scheduler, RankSchedulers) else (scheduler,):
        speculation = each._speculation
        speculation._max_draft_tokens = most
        speculation._best_lengths = take_all  # type: ignore[method-assign]
        speculation._best = lambda offers, load, most, idle_s: _Choice(  # type: ignore[method-assign]
            take_all(offers, load, most), 1.0, 1.0
        )
        speculation._pays_late = lambda choice: rng.random() < 0.7  # type: ignore[method-assign]
    return engine


def num_late(engine: Engine) -> list[int]:
    """Count the plans that start late, from now on, in a list of one number."""
    scheduler, count = engine.loop.scheduler, [0]
    plan = scheduler.plan

    def counted(*args: Any) -> StepPlan | None:
        planned = plan(*args)
        count[0] += planned is not None and any(chunk.unsettled for chunk in planned.chunks)
        return planned

    scheduler.plan = counted  # type: ignore[method-assign]
    return count


def answer(events: list[TokenEvent]) -> Answer:
    """All that a client learns of an answer, whatever the number of its events."""
    last = events[-1]
    logprobs = [each for event in events for each in event.logprobs]
    return tokens(events), logprobs, last.finish_reason, last.error


def answers(engine: Engine, requests: list[Request]) -> dict[str, Answer]:
    return {request_id: answer(events) for request_id, events in run(engine, requests).items()}


def num_accepted(engine: Engine) -> int:
    return sum(sum(stats.accepted) for stats in engine.loop.stats().drafters)
