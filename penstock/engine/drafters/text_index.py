"""Finds earlier occurrences of the latest tokens in a text, by hash chains as in LZ77. Knows no request. Imports no
torch.

A place is a position in the text, seen as what follows the tokens before it. Each run of `RUN` tokens has a slot
by its hash. The slot has the latest place behind such a run, and each place has the place before it with the same
slot. A token takes 4 bytes for itself, 4 for the chain and 4 to 16 for slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy.typing as npt

RUN = 3
NO_TOKEN = 2**31 - 1  # stands between two texts: in no vocabulary, so no match reaches across
_MIN_SLOTS = 1 << 8
_MAX_SLOTS = 1 << 16  # numpy sorts 16-bit numbers in linear time
_MAX_TRIES = 12  # places that a search compares
_FEW = 48  # tokens that are indexed one by one; more are indexed with numpy


class TextIndex:
    """Tokens, to which more are appended, and an index of them that only searches update."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.tokens = array("i", token_ids)
        self._num_slots = 0
        self._latest = array("i")  # by slot: the latest place, or -1
        self._earlier = array("i")  # by place: the place before it with the same slot, or -1

    def find(self, context: array[int], max_length: int) -> tuple[int, int, int]:
        """Return the place whose predecessors have the longest match with the last tokens of `context`, the length of
        the match, and how many of the other places of that length are followed by another token. Among equal lengths,
        the latest place wins. The length is 0 if no place has `RUN` tokens in common, and at most `max_length`."""
        self._update()
        tokens, end = self.tokens, len(context)
        if end < RUN or not self._num_slots:
            return 0, 0, 0
        place = self._latest[_slot(context[end - 3], context[end - 2], context[end - 1], self._num_slots)]
        found = best = others = 0
        for _ in range(_MAX_TRIES):
            if place < 0:
                break
            if not best or best > place or tokens[place - best] == context[end - best]:
                longest = min(max_length, place, end)
                length = 0
                while length < longest and tokens[place - 1 - length] == context[end - 1 - length]:
                    length += 1
                if length > best and length >= RUN:
                    found, best, others = place, length, 0
                elif length == best and best and tokens[place] != tokens[found]:
                    others += 1
                if best == max_length:
                    break
            place = self._earlier[place]
        return found, best, others

    def _update(self) -> None:
        """Index all places but the one after the last token, where nothing follows yet."""
        first, stop = len(self._earlier), len(self.tokens)
        if first >= stop:
            return
        if stop > self._num_slots < _MAX_SLOTS:
            self._num_slots = min(max(_MIN_SLOTS, 1 << (2 * stop - 1).bit_length()), _MAX_SLOTS)
            self._latest = array("i", [-1]) * self._num_slots
            self._earlier = array("i")
            first = 0
        if stop - first > _FEW:
            self._index_many(first, stop)
            return
        tokens, latest = self.tokens, self._latest
        for place in range(first, stop):
            if place < RUN:
                self._earlier.append(-1)
                continue
            slot = _slot(tokens[place - 3], tokens[place - 2], tokens[place - 1], self._num_slots)
            self._earlier.append(latest[slot])
            latest[slot] = place

    def _index_many(self, first: int, stop: int) -> None:
        import numpy as np  # a tenth of a second, which an echo engine need not take to start

        begin = max(first, RUN)
        self._earlier.extend([-1] * (begin - first))
        if begin >= stop:
            return
        tokens = np.frombuffer(self.tokens, dtype=np.intc)[begin - RUN : stop - 1].astype(np.uint64)
        slots = _slot(tokens[:-2], tokens[1:-1], tokens[2:], self._num_slots).astype(np.uint16)
        order = np.argsort(slots, kind="stable")
        slots, places = slots[order], (order + begin).astype(np.intc)
        latest = np.frombuffer(self._latest, dtype=np.intc)
        is_first = np.empty(len(slots), dtype=np.bool_)
        is_first[0] = True
        np.not_equal(slots[1:], slots[:-1], out=is_first[1:])
        before = np.empty_like(places)
        before[1:] = places[:-1]
        before[is_first] = latest[slots[is_first]]
        earlier = np.empty_like(places)
        earlier[order] = before
        self._earlier.frombytes(earlier.tobytes())
        is_last = np.append(is_first[1:], True)
        latest[slots[is_last]] = places[is_last]


_Tokens = TypeVar("_Tokens", int, "npt.NDArray[Any]")


def _slot(first: _Tokens, second: _Tokens, third: _Tokens, num_slots: int) -> _Tokens:
    """Return the slot of a run of tokens, or the slots of many runs."""
    mixed = (first * 0x9E3779B1 + second * 0x85EBCA6B + third * 0xC2B2AE35) & 0xFFFFFFFF
    slot: _Tokens = ((mixed * 0x2545F491) >> 16) & (num_slots - 1)
    return slot
