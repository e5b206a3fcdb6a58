"""Fill in the middle: the control tokens that tell a model which text stands before and behind the gap.

A model can fill in where its vocabulary has all tokens of one family. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class InfillTokens(msgspec.Struct, frozen=True):
    """The tokens before the text in front of the gap, before the text behind it, and before the answer."""

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False


FAMILIES = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillTokens("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)


def infill_ids(token_id: Callable[[str], int | None]) -> tuple[InfillTokens, dict[str, int]] | None:
    """Return the first family of which a vocabulary has all tokens, and their ids."""
    for family in FAMILIES:
        ids = {
            text: token_id(text) for text in (family.prefix, family.suffix, family.middle) if text is not None
        }
        if None not in ids.values():
            return family, {text: found for text, found in ids.items() if found is not None}
    return None


def laid_out(
    family: InfillTokens, ids: dict[str, int], before: tuple[int, ...], behind: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the prompt of a gap, from the tokens of the texts around it."""
    first = (ids[family.prefix], *before)
    second = (ids[family.suffix], *behind)
    end = () if family.middle is None else (ids[family.middle],)
    return (*second, *first, *end) if family.suffix_first else (*first, *second, *end)
