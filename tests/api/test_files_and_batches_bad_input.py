"""Whatever is sent to files and batches, the answer is no 5xx, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.stored_work import ServedWork, serving_work
from tests.gateway.fake_engine import FakeEngine, script_text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedWork]:
    folder: Path = tmp_path_factory.mktemp("work")
    with serving_work(FakeEngine(script_text("fine")), folder) as served:
        yield served


quickly = settings(max_examples=40, deadline=None)


@quickly
@given(
    body=st.binary(max_size=200) | st.lists(
        st.sampled_from(
            [b"--b", b"--b--", b"\r\n", b"\n", b"content-disposition: form-data", b'; name="file"', b"x: y",
             b'; filename="f"', b'; name="purpose"', b"batch", b"\0", b"\xff", b'"', b";"]
        ),
        max_size=20,
    ).map(b"".join),
    kind=st.sampled_from(
        ["multipart/form-data; boundary=b", "multipart/form-data", "multipart/form-data; boundary=",
         'multipart/form-data; boundary="', "text/plain", "", "multipart/form-data; boundary=" + "b" * 300]
    ),
)  # fmt: skip
def test_forms(served: ServedWork, body: bytes, kind: str) -> None:
    answer = httpx.post(f"{served.url}/v1/files", content=body, headers={"content-type": kind})
    assert answer.status_code in (200, 400)


def test_a_form_has_few_parts_whatever_their_names(served: ServedWork) -> None:
    part = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--b--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b"}
    taken = httpx.post(f"{served.url}/v1/files", content=part * 32 + file, headers=kind)
    refused = httpx.post(f"{served.url}/v1/files", content=part * 33 + file, headers=kind)
    assert (taken.status_code, refused.status_code) == (200, 400)
    assert "more than 32 fields" in refused.text


@pytest.mark.parametrize(
    "name",
    ["data:text/html,a.png", "http://[a.png", "../../a.png", "a\u202egnp.png", "C:\\a.png", '"; x="a.png'],
)
def test_odd_names_of_files(served: ServedWork, name: str) -> None:
    """A name is kept as it came and is only a name: its ending tells the type, and no path follows from it."""
    sdk = served.anthropic()
    file = sdk.beta.files.upload(file=(name, b"x"))
    assert (file.mime_type, sdk.beta.files.retrieve_metadata(file.id)) == ("image/png", file)
    answer = sdk.beta.files.download(file.id)
    assert answer.read() == b"x"
    quoted = answer.headers["content-disposition"].removeprefix("attachment; filename*=utf-8''")
    assert not set(quoted) & set('"; /\\')
    sdk.beta.files.delete(file.id)


def test_a_file_that_is_deleted_while_it_is_read(served: ServedWork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes go at any moment: before the answer begins, or while it is sent."""
    sdk = served.openai()
    blobs = served.work.files.blobs
    file_id = sdk.files.create(file=b"x" * 1_000_000, purpose="batch").id
    read = sdk.files.with_streaming_response.content(file_id)
    with read as answer:
        pieces = answer.iter_bytes(1 << 16)
        start = next(pieces)
        blobs.remove(file_id)
        assert start + b"".join(pieces) == b"x" * 1_000_000
    file_id = sdk.files.create(file=b"x", purpose="batch").id
    num_bytes = blobs.num_bytes

    def remove(blob_id: str) -> int:
        size = num_bytes(blob_id)
        blobs.remove(blob_id)
        return size

    monkeypatch.setattr(blobs, "num_bytes", remove)
    with pytest.raises(openai.NotFoundError, match="are gone"):
        sdk.files.content(file_id)


def test_bytes_that_another_request_removes_meanwhile(served: ServedWork) -> None:
    sdk = served.openai()
    file = sdk.files.create(file=b"{}", purpose="batch")
    upload = sdk.uploads.create(filename="a", purpose="batch", mime_type="text/plain", bytes=2)
    part = sdk.uploads.parts.create(upload.id, data=b"{}")
    for blob_id in (file.id, part.id):
        served.work.files.blobs.remove(blob_id)
    with pytest.raises(openai.NotFoundError):
        sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="is gone"):
        sdk.uploads.complete(upload.id, part_ids=[part.id])


@pytest.mark.parametrize("path", ["/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}"])
@pytest.mark.parametrize("name", ["%00", "..%2f..%2fetc%2fpasswd", "%ff", "a" * 500, "%F0%9F%98%80"])
def test_ids(served: ServedWork, path: str, name: str) -> None:
    for url in (path, path.replace("/v1/batches", "/v1/messages/batches")):
        answer = httpx.get(served.url + url.format(name))
        assert answer.status_code in (404, 405), (url, answer.text)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files?limit=x",
        "/v1/files?limit=-1",
        "/v1/files?limit=99999999999999999999",
        "/v1/files?order=up",
        "/v1/files?after=%00",
        "/v1/files?purpose=%00",
        "/v1/batches?limit=101",
        "/v1/batches?after=nothing",
        "/v1/messages/batches?limit=0",
        "/v1/messages/batches?after_id=%00",
        "/v1/messages/batches?before_id=nothing",
    ],
)
def test_queries(served: ServedWork, path: str) -> None:
    answer = httpx.get(served.url + path)
    assert answer.status_code == 400, answer.text
    assert ("request_id" in answer.json()) == path.startswith("/v1/messages")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=5,
)


@quickly
@given(
    path=st.sampled_from(
        ["/v1/batches", "/v1/messages/batches", "/v1/messages", "/v1/messages/count_tokens"]
    ),
    body=st.dictionaries(
        st.sampled_from(
            ["requests", "input_file_id", "endpoint", "model", "messages", "system", "max_tokens", "x"]
        ),
        json_values,
    ),
)
def test_bodies(served: ServedWork, path: str, body: dict[str, object]) -> None:
    answer = httpx.post(served.url + path, content=json.dumps(body).encode())
    assert 400 <= answer.status_code < 500
    assert ("request_id" in answer.json()) == path.startswith("/v1/messages")
