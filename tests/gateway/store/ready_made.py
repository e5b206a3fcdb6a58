"""A migrated SQLite file to copy, because migrating takes longer than most tests do."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from penstock.gateway.store.database import Database, sqlite_url


@functools.cache
def _template() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()  # goes away with the process
    database = Database(sqlite_url(Path(folder.name)))
    database.migrate()
    database.close()
    return folder


def ready_made_database(folder: Path) -> Database:
    """A database in `folder` that has its tables already."""
    shutil.copytree(_template().name, folder, dirs_exist_ok=True)
    return Database(sqlite_url(folder))
