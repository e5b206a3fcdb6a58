"""Bounds on bodies that are arriving: on the memory of all bodies of a process and of a workspace, and on the framing
and the speed of each body.

Without a bound on memory, a few hundred connections that each send most of a large body, and then wait, would hold
gigabytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.core.errors import Overloaded, RateLimited
from penstock.core.shares import Shares

WORKSPACE_SHARE = 4  # a workspace may hold one part in this many
KEPT_FACTOR = 4  # times the bytes of bodies that arrive, for those of requests that are answered
RETRY_AFTER_S = 5.0
MIN_BODY_BYTES = 16 << 10  # that must arrive in each `body_timeout_s`
MAX_DISCARDED_BYTES = 64 << 20
MAX_FRAMING_BYTES = 1 << 20  # of chunks and trailers; small chunks may have more, in proportion to the body
MAX_FRAMING_FACTOR = 16


@dataclass(slots=True)
class ArrivingBody:
    """Counts of the bytes of one request's body."""

    num_content_bytes: int = 0
    num_framed_bytes: int = 0  # the content with its framing
    num_discarded_bytes: int = 0  # of a body that was refused
    _num_seen_bytes: int = 0  # of the content, at the last call of `has_grown`

    def has_grown(self) -> bool:
        """Return whether enough content has arrived since the last call."""
        num_new_bytes = self.num_content_bytes - self._num_seen_bytes
        self._num_seen_bytes = self.num_content_bytes
        return num_new_bytes >= MIN_BODY_BYTES

    @property
    def is_mostly_framing(self) -> bool:
        most = MAX_FRAMING_BYTES + MAX_FRAMING_FACTOR * self.num_content_bytes
        return self.num_framed_bytes - self.num_content_bytes > most


class PendingBodies:
    """The bytes of bodies and messages that have not arrived in full, and of bodies that wait to be decoded. Any
    single body fits the bounds.

    `kept` are those of large bodies until their requests end, and of what WebSockets keep: what a request says is in
    memory for as long as its answer waits or is written."""

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max(max_bytes, max_body_bytes)
        self.kept = Shares(KEPT_FACTOR * self._max_bytes)
        self._max_workspace_bytes = max(max_bytes // WORKSPACE_SHARE, max_body_bytes)
        self._by_workspace: Counter[str] = Counter()

    def add(self, workspace_id: str, num_bytes: int) -> None:
        """Count bytes that are about to be kept. Raises if they are too many; nothing is counted then."""
        if self._by_workspace[workspace_id] + num_bytes > self._max_workspace_bytes:
            raise RateLimited(
                f"Request bodies of this workspace that arrive or wait to be read hold {self._max_workspace_bytes} "
                "bytes, which is the limit.",
                hint="Send fewer large bodies at a time.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                "This server is receiving as many large request bodies as it can hold.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._by_workspace[workspace_id] += num_bytes
        self.num_bytes += num_bytes

    def keep(self, workspace_id: str, num_bytes: int) -> None:
        """Count bytes that are kept; take them from `kept` later. Raises RateLimited."""
        if not self.kept.take(workspace_id, num_bytes):
            raise RateLimited(
                f"The requests of this workspace that run or wait hold {self.kept.of(workspace_id)} bytes, which is "
                "its share.",
                hint="Send fewer large requests at a time.",
                retry_after_s=RETRY_AFTER_S,
            )

    def remove(self, workspace_id: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._by_workspace[workspace_id] -= num_bytes
        if not self._by_workspace[workspace_id]:
            del self._by_workspace[workspace_id]
