"""Cache marks on a chat to token positions in its prompt. Knows a template only by its output for a chat.

A client marks pieces of content: a tool, a part of a turn, a turn. The prompt up to the end of such a piece is to be
kept. Only the model's template determines where that piece ends in the rendered text. So the chat is rendered a
second time with an invisible sign behind every text. If the result is the same text with the signs in it, they tell
the places, and whether the template kept the order of the pieces. Otherwise, and for pieces that cannot carry a sign,
the chat is rendered without what follows the mark, and the place is where the two texts part.

Such a place may lie before the true end of the piece, or be missing, when a template moves or trims content: then
less is kept than was asked for. It never depends on what follows the mark, as long as the template does not either,
so that the next request finds what this one kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Literal

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.figures import Count
from penstock.core.plan import CacheUse
from penstock.core.request import CacheBreakpoint
from penstock.gateway.prompts import CacheMark, ChatMessage, ChatPrompt, ImagePart, TextPart

MAX_MARKS = 4
MAX_PIECES_BACK = 20  # how far before a mark an entry may end that is reused for it
FIVE_MINUTES_S = 300.0

# Private-use characters of the last plane, one for each text: those that the chat itself does not hold.
_SIGNS = range(0x100000, 0x10FFFD)
_SIGN = re.compile("[\U00100000-\U0010fffc]")
_CHANGE = "\U0010fffd"
# If signs do not work, each place costs another rendering. The marks themselves come first.
MAX_RENDERINGS = 12

Render = Callable[[ChatPrompt], str]


class PromptCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[prompt_cache]` of the settings file, which may change while a server runs."""

    # Fewest tokens of a prefix to be kept; None for the setting of the engine.
    min_tokens: Count | None = None


class Piece(msgspec.Struct, frozen=True):
    """One piece of content, in the order tools, system, messages."""

    kind: Literal["tool", "text", "image", "call"]
    index: int  # of the tool, or of the message
    part: int = 0  # of the message: which text or which call
    mark: CacheMark | None = None


class KeptText(msgspec.Struct, frozen=True):
    """A prefix of the prompt's text to keep; positions are counted in characters."""

    end: int
    ttl_s: float
    earlier: tuple[int, ...]


def tools_salt(prompt: ChatPrompt) -> str:
    """Return a salt that keeps prefixes of chats with different tools apart. Changed tools invalidate everything:
    most templates write them first, but some behind the system prompt, which would then be found again."""
    if not prompt.tools:
        return ""
    # Without the marks, which may move from one request to the next.
    tools = [(tool.name, tool.description, tool.parameters, tool.strict) for tool in prompt.tools]
    return blake2b(msgspec.json.encode(tools), digest_size=16).hexdigest()


def marked_pieces(prompt: ChatPrompt) -> list[Piece]:
    """Return the pieces of a chat; empty when none of them carries a mark. Raises InvalidRequest for marks against
    the rules."""
    if not has_cache_marks(prompt):
        return []
    pieces = [Piece("tool", index, mark=tool.cache) for index, tool in enumerate(prompt.tools)]
    for index, message in enumerate(prompt.messages):
        pieces += _pieces_of(index, message)
    ttls_s = [piece.mark.ttl_s for piece in pieces if piece.mark is not None]
    if len(ttls_s) > MAX_MARKS:
        raise InvalidRequest(
            f"A request may have {MAX_MARKS} blocks with cache_control, and this one has {len(ttls_s)}.",
            param="cache_control",
        )
    if ttls_s != sorted(ttls_s, reverse=True):
        raise InvalidRequest(
            "A cache_control block with a longer ttl must not come after one with a shorter ttl.",
            param="cache_control",
            hint="Prompts are read in the order tools, system, messages.",
        )
    return pieces


def locate(prompt: ChatPrompt, pieces: Sequence[Piece], text: str, render: Render) -> list[KeptText]:
    """Return where the marked prefixes of a chat, rendered as `text`, end; in ascending order."""
    finder = _Finder(prompt, pieces, text, render)
    ends = {number: finder.end_of(number) for number, piece in enumerate(pieces) if piece.mark is not None}
    kept: dict[int, KeptText] = {}
    for number, end in ends.items():
        mark = pieces[number].mark
        if not end or mark is None:
            continue
        nearest_first = range(number - 1, max(0, number - MAX_PIECES_BACK) - 1, -1)
        earlier = {finder.end_of(each) for each in nearest_first if pieces[each].kind == "text"}
        positions = sorted(position for position in earlier if position is not None and 0 < position < end)
        ttl_s = max(mark.ttl_s, kept[end].ttl_s if end in kept else 0.0)
        kept[end] = KeptText(end, ttl_s, tuple(positions))
    return [kept[end] for end in sorted(kept)]


def breakpoints_at(
    kept: Sequence[KeptText], num_tokens_before: Mapping[int, int]
) -> tuple[CacheBreakpoint, ...]:
    """Return the same in tokens, given how many of them end at or before a character."""
    return tuple(
        CacheBreakpoint(
            num_tokens_before[prefix.end],
            prefix.ttl_s,
            tuple(num_tokens_before[end] for end in prefix.earlier),
        )
        for prefix in kept
    )


def written_by_ttl(breakpoints: Sequence[CacheBreakpoint], use: CacheUse) -> tuple[int, int]:
    """Tokens newly kept for five minutes, and for longer."""
    short = long = 0
    for breakpoint, num_tokens in zip(breakpoints, use.written_tokens, strict=True):
        if breakpoint.ttl_s <= FIVE_MINUTES_S:
            short += num_tokens
        else:
            long += num_tokens
    return short, long


def has_cache_marks(prompt: ChatPrompt) -> bool:
    for message in prompt.messages:
        if message.cache is not None:
            return True
        if message.tool_calls and any(call.cache is not None for call in message.tool_calls):
            return True
        if not isinstance(message.content, str) and any(part.cache is not None for part in message.content):
            return True
    return bool(prompt.tools) and any(tool.cache is not None for tool in prompt.tools)


def _pieces_of(index: int, message: ChatMessage) -> list[Piece]:
    """Return the pieces of a turn. A mark on the whole turn counts as a mark on its last piece."""
    pieces = [
        Piece("image" if isinstance(text, ImagePart) else "text", index, part, text.cache)
        for part, text in enumerate(message.parts)
    ]
    pieces += [Piece("call", index, part, call.cache) for part, call in enumerate(message.tool_calls)]
    if message.cache is not None and pieces and pieces[-1].mark is None:
        pieces[-1] = msgspec.structs.replace(pieces[-1], mark=message.cache)
    return pieces


class _Finder:
    """Finds where pieces end in the text of one chat. Everything it renders, it renders when first needed."""

    def __init__(self, prompt: ChatPrompt, pieces: Sequence[Piece], text: str, render: Render) -> None:
        self._prompt = prompt
        self._pieces = pieces
        self._text = text
        self._render = render
        self._num_renderings = 0
        self._signed = self._find_signs()
        self._cut: dict[int, int | None] = {}

    def end_of(self, number: int) -> int | None:
        piece = self._pieces[number]
        if piece.kind == "tool":
            return self._end_of_tool(piece.index)
        if piece.kind == "text" and self._signed is not None:
            return self._signed[number]
        if number not in self._cut:
            self._cut[number] = self._where_parted(_cut_after(self._prompt, piece))
        return self._cut[number]

    def _find_signs(self) -> dict[int, int | None] | None:
        """Return the end of every text, or None for one that the template leaves out, repeats, or puts after a later
        one. None for all when signs change the text or cannot be told from it."""
        texts = [number for number, piece in enumerate(self._pieces) if piece.kind == "text"]
        held = frozenset() if self._text.isascii() else frozenset(_SIGN.findall(self._text))
        signs = list(islice((sign for sign in map(chr, _SIGNS) if sign not in held), len(texts)))
        if not texts or len(signs) < len(texts):
            return None
        number_of = dict(zip(signs, texts, strict=True))
        signed = self._try(_with_signs(self._prompt, {self._pieces[number_of[sign]]: sign for sign in signs}))
        if signed is None:
            return None
        found = [each for each in _SIGN.finditer(signed) if each[0] in number_of]
        starts = [0, *(each.end() for each in found)]
        ends_of_stretches = [*(each.start() for each in found), len(signed)]
        stretches = (signed[start:end] for start, end in zip(starts, ends_of_stretches, strict=True))
        if "".join(stretches) != self._text:
            return None
        places: dict[int, list[int]] = {number: [] for number in texts}
        for num_signs_before, each in enumerate(found):
            places[number_of[each[0]]].append(each.start() - num_signs_before)
        ends: dict[int, int | None] = {}
        first_later = len(self._text) + 1
        for number in reversed(texts):
            at = places[number]
            ends[number] = at[0] if len(at) == 1 and at[0] < first_later else None
            first_later = min([first_later, *at])
        return ends

    def _end_of_tool(self, index: int) -> int | None:
        """Return the position where the text first depends on what comes after a tool. A template that writes the
        system prompt before the tools cannot keep them apart: then the place is after both."""
        begins = self._where_parted(_with_tools_changed(self._prompt, [index]))
        later = _with_tools_changed(self._prompt, range(index + 1, len(self._prompt.tools)))
        for roles_kept in ((), ("system", "developer")):
            end = self._where_parted(_with_turns_changed(later, roles_kept))
            if begins is not None and end is not None and begins < end:
                return end
        return None

    def _where_parted(self, variant: ChatPrompt) -> int | None:
        text = self._try(variant)
        return None if text is None else _common_length(self._text, text)

    def _try(self, prompt: ChatPrompt) -> str | None:
        if self._num_renderings >= MAX_RENDERINGS:
            return None
        self._num_renderings += 1
        try:
            return self._render(prompt)
        except InvalidRequest:  # the template wants turns that the variant lacks
            return None


def _with_texts(prompt: ChatPrompt, change: Callable[[int, int, str], str]) -> ChatPrompt:
    """Return every text of every turn as `change(message, part, text)` has it."""
    messages = []
    for index, message in enumerate(prompt.messages):
        if isinstance(message.content, str):
            content: str | tuple[TextPart, ...] = change(index, 0, message.content) if message.content else ""
        else:
            content = tuple(
                msgspec.structs.replace(text, text=change(index, part, text.text))
                for part, text in enumerate(message.content)
            )
        messages.append(msgspec.structs.replace(message, content=content))
    return msgspec.structs.replace(prompt, messages=tuple(messages))


def _with_signs(prompt: ChatPrompt, signs: Mapping[Piece, str]) -> ChatPrompt:
    """A sign stands before white space at the end of a text, which templates like to trim; a blank text, which they
    like to skip, has none."""
    by_place = {(piece.index, piece.part): sign for piece, sign in signs.items()}

    def sign(index: int, part: int, text: str) -> str:
        body = text.rstrip()
        return body + by_place[index, part] + text[len(body) :] if body else text

    return _with_texts(prompt, sign)


def _with_turns_changed(prompt: ChatPrompt, roles_kept: Sequence[str]) -> ChatPrompt:
    def change(index: int, part: int, text: str) -> str:
        return text if prompt.messages[index].role in roles_kept else _CHANGE + text

    return _with_texts(prompt, change)


def _with_tools_changed(prompt: ChatPrompt, indices: Sequence[int]) -> ChatPrompt:
    tools = list(prompt.tools)
    for index in indices:
        tools[index] = msgspec.structs.replace(tools[index], name=_CHANGE + tools[index].name)
    return msgspec.structs.replace(prompt, tools=tuple(tools))


def _cut_after(prompt: ChatPrompt, piece: Piece) -> ChatPrompt:
    """Return the chat up to and including a piece of one of its turns."""
    message = prompt.messages[piece.index]
    if piece.kind != "call":
        content = message.content if isinstance(message.content, str) else message.content[: piece.part + 1]
        message = msgspec.structs.replace(message, content=content, tool_calls=())
    else:
        message = msgspec.structs.replace(message, tool_calls=message.tool_calls[: piece.part + 1])
    return msgspec.structs.replace(
        prompt,
        messages=(*prompt.messages[: piece.index], message),
        add_generation_prompt=False,
        continues_last=False,
    )


def _common_length(first: str, second: str) -> int:
    """Return the length of the common prefix, by bisection: slices compare at C speed."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
