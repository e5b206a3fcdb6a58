"""Releases of new revisions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006_releases"
down_revision = "0005_response_holder"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "releases",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("stage", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_releases"),
    )
    op.create_index("ix_releases_created_at", "releases", ["created_at"])


def downgrade() -> None:
    op.drop_table("releases")
