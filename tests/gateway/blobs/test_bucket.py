"""Blobs in a folder and in the bucket of a real object store keep the same promises."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import pytest

from penstock.core.errors import StoreUnavailable
from penstock.gateway.blobs import bucket as buckets
from penstock.gateway.blobs.blobs import Blobs, FileFolder
from penstock.gateway.blobs.bucket import PART_BYTES, Bucket, S3Client
from tests.gateway.blobs.object_store import ObjectStore


@pytest.fixture(params=["folder", "bucket"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "folder":
        return FileFolder(tmp_path)
    store: ObjectStore = request.getfixturevalue("object_store")
    return Bucket(store.client(f"tests/{secrets.token_hex(4)}"))


@pytest.fixture
def client(object_store: ObjectStore) -> S3Client:
    return object_store.client(f"tests/{secrets.token_hex(4)}")


def read(blobs: Blobs, blob_id: str) -> bytes:
    with blobs.open(blob_id) as opened:
        return opened.read()


def write(blobs: Blobs, blob_id: str, data: bytes) -> None:
    with blobs.writing(blob_id) as writer:
        writer.write(data)


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000])
def test_what_is_written_can_be_read(blobs: Blobs, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    assert not blobs.exists("a")
    write(blobs, "a", data)
    assert blobs.exists("a")
    assert read(blobs, "a") == data
    assert blobs.num_bytes("a") == num_bytes


def test_nothing_is_seen_before_it_is_published(blobs: Blobs) -> None:
    writer = blobs.begin("a")
    writer.write(b"half")
    assert not blobs.exists("a")
    writer.abandon()
    assert writer.closed
    assert not blobs.exists("a")
    with contextlib.suppress(RuntimeError), blobs.writing("a") as writer:
        writer.write(b"half")
        raise RuntimeError
    assert not blobs.exists("a")


def test_who_publishes_last_wins(blobs: Blobs) -> None:
    first, second = blobs.begin("a"), blobs.begin("a")
    second.write(b"second")
    second.publish()
    first.write(b"first")
    first.publish()
    assert read(blobs, "a") == b"first"


def test_copies_live_on(blobs: Blobs) -> None:
    write(blobs, "a", b"data")
    blobs.copy("a", "b")
    blobs.remove("a")
    blobs.remove("a")
    assert read(blobs, "b") == b"data"
    with pytest.raises(FileNotFoundError):
        blobs.open("a")
    with pytest.raises(FileNotFoundError):
        blobs.num_bytes("a")
    with pytest.raises(FileNotFoundError):
        blobs.copy("a", "c")


def test_lines(blobs: Blobs) -> None:
    write(blobs, "a", b"one\ntwo\n\nthree")
    with blobs.open("a") as opened:
        assert list(opened) == [b"one\n", b"two\n", b"\n", b"three"]


@pytest.mark.parametrize("blob_id", ["", "../a", "a/b", "a" * 65, "a?b", "a%2e"])
def test_ids_cannot_leave_their_place(blobs: Blobs, blob_id: str) -> None:
    for use in (blobs.exists, blobs.open, blobs.begin, blobs.remove, blobs.num_bytes):
        with pytest.raises(ValueError, match="not the id of a blob"):
            use(blob_id)


class TestParts:
    """Large blobs go in parts and come in pieces."""

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(buckets, "PIECE_BYTES", 1 << 20)

    def test_a_blob_of_three_parts(self, client: S3Client) -> None:
        data = os.urandom(2 * PART_BYTES + 12_345)
        blobs = Bucket(client)
        writer = blobs.begin("a")
        for start in range(0, len(data), 1 << 20):
            writer.write(data[start : start + (1 << 20)])
            assert len(writer._pending) < PART_BYTES
        assert not blobs.exists("a")
        assert len(client.unfinished_parts()) == 1
        writer.publish()
        assert client.unfinished_parts() == []
        assert read(blobs, "a") == data

    def test_an_abandoned_blob_leaves_no_parts(self, client: S3Client) -> None:
        blobs = Bucket(client)
        writer = blobs.begin("a")
        writer.write(bytes(PART_BYTES + 1))
        writer.abandon()
        assert client.unfinished_parts() == []
        assert not blobs.exists("a")

    def test_parts_of_a_process_that_died_are_removed_after_a_day(
        self, client: S3Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blobs = Bucket(client)
        blobs.begin("a").write(bytes(PART_BYTES))
        # moto says that every upload began in 2010
        with monkeypatch.context() as patient:
            patient.setattr(buckets, "ABANDONED_AFTER_S", 1e11)
            blobs.remove_abandoned()
        assert len(client.unfinished_parts()) == 1
        blobs.remove_abandoned()
        assert client.unfinished_parts() == []

    def test_a_completion_whose_answer_was_lost(self, client: S3Client) -> None:
        blobs = Bucket(client)
        writer = blobs.begin("a")
        writer.write(bytes(PART_BYTES))
        client.complete_parts("a", writer._upload_id, writer._tags)
        writer.publish()
        assert blobs.num_bytes("a") == PART_BYTES

    def test_an_object_that_changes_is_not_read_as_a_mixture(self, client: S3Client) -> None:
        blobs = Bucket(client)
        write(blobs, "a", b"a" * (3 << 20))
        with blobs.open("a") as opened:
            assert opened.read(1) == b"a"
            write(blobs, "a", b"b" * (3 << 20))
            with pytest.raises(StoreUnavailable):
                opened.read()
