"""Decides which tokens stand before a plain-text prompt, for servers and offline engines alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.core.messages import ModelCard


class _Encoding(Protocol):
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def special_tokens_mask(self) -> Sequence[int]: ...


class _Tokenizer(Protocol):
    def encode(self, text: str, /) -> _Encoding: ...


def first_of_template(tokenizer: _Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer's own template writes before a text."""
    encoding = tokenizer.encode("a")
    is_special = (*encoding.special_tokens_mask, 0)
    return tuple(encoding.ids[: is_special.index(0)])


def first_of_prompt(card: ModelCard, of_template: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens before a plain-text prompt. Some models have several of them, or call none of them the
    beginning of a sequence: their template writes them."""
    if card.add_bos_token and card.bos_token_id is not None:
        return of_template if of_template[:1] == (card.bos_token_id,) else (card.bos_token_id,)
    is_denied = of_template[:1] == (card.bos_token_id,)
    return () if card.is_encoder or is_denied else of_template
