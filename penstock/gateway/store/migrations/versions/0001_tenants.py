"""Organisations, workspaces, keys and the audit log.

A default organisation with a default workspace is there from the start, so that the first key needs no ceremony.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0001_tenants"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    organizations = op.create_table(
        "organizations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("archived_at", sa.Double),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_organizations"),
    )
    workspaces = op.create_table(
        "workspaces",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("organization_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("archived_at", sa.Double),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workspaces"),
        sa.ForeignKeyConstraint(
            ["organization_id"], ["organizations.id"], name="fk_workspaces_organization_id"
        ),
    )
    _create_keys()
    tenant_revision = op.create_table(
        "tenant_revision",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenant_revision"),
    )
    _create_audit_log()
    for table, column in (
        ("organizations", "revision"),
        ("workspaces", "organization_id"),
        ("workspaces", "revision"),
        ("keys", "workspace_id"),
        ("keys", "revision"),
        ("audit_log", "at"),
    ):
        op.create_index(f"ix_{table}_{column}", table, [column])
    op.create_index("ix_audit_log_target_id", "audit_log", ["target", "id"])

    default = {"id": "default", "name": "Default", "created_at": time.time(), "revision": 1}
    op.bulk_insert(organizations, [default])
    op.bulk_insert(workspaces, [{**default, "organization_id": "default"}])
    op.bulk_insert(tenant_revision, [{"id": 1, "revision": 1}])


def _create_keys() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("prefix", sa.String(32), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("allowed_models", sa.JSON(none_as_null=True)),
        sa.Column("best_tier", sa.String(16), nullable=False),
        sa.Column("caches_responses", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.String(256), nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.Column("last_used_at", sa.Double),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name="fk_keys_workspace_id"),
        sa.UniqueConstraint("prefix", name="uq_keys_prefix"),
    )


def _create_audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("actor", sa.String(256), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(64)),
        sa.Column("before", sa.JSON(none_as_null=True)),
        sa.Column("after", sa.JSON(none_as_null=True)),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )


def downgrade() -> None:
    for table in ("audit_log", "keys", "workspaces", "organizations", "tenant_revision"):
        op.drop_table(table)
