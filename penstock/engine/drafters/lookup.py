"""Drafts by lookup: copies what followed the latest tokens earlier, in the request's own text, in the answer that the
client predicts, or in recent answers of the same tenant. Needs no model. Imports no torch.

There are two methods. A *search* finds the longest earlier match of the latest tokens. An *alignment* follows a
text that the answer copies, token by token, without searching. Where the answer departs from that text for a few
tokens, the alignment finds the point at which both agree again, learns the replacement, and expects the same
replacement further on. A file that is returned with one name changed is therefore drafted almost without a gap.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.core.plan import PREDICTION, Draft
from penstock.core.request import Request
from penstock.engine.drafters.text_index import NO_TOKEN, TextIndex

NAME = "lookup"

# Grades of drafts. Grades from SHORT to COPIED go by the number of tokens in a row that have agreed.
DISPUTED, SHORT, MEDIUM, LONG, COPIED, REJOINING, FROM_ANSWER, FROM_ANSWER_LONG = range(8)
_MEDIUM, _LONG, _COPIED = 5, 9, 17  # the fewest tokens of these grades
_MOST_DRAFTED = {
    DISPUTED: 2,
    SHORT: 4,
    MEDIUM: 8,
    FROM_ANSWER: 4,
}  # tokens; as many as wanted in other grades
_MAX_MATCH = 32  # tokens that a search compares
_ANSWER_MATCH = 6  # the shortest match in another answer

_MIN_COPIED = 12  # an alignment of fewer tokens ends where the answer departs from the text
_WINDOW = 24  # the most tokens of a departure
_REJOINED = 2  # this many tokens must agree for a departure to end
_MAX_EDITS = 16  # replacements of a request that are remembered

PROMPT_TAIL = 32  # tokens of the prompt that are remembered before an answer
MIN_ANSWER = 8  # shorter answers are not remembered
TENANT_TOKENS = 1 << 15  # of answers of one tenant, 0.5 MiB
ALL_TOKENS = 1 << 20  # of answers of all tenants, 16 MiB

_Owner: TypeAlias = tuple[str, str, str]


@dataclass(slots=True)
class _Edit:
    """A replacement that the answer has made in the text that it copies."""

    old: array[int]
    new: tuple[int, ...]
    num_seen: int = 1
    num_refuted: int = 0


class _Alignment:
    """A place in a text that the answer copies: the answer's next token is expected to be the token there. `length`
    says how many tokens in a row have agreed; a departure from a long copy costs half of them."""

    def __init__(
        self,
        text: TextIndex,
        place: int,
        length: int,
        edits: dict[int, _Edit],
        *,
        is_own: bool,
        is_disputed: bool = False,
        drafter: str = NAME,
    ) -> None:
        """`edits` has replacements by the first replaced token. `is_own`: the text is the answer's own beginning.
        `is_disputed`: other places in the text match as well, and something else follows there."""
        self._drafter = drafter
        self.length = length
        self._text = text
        self._place = place
        self._edits = edits
        self._is_own = is_own
        self._is_disputed = is_disputed
        self._replacing: tuple[int, ...] = ()  # the rest of a replacement that the answer has begun
        self._num_away = 0  # tokens of the answer since its departure from the text; 0 while both agree
        self._left_at = 0  # the place of the departure
        self._length_before = 0

    @property
    def is_away(self) -> bool:
        return self._num_away > 0

    def advance(self, answer: array[int]) -> bool:
        """Compare the answer's last token, which is new. Returns False if the answer no longer copies the text."""
        if self._num_away:
            return self._rejoin(answer)
        token_id = answer[-1]
        if self._replacing:
            if token_id == self._replacing[0]:
                self._replacing = self._replacing[1:]
                self.length += 1
                return True
            self._replacing = ()
        elif (
            self._place < len(self._text.tokens) - self._is_own
        ):  # the new token itself is no place to copy from
            edit = self._edit_at(self._place)
            if edit is not None and token_id == edit.new[0]:
                edit.num_seen += 1
                self._replacing = edit.new[1:]
                self._place += len(edit.old)
                self.length += 1
                return True
            if token_id == self._text.tokens[self._place]:
                if edit is not None:
                    edit.num_refuted += 1
                self._place += 1
                self.length += 1
                return True
        self._num_away, self._left_at = 1, self._place
        self._length_before, self.length = self.length, 0
        return self._length_before >= _MIN_COPIED

    def draft(self, max_tokens: int) -> Draft | None:
        if self._num_away and not self.length:
            return None
        grade = self._grade()
        max_tokens = min(max_tokens, _MOST_DRAFTED.get(grade, max_tokens))
        tokens, place = self._text.tokens, self._place
        size = len(tokens)
        draft = list(self._replacing)
        while len(draft) < max_tokens:
            if place < size:
                edit = self._edit_at(place)
                if edit is not None:
                    draft += edit.new
                    place += len(edit.old)
                    continue
                token_id = tokens[place]
            elif self._is_own and place - size < len(draft):  # the text repeats itself
                token_id = draft[place - size]
            else:
                break
            if token_id == NO_TOKEN:
                break
            draft.append(token_id)
            place += 1
        return Draft(tuple(draft[:max_tokens]), self._drafter, grade) if draft else None

    def _grade(self) -> int:
        if not self._is_own and self._drafter == NAME:
            return FROM_ANSWER_LONG if self.length >= _COPIED else FROM_ANSWER
        if self._num_away:
            return REJOINING
        if self._is_disputed and self.length < _LONG:
            return DISPUTED
        return SHORT + (self.length >= _MEDIUM) + (self.length >= _LONG) + (self.length >= _COPIED)

    def _edit_at(self, place: int) -> _Edit | None:
        edit = self._edits.get(self._text.tokens[place])
        if edit is None or edit.num_refuted > edit.num_seen:
            return None
        return edit if self._text.tokens[place : place + len(edit.old)] == edit.old else None

    def _rejoin(self, answer: array[int]) -> bool:
        """Look for the place after the departure where the text agrees with the answer's last tokens again."""
        self._num_away += 1
        if self._num_away > _WINDOW:
            return False
        tokens, left_at, end = self._text.tokens, self._left_at, len(answer)
        stop = min(left_at + _WINDOW, len(tokens) - (self._num_away if self._is_own else 0))
        place, agreed = left_at, 0
        while True:
            try:
                place = tokens.index(answer[-1], place, stop) + 1
            except ValueError:
                break
            longest = min(self._num_away, place - left_at)
            length = 1
            while length < longest and tokens[place - 1 - length] == answer[end - 1 - length]:
                length += 1
            if length > agreed:
                agreed, self._place = length, place
        self.length = agreed + self._length_before // 2 if agreed else 0
        if agreed >= _REJOINED:
            old = tokens[left_at : self._place - agreed]
            new = tuple(answer[end - self._num_away : end - agreed])
            if old and new:
                if len(self._edits) == _MAX_EDITS:
                    self._edits.pop(next(iter(self._edits)))
                self._edits[old[0]] = _Edit(old, new)
            self._num_away = 0
        return True


class _RecentAnswers:
    """The latest answers of one tenant, in two texts: a full one takes the place of the older one."""

    def __init__(self) -> None:
        self.texts = (TextIndex(), TextIndex())

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)

    def remember(self, answer: array[int]) -> None:
        most = TENANT_TOKENS // 2 - 1
        if len(self.texts[0].tokens) + len(answer) > most:
            self.texts = (TextIndex(), self.texts[0])
        self.texts[0].tokens.extend(answer[-most:])
        self.texts[0].tokens.append(NO_TOKEN)


class _Follower:
    """The tokens of one request, and what its answer seems to copy."""

    def __init__(self, request: Request) -> None:
        self.owner = _owner(request)
        self.num_answered = len(request.output_token_ids)
        self._request = request
        self._unread: list[int] = []  # tokens that came before the first draft was wanted
        self._text: TextIndex | None = None  # prompt and answer
        self._copied: _Alignment | None = None
        self._edits: dict[int, _Edit] = {}
        self._prediction: TextIndex | None = None
        if request.prediction:  # the answer is expected to begin like it
            self._prediction = TextIndex(request.prediction)
            self._copied = self._aligned_with_prediction(self._prediction, 0, _MIN_COPIED)

    def append(self, token_ids: tuple[int, ...]) -> None:
        self.num_answered += len(token_ids)
        if self._text is None:
            self._unread += token_ids
        else:
            self._take(self._text.tokens, token_ids)

    def _take(self, tokens: array[int], token_ids: Sequence[int]) -> None:
        for place, token_id in enumerate(token_ids):
            if self._copied is None:
                tokens.extend(token_ids[place:])
                return
            tokens.append(token_id)
            if not self._copied.advance(tokens):
                self._copied = None

    def propose(self, max_tokens: int, recent: _RecentAnswers | None) -> Draft | None:
        text, copied = self._read(), self._copied
        if copied is None or copied.length < _COPIED:
            found = self._search(text, recent)
            if found is not None and (copied is None or found.length > copied.length):
                # A short match does not end the wait for a departure's end.
                if copied is None or not copied.is_away or found.length >= _MIN_COPIED:
                    self._copied = found
                return found.draft(max_tokens)
        return copied.draft(max_tokens) if copied is not None else None

    def answer(self) -> array[int]:
        """Return the answer after the prompt's last tokens."""
        num_tokens = self.num_answered + min(PROMPT_TAIL, len(self._request.prompt_token_ids))
        if self._text is not None:
            return self._text.tokens[-num_tokens:]
        tail = self._request.prompt_token_ids[-PROMPT_TAIL:]
        return array("i", [*tail, *self._request.output_token_ids, *self._unread])

    def _read(self) -> TextIndex:
        if self._text is None:
            self._text = TextIndex(self._request.prompt_token_ids)
            self._take(self._text.tokens, (*self._request.output_token_ids, *self._unread))
            self._unread = []
        return self._text

    def _search(self, text: TextIndex, recent: _RecentAnswers | None) -> _Alignment | None:
        place, length, others = text.find(text.tokens, _MAX_MATCH)
        found = None
        if length:
            found = _Alignment(text, place, length, self._edits, is_own=True, is_disputed=others > 0)
        if self._prediction is not None:
            place, longer, _ = self._prediction.find(text.tokens, _MAX_MATCH)
            if longer and longer >= length:
                length = longer
                found = self._aligned_with_prediction(self._prediction, place, length)
        for answers in recent.texts if recent is not None else ():
            place, longer, _ = answers.find(text.tokens, _MAX_MATCH)
            if longer > length and longer >= _ANSWER_MATCH:
                length = longer
                found = _Alignment(answers, place, length, {}, is_own=False)
        return found

    def _aligned_with_prediction(self, prediction: TextIndex, place: int, length: int) -> _Alignment:
        return _Alignment(prediction, place, length, {}, is_own=False, drafter=PREDICTION)


class LookupDrafter:
    """Drafts from the texts of running requests, and from the latest answers of each tenant.

    An answer is remembered for requests with the same tenant, cache salt and adapter only, and only in memory: the
    latest `TENANT_TOKENS` of such requests, and at most `ALL_TOKENS` in all. The least recently used answers are
    forgotten first.
    """

    def __init__(self) -> None:
        self._followers: dict[str, _Follower] = {}
        self._recent: OrderedDict[_Owner, _RecentAnswers] = OrderedDict()  # the last one was used last
        self._num_remembered = 0  # tokens

    def add(self, request: Request) -> None:
        if request.pooling is None and request.sampling.max_tokens > 1:
            self._followers[request.id] = _Follower(request)

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None:
        follower = self._followers.get(request_id)
        if follower is not None:
            follower.append(token_ids)

    def remove(self, request_id: str) -> None:
        follower = self._followers.pop(request_id, None)
        if follower is None or follower.num_answered < MIN_ANSWER:
            return
        recent = self._recent.setdefault(follower.owner, _RecentAnswers())
        self._recent.move_to_end(follower.owner)
        self._num_remembered -= recent.num_tokens
        recent.remember(follower.answer())
        self._num_remembered += recent.num_tokens
        while self._num_remembered > ALL_TOKENS:
            _, forgotten = self._recent.popitem(last=False)
            self._num_remembered -= forgotten.num_tokens

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for request_id, max_tokens in wanted.items():
            follower = self._followers.get(request_id)
            if follower is None or max_tokens < 1:
                continue
            recent = self._recent.get(follower.owner)
            if recent is not None:
                self._recent.move_to_end(follower.owner)
            draft = follower.propose(max_tokens, recent)
            if draft is not None:
                drafts[request_id] = draft
        return drafts


def _owner(request: Request) -> _Owner:
    """Return the parts of `Request.prefix_salt`, which requests must have in common to see each other's answers."""
    return request.tenant, request.cache_salt, request.adapter.digest if request.adapter is not None else ""
