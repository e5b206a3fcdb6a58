"""Run by Alembic for each upgrade, on the connection that `penstock.gateway.store.database` passes in."""

from __future__ import annotations

from alembic import context

from penstock.gateway.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True
)
with context.begin_transaction():
    context.run_migrations()
