"""Text to token ids and back, for one served model. Wraps a `tokenizers.Tokenizer`; knows nothing of requests.

`detokenizer` turns streams of tokens into text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from tokenizers import Encoding, Tokenizer

from penstock.core.errors import ModelLoadError
from penstock.core.messages import ModelCard, first_of_prompt, first_of_template
from penstock.gateway.text.detokenizer import (
    ByteDetokenizer,
    DecoderKind,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
)
from penstock.gateway.turns import FairSlots

# Below this a hop to another thread costs more than the encoding that it would take off the event loop.
DIRECT_ENCODE_CHARS = 4096
# Many short texts are as much work as a long one: more than these, in one turn of the event loop, go to threads too.
DIRECT_CHARS_PER_TURN = 16_384
ENCODE_THREADS = 2
LARGE_TOKENS = 1 << 17  # texts that may have more than this take turns in a thread of their own
SLICE_CHARS = 1 << 16  # of a long text, whose tokens are counted slice by slice
TOKENS_PER_CUT = 256  # that a cut in the middle of a word may add, generously
# A text is tokenized without counting first if it cannot have more than this many times the tokens that are allowed,
# which leaves out ordinary texts, or more than the second number.
SURE_FACTOR = 4
SURE_TOKENS = 1 << 20
BYTES_PER_CHARACTER = 4  # at most, in UTF-8
COMPOSING_FACTOR = 4  # Unicode composes at most four characters into one
LOSSY_FACTOR = 16  # for tokenizers that delete characters, or join those that they do not know


T = TypeVar("T")


class TooManyTokens(Exception):
    """A text has more tokens than are allowed, and at least so many."""

    def __init__(self, at_least: int) -> None:
        super().__init__(at_least)
        self.at_least = at_least


class TextTokenizer:
    """Encodes, decodes and makes detokenizers. One per model card; safe to share between requests."""

    def __init__(self, card: ModelCard) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
        except Exception as error:  # the bindings raise a bare Exception
            raise ModelLoadError(f"The tokenizer of {card.name} cannot be read: {error}") from error
        self._card = card
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template_ids = first_of_template(self._tokenizer)
        self.bos_ids = first_of_prompt(card, self._template_ids)
        file = _decode_file(card.tokenizer_json)
        self._decoder = DecoderKind.of(file.decoder)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # No text has fewer tokens than its characters divided by this. For tokenizers that drop or join characters
        # without limit the figure is generous instead of exact: no text worth answering comes near it.
        shrink_factor = _shrink_factor(file.normalizer) if self._decoder.bytewise else LOSSY_FACTOR
        self.max_characters_per_token = shrink_factor * max(map(len, vocabulary), default=1)
        self.max_token_id = max(vocabulary.values(), default=0)  # of what `encode` gives
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._token_bytes = TokenBytes(self._tokenizer, byte_level=self._decoder.byte_level)
        self._visible_bytes: dict[frozenset[int], TokenBytes] = {}  # by which special tokens are shown
        self._threads = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="tokenize")
        self._large_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-large")
        self._slots, self._large_slots = FairSlots(ENCODE_THREADS), FairSlots(1)
        # Characters that this turn of the event loop may still encode.
        self._direct_room = DIRECT_CHARS_PER_TURN

    def _goes_direct(self, num_characters: int) -> bool:
        """Return whether a text is encoded on the event loop, at once."""
        if num_characters > min(DIRECT_ENCODE_CHARS, self._direct_room):
            return False
        if self._direct_room == DIRECT_CHARS_PER_TURN:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._direct_room -= num_characters
        return True

    def _end_turn(self) -> None:
        self._direct_room = DIRECT_CHARS_PER_TURN

    async def _off_loop(self, work: Callable[[], T], *texts: str) -> T:
        """Do work with texts in a thread. Large texts do not keep the threads from smaller ones, and workspaces share
        the threads."""
        is_large = sum(map(_most_tokens, texts)) > LARGE_TOKENS
        if is_large:
            return await self._large_slots.in_thread(self._large_thread, work)
        return await self._slots.in_thread(self._threads, work)

    async def check_length(self, text: str, max_tokens: int) -> None:
        """Raise TooManyTokens for a long text that is sure to have more than `max_tokens`, without tokenizing the
        rest of it."""
        if not _is_counted(text, max_tokens):
            return
        reached = await self._off_loop(lambda: self._reach(text, max_tokens, "right"), text)
        if reached is not None:
            raise TooManyTokens(reached.num_tokens)

    async def shortened(self, text: str, num_tokens: int, side: Literal["left", "right"] = "right") -> str:
        """Return the text, cut on one `side` if it is long, with more than `num_tokens` left."""
        if not _is_counted(text, num_tokens):
            return text
        return await self._off_loop(lambda: self._shortened(text, num_tokens, side), text)

    async def encode(
        self, text: str, *, add_special_tokens: bool, plain_ranges: Sequence[tuple[int, int]] = ()
    ) -> tuple[int, ...]:
        """Token ids of `text`, after the model's beginning-of-sequence token where it wants one and
        `add_special_tokens` allows it. Special tokens spelled out inside `plain_ranges` are taken for plain text.
        Long texts are encoded off the event loop."""
        begin = self.bos_ids if add_special_tokens else ()
        if self._goes_direct(len(text)):
            return self._encode(text, plain_ranges, begin)
        return await self._off_loop(lambda: self._encode(text, plain_ranges, begin), text)

    async def encode_marked(
        self, text: str, plain_ranges: Sequence[tuple[int, int]], positions: Sequence[int]
    ) -> tuple[tuple[int, ...], dict[int, int]]:
        """Return the tokens of `encode` without special tokens, and for each of `positions`, in characters, how
        many leading tokens end at or before it."""
        if self._goes_direct(len(text)):
            return self._encode_marked(text, plain_ranges, positions)
        return await self._off_loop(lambda: self._encode_marked(text, plain_ranges, positions), text)

    async def encode_with_template(
        self,
        text: str,
        second: str | None = None,
        *,
        max_tokens: int | None = None,
        max_second: int | None = None,
        side: Literal["left", "right"] = "right",
    ) -> tuple[tuple[int, ...], int]:
        """Token ids with every special token that the tokenizer itself puts around a text or a pair of texts, and the
        place at which the second text begins for the model; 0 if the model does not tell texts apart. More than
        `max_tokens` are cut away on one `side`, special tokens excepted, from the longer text of a pair first; of the
        second text at most `max_second` are kept."""

        def shortened(given: str) -> str:
            if max_tokens is None or not _is_counted(given, max_tokens):
                return given
            return self._shortened(given, max_tokens, side)

        def encode() -> tuple[tuple[int, ...], int]:
            first = _encoded(self._tokenizer, shortened(text))
            other = None if second is None else _encoded(self._tokenizer, shortened(second))
            if other is not None and max_second is not None:
                other.truncate(max_second, direction=side)
            if max_tokens is not None:
                extra = self._tokenizer.num_special_tokens_to_add(other is not None) + len(self._missing_bos)
                room = _shared_room(
                    max(0, max_tokens - extra), len(first), 0 if other is None else len(other)
                )
                first.truncate(room[0], direction=side)
                if other is not None:
                    other.truncate(room[1], direction=side)
            whole = self._tokenizer.post_process(first, other, add_special_tokens=True)
            ids, kinds = tuple(whole.ids), whole.type_ids
            second_at = kinds.index(1) + len(self._missing_bos) if other is not None and 1 in kinds else 0
            return (*self._missing_bos, *ids), second_at

        if self._goes_direct(len(text) + len(second or "")):
            return encode()
        return await self._off_loop(encode, text, second or "")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the whole text, special tokens included."""
        if len(token_ids) <= DIRECT_ENCODE_CHARS:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
        return str(text)

    async def decode_later(self, token_ids: Sequence[int]) -> str:
        """As `decode`; many token ids are decoded off the event loop."""
        if self._goes_direct(len(token_ids)):
            return self.decode(token_ids)
        return await self._slots.in_thread(self._threads, lambda: self.decode(token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token; not always whole characters."""
        return self._token_bytes[token_id]

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is spelled so, if there is one."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the special tokens among `texts`."""
        ids = {self._tokenizer.token_to_id(text) for text in texts}
        return self._special_ids & ids

    def detokenizer(
        self, prompt_token_ids: Sequence[int], shown_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """For the text that follows a prompt. Special tokens other than `shown_ids` are left out."""
        if not self._decoder.bytewise:
            return WindowDetokenizer(self._tokenizer, self._special_ids - shown_ids, prompt_token_ids)
        starts_text = self._decoder.strips_first_space and self._special_ids.issuperset(prompt_token_ids)
        return ByteDetokenizer(self._visible_bytes_with(shown_ids), strip_first_space=starts_text)

    def _visible_bytes_with(self, shown_ids: frozenset[int]) -> TokenBytes:
        table = self._visible_bytes.get(shown_ids)
        if table is None:
            table = TokenBytes(self._tokenizer, byte_level=self._decoder.byte_level)
            table.update(dict.fromkeys(self._special_ids - shown_ids, b""))
            self._visible_bytes[shown_ids] = table
        return table

    def _reach(self, text: str, num_tokens: int, side: Literal["left", "right"]) -> _Reached | None:
        """Count the tokens of a text slice by slice, until there are surely more than `num_tokens`; None if the text
        ends before. The slices come from the other side than `side`."""
        allowed = num_tokens
        counted = 0
        for num_slices in range(1, len(text) // SLICE_CHARS + 2):
            end = num_slices * SLICE_CHARS
            part = (
                text[end - SLICE_CHARS : end]
                if side == "right"
                else text[-end : len(text) - end + SLICE_CHARS]
            )
            (encoding,) = self._tokenizer.encode_batch_fast([part], add_special_tokens=False)
            counted += len(encoding)
            allowed += TOKENS_PER_CUT
            if counted > allowed:
                return _Reached(min(end, len(text)), counted)
        return None

    def _shortened(self, text: str, num_tokens: int, side: Literal["left", "right"]) -> str:
        reached = self._reach(text, num_tokens, side)
        if reached is None:
            return text
        kept = reached.num_characters
        return text[:kept] if side == "right" else text[-kept:]

    def _encode(
        self, text: str, plain_ranges: Sequence[tuple[int, int]], begin: Sequence[int] = ()
    ) -> tuple[int, ...]:
        ids = [*begin]
        for _, tokenizer, part in self._stretches(text, plain_ranges):
            ids += _encoded(tokenizer, part, has_offsets=False).ids
        return tuple(ids)

    def _encode_marked(
        self, text: str, plain_ranges: Sequence[tuple[int, int]], positions: Sequence[int]
    ) -> tuple[tuple[int, ...], dict[int, int]]:
        ids: list[int] = []
        found = dict.fromkeys(positions, 0)
        for start, tokenizer, part in self._stretches(text, plain_ranges):
            encoding = _encoded(tokenizer, part)
            for position in positions:
                if position > start:
                    found[position] = len(ids) + _num_tokens_before(encoding, position - start)
            ids += encoding.ids
        return tuple(ids), found

    def _stretches(
        self, text: str, plain_ranges: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, Tokenizer, str]]:
        """Yield the stretches of a text that are tokenized apart, each with where it begins and its tokenizer."""
        position = 0
        for start, end in plain_ranges:
            if start > position:
                yield position, self._tokenizer, text[position:start]
            yield start, self._plain_tokenizer, text[start:end]
            position = end
        if position < len(text):
            yield position, self._tokenizer, text[position:]

    @cached_property
    def _missing_bos(self) -> tuple[int, ...]:
        """Return the beginning-of-sequence token, if the tokenizer's own template does not write it."""
        return () if self._template_ids[:1] == self.bos_ids[:1] else self.bos_ids

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """Return the same tokenizer without special tokens. Few chats need it, and it takes a moment to build."""
        tokenizer = Tokenizer.from_buffer(self._card.tokenizer_json)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _shared_room(room: int, first: int, second: int) -> tuple[int, int]:
    """Share out `room` over two texts of these lengths: the longer text is cut first, down to the shorter one."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (shorter, longer) if first <= second else (longer, shorter)


class _Reached(NamedTuple):
    num_characters: int
    num_tokens: int


def _most_tokens(text: str) -> int:
    """Return the number of bytes that a text has at most: no tokenizer here makes more tokens."""
    return len(text) if text.isascii() else BYTES_PER_CHARACTER * len(text)


def _is_counted(text: str, max_tokens: int) -> bool:
    """Return whether a text is so long that its tokens are counted before it is tokenized as a whole."""
    return len(text) > SLICE_CHARS and _most_tokens(text) > min(SURE_FACTOR * max_tokens, SURE_TOKENS)


def _encoded(tokenizer: Tokenizer, text: str, *, has_offsets: bool = True) -> Encoding:
    """The batch calls of `tokenizers` let other threads run meanwhile; its calls for one text do not. An encoding
    without offsets has no texts of tokens either, which would take long to free, with the lock of the interpreter."""
    if len(text) <= DIRECT_ENCODE_CHARS:
        return tokenizer.encode(text, add_special_tokens=False)
    encode_batch = tokenizer.encode_batch if has_offsets else tokenizer.encode_batch_fast
    (encoding,) = encode_batch([text], add_special_tokens=False)
    return encoding


def _num_tokens_before(encoding: Encoding, position: int) -> int:
    """Leading tokens that end at or before a character. Fewer where tokenizing dropped characters around it."""
    num_tokens = len(encoding)
    last = encoding.token_to_chars(num_tokens - 1) if num_tokens else None
    if last is None or position >= last[1]:
        return num_tokens
    for character in range(position, -1, -1):
        token: int | None = encoding.char_to_token(character)
        if token is not None:
            return token
    return 0


class _TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer file that are read here."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None


_decode_file = msgspec.json.Decoder(_TokenizerFile).decode


def _shrink_factor(normalizer: dict[str, Any] | None) -> int:
    """Return how many characters of a text may become one before the text is tokenized."""
    if normalizer is None:
        return 1
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    factor = 1
    for step in steps:
        match step:
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) <= len(
                new
            ):
                pass
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
                factor = COMPOSING_FACTOR
            case _:
                return LOSSY_FACTOR
    return factor
