"""When to measure what a workspace stores, so that the oldest of it can be deleted."""

from __future__ import annotations

_CHECKED_SHARE = 1 / 64  # a workspace is measured again after it has added so much of what it may keep


class GrowthCheck:
    """Says when a workspace has grown so much that it should be measured, which reads all its rows."""

    def __init__(self, max_workspace_bytes: int) -> None:
        self._max_workspace_bytes = max_workspace_bytes
        self._num_added: dict[str, int] = {}  # bytes per workspace since it was last measured

    def is_due(self, workspace_id: str, num_bytes: int) -> bool:
        is_known = workspace_id in self._num_added
        num_added = self._num_added.get(workspace_id, 0) + num_bytes
        is_due = not is_known or num_added >= self._max_workspace_bytes * _CHECKED_SHARE
        self._num_added[workspace_id] = 0 if is_due else num_added
        return is_due
