from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gateway.store.database import Database, sqlite_url


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(tmp_path / "data"))
    yield database
    database.close()
