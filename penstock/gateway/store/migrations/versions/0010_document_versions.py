"""Settings and adapters in the database, with versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010_document_versions"
down_revision = "0009_fleet_hosts"


def upgrade() -> None:
    op.create_table(
        "document_versions",
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("version", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("actor", sa.String(256), nullable=False),
        sa.Column("note", sa.String(512), nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.PrimaryKeyConstraint("kind", "version", name="pk_document_versions"),
    )


def downgrade() -> None:
    op.drop_table("document_versions")
