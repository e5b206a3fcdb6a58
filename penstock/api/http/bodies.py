"""Bounds the memory of bodies that have begun to arrive: of all requests of a process together, and of a workspace.

Without a bound, a few hundred connections that each send most of a large body, and then wait, would hold gigabytes.
"""

from __future__ import annotations

from collections import Counter

from penstock.core.errors import Overloaded, RateLimited

WORKSPACE_SHARE = 4  # a workspace may hold one part in so many
RETRY_AFTER_S = 5.0


class PendingBodies:
    """The bytes of bodies and messages that have not arrived in full. Any single body fits the bounds."""

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max(max_bytes, max_body_bytes)
        self._max_workspace_bytes = max(max_bytes // WORKSPACE_SHARE, max_body_bytes)
        self._by_workspace: Counter[str] = Counter()

    def add(self, workspace_id: str, num_bytes: int) -> None:
        """Count bytes that are about to be kept. Raises where that is too much; nothing is counted then."""
        if self._by_workspace[workspace_id] + num_bytes > self._max_workspace_bytes:
            raise RateLimited(
                f"Request bodies of this workspace that have not arrived in full hold {self._max_workspace_bytes} "
                "bytes, which is all that they may.",
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

    def remove(self, workspace_id: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._by_workspace[workspace_id] -= num_bytes
        if not self._by_workspace[workspace_id]:
            del self._by_workspace[workspace_id]
