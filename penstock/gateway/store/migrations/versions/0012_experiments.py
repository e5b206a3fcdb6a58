"""Experiments with policy sets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012_experiments"
down_revision = "0011_fleet_leases"


def upgrade() -> None:
    op.create_table(
        "experiments",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("stage", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_experiments"),
    )
    op.create_index("ix_experiments_created_at", "experiments", ["created_at"])


def downgrade() -> None:
    op.drop_table("experiments")
