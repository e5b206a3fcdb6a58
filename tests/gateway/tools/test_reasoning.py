from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.tools.answer_form import REASONING, AnswerForm
from penstock.gateway.tools.call_parser import CallParser
from penstock.gateway.tools.formats import APERTUS, COMMAND, HERMES, JAMBA
from penstock.gateway.tools.parser import PlainText, ReasoningSplitter
from penstock.gateway.tools.tool_format import ToolFormat
from tests.gateway.tools.recorder import SCHEMAS, TOOLS, Recorder, feed
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
        ("</think>\n\nYes.", False, Recorder(text="Yes.")),
        (" </thi", False, Recorder(text=" </thi")),
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


def read(name: str, tool_format: ToolFormat | None, *pieces: str) -> Recorder:
    """Read an answer as a server does that knows the marks of thoughts and, perhaps, the format of calls."""
    recorder = Recorder()
    form = AnswerForm(
        tool_format=tool_format, tools=SCHEMAS if tool_format else {}, reasoning=REASONING[name]
    )
    feed(form.parser(recorder), pieces)
    return recorder


ACTION = '<|START_ACTION|>[{"tool_name": "get_time", "parameters": {}}]<|END_ACTION|>'
CALLED = [("get_time", "{}")]


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        (
            "command",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes, <b>.\n\nNo.<|END_RESPONSE|>",
            Recorder(reasoning="Hm.", text="Yes, <b>.\n\nNo."),
        ),
        ("command", "<|START_TEXT|>Yes.<|END_TEXT|>", Recorder(text="Yes.")),
        (
            "command",
            f"<|START_THINKING|>Hm.<|END_THINKING|>{ACTION}",
            Recorder(reasoning="Hm.", calls=CALLED),
        ),
        ("command", "<|START_RESPONSE|>cut of", Recorder(text="cut of")),
        ("command", "Bare <|END_RESPONSE|> words.", Recorder(text="Bare <|END_RESPONSE|> words.")),
        (
            "hunyuan",
            "<think>\nHm.\n</think>\n<answer>\nYes.\n\n  - no\n</answer>\n",
            Recorder(reasoning="Hm.", text="Yes.\n\n  - no"),
        ),
        ("hunyuan", "<think></think><answer>a </answ", Recorder(text="a </answ")),
        (
            "apertus",
            '<|inner_prefix|>Hm. <|tools_prefix|>[{"get_time": {}}]<|tools_suffix|>',
            Recorder(reasoning="Hm.", calls=CALLED),
        ),
        (
            "responses",
            "<think>\nHm.\n</think>\n<response>\nYes.\n</response>\n",
            Recorder(reasoning="Hm.", text="Yes."),
        ),
        (
            "hy_v3",
            "<think:opensource>Hm.</think:opensource>Yes.",
            Recorder(reasoning="Hm.", text="Yes."),
        ),
        (
            "solar_open",
            "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>",
            Recorder(reasoning="Hm.", text="Yes."),
        ),
        (
            "apriel",
            "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]\n",
            Recorder(reasoning="Hm.", text="Yes."),
        ),
        ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", Recorder(reasoning="Hm.", text="Yes.")),
    ],
)
def test_answers_between_tags_of_their_own(name: str, answer: str, expected: Recorder) -> None:
    tool_format = {"command": COMMAND, "hunyuan": JAMBA, "apertus": APERTUS}.get(name, HERMES)
    assert read(name, tool_format, answer) == expected
    assert read(name, tool_format, *answer) == expected


def test_tags_around_an_answer_go_where_no_tools_are_offered() -> None:
    assert read("command", None, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>") == Recorder(text="Yes.")


@given(
    name=st.sampled_from(["command", "hunyuan", "apertus", "responses", "solar_open", "apriel"]),
    text=st.lists(
        st.sampled_from(
            [
                *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", ACTION),
                *("<think>", "</think>", "<answer>", "</answer>", " ", "\n", "a", "<", "<|START_"),
                *("<response>", "</response>", "<|think|>", "<|end|>", "<|begin|>assistant", "<|content|>"),
                *("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
                *("<|inner_prefix|>", "<|inner_suffix|>", '<|tools_prefix|>[{"get_time": {}}]'),
            ]
        )
    ).map("".join),
    places=st.lists(st.integers(0, 200), max_size=8),
)
def test_cutting_answers_between_tags_makes_no_difference(name: str, text: str, places: list[int]) -> None:
    tool_format = {"command": COMMAND, "hunyuan": JAMBA, "apertus": APERTUS}.get(name, HERMES)
    assert read(name, tool_format, *cut(text, places)) == read(name, tool_format, text)


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
