"""Brings a database's tables to what this release needs. Knows no table: those are in `migrations/versions`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy
from sqlalchemy import Connection

from penstock.core.errors import ConfigError
from penstock.version import __version__

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

logger = logging.getLogger(__name__)

_MIGRATIONS = Path(__file__).parent / "migrations"
_LOCK_NUMBER = 0x70656E73746F636B  # "penstock": any number that all our processes agree on


def migrate(connection: Connection) -> None:
    """Runs inside a transaction that locks out other migrations, so that several starting gateways take turns."""
    # Alembic is slow to import, and most commands touch no database.
    from alembic import command
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    if connection.dialect.name == "postgresql":
        connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    script = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_heads()
    if current == tuple(script.get_heads()):
        return
    _refuse_newer(current, script)
    command.upgrade(config, "head")
    logger.info("database tables are now at %s", ", ".join(script.get_heads()))


def _refuse_newer(current: tuple[str, ...], script: ScriptDirectory) -> None:
    known = {revision.revision for revision in script.walk_revisions()}
    unknown = [revision for revision in current if revision not in known]
    if unknown:
        raise ConfigError(
            f"The database was written by a newer Penstock than this one ({__version__}): its tables are at "
            f"'{unknown[0]}', which this release does not know.",
            hint="Upgrade Penstock, or choose another database.",
        )
