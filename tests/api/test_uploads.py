"""/v1/uploads as the real `openai` SDK sees them: parts, quota, walls between workspaces."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.gateway import uploads as uploads_module
from penstock.gateway.files import FilesConfig
from tests.api.stored_work import ServedWork, serving_work
from tests.gateway.fake_engine import FakeEngine, script_text

DATA = b"0123456789" * 1000


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedWork]:
    with serving_work(FakeEngine(script_text("ok")), tmp_path) as served:
        yield served


def begin(sdk: openai.OpenAI, num_bytes: int = len(DATA), **options: Any) -> Any:
    fields: Any = {"filename": "a.jsonl", "purpose": "batch", "mime_type": "text/plain"} | options
    return sdk.uploads.create(bytes=num_bytes, **fields)


def parts_on_disk(served: ServedWork) -> list[Path]:
    return list(served.work.files.blobs.path("x").parent.glob("part_*"))


def test_a_file_in_parts(served: ServedWork) -> None:
    sdk = served.openai()
    upload = begin(sdk)
    assert (upload.object, upload.status, upload.bytes) == ("upload", "pending", len(DATA))
    second = sdk.uploads.parts.create(upload.id, data=DATA[4000:])
    first = sdk.uploads.parts.create(upload.id, data=DATA[:4000])
    assert first.upload_id == upload.id
    assert list(sdk.files.list()) == [], "neither parts nor uploads are files"
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(first.id)
    done = sdk.uploads.complete(upload.id, part_ids=[first.id, second.id], md5=hashlib.md5(DATA).hexdigest())
    assert done.status == "completed"
    assert done.file is not None
    assert (done.file.bytes, done.file.filename, done.file.purpose) == (len(DATA), "a.jsonl", "batch")
    assert sdk.files.content(done.file.id).read() == DATA
    assert parts_on_disk(served) == []
    for call in (
        lambda: sdk.uploads.cancel(upload.id),
        lambda: sdk.uploads.parts.create(upload.id, data=b"x"),
    ):
        with pytest.raises(openai.ConflictError, match="completed"):
            call()


def test_the_helper_of_the_sdk(served: ServedWork) -> None:
    done = served.openai().uploads.upload_file_chunked(
        file=io.BytesIO(DATA).getvalue(),
        filename="b.txt",
        bytes=len(DATA),
        mime_type="text/plain",
        purpose="user_data",
        part_size=3000,
    )
    assert done.file is not None
    assert served.openai().files.content(done.file.id).read() == DATA


def test_cancelled(served: ServedWork) -> None:
    sdk = served.openai()
    upload = begin(sdk)
    part = sdk.uploads.parts.create(upload.id, data=DATA)
    assert sdk.uploads.cancel(upload.id).status == "cancelled"
    assert parts_on_disk(served) == []
    with pytest.raises(openai.ConflictError):
        sdk.uploads.complete(upload.id, part_ids=[part.id])


def test_refusals(served: ServedWork) -> None:
    sdk = served.openai()
    upload = begin(sdk)
    part = sdk.uploads.parts.create(upload.id, data=DATA[:9000])
    for part_ids, match in ((["part_none"], "no part"), ([part.id], "9000 bytes"), ([part.id] * 2, "bytes")):
        with pytest.raises(openai.BadRequestError, match=match):
            sdk.uploads.complete(upload.id, part_ids=part_ids)
    with pytest.raises(openai.APIStatusError) as error:
        sdk.uploads.parts.create(upload.id, data=DATA[:2000])
    assert error.value.status_code == 413
    rest = sdk.uploads.parts.create(upload.id, data=DATA[9000:])
    with pytest.raises(openai.BadRequestError, match="md5"):
        sdk.uploads.complete(upload.id, part_ids=[part.id, rest.id], md5="0" * 32)
    assert sdk.uploads.complete(upload.id, part_ids=[part.id, rest.id]).status == "completed"
    for options, param in (({"purpose": "fun"}, "purpose"), ({"num_bytes": 0}, "bytes")):
        with pytest.raises(openai.BadRequestError) as refused:
            begin(sdk, **options)
        assert refused.value.param == param
    with pytest.raises(openai.APIStatusError) as error:
        begin(sdk, 1 << 40)
    assert error.value.status_code == 413
    with pytest.raises(openai.NotFoundError):
        sdk.uploads.cancel("upload_none")


def test_another_workspace_sees_nothing(served: ServedWork) -> None:
    owner, other = served.openai(), served.openai("w2")
    upload = begin(owner)
    part = owner.uploads.parts.create(upload.id, data=DATA)
    for call in (
        lambda: other.uploads.parts.create(upload.id, data=b"x"),
        lambda: other.uploads.complete(upload.id, part_ids=[part.id]),
        lambda: other.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    theirs = begin(other)
    with pytest.raises(openai.BadRequestError, match="no part"):
        other.uploads.complete(theirs.id, part_ids=[part.id])


def test_parts_count_against_the_quota_and_their_number_is_bounded(
    served: ServedWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.work.files.config = FilesConfig(max_file_bytes=1 << 20, max_workspace_bytes=15_000)
    sdk = served.openai()
    upload = begin(sdk)
    part = sdk.uploads.parts.create(upload.id, data=DATA)
    other = begin(sdk)
    with pytest.raises(openai.APIStatusError) as error:
        sdk.uploads.parts.create(other.id, data=DATA)
    assert error.value.status_code == 413
    assert sdk.uploads.complete(upload.id, part_ids=[part.id]).status == "completed", "not counted twice"
    monkeypatch.setattr(uploads_module, "MAX_PARTS", 1)
    sdk.uploads.parts.create(other.id, data=b"a")
    with pytest.raises(openai.BadRequestError, match="at most 1 parts"):
        sdk.uploads.parts.create(other.id, data=b"b")
    monkeypatch.setattr(uploads_module, "MAX_PENDING", 2)
    with pytest.raises(openai.APIStatusError) as error:
        begin(sdk)
    assert error.value.status_code == 413
