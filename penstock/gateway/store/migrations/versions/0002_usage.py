"""The usage ledger, and answers kept for idempotency keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002_usage"
down_revision = "0001_tenants"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("organization_id", sa.String(64), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(256), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False),
        sa.Column("user", sa.String(256)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("error_code", sa.String(64)),
        sa.Column("is_cached", sa.Boolean, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger, nullable=False),
        sa.Column("cache_write_5m_tokens", sa.BigInteger, nullable=False),
        sa.Column("cache_write_1h_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_picodollars", sa.BigInteger, nullable=False),
        sa.Column("duration_s", sa.Double, nullable=False),
        sa.Column("first_token_s", sa.Double),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage"),
    )
    op.create_index("ix_usage_workspace_id_day", "usage", ["workspace_id", "day"])
    op.create_index("ix_usage_day", "usage", ["day"])
    op.create_table(
        "usage_spend",
        sa.Column("day", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(256), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("cost_picodollars", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("day", "workspace_id", "key_id", "model", name="pk_usage_spend"),
    )
    op.create_table(
        "idempotent_answers",
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.String(256), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(32), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("answer", sa.LargeBinary),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("workspace_id", "idempotency_key", name="pk_idempotent_answers"),
    )
    op.create_index("ix_idempotent_answers_expires_at", "idempotent_answers", ["expires_at"])


def downgrade() -> None:
    op.drop_table("idempotent_answers")
    op.drop_table("usage_spend")
    op.drop_table("usage")
