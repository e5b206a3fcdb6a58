"""A dialect without an API: each line says how it is to be answered. And a server's worth of batches around it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.identity import Principal
from penstock.gateway.batches.batch import Batch, BatchLine, BatchStatus, Counts, LineAnswer, LineResult
from penstock.gateway.batches.runner import BatchesConfig, BatchRunner
from penstock.gateway.batches.store import BatchStore
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.files import FileStore
from penstock.gateway.store.database import Database

Script = Callable[[BatchLine], Awaitable[bytes]]


class Wall:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def echo(line: BatchLine) -> bytes:
    await asyncio.sleep(0)
    return line.body


class ScriptedDialect:
    max_lines = 1000

    def __init__(self, script: Script = echo, *, lists_output_files: bool = True) -> None:
        self.lists_output_files = lists_output_files
        self.script = script
        self.asked: Counter[str] = Counter()
        self.in_flight = 0
        self.most_in_flight = 0

    def read_line(self, batch: Batch, number: int, raw: bytes) -> BatchLine:
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise InvalidRequest("This line is not JSON.", param="body") from error
        return BatchLine(number, line["custom_id"], json.dumps(line["body"]).encode())

    async def answer(self, batch: Batch, line: BatchLine, request_id: str) -> LineAnswer:
        attempt = self.asked[line.custom_id]
        assert request_id == f"{batch.id}-{line.number}" + (f"-{attempt}" if attempt else "")
        self.asked[line.custom_id] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            return LineAnswer(200, await self.script(line))
        finally:
            self.in_flight -= 1

    def refusal(self, error: PenstockError, request_id: str) -> LineAnswer:
        return LineAnswer(error.status, json.dumps(error.message).encode())

    def result_line(self, batch: Batch, result: LineResult) -> bytes:
        body = json.loads(result.body) if result.body else None
        return json.dumps([result.number, result.custom_id, result.outcome, body]).encode()


class CountingStore(BatchStore):
    """Counts how often the runner asked whether there is a database."""

    num_asked = 0

    @property
    def exists(self) -> bool:
        self.num_asked += 1
        return super().exists


class CountingRunner(BatchRunner):
    """Counts its looks at the database that are over."""

    num_looks = 0

    async def _look(self) -> None:
        await super()._look()
        self.num_looks += 1


class Server:
    """What one process holds. Several may share a database and a folder."""

    def __init__(
        self, data_dir: Path, database: Database, wall: Wall, dialect: ScriptedDialect | None = None
    ) -> None:
        self.wall = wall
        self.database = database
        self.dialect = dialect or ScriptedDialect()
        self.files = FileStore(database, FileFolder(data_dir / "files"), wall_clock=self._now)
        self.store = CountingStore(database, wall_clock=self._now, lease_clock=lambda _: self._now())
        config = BatchesConfig(max_concurrent_lines=4, poll_s=0.005, lease_s=30.0)
        self.runner = CountingRunner(self.store, self.files, config, wall_clock=self._now)
        self.runner.teach("scripted", self.dialect)
        self._stalled_at: float | None = None

    def _now(self) -> float:
        return self.wall() if self._stalled_at is None else self._stalled_at

    async def hand_in(
        self,
        lines: list[str | bytes],
        batch_id: str = "batch_1",
        status: BatchStatus = BatchStatus.VALIDATING,
        workspace_id: str = "w1",
    ) -> Batch:
        """A batch of one line for each text, or of raw bytes."""
        batch = Batch(
            id=batch_id,
            workspace_id=workspace_id,
            kind="scripted",
            endpoint="/v1/echo",
            status=status,
            principal=Principal(workspace_id=workspace_id),
            created_at=self.wall(),
            expires_at=self.wall() + 24 * 3600,
            counts=Counts(),
        )
        with self.files.blobs.writing(batch.input_id) as file:
            for line in lines:
                if isinstance(line, str):
                    line = json.dumps({"custom_id": line, "body": line}).encode()
                file.write(line + b"\n")
        await self.store.create(batch)
        return batch

    async def get(self, batch_id: str = "batch_1") -> Batch:
        return await self.store.get("w1", batch_id, "scripted")

    async def until(self, condition: Callable[[Batch], bool], batch_id: str = "batch_1") -> Batch:
        async with asyncio.timeout(60):
            while not condition(batch := await self.get(batch_id)):
                await asyncio.sleep(0.002)
        return batch

    async def until_over(self, batch_id: str = "batch_1") -> Batch:
        return await self.until(lambda batch: not batch.is_active and not self.runner.num_running, batch_id)

    async def until_true(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)

    async def looked(self) -> None:
        """Return when the runner has looked at everything that is in the database now."""
        enough = self.runner.num_looks + 2  # the look that is underway may have begun before now
        await self.until_true(lambda: self.runner.num_looks >= enough)

    def stall(self) -> None:
        """It no longer looks, but its lines still run. What one of its threads has begun ends at the time of now, so
        that it cannot take the lease once more when the wall's time goes on."""
        self._stalled_at = self.wall()
        assert self.runner._loop is not None
        self.runner._loop.cancel()

    async def kill(self) -> None:
        """As kill -9 would: nothing more is written, and the lease is not given back."""
        self._stalled_at = self.wall()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def output(self, batch: Batch, part: str = "output") -> list[list[object]]:
        file_id = getattr(batch.details, f"{part}_file_id")
        if file_id is None:
            return []
        return [json.loads(line) for line in self.files.blobs.path(file_id).read_bytes().splitlines()]
