"""Alembic's environment. Ships inside the package, because a server upgrades its own database when it starts."""
