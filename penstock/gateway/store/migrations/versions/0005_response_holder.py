"""Until when the gateway that makes a response in the background has promised to be alive."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_response_holder"
down_revision = "0004_responses"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("responses", sa.Column("lease_until", sa.Double))


def downgrade() -> None:
    op.drop_column("responses", "lease_until")
