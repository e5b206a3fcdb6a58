"""Stream events of responses, conversations, stored chat completions and uploads in parts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008_stored_objects"
down_revision = "0007_responses_by_workspace"

_INDEX = "ix_stored_objects_workspace_id_kind_parent_id_id"


def upgrade() -> None:
    op.add_column("responses", sa.Column("num_event_bytes", sa.BigInteger))
    op.add_column("files", sa.Column("details", sa.JSON))
    op.create_table(
        "response_events",
        sa.Column("response_id", sa.String(64), nullable=False),
        sa.Column("first", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("events", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("response_id", "first", name="pk_response_events"),
        sa.ForeignKeyConstraint(
            ["response_id"], ["responses.id"], name="fk_response_events_response_id", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "stored_objects",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("parent_id", sa.String(64), nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("model", sa.String(256)),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("input", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("position", name="pk_stored_objects"),
    )
    op.create_index(_INDEX, "stored_objects", ["workspace_id", "kind", "parent_id", "id"], unique=True)
    op.create_index("ix_stored_objects_expires_at", "stored_objects", ["expires_at"])


def downgrade() -> None:
    op.drop_table("stored_objects")
    op.drop_table("response_events")
    op.drop_column("files", "details")
    op.drop_column("responses", "num_event_bytes")
