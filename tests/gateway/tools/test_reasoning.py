from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.tools.call_parser import CallParser
from penstock.gateway.tools.formats import HERMES, REASONING
from penstock.gateway.tools.parser import PlainText, ReasoningSplitter
from tests.gateway.tools.recorder import TOOLS, Recorder, feed
from tests.gateway.tools.test_call_parser import cut


def split(*pieces: str, is_open: bool = False, with_tools: bool = False) -> Recorder:
    recorder = Recorder()
    then = CallParser(recorder, HERMES.markers, TOOLS) if with_tools else PlainText(recorder)
    feed(ReasoningSplitter(recorder, then, is_open=is_open), pieces)
    return recorder


@pytest.mark.parametrize(
    ("answer", "is_open", "expected"),
    [
        ("<think>\nhm, so\n</think>\n\nYes. ", False, Recorder(reasoning="hm, so", text="Yes. ")),
        ("hm, so\n</think>\n\nYes.", True, Recorder(reasoning="hm, so", text="Yes.")),
        ("\n<think></think>Yes.", False, Recorder(text="Yes.")),
        ("<think>cut of", False, Recorder(reasoning="cut of")),
        ("cut off </thi", True, Recorder(reasoning="cut off </thi")),
        ("No thoughts <think>here</think>", False, Recorder(text="No thoughts <think>here</think>")),
        (" <thin", False, Recorder(text=" <thin")),
        ("", True, Recorder()),
    ],
)
def test_splitting(answer: str, is_open: bool, expected: Recorder) -> None:
    assert split(answer, is_open=is_open) == expected
    assert split(*answer, is_open=is_open) == expected


def test_calls_after_the_reasoning_but_not_in_it() -> None:
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    recorder = split(f"<think>{call}</think>\n{call}", with_tools=True)
    assert recorder == Recorder(reasoning=call, calls=[("get_time", "{}")])


def test_a_mark_of_a_token_and_a_word() -> None:
    marks = REASONING["gemma4"]
    assert {"<|channel>", "<channel|>"} <= set(marks.texts)
    recorder = Recorder()
    splitter = ReasoningSplitter(recorder, PlainText(recorder), is_open=False, marks=marks)
    feed(splitter, "<|channel>thought\nhm, so\n<channel|>Yes.")
    assert recorder == Recorder(reasoning="hm, so", text="Yes.")


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", " ", "\n", "a", "</", "<t"])).map(
        "".join
    ),
    places=st.lists(st.integers(0, 200), max_size=8),
    is_open=st.booleans(),
)
def test_cutting_makes_no_difference(text: str, places: list[int], is_open: bool) -> None:
    whole = split(text, is_open=is_open, with_tools=True)
    assert split(*cut(text, places), is_open=is_open, with_tools=True) == whole
