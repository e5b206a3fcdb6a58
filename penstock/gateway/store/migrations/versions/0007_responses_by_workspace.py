"""An index by which the oldest responses of a workspace are found."""

from __future__ import annotations

from alembic import op

revision = "0007_responses_by_workspace"
down_revision = "0006_releases"


def upgrade() -> None:
    op.create_index("ix_responses_workspace_id_created_at", "responses", ["workspace_id", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_responses_workspace_id_created_at", "responses")
