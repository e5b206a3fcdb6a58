"""Text in, text out: what is streamed must be what decoding the whole would give."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from penstock.core.errors import ModelLoadError
from penstock.gateway.text.detokenizer import REPLACEMENT_CHARACTER, ByteDetokenizer, WindowDetokenizer
from penstock.gateway.text.tokenizer import (
    DIRECT_CHARS_PER_TURN,
    DIRECT_ENCODE_CHARS,
    LARGE_TOKENS,
    SLICE_CHARS,
    TextTokenizer,
    TooManyTokens,
)
from tests.gateway import vocabularies
from tests.gateway.fake_engine import BOS_ID, EOS_ID, byte_tokenizer, model_card

EMOJI = st.sampled_from(["😀", "👩‍👩‍👧", "🏳️‍🌈", "é", "e\u0301", "日", "\u200d", " ", "\n", "the"])
TEXTS = st.lists(st.one_of(EMOJI, st.text(max_size=5)), max_size=12).map("".join)

ANY_TOKENS = st.lists(st.integers(0, vocabularies.byte_level().get_vocab_size() - 1))


def tokenizer_of(tokenizer: Tokenizer, **changes: object) -> TextTokenizer:
    return TextTokenizer(model_card(tokenizer=tokenizer, **changes))


BYTE_LEVEL = tokenizer_of(vocabularies.byte_level())
SENTENCEPIECE = tokenizer_of(vocabularies.sentencepiece())
METASPACE = tokenizer_of(vocabularies.metaspace())


def stream(tokenizer: TextTokenizer, prompt_ids: list[int], ids: list[int], sizes: list[int]) -> list[str]:
    """Push `ids` in groups of the given sizes, then singly."""
    detokenizer = tokenizer.detokenizer(prompt_ids)
    pieces = []
    position = 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(detokenizer.push(tuple(ids[position : position + size])))
        position += size
    return [*pieces, detokenizer.finish()]


@given(
    st.lists(st.integers(0, vocabularies.byte_level().get_vocab_size() - 1)),
    st.lists(st.integers(1, 4), max_size=5),
)
def test_byte_level_stream_of_any_tokens_is_the_whole_decode(ids: list[int], sizes: list[int]) -> None:
    whole = vocabularies.byte_level().decode(ids, skip_special_tokens=True)
    assert "".join(stream(BYTE_LEVEL, [], ids, sizes)) == whole


@given(TEXTS)
def test_byte_level_stream_never_emits_half_a_character(text: str) -> None:
    ids = vocabularies.byte_level().encode(text).ids
    pieces = stream(BYTE_LEVEL, [], ids, [])
    assert "".join(pieces) == text
    assert REPLACEMENT_CHARACTER in text or not any(REPLACEMENT_CHARACTER in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
@given(prompt=TEXTS, text=TEXTS)
def test_answer_follows_its_prompt_as_in_one_text(kind: str, prompt: str, text: str) -> None:
    """Splits one encoded text into prompt and answer: the parts must join to what the whole decodes to."""
    raw = getattr(vocabularies, kind)()
    tokenizer = {"sentencepiece": SENTENCEPIECE, "metaspace": METASPACE}[kind]
    prompt_ids = raw.encode(prompt + "the", add_special_tokens=False).ids
    ids = raw.encode(prompt + "the" + text, add_special_tokens=False).ids
    if ids[: len(prompt_ids)] != prompt_ids:
        return  # a merge across the seam: the answer does not begin at a token
    answer = "".join(stream(tokenizer, prompt_ids, ids[len(prompt_ids) :], []))
    assert raw.decode(prompt_ids) + answer == raw.decode(ids)


def test_sentencepiece_keeps_the_space_between_prompt_and_answer() -> None:
    the = vocabularies.sentencepiece().token_to_id("▁the")
    assert "".join(stream(SENTENCEPIECE, [the], [the, the], [])) == " the the"
    assert "".join(stream(SENTENCEPIECE, [1], [the, the], [])) == "the the", "after <s> alone a text begins"


def test_kinds_of_decoder_are_recognised() -> None:
    assert isinstance(BYTE_LEVEL.detokenizer([]), ByteDetokenizer)
    assert isinstance(SENTENCEPIECE.detokenizer([]), ByteDetokenizer)
    assert isinstance(METASPACE.detokenizer([]), WindowDetokenizer)


def test_window_does_not_wait_forever_for_a_character() -> None:
    broken = vocabularies.metaspace().token_to_id("<0xF0>")
    detokenizer = METASPACE.detokenizer([])
    pieces = [detokenizer.push((broken,)) for _ in range(100)]
    assert sum(map(bool, pieces)) > 10


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, METASPACE])
def test_special_tokens_are_not_streamed(tokenizer: TextTokenizer) -> None:
    special = 0 if tokenizer is BYTE_LEVEL else 2
    assert "".join(stream(tokenizer, [], [special, special], [])) == ""


def test_token_past_the_tokenizer_has_no_text() -> None:
    """Models pad their vocabulary beyond what the tokenizer knows."""
    assert BYTE_LEVEL.detokenizer([]).push((999_999,)) == ""


async def test_encode_adds_the_first_token_only_where_the_card_says() -> None:
    wants = tokenizer_of(byte_tokenizer(), add_bos_token=True)
    wants_none = tokenizer_of(byte_tokenizer())
    assert await wants.encode("ab", add_special_tokens=True) == (BOS_ID, 97, 98)
    assert await wants.encode("ab", add_special_tokens=False) == (97, 98)
    assert await wants_none.encode("ab", add_special_tokens=True) == (97, 98)


@pytest.mark.parametrize(
    ("card", "first"),
    [
        ({"bos_token_id": None}, (EOS_ID, BOS_ID)),  # GLM 4 calls none of both the beginning of a sequence
        ({"bos_token_id": EOS_ID, "add_bos_token": True}, (EOS_ID, BOS_ID)),
        ({"bos_token_id": BOS_ID, "add_bos_token": True}, (BOS_ID,)),
        ({"bos_token_id": EOS_ID}, ()),  # the settings deny it
        ({"bos_token_id": None, "is_encoder": True}, ()),
    ],
)
async def test_first_tokens_that_the_template_of_the_tokenizer_writes(
    card: dict[str, Any], first: tuple[int, ...]
) -> None:
    raw = byte_tokenizer()
    specials = [("<|end|>", EOS_ID), ("<|begin|>", BOS_ID)]
    raw.post_processor = processors.TemplateProcessing(single="<|end|> <|begin|> $A", special_tokens=specials)
    tokenizer = tokenizer_of(raw, **card)
    assert await tokenizer.encode("ab", add_special_tokens=True) == (*first, 97, 98)


async def test_long_texts_are_encoded_like_short_ones() -> None:
    tokenizer = tokenizer_of(byte_tokenizer())
    text = "x" * (DIRECT_ENCODE_CHARS + 1)
    assert await tokenizer.encode(text, add_special_tokens=False) == tuple(text.encode())


async def test_truncation_in_the_file_is_ignored() -> None:
    raw = byte_tokenizer()
    raw.enable_truncation(2)
    raw.enable_padding(length=5)
    assert await tokenizer_of(raw).encode("abc", add_special_tokens=False) == (97, 98, 99)


def test_decode_shows_special_tokens() -> None:
    assert tokenizer_of(byte_tokenizer()).decode([97, EOS_ID]) == "a<|end|>"


def test_unreadable_file_is_a_clear_error() -> None:
    with pytest.raises(ModelLoadError, match="tokenizer of bytes"):
        TextTokenizer(model_card(tokenizer_json=b"{}"))


async def test_many_short_texts_in_one_turn_of_the_event_loop_are_encoded_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request may have thousands of prompts, and each is encoded without a pause after the one before."""
    threads: list[bool] = []
    encode = TextTokenizer._encode

    def noted(
        self: TextTokenizer, text: str, plain_ranges: Sequence[tuple[int, int]], begin: Sequence[int]
    ) -> tuple[int, ...]:
        threads.append(threading.current_thread() is not threading.main_thread())
        return encode(self, text, plain_ranges, begin)

    monkeypatch.setattr(TextTokenizer, "_encode", noted)
    tokenizer = tokenizer_of(byte_tokenizer())
    num_direct = DIRECT_CHARS_PER_TURN // DIRECT_ENCODE_CHARS
    for _ in range(num_direct + 1):
        assert len(await tokenizer.encode("x" * DIRECT_ENCODE_CHARS, add_special_tokens=False)) == 4096
    assert threads == [False] * num_direct + [True]
    await tokenizer.encode("x", add_special_tokens=False)  # in another turn, after the thread's answer
    assert threads[-1] is False


@pytest.mark.parametrize("side", ["right", "left"])
async def test_long_text_is_tokenized_only_as_far_as_its_first_or_last_tokens(
    side: Literal["left", "right"],
) -> None:
    text = "".join(chr(0x1F600 + number % 64) for number in range(10 * SLICE_CHARS))
    part = await BYTE_LEVEL.shortened(text, 1000, side)
    assert 1000 < len(part) <= SLICE_CHARS
    whole = await BYTE_LEVEL.encode(text, add_special_tokens=False)
    ids = await BYTE_LEVEL.encode(part, add_special_tokens=False)
    assert ids[:1000] == whole[:1000] if side == "right" else ids[-1000:] == whole[-1000:]


async def test_text_with_too_many_tokens_is_told_before_it_is_tokenized_to_its_end() -> None:
    text = "😀" * (10 * SLICE_CHARS)
    num_tokens = len(await BYTE_LEVEL.encode(text, add_special_tokens=False))
    with pytest.raises(TooManyTokens) as caught:
        await BYTE_LEVEL.check_length(text, 1000)
    assert 1000 < caught.value.at_least < num_tokens / 5
    await BYTE_LEVEL.check_length(text, num_tokens)


async def test_ordinary_text_that_fits_is_not_counted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BYTE_LEVEL, "_reach", None)
    text = "an ordinary text " * 10_000
    await BYTE_LEVEL.check_length(text, len(text) // 4)
    assert await BYTE_LEVEL.shortened(text, len(text) // 4) == text


async def test_large_texts_leave_the_threads_to_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(vocabularies.byte_level())
    go_on = threading.Event()
    encode = tokenizer._encode

    def encode_slowly(text: str, *rest: object) -> tuple[int, ...]:
        if len(text) > LARGE_TOKENS:
            go_on.wait(120)
        return encode(text, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizer, "_encode", encode_slowly)
    large = [
        asyncio.create_task(tokenizer.encode("a" * (LARGE_TOKENS + 1), add_special_tokens=False))
        for _ in range(8)
    ]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await tokenizer.encode("b" * (DIRECT_ENCODE_CHARS + 1), add_special_tokens=False)
    assert not any(task.done() for task in large)
    go_on.set()
    await asyncio.gather(*large)
