"""Calls in the formats of the families that we load, whole, broken and cut in any way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.prompts import ToolCall
from penstock.gateway.tools.call_parser import CallParser
from penstock.gateway.tools.formats import (
    FORMATS,
    GEMMA,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    ToolFormat,
)
from tests.gateway.tools.recorder import TOOLS, Recorder, parse_calls

PARIS = '{"city": "Paris"}'
ONE_CALL = Recorder(calls=[("weather", PARIS)])

ANSWERS: list[tuple[ToolFormat, str, Recorder]] = [
    (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', ONE_CALL),
    (HERMES, f'<tool_call>{{"arguments":{PARIS},"name":"weather"}}</tool_call>', ONE_CALL),
    (HERMES, f'<tool_call>{{"type": "function", "function": {{"name": "weather", "arguments": {PARIS}}}}}',
     Recorder(calls=[("weather", '{"city":"Paris"}')])),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', ONE_CALL),
    (HERMES, '<tool_call>{"name": "weather"}</tool_call>', Recorder(calls=[("weather", "{}")])),
    (HERMES, '<tool_call>{"name": "weather", "arguments": null}</tool_call>', Recorder(calls=[("weather", "{}")])),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": "}\\"{ </tool_call>"}}</tool_call>',
     Recorder(calls=[("weather", '{"a": "}\\"{ </tool_call>"}')])),
    (HERMES, f'Let me look.\n\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
             '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\nDone. ',
     Recorder(text="Let me look.Done. ", calls=[("weather", PARIS), ("get_time", "{}")])),
    (HERMES, f'<tool_call>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "get_time"}}]</tool_call>',
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (LLAMA3_JSON, f'{{"name": "weather", "parameters": {PARIS}}}', ONE_CALL),
    (LLAMA3_JSON, f' \n{{"type": "function", "name": "weather", "parameters": {PARIS}}}', ONE_CALL),
    (LLAMA3_JSON, f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; '
                  '{"name": "get_time", "parameters": {}}',
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (LLAMA3_JSON, f'{{"function": "weather", "parameters": {PARIS}}}', ONE_CALL),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, '
              '{"name": "get_time", "arguments": {}}]',
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}, "id": "abcdefghi"}}]', ONE_CALL),
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather[ARGS]{PARIS}", ONE_CALL),
    (MISTRAL_ARGS, f"Well. [TOOL_CALLS]weather{PARIS}[TOOL_CALLS]get_time[ARGS]{{}}",
     Recorder(text="Well.", calls=[("weather", PARIS), ("get_time", "{}")])),
    (GEMMA, f'```tool_code\n{{"name": "weather", "parameters": {PARIS}}}\n```', ONE_CALL),
    (GEMMA, f'```json\n[{{"name": "weather", "parameters": {PARIS}}}]\n```\n', ONE_CALL),
    (GEMMA, f'{{"name": "weather", "parameters": {PARIS}}}', ONE_CALL),
    (GEMMA, 'Sure:\n```tool_code\nprint(weather(city="Paris"))\n```',
     Recorder(text="Sure:", calls=[("weather", '{"city":"Paris"}')])),
    (GEMMA, '[weather(city="Paris"), get_time()]',
     Recorder(calls=[("weather", '{"city":"Paris"}'), ("get_time", "{}")])),
    (GEMMA, '```tool_code\n[weather(city="Paris", days=[1, 2]), get_time()]\n```',
     Recorder(calls=[("weather", '{"city":"Paris","days":[1,2]}'), ("get_time", "{}")])),
]  # fmt: skip

# What looks like a call but is none stays text, to the letter.
TEXTS: list[tuple[ToolFormat, str]] = [
    (HERMES, "Plain words.\n"),
    (HERMES, "a < b <tool_calling> </tool_call> \n"),
    (HERMES, "<tool_call>not json</tool_call>"),
    (HERMES, "<tool_call></tool_call>"),
    (HERMES, 'see <tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> there'),
    (HERMES, '<tool_call>{"name": 5}'),
    (HERMES, '<tool_call>{"name": "weath'),
    (HERMES, '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'weather'}</tool_call>"),
    (LLAMA3_JSON, '{"name": "Ada", "age": 36}'),
    (LLAMA3_JSON, '{"colour": "red"} is JSON'),
    (LLAMA3_JSON, "  {"),
    (LLAMA3_JSON, 'First {"name": "weather", "parameters": {}}'),
    (MISTRAL, "[1, 2] and [TOOL"),
    (MISTRAL, "weather[ARGS]{}"),
    (GEMMA, '```json\n{"a": 1}\n```\nmore'),
    (GEMMA, "```tool_code\nimport os\n```"),
    (GEMMA, '```tool_code\nweather("Paris")\n```'),
    (GEMMA, "```tool_code\nweather(city=__import__('os'))\n```"),
    (GEMMA, "```tool_code\nrm(path='/')\n```"),
    (GEMMA, "[1, 2] is a list"),
    (GEMMA, "[weather] is a word, weather(x) no call"),
    (GEMMA, "```python\nprint(1)\n```"),
]


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize(("tool_format", "answer", "expected"), ANSWERS)
def test_calls(tool_format: ToolFormat, answer: str, expected: Recorder) -> None:
    assert parse_calls(tool_format, answer) == expected
    assert parse_calls(tool_format, *answer) == expected


@pytest.mark.parametrize(("tool_format", "text"), TEXTS)
def test_what_is_no_call_stays_text(tool_format: ToolFormat, text: str) -> None:
    assert parse_calls(tool_format, text) == Recorder(text=text)
    assert parse_calls(tool_format, *text) == Recorder(text=text)


PIECES = st.sampled_from(
    [answer for _, answer, _ in ANSWERS] + [text for _, text in TEXTS] + [" ", "{", "}", '"']
)


@given(
    tool_format=st.sampled_from(list(FORMATS.values())),
    fragments=st.lists(st.tuples(PIECES, st.integers(0, 80), st.integers(0, 80)), max_size=4),
    places=st.lists(st.integers(0, 2000), max_size=12),
)
def test_cutting_makes_no_difference(
    tool_format: ToolFormat, fragments: list[tuple[str, int, int]], places: list[int]
) -> None:
    text = "".join(
        piece[start : len(piece) - end] if end else piece[start:] for piece, start, end in fragments
    )
    assert parse_calls(tool_format, *cut(text, places)) == parse_calls(tool_format, text)


@given(text=st.text(st.sampled_from('<>/tool_callname{}[]":, \n\\`json'), max_size=60))
def test_nothing_is_lost_without_a_call(text: str) -> None:
    recorder = parse_calls(HERMES, text)
    assert recorder.calls == []
    assert recorder.text == text


def test_arguments_are_passed_on_while_they_are_written() -> None:
    recorder = Recorder()
    parser = CallParser(recorder, HERMES.markers, TOOLS)
    parser.push('<tool_call>{"name": "weather", "arguments": {"city": "Pa')
    assert recorder.calls == [("weather", '{"city": "Pa')]


def test_broken_arguments_reach_the_client_as_they_are() -> None:
    recorder = parse_calls(HERMES, '<tool_call>{"name": "weather", "arguments": {"a": [1}}</tool_call>after')
    assert recorder == Recorder(text="after", calls=[("weather", '{"a": [1}}')])


def test_a_broken_call_after_a_good_one_becomes_text() -> None:
    recorder = parse_calls(LLAMA3_JSON, '{"name": "weather", "parameters": {}}; {"city": "Paris"} ok')
    assert recorder == Recorder(text='{"city": "Paris"} ok', calls=[("weather", "{}")])


@pytest.mark.parametrize("tool_format", FORMATS.values())
def test_what_a_format_writes_it_also_reads(tool_format: ToolFormat) -> None:
    calls = (ToolCall("1", "weather", PARIS), ToolCall("2", "get_time", "{}"))
    assert parse_calls(tool_format, tool_format.written(calls)).calls == [
        ("weather", PARIS),
        ("get_time", "{}"),
    ]


@pytest.mark.parametrize("rest", ["<tool", "<tool_call>", '<tool_call>\n{"name": "wea', "</tool_ca"])
def test_a_call_cut_off_after_others_leaves_no_debris(rest: str) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}'
    closing = "" if rest.startswith("</") else "</tool_call>\n"
    assert parse_calls(HERMES, call + closing + rest) == Recorder(calls=[("weather", "{}")])


def test_a_hidden_marker_is_not_shown_with_what_is_no_call() -> None:
    assert parse_calls(MISTRAL, "a [TOOL_CALLS]nothing[ARGS]{}") == Recorder(text="a nothing[ARGS]{}")
    assert parse_calls(LLAMA3_JSON, "<|python_tag|>import os") == Recorder(text="import os")
    broken = parse_calls(MISTRAL, *'[TOOL_CALLS]weather[ARGS]{"a": 1]}')
    assert broken == Recorder(calls=[("weather", '{"a": 1]}')])


def test_deep_nesting_is_no_danger() -> None:
    deep = "[" * 100_000
    answer = f'<tool_call>{{"arguments": {deep}{"]" * 100_000}, "name": "weather"}}</tool_call>'
    assert parse_calls(HERMES, answer) == Recorder(text=answer)
    python = f"```tool_code\nweather(a={'[' * 5000}{']' * 5000})\n```"
    assert parse_calls(GEMMA, python) == Recorder(text=python)
