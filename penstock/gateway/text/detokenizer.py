"""Token ids to text, for a stream of tokens. Knows nothing of requests.

The joined pieces of a detokenizer are the text that decoding all tokens at once gives, and no piece ends inside a
character.

`StopMatcher` finds the first stop string in a text that arrives in pieces, and holds back only text that may still
become the beginning of a stop string. The outcome does not depend on how the text was cut: the stop string that is
complete first wins, and of two that end together the longer one.
"""

from __future__ import annotations

import copy
import re
from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Return the rest of an incomplete character, as replacement characters."""
        ...

    def fork(self) -> Detokenizer:
        """Return a detokenizer that continues from here by itself."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings: one table look-up and one UTF-8 decode per push."""

    __slots__ = ("_bytes_of", "_strip_first_space", "_tail")

    def __init__(self, bytes_of: Mapping[int, bytes], *, strip_first_space: bool) -> None:
        self._bytes_of = bytes_of
        self._strip_first_space = strip_first_space
        self._tail = b""  # the first bytes of an unfinished character: at most three

    def push(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        if len(token_ids) == 1:
            data = bytes_of[token_ids[0]]
        else:
            data = b"".join([bytes_of[token_id] for token_id in token_ids])
        if self._strip_first_space and data:
            data = data.removeprefix(b" ")
            self._strip_first_space = False
        if self._tail:
            data = self._tail + data
        text, num_decoded = utf_8_decode(data, "replace", False)
        self._tail = data[num_decoded:]
        return text

    def finish(self) -> str:
        text, _ = utf_8_decode(self._tail, "replace", True)
        self._tail = b""
        return text

    def fork(self) -> ByteDetokenizer:
        return copy.copy(self)


class WindowDetokenizer:
    """For any other decoder: decode a short window of tokens twice, and emit what the newest ones added.

    The window begins with the tokens emitted last, so that rules about spaces see what stands before. New tokens
    stay in it while the text ends in a replacement character, which may be the beginning of a character; after
    `MAX_HELD_TOKENS` it cannot be any more. The work per token is therefore bounded.
    """

    __slots__ = ("_num_context", "_special_ids", "_tokenizer", "_window")

    MAX_PROMPT_CONTEXT = 8
    MAX_HELD_TOKENS = 8  # the broken rest of a character, three bytes at most, and a whole one of four

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._window = [
            token_id
            for token_id in prompt_token_ids[-self.MAX_PROMPT_CONTEXT :]
            if token_id not in special_ids
        ]
        while self._window and tokenizer.decode(self._window).startswith(REPLACEMENT_CHARACTER):
            del self._window[0]  # the context must not begin inside a character
        self._num_context = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = [self._push_one(token_id) for token_id in token_ids if token_id not in self._special_ids]
        return "".join(pieces)

    def finish(self) -> str:
        return self._emit(self._new_text())

    def fork(self) -> WindowDetokenizer:
        forked = copy.copy(self)
        forked._window = list(self._window)
        return forked

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        num_held = len(self._window) - self._num_context
        if text.endswith(REPLACEMENT_CHARACTER) and num_held < self.MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def _new_text(self) -> str:
        # Those in the window are to be shown, special or not.
        context: str = self._tokenizer.decode(self._window[: self._num_context], skip_special_tokens=False)
        whole: str = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return whole[len(context) :]

    def _emit(self, text: str) -> str:
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        return text


def _bytes_of_byte_level_characters() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself where Latin-1 has a visible one,
    else the next free code point from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}


_BYTE_LEVEL = _bytes_of_byte_level_characters()


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, computed at the first use."""

    def __init__(self, tokenizer: Tokenizer, *, byte_level: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._byte_level = byte_level

    def __missing__(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token_id)
        data = b"" if piece is None else self._bytes_of(piece)
        self[token_id] = data
        return data

    def _bytes_of(self, piece: str) -> bytes:
        if self._byte_level:
            try:
                return bytes([_BYTE_LEVEL[character] for character in piece])
            except KeyError:  # an added token, written as plain text
                return piece.encode()
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_WORD_START, " ").encode()


class DecoderKind:
    """The way in which the decoder of a tokenizer file turns tokens into text.

    Almost every language model's decoder maps each token to bytes, whatever stands around it: byte-level
    vocabularies, and SentencePiece ones with byte fallback. Those are `bytewise`; the rest needs context.
    """

    def __init__(self, *, byte_level: bool, bytewise: bool, strips_first_space: bool) -> None:
        self.byte_level = byte_level
        self.bytewise = bytewise
        self.strips_first_space = strips_first_space

    @classmethod
    def of(cls, decoder: dict[str, Any] | None) -> DecoderKind:
        steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        byte_level = kinds == ["ByteLevel"]
        sentencepiece = (
            kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
            and steps[0]["pattern"] == {"String": _WORD_START}
            and steps[0]["content"] == " "
            and (len(steps) == 3 or steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}])
        )
        return cls(
            byte_level=byte_level,
            bytewise=byte_level or sentencepiece,
            strips_first_space=sentencepiece and len(steps) == 4,
        )


@lru_cache(maxsize=256)
def _border_lengths(pattern: str) -> Sequence[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix. All answers to a
    request share it."""
    borders = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = borders[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        borders[position] = length
    return borders


class StopMatcher:
    """Follows every stop string at once (Knuth-Morris-Pratt), in time linear in the text."""

    def __init__(self, stop_strings: Sequence[str], *, keeps_match: bool = False) -> None:
        self._keeps_match = keeps_match  # the stop string is a part of the text
        self._patterns = [(pattern, _border_lengths(pattern)) for pattern in stop_strings]
        self._first_characters = frozenset(pattern[0] for pattern in stop_strings)
        self._matched_lengths = [0] * len(stop_strings)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is now known to come before any stop string. After a match nothing more comes out."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            longest = self._step(character)
            if longest:
                self.matched = longest
                self._held = ""
                return buffer[: position if self._keeps_match else position - len(longest)]
        num_held = max(self._matched_lengths)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> StopMatcher:
        """Return a matcher that continues from here by itself."""
        forked = copy.copy(self)
        forked._matched_lengths = list(self._matched_lengths)
        return forked

    def _step(self, character: str) -> str | None:
        """Advance every pattern by one character; the longest that this completes, if any."""
        complete: str | None = None
        for index, (pattern, borders) in enumerate(self._patterns):
            length = self._matched_lengths[index]
            while length and pattern[length] != character:
                length = borders[length - 1]
            if pattern[length] == character:
                length += 1
            self._matched_lengths[index] = length
            if length == len(pattern) and (complete is None or length > len(complete)):
                complete = pattern
        return complete


class StopWatch:
    """Tells whether a sequence of tokens has come to a stop string. A watch never changes, so sequences with the same
    beginning share its watch. The first `min_tokens` tokens are no part of a stop string."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens

    @property
    def is_stopped(self) -> bool:
        return self._matcher.matched is not None

    def after(self, token_id: int) -> StopWatch:
        """Return the watch of the sequence with one token more."""
        detokenizer, matcher = self._detokenizer.fork(), self._matcher
        text = detokenizer.push((token_id,))
        if text and not self._min_tokens:
            matcher = matcher.fork()
            matcher.push(text)
        return StopWatch(detokenizer, matcher, max(0, self._min_tokens - 1))
