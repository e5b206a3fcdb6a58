"""Events survive any cut between packets, and any character in their text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.external import server
from penstock.cluster.external.server import EventLines, LineTooLong

TEXT = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text.strip() == text and text.encode().strip() == text.encode() and text != "[DONE]"
)


def read(data: bytes, cuts: list[int]) -> list[bytes]:
    lines = EventLines()
    events: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        events += lines.feed(data[start:end])
    return events + lines.end()


@settings(max_examples=50)
@given(st.lists(TEXT, max_size=5), st.data(), st.sampled_from(["\n\n", "\r\n\r\n"]), st.booleans())
def test_events_come_out_as_they_went_in(
    texts: list[str], data: st.DataObject, end: str, says_done: bool
) -> None:
    stream = ": hello\n\n" + "".join(f"event: x\ndata: {text}{end}" for text in texts)
    encoded = (stream + ("data: [DONE]\n\ndata: more\n\n" if says_done else "")).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    assert read(encoded, cuts) == [text.encode() for text in texts]


def test_a_stream_without_lines_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_LINE_BYTES", 100)
    with pytest.raises(LineTooLong):
        read(b"data: " + b"x" * 200, [50, 100, 150])
