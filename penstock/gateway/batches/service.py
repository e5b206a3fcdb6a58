"""The files and batches of a server, put together. Writes nothing before one of them is used."""

from __future__ import annotations

from pathlib import Path

from penstock.gateway.batches.runner import BatchesConfig, BatchRunner
from penstock.gateway.batches.store import BatchStore
from penstock.gateway.files.files import FilesConfig, FileStore
from penstock.gateway.store.database import Database


class StoredWork:
    """Several gateways may share a database; then they must share the data folder, too."""

    def __init__(
        self,
        database: Database,
        data_dir: Path,
        *,
        files: FilesConfig | None = None,
        batches: BatchesConfig | None = None,
    ) -> None:
        self.files = FileStore(database, data_dir, files)
        self.batches = BatchStore(database)
        self.runner = BatchRunner(self.batches, self.files, batches)
