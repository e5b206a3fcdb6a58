"""Runs the engine in this process, for many prompts at once: `penstock generate`, `penstock bench offline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from penstock.core.engine_config import EngineConfig
from penstock.core.errors import InvalidRequest, Overloaded, error_from_code
from penstock.core.messages import EngineStats, ModelCard, first_of_prompt, first_of_template
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.engine.build import build_engine
from penstock.engine.loop import EngineLoop

OnToken = Callable[[int, tuple[int, ...]], None]


@dataclass(slots=True)
class Completion:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class OfflineEngine:
    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self._engine = build_engine(config, model_path)
        self.card: ModelCard = self._engine.ready.model
        self._tokenizer = (
            Tokenizer.from_str(self.card.tokenizer_json.decode()) if self.card.tokenizer_json else None
        )
        if self._tokenizer is not None:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self._num_requests = 0

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Complete every prompt; `on_token` is called with a prompt's index and its new tokens after each step."""
        per_prompt = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(per_prompt) != len(prompts):
            raise InvalidRequest(f"There are {len(prompts)} prompts and {len(per_prompt)} sampling settings.")
        pending = [self._request(prompt, params) for prompt, params in zip(prompts, per_prompt, strict=True)]
        completions = [Completion() for _ in pending]
        index_of = {request.id: index for index, request in enumerate(pending)}
        pending.reverse()
        loop = self._engine.loop
        while pending or loop.has_work:
            self._admit(pending)
            for event in loop.step():
                index = index_of[event.request_id]
                _extend(completions[index], event)
                if on_token is not None and event.token_ids:
                    on_token(index, event.token_ids)
            for rejected in loop.take_rejections():
                raise error_from_code(rejected.code, rejected.message)
        if self._tokenizer is not None:
            for completion in completions:
                completion.text = self._tokenizer.decode(completion.token_ids)
        return completions

    @property
    def loop(self) -> EngineLoop:
        """Return the engine's loop, for benchmarks that count steps."""
        return self._engine.loop

    def stats(self) -> EngineStats:
        return self._engine.loop.stats()

    def close(self) -> None:
        self._engine.close()

    def _admit(self, pending: list[Request]) -> None:
        """Hand over requests until the queue is full; the rest wait here."""
        while pending:
            try:
                self._engine.loop.add(pending[-1])
            except Overloaded:
                if not self._engine.loop.has_work:
                    raise
                return
            pending.pop()

    def _request(self, prompt: str | Sequence[int], sampling: SamplingParams) -> Request:
        self._num_requests += 1
        return Request(
            id=f"offline-{self._num_requests}", prompt_token_ids=self._token_ids(prompt), sampling=sampling
        )

    def _token_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self._tokenizer is None:
            raise InvalidRequest("The model has no tokenizer.", hint="Give token ids instead of text.")
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        return (*self._first_ids, *ids)

    @cached_property
    def _first_ids(self) -> tuple[int, ...]:
        """Return the tokens before a plain-text prompt."""
        assert self._tokenizer is not None
        return first_of_prompt(self.card, first_of_template(self._tokenizer))


def _extend(completion: Completion, event: TokenEvent) -> None:
    completion.token_ids.extend(event.token_ids)
    if event.num_cached_tokens is not None:
        completion.num_cached_tokens = event.num_cached_tokens
    if event.finish_reason is not None:
        completion.finish_reason = event.finish_reason
        completion.error = event.error
