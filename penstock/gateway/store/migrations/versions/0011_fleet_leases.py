"""The leader of a shared fleet, and what it has decided."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011_fleet_leases"
down_revision = "0010_document_versions"


def upgrade() -> None:
    op.create_table(
        "fleet_leases",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("holder", sa.String(256), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_fleet_leases"),
    )
    op.create_table(
        "fleet_documents",
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_fleet_documents"),
    )


def downgrade() -> None:
    op.drop_table("fleet_documents")
    op.drop_table("fleet_leases")
