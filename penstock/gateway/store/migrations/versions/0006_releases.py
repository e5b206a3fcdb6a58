"""The oldest revision that a database can have. Databases of earlier development versions are refused."""

from __future__ import annotations

revision = "0006_releases"
down_revision = None


def upgrade() -> None:
    """Does nothing: a new database gets all its tables from `tables.create_tables`."""


def downgrade() -> None:
    """Does nothing."""
