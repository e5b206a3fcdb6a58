"""Files, batches and the journal of their results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003_files_batches"
down_revision = "0002_usage"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("filename", sa.String(512), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_index("ix_files_workspace_id_created_at", "files", ["workspace_id", "created_at"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("principal", sa.JSON, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("times", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("num_lines", sa.Integer, nullable=False),
        sa.Column("num_succeeded", sa.Integer, nullable=False),
        sa.Column("num_errored", sa.Integer, nullable=False),
        sa.Column("num_canceled", sa.Integer, nullable=False),
        sa.Column("num_expired", sa.Integer, nullable=False),
        sa.Column("ending", sa.String(16)),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_status", "batches", ["status"])
    op.create_index("ix_batches_workspace_id_created_at", "batches", ["workspace_id", "created_at"])
    op.create_table(
        "batch_results",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("line_number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("custom_id", sa.String(512), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("status_code", sa.Integer, nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "line_number", name="pk_batch_results"),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batches.id"], name="fk_batch_results_batch_id", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )


def downgrade() -> None:
    op.drop_table("leases")
    op.drop_table("batch_results")
    op.drop_table("batches")
    op.drop_table("files")
