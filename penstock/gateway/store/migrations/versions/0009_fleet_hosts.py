"""The hosts of a shared fleet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009_fleet_hosts"
down_revision = "0008_stored_objects"


def upgrade() -> None:
    op.create_table(
        "fleet_hosts",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_fleet_hosts"),
    )


def downgrade() -> None:
    op.drop_table("fleet_hosts")
