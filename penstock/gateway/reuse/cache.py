"""Answers by fingerprint, in memory, bounded in time and bytes, and the settings of those bounds.

Both tables of the settings file can change while a server runs. Knows neither streams nor accounts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

_ENTRY_OVERHEAD_BYTES = 256  # keys and bookkeeping, roughly


@dataclass(frozen=True, slots=True)
class _Entry:
    answer: bytes
    stored_at: float
    expires_at: float


class AnswerCache:
    """Least recently used entries go first when bytes run out. Keys hold the workspace, so that no other workspace
    can find, or time, an answer."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[str, bytes], _Entry] = OrderedDict()

    def get(self, workspace_id: str, fingerprint: bytes, now: float, max_age_s: float) -> bytes | None:
        """The answer of this fingerprint, unless it is older than the writer or the reader allows."""
        key = workspace_id, fingerprint
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now >= entry.expires_at:
            self._remove(key)
            return None
        if now - entry.stored_at > max_age_s:
            return None
        self._entries.move_to_end(key)
        return entry.answer

    def put(self, workspace_id: str, fingerprint: bytes, answer: bytes, now: float, ttl_s: float) -> None:
        key = workspace_id, fingerprint
        if key in self._entries:
            self._remove(key)
        if len(answer) + _ENTRY_OVERHEAD_BYTES > self.max_bytes:
            return  # the entry alone is larger than the cache
        self._entries[key] = _Entry(answer, now, now + ttl_s)
        self.num_bytes += len(answer) + _ENTRY_OVERHEAD_BYTES
        self.shrink_to(self.max_bytes)

    def shrink_to(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        while self.num_bytes > max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: tuple[str, bytes]) -> None:
        self.num_bytes -= len(self._entries.pop(key).answer) + _ENTRY_OVERHEAD_BYTES


class ResponseCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[response_cache]`. Nothing is kept for a caller that did not opt in."""

    enabled: bool = True
    ttl_s: Annotated[float, Meta(gt=0)] = 300.0  # for keys that opted in, where no header says otherwise
    max_ttl_s: Annotated[float, Meta(gt=0)] = 86_400.0  # the longest that a header gets
    max_bytes: Annotated[int, Meta(ge=0)] = 64 << 20
    max_entry_bytes: Annotated[int, Meta(ge=0)] = 1 << 20


class IdempotencySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[idempotency]`."""

    enabled: bool = True
    ttl_s: Annotated[float, Meta(gt=0)] = 86_400.0
    abandoned_after_s: Annotated[float, Meta(ge=0)] = 60.0  # how long an answer runs on without any reader
    max_bytes: Annotated[int, Meta(ge=0)] = 64 << 20
    max_entry_bytes: Annotated[int, Meta(ge=0)] = 4 << 20
