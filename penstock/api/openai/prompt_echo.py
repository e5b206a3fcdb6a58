"""Prompts in answers: the text (`echo`), and log-probabilities of its tokens in two formats, OpenAI's (`echo` with
`logprobs`) and vLLM's (`prompt_logprobs`).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from penstock.api.openai.answers import (
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    completion_logprobs,
    encoded,
    token_text,
    top_logprobs,
)
from penstock.core.errors import InvalidRequest
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import DIRECT_LOGPROBS, AnswerStream, WrappedAnswer
from penstock.gateway.models.catalogue import AnsweringModel
from penstock.gateway.prompts import Prompt, ScoredPrompt, TextPrompt, TokenPrompt
from penstock.gateway.turns import in_thread

TokenBytes = Callable[[int], bytes]
VocabularyOf = Callable[[str], TokenBytes]  # by the name of the model that answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPrompts:
    """The parts of the prompt that a request asks for. `texts` are the echoed prompts, if any. `echoed_top` and
    `scored_top` are the numbers of alternatives in OpenAI's and in vLLM's format, None if that format is not used."""

    n: int
    texts: Sequence[str] = ()
    echoed_top: int | None = None
    scored_top: int | None = None

    def text(self, index: int) -> str:
        """Return the prompt that an answer begins with. The n answers of a prompt follow each other."""
        return self.texts[index // self.n] if self.texts else ""


@dataclass(frozen=True, slots=True)
class _Rendered:
    prompt: ScoredPrompt
    echoed: CompletionLogprobs | None
    scored: PromptLogprobList | None


class EchoedAnswer(WrappedAnswer):
    """An answer that comes with its prompt. Many log-probabilities are written off the event loop, before their
    deltas are handed on."""

    def __init__(self, answer: AnswerStream, shown: ShownPrompts, vocabulary_of: VocabularyOf) -> None:
        super().__init__(answer)
        self._shown = shown
        self._vocabulary_of = vocabulary_of
        self._has_begun: set[int] = set()
        self._latest: _Rendered | None = None  # answers to one prompt share it
        self._rendered: dict[int, _Rendered] = {}

    async def __anext__(self) -> list[Delta]:
        return await self._show(await anext(self._answer))

    async def collect(self) -> list[Delta]:
        return await self._show(await self._answer.collect())

    def logprobs(self, delta: Delta) -> CompletionLogprobs:
        """Return the log-probabilities of a delta: of its prompt's tokens, if it has any, and of its own tokens."""
        shift = len(self._shown.text(delta.index))
        own = completion_logprobs(delta.details, shift)
        rendered = self._rendered.get(delta.index) if delta.prompt is not None else None
        return own if rendered is None or rendered.echoed is None else rendered.echoed.followed_by(own)

    def prompt_logprobs(self, delta: Delta) -> PromptLogprobList | None:
        rendered = self._rendered.get(delta.index)
        return None if rendered is None else rendered.scored

    async def _show(self, deltas: list[Delta]) -> list[Delta]:
        scored = [(delta.index, delta.prompt) for delta in deltas if delta.prompt is not None]
        if not scored:
            return list(map(self._echoed, deltas))
        token_bytes = self._vocabulary_of(self._answer.model)
        num_top = (self._shown.echoed_top or 0) + (self._shown.scored_top or 0)
        count = sum(len(prompt.token_ids) for _, prompt in scored) * (1 + num_top)
        if count <= DIRECT_LOGPROBS:
            self._render(scored, token_bytes)
        else:
            await in_thread(self._render, scored, token_bytes)
        return list(map(self._echoed, deltas))

    def _echoed(self, delta: Delta) -> Delta:
        if delta.index in self._has_begun:
            return delta
        self._has_begun.add(delta.index)
        text = self._shown.text(delta.index)
        return msgspec.structs.replace(delta, text=text + delta.text) if text else delta

    def _render(self, scored: Sequence[tuple[int, ScoredPrompt]], token_bytes: TokenBytes) -> None:
        for index, prompt in scored:
            if self._latest is None or self._latest.prompt is not prompt:
                self._latest = _render(prompt, self._shown.text(index), self._shown, token_bytes)
            self._rendered[index] = self._latest


def _render(prompt: ScoredPrompt, text: str, shown: ShownPrompts, token_bytes: TokenBytes) -> _Rendered:
    echoed = scored = None
    if shown.echoed_top is not None:
        echoed = echoed_logprobs(prompt, text, shown.echoed_top, token_bytes)
    if shown.scored_top is not None:
        scored = scored_tokens(prompt, shown.scored_top, token_bytes)
    return _Rendered(prompt, echoed, scored)


def echoed_logprobs(
    prompt: ScoredPrompt, text: str, num_top: int, token_bytes: TokenBytes
) -> CompletionLogprobs:
    """Return log-probabilities in the shape of completions: the first token has null."""
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    tokens = []
    for token_id, score in prompt.scores(num_top):
        token = token_text(token_bytes(token_id))
        tokens.append(token)
        logprobs.append(None if score is None else score.logprob)
        if score is None:
            tops.append(None)
        else:
            alternatives = ((token_text(token_bytes(top_id)), logprob) for top_id, logprob in score.top)
            tops.append(encoded(top_logprobs(alternatives, token, score.logprob)))
    offsets = list(text_offsets(map(token_bytes, prompt.token_ids), text))
    return CompletionLogprobs(offsets, logprobs, tokens, tops if num_top else None)


def text_offsets(tokens: Iterator[bytes], text: str) -> Iterator[int]:
    """Yield the position in the prompt's text, in characters, where each token begins. Tokens that were added in
    front of the text have no position of their own, nor has the leading space that some tokenizers add."""
    decode = getincrementaldecoder("utf-8")("replace").decode
    offset = 0
    for token in tokens:
        yield min(offset, len(text))
        piece = decode(token)
        if not offset and not text.startswith(piece):
            piece = piece.removeprefix(" ") if text.startswith(piece.removeprefix(" ")) else ""
        offset += len(piece)


def scored_tokens(prompt: ScoredPrompt, num_top: int, token_bytes: TokenBytes) -> PromptLogprobList:
    """vLLM's shape: by token id, first the prompt's own token."""
    rows: PromptLogprobList = []
    for token_id, score in prompt.scores(num_top):
        if score is None:
            rows.append(None)
            continue
        row = {str(token_id): PromptLogprob(score.logprob, score.rank, token_text(token_bytes(token_id)))}
        for rank, (top_id, logprob) in enumerate(score.top, start=1):
            if top_id != token_id:
                row[str(top_id)] = PromptLogprob(logprob, rank, token_text(token_bytes(top_id)))
        rows.append(encoded(row))
    return rows


async def prompt_texts(prompts: Sequence[Prompt], model: AnsweringModel) -> list[str]:
    """Raises InvalidRequest for token ids outside the vocabulary."""
    texts = []
    for prompt in prompts:
        if isinstance(prompt, TextPrompt):
            texts.append(prompt.text)
        elif isinstance(prompt, TokenPrompt):
            texts.append(await model.decode(prompt.token_ids))
        else:
            raise InvalidRequest("Only the prompts of completions can be echoed.", param="echo")
    return texts
