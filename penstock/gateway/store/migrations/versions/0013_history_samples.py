"""Samples of the console's history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013_history_samples"
down_revision = "0012_experiments"


def upgrade() -> None:
    op.create_table(
        "history_samples",
        sa.Column("process", sa.String(64), nullable=False),
        sa.Column("span", sa.String(16), nullable=False),
        sa.Column("at", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("server", sa.String(64), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("process", "span", "at", name="pk_history_samples"),
    )
    op.create_index("ix_history_samples_span_at", "history_samples", ["span", "at"])


def downgrade() -> None:
    op.drop_table("history_samples")
