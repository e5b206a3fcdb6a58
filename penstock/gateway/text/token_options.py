"""Options whose meaning depends on the vocabulary: bad words and breakers of repetitions, which clients give as texts
and engines take as tokens, and the control tokens for filling in the middle of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.core.lru import LruCache
from penstock.core.request import Dry
from penstock.gateway.checks import check_token_ids
from penstock.gateway.prompts import SamplingOptions
from penstock.gateway.text.tokenizer import TextTokenizer
from penstock.gateway.turns import in_thread


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


OPTIONS = (
    *("bad_words", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers"),
)
_EVERY_TOKEN = 2**31 - 1
_MOST_CACHED = 16


class Breakers:
    """Finds the tokens that break a repetition: those that contain one of some texts, and the last token of such a
    text where the text has several."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        import numpy as np  # a tenth of a second, which a gateway need not take to start

        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._text = np.frombuffer(b"".join(tokens), dtype=np.uint8)  # of all tokens, one behind the other
        self._ends = np.cumsum([len(token) for token in tokens])

    def mask(self, texts: tuple[str, ...], last_ids: list[int]) -> bytes:
        import numpy as np

        found = np.zeros(len(self._ends), dtype=np.bool_)
        found[last_ids] = True
        for data in (text.encode(errors="surrogatepass") for text in texts):
            starts = np.flatnonzero(self._text[: max(0, len(self._text) - len(data) + 1)] == data[0])
            for offset, byte in enumerate(data[1:], 1):
                starts = starts[self._text[starts + offset] == byte]
            owners = np.searchsorted(self._ends, starts, side="right")
            found[owners[starts + len(data) <= self._ends[owners]]] = True
        return np.packbits(found, bitorder="little").tobytes()


class TokenOptions:
    """The options of one model's requests. The tokens of the last few sets of breakers are kept."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._breakers: Breakers | None = None
        self._masks = LruCache[tuple[str, ...], bytes](_MOST_CACHED)

    async def fields(self, options: SamplingOptions) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that replace `OPTIONS`."""
        fields: dict[str, Any] = {}
        if options.bad_words:
            fields["bad_words"] = await self._bad_words(options.bad_words)
        if options.repeat_last_n is not None:
            fields["repeat_last_n"] = _EVERY_TOKEN if options.repeat_last_n < 0 else options.repeat_last_n
        last_n = options.dry_penalty_last_n
        if options.dry_multiplier and last_n:
            fields["dry"] = Dry(
                options.dry_multiplier,
                options.dry_base,
                options.dry_allowed_length,
                None if last_n < 0 else last_n,
                await self._mask(tuple(sorted(set(options.dry_sequence_breakers)))),
            )
        return fields

    async def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, with and without a space in front."""
        forms = [form for word in words for form in dict.fromkeys((word, f" {word.lstrip()}"))]
        encoded = [await self._tokenizer.encode(form, add_special_tokens=False) for form in forms]
        for token_ids in encoded:
            check_token_ids(token_ids, self._vocab_size, param="bad_words")
        return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))

    async def _mask(self, texts: tuple[str, ...]) -> bytes:
        mask = self._masks.get(texts)
        if mask is None:
            encoded = [await self._tokenizer.encode(f"a{text}", add_special_tokens=False) for text in texts]
            last_ids = [ids[-1] for ids in encoded if len(ids) > 1 and ids[-1] < self._vocab_size]
            mask = await in_thread(self._find, texts, last_ids)
            self._masks.put(texts, mask)
        return mask

    def _find(self, texts: tuple[str, ...], last_ids: list[int]) -> bytes:
        if self._breakers is None:
            self._breakers = Breakers(self._tokenizer, self._vocab_size)
        return self._breakers.mask(texts, last_ids)
