"""`echo` of /v1/completions: answers that begin with their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.gateway.catalogue import AnsweringModel
from penstock.gateway.choice import Delta
from penstock.gateway.prompts import Prompt, TextPrompt, TokenPrompt
from penstock.gateway.stream import AnswerStream
from penstock.gateway.wrapped_answer import WrappedAnswer


class EchoedAnswer(WrappedAnswer):
    """`prompts` as text; the n answers of a prompt follow each other."""

    def __init__(self, answer: AnswerStream, prompts: Sequence[str], n: int) -> None:
        super().__init__(answer)
        self._prompts = dict(enumerate(prompt for prompt in prompts for _ in range(n)))

    async def __anext__(self) -> list[Delta]:
        return list(map(self._echoed, await anext(self._answer)))

    async def collect(self) -> list[Delta]:
        return list(map(self._echoed, await self._answer.collect()))

    def _echoed(self, delta: Delta) -> Delta:
        prompt = self._prompts.pop(delta.index, "")  # once, before the first piece
        return msgspec.structs.replace(delta, text=prompt + delta.text) if prompt else delta


def prompt_texts(prompts: Sequence[Prompt], model: AnsweringModel) -> list[str]:
    """Raises InvalidRequest for token ids that nobody here can read."""
    texts = []
    for prompt in prompts:
        if isinstance(prompt, TextPrompt):
            texts.append(prompt.text)
        elif isinstance(prompt, TokenPrompt):
            texts.append(model.decode(prompt.token_ids))
        else:
            raise InvalidRequest("Only the prompts of completions can be echoed.", param="echo")
    return texts
