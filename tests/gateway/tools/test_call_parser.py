"""Calls in the formats of the families that we load, whole, broken and cut in any way."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.prompts import ToolCall
from penstock.gateway.tools.formats import (
    APERTUS,
    COMMAND,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FORMATS,
    GEMMA,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    JAMBA,
    KIMI_K2,
    LLAMA3_JSON,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_ARGS,
    OLMO3,
    PYTHONIC,
    QWEN3_CODER,
)
from penstock.gateway.tools.tagged_calls import json_of
from penstock.gateway.tools.tool_format import ToolFormat
from tests.gateway.tools.recorder import SCHEMAS, Recorder, parse_calls

PARIS = '{"city": "Paris"}'
M3 = "]<]minimax[>["
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
    (PYTHONIC, '[weather(city="Paris", days=2), get_time()]',
     Recorder(calls=[("weather", '{"city":"Paris","days":2}'), ("get_time", "{}")])),
    (PYTHONIC, '<|python_start|>[weather(city="Paris", dry=true, at=null)]<|python_end|>',
     Recorder(calls=[("weather", '{"city":"Paris","dry":true,"at":null}')])),
    (GRANITE, f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "get_time"}}]',
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (DEEPSEEK_V3, "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
                  f"{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{{}}"
                  "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     Recorder(text="Let me see.", calls=[("weather", PARIS), ("get_time", "{}")])),
    (DEEPSEEK_V31, f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
                   "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (KIMI_K2, "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
              f"{PARIS}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{{}}"
              "<|tool_call_end|><|tool_calls_section_end|>",
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (GLM, "Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pa\"r\nis</arg_value>\n"
          "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
     Recorder(text="Sure.", calls=[("weather", '{"city": "Pa\\"r\\nis", "days": 2}'), ("get_time", "{}")])),
    (GLM, "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call> Done.",
     Recorder(text="Done.", calls=[("weather", '{"city": "Paris"}')])),
    (QWEN3_CODER, "<tool_call>\n<function=weather>\n<parameter=city>\nPa < b\n\nris\n</parameter>\n<parameter=days>\n"
                  "2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n"
                  "</tool_call>",
     Recorder(calls=[("weather", '{"city": "Pa < b\\n\\nris", "days": 2}'), ("get_time", "{}")])),
    (QWEN3_CODER, "<tool_call>\n<function=get_time>\n<parameter=zone>\nUTC\n</parameter>\n<parameter=all>\ntrue\n"
                  "</parameter>\n<parameter=of>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
     Recorder(calls=[("get_time", '{"zone": "UTC", "all": true, "of": [1, 2]}')])),
    (MINIMAX_M2, '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
                 '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
     Recorder(calls=[("weather", '{"city": "Paris"}'), ("get_time", "{}")])),
    (FORMATS["seed_oss"], "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n"
                          "</seed:tool_call>", ONE_CALL),
    (FORMATS["lfm2"], '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>Checking.',
     Recorder(text="Checking.", calls=[("weather", '{"city":"Paris"}')])),
    (FORMATS["nemotron"], f'<TOOLCALL>[{{"name": "weather", "arguments": {PARIS}}}]</TOOLCALL>', ONE_CALL),
    # No text where the schema allows none, unless it is no JSON.
    (QWEN3_CODER, "<tool_call>\n<function=weather>\n<parameter=days>\nnull\n</parameter>\n</function>\n</tool_call>",
     Recorder(calls=[("weather", '{"days": null}')])),
    (QWEN3_CODER, "<tool_call>\n<function=weather>\n<parameter=days>\n3.0\n</parameter>\n<parameter=days>\na few\n"
                  "</parameter>\n</function>\n</tool_call>",
     Recorder(calls=[("weather", '{"days": 3.0, "days": "a few"}')])),
    (FORMATS["gemma4"], '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
     Recorder(calls=[("weather", '{"city":"Paris"}')])),
    (FORMATS["gemma4"], '<|tool_call>call:weather{city:<|"|>a "b" {c} <tool_call|>\n<|"|>,days:3,'
                        'at:[{x:-1.5,y:true}]}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
     Recorder(calls=[("weather", '{"city":"a \\"b\\" {c} <tool_call|>\\n","days":3,"at":[{"x":-1.5,"y":true}]}'),
                     ("get_time", "{}")])),
    (FORMATS["gemma4"], "<|tool_call>call:weather{city=Paris}<tool_call|>",
     Recorder(calls=[("weather", "{city=Paris}")])),
    (DEEPSEEK_V32, 'Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
                   '<｜DSML｜parameter name="city" string="true">Pa\nris 1</｜DSML｜parameter>\n'
                   '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
                   '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
     Recorder(text="Let me see.", calls=[("weather", '{"city": "Pa\\nris 1", "days": 2}'), ("get_time", "{}")])),
    # The mark of a parameter wins over its schema.
    (DEEPSEEK_V32, '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
                   '<｜DSML｜parameter name="city" string="false">null</｜DSML｜parameter>\n'
                   '<｜DSML｜parameter name="days" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
                   '</｜DSML｜tool_calls>',
     Recorder(calls=[("weather", '{"city": null, "days": "2"}')])),
    (DEEPSEEK_V32, '<｜DSML｜function_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="tr',
     Recorder(calls=[("weather", "{}")])),
    (COMMAND, '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
              f'{PARIS}}},\n    {{"tool_call_id": "1", "tool_name": "get_time", "parameters": {{}}}}\n]'
              "<|END_ACTION|>",
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (COMMAND, f'I look. <|START_ACTION|>[{{"tool_name": "weather", "parameters": {PARIS}}}]<|END_ACTION|>',
     Recorder(text="I look.", calls=[("weather", PARIS)])),
    (JAMBA, f'Well.\n<tool_calls>[\n{{"name": "weather", "arguments": {PARIS}}},\n{{"name": "get_time", "arguments": '
            "{}}\n]</tool_calls>",
     Recorder(text="Well.", calls=[("weather", PARIS), ("get_time", "{}")])),
    (JAMBA, f'<tool_calls>\n{{"name": "weather", "arguments": {PARIS}}}\n{{"name": "get_time", "arguments": {{}}}}\n'
            "</tool_calls>", Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),  # as MiniMax M1 writes
    (OLMO3, '<function_calls>\nweather(city="Paris", days=null)\nget_time()\n</function_calls> Done.',
     Recorder(text="Done.", calls=[("weather", '{"city":"Paris","days":null}'), ("get_time", "{}")])),
    (APERTUS, f'Sure.<|tools_prefix|>[{{"weather": {PARIS}}}, {{"get_time": {{}}}}]<|tools_suffix|>after',
     Recorder(text="Sure.after", calls=[("weather", PARIS), ("get_time", "{}")])),
    (APERTUS, '<|tools_prefix|>[{"weather":{"city": "}]"}', Recorder(calls=[("weather", '{"city": "}]"}')])),
    (MISTRAL_ARGS, f"Well.[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{PARIS}[TOOL_CALLS]get_time[CALL_ID]x[ARGS]"
                   "{}",
     Recorder(text="Well.", calls=[("weather", PARIS), ("get_time", "{}")])),  # Mistral Small 3.2
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather[CALL_ID][ARGS]{PARIS}", ONE_CALL),
    (LLAMA3_JSON, '[weather(city="Paris"), get_time()]',
     Recorder(calls=[("weather", '{"city":"Paris"}'), ("get_time", "{}")])),  # Llama 3.2
    (LLAMA3_JSON, f'[{{"name": "weather", "arguments": {PARIS}}}]', ONE_CALL),  # xLAM
    (GRANITE, f'<function_call> {{"name": "weather", "arguments": {PARIS}}}', ONE_CALL),
    (FORMATS["functiongemma"], "<start_function_call>call:weather{city:<escape>Pa{\"<escape>,days:3}"
                               "<end_function_call><start_function_call>call:get_time{}<end_function_call>",
     Recorder(calls=[("weather", '{"city":"Pa{\\"","days":3}'), ("get_time", "{}")])),
    (FORMATS["functiongemma"], "<start_function_call>call:weather{city:<escape>3<escape>,days:<escape>3<escape>}",
     Recorder(calls=[("weather", '{"city":"3","days":3}')])),
    (FORMATS["functionary"], f"I look.<function=weather>{PARIS}</function><function=get_time>{{}}</function>",
     Recorder(text="I look.", calls=[("weather", PARIS), ("get_time", "{}")])),
    (FORMATS["minicpm5"], '<function name="weather"><param name="city">Paris</param><param name="days">2</param>'
                          '</function>\n<function name="get_time"></function>',
     Recorder(calls=[("weather", '{"city": "Paris", "days": 2}'), ("get_time", "{}")])),
    (FORMATS["minicpm5"], '<function name="weather"><param name="city"><![CDATA[a </param>\n]] <b>]]></param>'
                          "</function>",
     Recorder(calls=[("weather", '{"city": "a </param>\\n]] <b>"}')])),
    (FORMATS["minicpm5"], '<function name="weather"><param name="city"><![CD</param></function>',
     Recorder(calls=[("weather", '{"city": "<![CD"}')])),
    (FORMATS["hy_v3"], "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
                       "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris"
                       "</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>get_time"
                       "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (FORMATS["minimax_m3"], f'Well.{M3}<tool_call>\n{M3}<invoke name="weather">{M3}<city>1 < 2{M3}</city>{M3}<days>2'
                            f'{M3}</days>{M3}<at>{M3}<item>{M3}<x>1.5{M3}</x>{M3}</item>{M3}</at>{M3}</invoke>\n'
                            f'{M3}<invoke name="get_time">{M3}</invoke>\n{M3}</tool_call>',
     Recorder(text="Well.", calls=[("weather", '{"city": "1 < 2", "days": 2, "at": [{"x": 1.5}]}'),
                                   ("get_time", "{}")])),
    (FORMATS["minimax_m3"], f'{M3}<tool_call>{M3}<invoke name="weather">{M3}<city>Paris{M3}<',
     Recorder(calls=[("weather", PARIS)])),
    (FORMATS["solar_open"], f"<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>weather<|tool_call:args|>{PARIS}"
                            "<|tool_call:end|><|tool_call:begin|>b2<|tool_call:name|>get_time<|tool_call:args|>{}"
                            "<|tool_call:end|>",
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (FORMATS["internlm"], f'Yes.<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {PARIS}}}'
                          "<|action_end|>\n",
     Recorder(text="Yes.", calls=[("weather", PARIS)])),
    (FORMATS["phi4_mini"], f'functools[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "get_time", '
                           '"arguments": {}}]',
     Recorder(calls=[("weather", PARIS), ("get_time", "{}")])),
    (FORMATS["phi4_mini"], f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]<|/tool_call|>', ONE_CALL),
    (FORMATS["gigachat3"], f'I look.\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {PARIS}}}',
     Recorder(text="I look.", calls=[("weather", PARIS)])),
    (FORMATS["longcat"], f'<longcat_tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</longcat_tool_call>',
     ONE_CALL),
    (FORMATS["command_r"], 'Action: ```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": '
                           f"{PARIS}\n    }}\n]```", ONE_CALL),
    (HARMONY, "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant<|channel|>commentary "
              f"to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
     Recorder(reasoning="Hm, <b>.", calls=[("weather", PARIS)])),
    (HARMONY, f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", ONE_CALL),
    (HARMONY, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>First: "
              "<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
     Recorder(reasoning="Hm.", text="First: Hello.")),
]  # fmt: skip

# What looks like a call but is none stays text, to the letter.
TEXTS: list[tuple[ToolFormat, str]] = [
    (HERMES, "Plain words.\n"),
    (HERMES, "a < b <tool_calling> </tool_call> \n"),
    (HERMES, "<tool_call>not json</tool_call>"),
    (HERMES, "<tool_call></tool_call>"),
    (HERMES, 'see <tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> there'),
    (HERMES, '<tool_call>{"name": 5}'),
    (HERMES, '<tool_call>{"name": {"name": "weather"}}</tool_call>'),
    (HERMES, '<tool_call>{"name": ["weather"]}</tool_call>'),
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
    (GLM, "<tool_call>nothing\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    (GLM, "<tool_call>two words\n</tool_call> and more"),
    (GLM, f"<tool_call>{'weather' * 100}"),
    (QWEN3_CODER, "<tool_call>\n<function=nothing>\n</function>\n</tool_call>"),
    (QWEN3_CODER, '<tool_call>\n{"name": "weather"}\n</tool_call>'),
    (QWEN3_CODER, "a <function=weather> b"),
    (MINIMAX_M2, '<minimax:tool_call>\n<invoke name="nothing">\n</invoke>'),
    (DEEPSEEK_V32, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="nothing">\n</｜DSML｜invoke>\n'),
    (DEEPSEEK_V32, "a <｜DSML｜ b"),
    (JAMBA, '<tool_calls>[{"name": "nothing", "arguments": {}}]</tool_calls>'),
    (JAMBA, "<tool_calls>none</tool_calls> of them"),
    (OLMO3, "<function_calls>\nnothing(a=1)\n</function_calls>"),
    (LLAMA3_JSON, "[1, 2] is a list"),
    (FORMATS["functionary"], "<function=nothing>{}</function>"),
    (FORMATS["minimax_m3"], f'{M3}<tool_call>\n{M3}<invoke name="nothing">{M3}</invoke>'),
    (FORMATS["minicpm5"], '<function name="nothing"></function> and more'),
    (FORMATS["command_r"], 'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]```'),
    (FORMATS["hy_v3"], "<tool_calls:opensource>none</tool_calls:opensource>"),
    (OLMO3, "<function_calls>\nweather('Paris')\n</function_calls>"),
    (COMMAND, "<START_ACTION> [1, 2]"),
    (APERTUS, '[{"weather": {}}] as such'),
    (HARMONY, "Plain words.\n"),
    (HARMONY, " to whom it may concern"),
    (PYTHONIC, "[1, 2] is a list"),
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
    parser = HERMES.parser(recorder, SCHEMAS)
    parser.push('<tool_call>{"name": "weather", "arguments": {"city": "Pa')
    assert recorder.calls == [("weather", '{"city": "Pa')]


def test_texts_among_parameters_are_passed_on_while_they_are_written() -> None:
    recorder = Recorder()
    parser = QWEN3_CODER.parser(recorder, SCHEMAS)
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\nPa\nri")
    assert recorder.calls == [("weather", '{"city": "Pa\\nri')]
    parser.push("s\n</para")
    assert recorder.calls == [("weather", '{"city": "Pa\\nris')]
    parser.push("meter>\n</function>\n</tool_call>")
    parser.finish()
    assert recorder.calls == [("weather", '{"city": "Paris"}'.replace("Paris", "Pa\\nris"))]


def test_a_call_that_goes_wrong_among_its_parameters_ends_there() -> None:
    answer = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\nWell, no."
    assert parse_calls(QWEN3_CODER, *answer) == Recorder(
        text="Well, no.", calls=[("weather", '{"city": "Rome"}')]
    )


def test_broken_arguments_reach_the_client_as_they_are() -> None:
    recorder = parse_calls(HERMES, '<tool_call>{"name": "weather", "arguments": {"a": [1}}</tool_call>after')
    assert recorder == Recorder(text="after", calls=[("weather", '{"a": [1}}')])


def test_a_broken_call_after_a_good_one_becomes_text() -> None:
    recorder = parse_calls(LLAMA3_JSON, '{"name": "weather", "parameters": {}}; {"city": "Paris"} ok')
    assert recorder == Recorder(text='{"city": "Paris"} ok', calls=[("weather", "{}")])


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
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
    assert parse_calls(COMMAND, "<|START_ACTION|>[1]<|END_ACTION|>") == Recorder(text="[1]<|END_ACTION|>")
    unknown = '[{"nothing": {"a": 1}}]<|tools_suffix|>'
    assert parse_calls(APERTUS, *f"<|tools_prefix|>{unknown}") == Recorder(text=unknown)
    broken = parse_calls(MISTRAL, *'[TOOL_CALLS]weather[ARGS]{"a": 1]}')
    assert broken == Recorder(calls=[("weather", '{"a": 1]}')])


def test_deep_nesting_is_no_danger() -> None:
    deep = "[" * 100_000
    answer = f'<tool_call>{{"arguments": {deep}{"]" * 100_000}, "name": "weather"}}</tool_call>'
    assert parse_calls(HERMES, answer) == Recorder(text=answer)
    python = f"```tool_code\nweather(a={'[' * 5000}{']' * 5000})\n```"
    assert parse_calls(GEMMA, python) == Recorder(text=python)


def test_lists_and_objects_may_be_written_as_python_writes_them() -> None:
    """Templates of Seed-OSS and MiniCPM 5 write the values of earlier calls so."""
    schema = {"type": "object"}
    assert json.loads(json_of("{'a': [1, None, True], 'b': 't'}", schema)) == {"a": [1, None, True], "b": "t"}
    assert json.loads(json_of("['p', 'q, r']", {"type": "array"})) == ["p", "q, r"]
    for text in ("{'a': f()}", "{1, 2}", "[b'x']", "['a'", "[" * 5000, "['" + "x" * 70_000 + "']"):
        assert json.loads(json_of(text, schema)) == text
    assert json.loads(json_of("['p']", {"type": "string"})) == "['p']"
