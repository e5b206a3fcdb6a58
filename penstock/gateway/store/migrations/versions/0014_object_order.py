"""Lists of stored objects in their order, without sorting all that a workspace keeps."""

from __future__ import annotations

from alembic import op

revision = "0014_object_order"
down_revision = "0013_history_samples"
_INDEX = "ix_stored_objects_workspace_id_kind_parent_id_position"


def upgrade() -> None:
    op.create_index(_INDEX, "stored_objects", ["workspace_id", "kind", "parent_id", "position"])


def downgrade() -> None:
    op.drop_index(_INDEX, "stored_objects")
