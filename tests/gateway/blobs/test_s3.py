"""The client of object stores: signatures as Amazon's own library makes them, repetitions, refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.core.errors import ConfigError, StoreUnavailable
from penstock.core.gateway_config import StoreConfig
from penstock.gateway.blobs import bucket
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.blobs.bucket import Bucket, ObjectMissing, S3Access, S3Client
from penstock.serve.environment import open_blobs
from tests.gateway.blobs.object_store import BUCKET, ObjectStore

ACCESS = S3Access("AKID", "secret", token="token", region="eu-west-1", endpoint="http://store:9000")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_FIRST_WAIT_S", 0.0)


def client_of(answer: Callable[[httpx.Request], httpx.Response], access: S3Access = ACCESS) -> S3Client:
    return S3Client("s3://bucket/some/prefix", access, httpx.MockTransport(answer))


@pytest.mark.parametrize("endpoint", ["http://store:9000", "https://store/base", None])
def test_signatures_are_those_of_amazons_library(endpoint: str | None) -> None:
    auth = pytest.importorskip("botocore.auth")
    awsrequest = pytest.importorskip("botocore.awsrequest")
    credentials = pytest.importorskip("botocore.credentials")
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, headers={"etag": '"t"'}, text="<UploadId>u/+=</UploadId>")

    access = S3Access("AKID", "secret", token="token", region="eu-west-1", endpoint=endpoint)
    client = client_of(answer, access)
    client.begin_parts("a")
    client.put_part("a", "u/+= ~", 2, b"body")
    client.copy("a", "b_c-d")
    client.put("a", b"")
    theirs = auth.S3SigV4Auth(credentials.Credentials("AKID", "secret", "token"), "s3", "eu-west-1")
    for request in seen:
        signed = request.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
        again = awsrequest.AWSRequest(
            request.method,
            str(request.url),
            headers={name: request.headers[name] for name in signed},
            data=request.content,
        )
        again.context["timestamp"] = request.headers["x-amz-date"]
        text = theirs.string_to_sign(again, theirs.canonical_request(again))
        assert theirs.signature(text, again) == request.headers["authorization"].partition("Signature=")[2]
    assert urlsplit(str(seen[0].url)).path.endswith("/some/prefix/a")


def test_failures_on_the_way_are_repeated() -> None:
    answers = iter(
        [httpx.ConnectError("no"), httpx.Response(503), httpx.ReadTimeout("late"), httpx.Response(200)]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        outcome = next(answers)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    client_of(answer).put("a", b"data")
    assert next(answers, None) is None


def test_a_store_that_is_away_is_a_sentence_and_then_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        raise httpx.ConnectError("connection refused")

    client = client_of(answer)
    with pytest.raises(StoreUnavailable, match="cannot be used at the moment; the log says why"):
        client.put("a", b"data")
    assert "http://store:9000 cannot be used: ConnectError: connection refused" in caplog.text
    assert "secret" not in caplog.text
    asked = num_asked
    with pytest.raises(StoreUnavailable):
        client.put("a", b"data")
    assert num_asked == asked, "callers do not all wait for a store that is known to be away"
    client._paused_until = 0.0
    with pytest.raises(StoreUnavailable):
        client.put("a", b"data")
    assert num_asked > asked


def test_refusals_are_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    num_asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        return httpx.Response(403, text="<Error><Code>SignatureDoesNotMatch</Code></Error>")

    with pytest.raises(StoreUnavailable):
        client_of(answer).head("a")
    assert num_asked == 1
    assert "403 SignatureDoesNotMatch" in caplog.text


def test_an_error_behind_a_200(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(lambda _: httpx.Response(200, text="<Error><Code>InternalError</Code></Error>"))
    with pytest.raises(StoreUnavailable):
        client.complete_parts("a", "u", ["t"])
    with pytest.raises(StoreUnavailable):
        client.copy("a", "b")
    with pytest.raises(StoreUnavailable):
        client.begin_parts("a")


def test_a_wrong_part_of_an_object_is_refused() -> None:
    client = client_of(lambda _: httpx.Response(206, content=b"xy", headers={"content-range": "bytes 5-6/7"}))
    with pytest.raises(StoreUnavailable, match="wrong answer"):
        Bucket(client).open("a")


def test_what_is_missing() -> None:
    with pytest.raises(ObjectMissing):
        client_of(lambda _: httpx.Response(404)).head("a")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "s3://UPPER", "s3://bucket/pre fix", "s3://b/?x", "http://x"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="is no place for files"):
        S3Client(url, ACCESS)


def test_a_bad_endpoint() -> None:
    with pytest.raises(ConfigError, match="is no URL"):
        S3Client("s3://bucket", S3Access("a", "b", endpoint="minio:9000"))


class TestConfiguration:
    @pytest.fixture(autouse=True)
    def environment(self, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.endpoint)

    def test_a_bucket(self) -> None:
        blobs = open_blobs(StoreConfig(files_url=f"s3://{BUCKET}/there"))
        assert isinstance(blobs, Bucket)
        with blobs.writing("a") as writer:
            writer.write(b"x")
        assert blobs.exists("a")

    def test_a_bucket_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="has no bucket 'not-there'"):
            open_blobs(StoreConfig(files_url="s3://not-there"))

    def test_a_store_that_does_not_answer_stops_no_start(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        open_blobs(StoreConfig(files_url=f"s3://{BUCKET}"))
        assert "files cannot be read or written until the object store answers" in caplog.text

    def test_no_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(ConfigError, match="needs credentials"):
            open_blobs(StoreConfig(files_url=f"s3://{BUCKET}"))

    def test_folders(self, tmp_path: object) -> None:
        for url in (f"{tmp_path}/shared", f"file://{tmp_path}/shared"):
            blobs = open_blobs(StoreConfig(files_url=url))
            assert isinstance(blobs, FileFolder)
            assert str(blobs.path("a")) == f"{tmp_path}/shared/a"
        with pytest.raises(ConfigError, match="cannot be kept at 'gs://'"):
            open_blobs(StoreConfig(files_url="gs://bucket"))
