"""Files of workspaces on a real database and a real folder."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest, NotFound, RequestTooLarge, StoreUnavailable
from penstock.gateway.blobs import blobs
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.files import FilesConfig, FileStore, StoredFile
from penstock.gateway.store.database import Database


class Wall:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def store(tmp_path: Path, wall: Wall) -> FileStore:
    config = FilesConfig(max_file_bytes=5000, max_workspace_bytes=12_000)
    return FileStore(Database("sqlite://"), FileFolder(tmp_path / "files"), config, wall_clock=wall)


async def keep(
    store: FileStore, data: bytes = b"data", workspace_id: str = "w1", expires_after_s: float | None = None
) -> StoredFile:
    upload = await store.upload(workspace_id)
    for start in range(0, len(data), 100):
        await upload.write(data[start : start + 100])
    return await store.create(upload, filename="a.jsonl", purpose="batch", expires_after_s=expires_after_s)


async def test_what_is_kept_can_be_read(store: FileStore) -> None:
    data = bytes(range(256)) * 10
    file = await keep(store, data)
    assert await store.get("w1", file.id) == file
    assert (file.num_bytes, file.filename, file.purpose) == (2560, "a.jsonl", "batch")
    assert store.blobs.path(file.id).read_bytes() == data


async def test_a_deleted_file_is_gone(store: FileStore) -> None:
    file = await keep(store)
    await store.delete("w1", file.id)
    assert not store.blobs.exists(file.id)
    with pytest.raises(NotFound):
        await store.get("w1", file.id)
    with pytest.raises(NotFound):
        await store.delete("w1", file.id)


async def test_a_file_of_another_workspace_does_not_exist(store: FileStore) -> None:
    file = await keep(store)
    for attempt in (store.get("w2", file.id), store.get("w2", "file-unknown"), store.delete("w2", file.id)):
        with pytest.raises(NotFound) as caught:
            await attempt
        assert file.workspace_id not in caught.value.message
    assert (await store.page("w2")).files == []
    with pytest.raises(InvalidRequest):
        await store.page("w2", after=file.id)
    assert store.blobs.exists(file.id)


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_show_every_file_once(store: FileStore, order: str) -> None:
    made = [(await keep(store, b"x")).id for _ in range(7)]
    seen: list[str] = []
    after = None
    while True:
        page = await store.page("w1", limit=3, order=order, after=after)  # type: ignore[arg-type]
        seen += [file.id for file in page.files]
        if not page.has_more:
            break
        after = seen[-1]
    assert seen == (made if order == "asc" else made[::-1])


async def test_an_expired_file_is_invisible_and_then_removed(store: FileStore, wall: Wall) -> None:
    short, forever = await keep(store, expires_after_s=3600), await keep(store)
    wall.now += 3500
    assert await store.remove_expired() == 0
    wall.now += 200
    with pytest.raises(NotFound):
        await store.get("w1", short.id)
    assert [file.id for file in (await store.page("w1")).files] == [forever.id]
    assert await store.remove_expired() == 1
    assert not store.blobs.exists(short.id)
    assert store.blobs.exists(forever.id)


async def test_an_upload_is_bounded(store: FileStore, tmp_path: Path) -> None:
    upload = await store.upload("w1")
    with pytest.raises(RequestTooLarge):
        await upload.write(b"x" * 5001)
    await upload.abandon()
    assert list((tmp_path / "files").iterdir()) == []


async def test_a_workspace_is_bounded(store: FileStore, tmp_path: Path) -> None:
    await keep(store, b"x" * 5000)
    await keep(store, b"x" * 5000)
    with pytest.raises(RequestTooLarge):
        await keep(store, b"x" * 5000)
    await keep(store, b"x" * 5000, "w2")
    assert len(list((tmp_path / "files").iterdir())) == 3


async def test_parallel_uploads_cannot_fill_more_than_the_quota(tmp_path: Path, wall: Wall) -> None:
    """Room is reserved before bytes reach the disk, so that parallel uploads count against each other."""
    piece = b"x" * (1 << 20)
    config = FilesConfig(max_file_bytes=4 << 20, max_workspace_bytes=6 << 20)
    store = FileStore(Database("sqlite://"), FileFolder(tmp_path / "files"), config, wall_clock=wall)
    uploads = [await store.upload("w1") for _ in range(6)]
    refused = 0
    for _ in range(3):
        for upload in list(uploads):
            try:
                await upload.write(piece)
            except RequestTooLarge:
                refused += 1
                uploads.remove(upload)
                await upload.abandon()
        on_disk = sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
        assert on_disk <= config.max_workspace_bytes
    assert (refused, len(uploads)) == (5, 1)
    file = await store.create(uploads[0], filename="a", purpose="batch")
    assert [shown.id for shown in (await store.page("w1")).files] == [file.id]
    # What the others had reserved is free again, and so is what this upload reserved beyond its size.
    next_upload = await store.upload("w1")
    for _ in range(3):
        await next_upload.write(piece)
    with pytest.raises(RequestTooLarge):
        await next_upload.write(b"y" * (1 << 20))
    await next_upload.abandon()
    assert (await store.page("w1")).files == [file]


async def test_the_room_of_an_upload_whose_process_died_is_free_after_a_day(
    tmp_path: Path, wall: Wall
) -> None:
    config = FilesConfig(max_workspace_bytes=2 << 20)
    store = FileStore(Database("sqlite://"), FileFolder(tmp_path / "files"), config, wall_clock=wall)
    lost = await store.upload("w1")
    await lost.write(b"x" * (1 << 20))
    with pytest.raises(NotFound):
        await store.get("w1", lost.file_id)
    with pytest.raises(RequestTooLarge):
        await keep(store, b"x" * 1000)
    wall.now += 25 * 3600
    await store.remove_expired()
    await keep(store, b"x" * 1000)


async def test_an_unfinished_upload_is_not_a_file(store: FileStore) -> None:
    upload = await store.upload("w1")
    await upload.write(b"half")
    assert not store.blobs.exists(upload.file_id)
    assert (await store.page("w1")).files == []


@pytest.mark.parametrize("file_id", ["../secret", "a/b", "", "file-\n", "x" * 65])
async def test_ids_cannot_leave_the_folder(store: FileStore, file_id: str) -> None:
    with pytest.raises(ValueError, match="not the id"):
        store.blobs.path(file_id)
    with pytest.raises(NotFound):
        await store.get("w1", file_id)


class FullDisk(io.FileIO):
    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_full_disk_is_an_outage_and_leaves_nothing(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await keep(store)

    def open_on_full_disk(path: Path, mode: str, opener: Any) -> io.BufferedWriter:
        return io.BufferedWriter(FullDisk(path, mode, opener=opener))

    with monkeypatch.context() as patched:
        patched.setattr(blobs, "open", open_on_full_disk, raising=False)
        for num_bytes in (1, io.DEFAULT_BUFFER_SIZE + 1):  # found out at the end, or at once
            with pytest.raises(StoreUnavailable), store.blobs.writing("blob") as file:
                file.write(bytes(num_bytes))
        upload = await store.upload("w1")
        await upload.write(bytes(4000))
        with pytest.raises(StoreUnavailable):
            await store.create(upload, filename="a", purpose="batch")
        await upload.abandon()
    assert len(list((tmp_path / "files").iterdir())) == 1
    told = [record.levelname for record in caplog.records if record.name == blobs.__name__]
    assert told == ["ERROR"], "one line for one outage"
    assert await store.reserve("w1", "another", 11_000, ahead=0), "the room is free again"
    await keep(store)
