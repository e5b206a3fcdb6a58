from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.http import Endpoint, ProtocolError, ResponseParser
from penstock.core.errors import UsageError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


def chunked(contents: list[bytes]) -> bytes:
    framed = [f"{len(content):x}\r\n".encode() + content + b"\r\n" for content in contents]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(framed) + b"0\r\n\r\n"


@given(
    payloads=st.lists(st.binary(min_size=1).map(lambda data: data.hex().encode()), min_size=1, max_size=6),
    chunk_cuts=st.lists(st.integers(0, 400), max_size=4),
    read_cuts=st.lists(st.integers(0, 900), max_size=8),
)
def test_payloads_do_not_depend_on_where_bytes_are_cut(
    payloads: list[bytes], chunk_cuts: list[int], read_cuts: list[int]
) -> None:
    stream = b": comment\n\n" + b"".join(b"data: " + payload + b"\r\n\r\n" for payload in payloads)
    response = chunked([piece for piece in pieces(stream, chunk_cuts) if piece])
    parser = ResponseParser()
    received = [payload for piece in pieces(response, read_cuts) for payload in parser.feed(piece)]
    assert received == payloads
    assert parser.complete


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(bounds)]


def test_a_plain_body_is_complete_when_its_length_has_arrived() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhel") == []
    assert not parser.complete
    parser.feed(b"lo")
    assert parser.complete
    assert (parser.status, bytes(parser.body)) == (404, b"hello")


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(HEAD + b"\r\ndata: one\n\n") == [b"one"]
    assert not parser.complete
    parser.end_of_input()
    assert parser.complete


def test_a_cut_chunked_stream_is_not_complete() -> None:
    parser = ResponseParser()
    parser.feed(chunked([b"data: one\n\n"])[:-5])
    parser.end_of_input()
    assert not parser.complete


@pytest.mark.parametrize("answer", [b"hello\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n"])
def test_nonsense_is_a_protocol_error(answer: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(answer)


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("localhost:9000/", "localhost", 9000, ""),
        ("https://example.org/base/v1", "example.org", 443, "/base"),
        ("http://[::1]:80", "::1", 80, ""),
    ],
)
def test_addresses(url: str, host: str, port: int, prefix: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.host, endpoint.port, endpoint.path_prefix) == (host, port, prefix)


@pytest.mark.parametrize("url", ["ftp://example.org", "http://", "http://x:y"])
def test_a_bad_address_is_a_sentence(url: str) -> None:
    with pytest.raises(UsageError, match="not an HTTP address"):
        Endpoint.parse(url)
