"""Which format a model gets, and how tools reach models whose templates know nothing of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import get_args

import llguidance
import msgspec
import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.gateway_config import GatewayConfig, ReasoningParser, ToolCallParser
from penstock.core.grammar_text import MAX_TEXT_BEHIND, grammar_text, token_ids_by_number
from penstock.core.messages import ModelCard
from penstock.core.request import Grammar, SamplingParams
from penstock.engine.grammar import with_unspellable_tokens
from penstock.gateway.models.served_model import ServedModel
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SamplingOptions,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from penstock.gateway.text.template import ChatTemplate, described_in_words, with_single_calls
from penstock.gateway.tools.answer_form import (
    MAX_FORCED_CALLS,
    REASONING,
    leaves_room_for_calls,
    reasoning_of,
    tool_grammar,
)
from penstock.gateway.tools.call_parser import CONTROL_TOKENS
from penstock.gateway.tools.formats import (
    FORMATS,
    GEMMA,
    HARMONY,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    tool_format_of,
)
from penstock.gateway.tools.parser import THINK
from penstock.gateway.tools.tool_format import ToolFormat
from tests.gateway.fake_engine import CHAT_TEMPLATE, byte_tokenizer, engine_ready, model_card
from tests.gateway.tools.recorder import Recorder, feed, parse_calls

WEATHER = Tool(
    "weather",
    "Tells it.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
TIME = Tool("get_time")
USER = ChatMessage("user", "Weather?")
CALLS = ChatMessage("assistant", "", tool_calls=(ToolCall("call_1", "weather", '{"city": "Rome"}'),))
RESULT = ChatMessage("tool", "sunny", tool_call_id="call_1")


# Parts of the makers' templates, and the families that have them.
@pytest.mark.parametrize(
    ("template", "families", "expected"),
    [
        (
            "… <tool_call>\n{…} …",
            "llama qwen2 qwen3 qwen3_moe qwen3_next mimo smollm3 exaone4 exaone_moe afmoe ernie4_5_moe "
            "granitemoehybrid",
            HERMES,
        ),
        ("… [TOOL_CALLS] …", "mistral mixtral", MISTRAL),
        ("… [TOOL_CALLS]…[ARGS] …", "mistral ministral3 mistral4", MISTRAL_ARGS),
        ("… <|python_tag|> …", "llama", LLAMA3_JSON),
        ("… <tool_call>{name}\n<arg_key> …", "glm4_moe glm4_moe_lite glm_moe_dsa", FORMATS["glm45"]),
        (
            "… <tool_call>\n<function= … <parameter= …",
            "qwen3_moe qwen3_next qwen3_5 qwen3_5_moe mimo_v2_flash nemotron_h",
            FORMATS["qwen3_coder"],
        ),
        ("… <minimax:tool_call> …", "minimax_m2", FORMATS["minimax_m2"]),
        ("… <|tool_calls_section_begin|> …", "deepseek_v3 kimi_linear", FORMATS["kimi_k2"]),
        ("… <｜tool▁calls▁begin｜> … ```json …", "deepseek_v3", FORMATS["deepseek_v3"]),
        ("… <｜tool▁calls▁begin｜> …", "deepseek_v3", FORMATS["deepseek_v31"]),
        ("… <|channel|>commentary …", "gpt_oss", FORMATS["harmony"]),
        ("… <|tool_call|> …", "granite granitemoe", FORMATS["granite"]),
        ("… <seed:tool_call>\n<function=name> … <parameter= …", "seed_oss", FORMATS["seed_oss"]),
        ("List of tools: <|tool_list_start|>[ …", "lfm2 lfm2_moe", FORMATS["lfm2"]),
        ("… <TOOLCALL>[{…}]</TOOLCALL> …", "llama nemotron_h", FORMATS["nemotron"]),
        ("… <|tool_call>call: … <tool_call|> …", "gemma4", FORMATS["gemma4"]),
        ("… <|START_ACTION|>[ … <|START_RESPONSE|> …", "cohere2", FORMATS["command"]),
        ("… <tool_calls>[ …", "jamba hunyuan_v1_dense hunyuan_v1_moe minimax", FORMATS["jamba"]),
        ("… <function_calls> …", "olmo3", FORMATS["olmo3"]),
        ("… <|tools_prefix|> …", "apertus", FORMATS["apertus"]),
        ("… <｜DSML｜function_calls> … <｜tool▁calls▁begin｜> …", "deepseek_v32", FORMATS["deepseek_v32"]),
        ("… <｜tool▁calls▁begin｜> …", "deepseek_v32", FORMATS["deepseek_v31"]),
        ("… <function={name}>{…}</function> …", "llama", FORMATS["functionary"]),
        ('… <function name="…"><param name=… …', "llama", FORMATS["minicpm5"]),
        ("… <start_function_call>call: …", "gemma3", FORMATS["functiongemma"]),
        ("… set end = ':opensource' … '<tool_calls{}>'.format(end) …", "hy_v3", FORMATS["hy_v3"]),
        ("… <|tool_calls|><|tool_call:begin|> …", "solar_open", FORMATS["solar_open"]),
        ("… ]<]minimax[>[ … <tool_call> …", "minimax_m3", FORMATS["minimax_m3"]),
        ("… <|action_start|><|plugin|> …", "internlm2 internlm3", FORMATS["internlm"]),
        ("… <|tool|>…<|/tool|> …", "phi3", FORMATS["phi4_mini"]),
        ("… functools[{…}] …", "phi3", FORMATS["phi4_mini"]),
        ("… function call<|role_sep|> …", "deepseek_v3", FORMATS["gigachat3"]),
        ("… <longcat_tool_call> …", "longcat_flash", FORMATS["longcat"]),
        ("… the `directly-answer` tool …", "cohere", FORMATS["command_r"]),
        ("… <function_call> {…} …", "gpt_bigcode", FORMATS["granite"]),
        ("List of tools: [ …", "lfm2", FORMATS["lfm2"]),
        (CHAT_TEMPLATE, "internlm3", FORMATS["internlm"]),
        (None, "deepseek_v32", FORMATS["deepseek_v32"]),
        ("… {{ '<' + '｜DSML｜' + 'tool_calls>' }} …", "deepseek_v4", FORMATS["deepseek_v4"]),
        (None, "deepseek_v4", FORMATS["deepseek_v4"]),
        ("… <|python_start|> …", "llama4", FORMATS["pythonic"]),
        (CHAT_TEMPLATE, "gemma gemma2 gemma3", GEMMA),
        (CHAT_TEMPLATE, "llama", HERMES),
        (None, "qwen3", HERMES),
    ],
)
def test_the_template_tells_the_format(
    template: str | None, families: str, expected: ToolFormat, shows: Callable[..., None]
) -> None:
    for family in families.split():
        shows(family, "tools", f"`{expected.name}`")
        card = model_card(chat_template=template, architecture=family)
        assert tool_format_of(card) is expected
        assert tool_format_of(card, "mistral") is MISTRAL
        assert tool_format_of(card, "none") is None


def test_a_template_for_tools_tells_the_format() -> None:
    card = model_card(chat_template=CHAT_TEMPLATE, named_templates={"tool_use": "… directly-answer …"})
    assert tool_format_of(card) is FORMATS["command_r"]


@pytest.mark.parametrize(
    ("template", "families", "marks"),
    [
        (
            "…<think>…",
            "llama qwen2 qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_moe mimo mimo_v2_flash deepseek_v3 deepseek_v32 "
            "deepseek_v4 glm4_moe glm4_moe_lite glm_moe_dsa smollm3 exaone4 exaone_moe minimax minimax_m2 nemotron_h "
            "olmo3 phi3 afmoe ernie4_5_moe",
            "think",
        ),
        ("… content.split('</think>')[-1] …", "qwen3", "think"),
        ("…<seed:think>…", "seed_oss", "seed_oss"),
        ("…<|channel>thought…<channel|>…", "gemma4", "gemma4"),
        ("…[THINK]…", "mistral ministral3 mistral4", "mistral"),
        ("…<|START_THINKING|>…<|START_RESPONSE|>…", "cohere2", "command"),
        ("…<think>…<answer>…", "hunyuan_v1_dense hunyuan_v1_moe", "hunyuan"),
        ("…<think>…<response>…", "granite granitemoe ernie4_5_moe", "responses"),
        ("…<mm:think>…", "minimax_m3", "minimax_m3"),
        ("…':opensource'…<think{}>…", "hy_v3", "hy_v3"),
        ("…<|think|>…<|content|>…", "solar_open", "solar_open"),
        ("…'Here are my reasoning steps:\\n'…[BEGIN FINAL RESPONSE]…", "mistral", "apriel"),
        ("…<|inner_prefix|>…", "apertus", "apertus"),
        ("…<|channel|>…", "gpt_oss", "harmony"),
        ("…", "*", None),
    ],
)
def test_the_template_tells_whether_a_model_thinks(
    template: str, families: str, marks: str | None, shows: Callable[..., None]
) -> None:
    for family in families.split():
        shows(family, "reasoning", f"`{marks}`" if marks else "–")
        card = model_card(chat_template=template, architecture=family)
        assert reasoning_of(card) is (REASONING[marks] if marks else None)
        assert reasoning_of(card, "qwen3") is THINK
        assert reasoning_of(card, "none") is None


def test_every_parser_has_a_name() -> None:
    thoughts = {reasoning_of(model_card(), name) for name in get_args(ReasoningParser)}
    assert thoughts == {None, *REASONING.values()}
    named = [tool_format_of(model_card(), name) for name in get_args(ToolCallParser)]
    assert [each for each in FORMATS.values() if each not in named] == []


# As Gemma 2's.
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)


def test_tools_stand_in_the_users_turn_where_a_template_has_no_other() -> None:
    text = render(NO_SYSTEM, USER)
    assert text.startswith("<user># Tools\n\nYou may call")
    assert text.endswith("<tool_response></tool_response>.\n\nWeather?")
    with pytest.raises(InvalidRequest, match="System role not supported"):
        render(NO_SYSTEM, ChatMessage("system", "Be kind."), USER)


def render(template: str, *messages: ChatMessage, tool_format: ToolFormat = HERMES) -> str:
    prompt = ChatPrompt(messages=messages, tools=(WEATHER,))
    return ChatTemplate(model_card(chat_template=template), tool_format).render(prompt).text


def test_a_template_that_knows_tools_gets_them_as_the_hub_writes_them() -> None:
    template = "{{ tools[0].function.name }} {{ tools[0].function.parameters.required[0] }}"
    assert render(template, USER) == "weather city"
    calls = "{% if tools %}{% endif %}{{ messages[1].tool_calls[0].function.arguments.city }}"
    assert render(calls, USER, CALLS) == "Rome"


def test_a_result_knows_the_name_of_its_tool() -> None:
    template = "{% if tools %}{% endif %}{% for m in messages %}{{ m.name or '-' }}:{{ m.tool_call_id }} {% endfor %}"
    assert render(template, CALLS, RESULT) == "-: weather:call_1 "


PARALLEL = (
    USER,
    ChatMessage(
        "assistant", "So:", tool_calls=(ToolCall("a", "weather", "{}"), ToolCall("b", "get_time", "{}"))
    ),
    ChatMessage("tool", "noon", tool_call_id="b"),
    ChatMessage("tool", "sunny", tool_call_id="a"),
    ChatMessage("assistant", "Well."),
)


def test_a_template_that_takes_one_call_in_a_turn_gets_one() -> None:
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call only') }}{% endif %}{{ m.role }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}:{{ m.content }} {% endfor %}"
    )
    assert render(template, *PARALLEL) == (
        "user:Weather? assistant(weather):So: tool:sunny assistant(get_time): tool:noon assistant:Well. "
    )


def test_single_calls_are_each_followed_by_a_result() -> None:
    told = with_single_calls(PARALLEL)
    assert [message.role for message in told] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert with_single_calls(told) == told
    unanswered = with_single_calls(PARALLEL[:2])
    assert [len(message.tool_calls) for message in unanswered] == [0, 1, 1]


def test_a_template_that_wants_arguments_as_text_gets_them() -> None:
    template = "{% if tools %}{% endif %}{{ 'args ' + messages[1].tool_calls[0].function.arguments }}"
    assert render(template, USER, CALLS) == 'args {"city": "Rome"}'


def test_a_template_that_refuses_everything_says_so() -> None:
    with pytest.raises(InvalidRequest, match="never"):
        render("{% if tools %}{% endif %}{{ raise_exception('never') }}", *PARALLEL)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("lfm2", '<|tool_call_start|>[{"name": "weather"'),
        ("hermes", '"name": "weather"'),
    ],
)
def test_a_template_that_writes_no_calls_gets_them_in_the_text(name: str, written: str) -> None:
    call = ChatMessage(
        "assistant", "Let me see.", tool_calls=(ToolCall("1", "weather", '{"city": "Paris"}'),)
    )
    template = (
        "{% if tools %}{% endif %}{% for each in messages %}[{{ each.role }}] {{ each.content }}{% endfor %}"
    )
    made = render(template, call, tool_format=FORMATS[name])
    assert made.startswith("[assistant] Let me see.")
    assert written in made
    knows = template.replace("[{{", "{{ each.tool_calls }}[{{")
    assert written not in render(knows, call, tool_format=FORMATS[name]).partition("[assistant]")[2]


def test_broken_arguments_of_an_earlier_call_stay_text() -> None:
    broken = ChatMessage("assistant", "", tool_calls=(ToolCall("1", "weather", '{"city": '),))
    template = "{% if tools %}{% endif %}{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(template, broken) == '{"city": '


def test_mistral_gets_ids_of_nine_characters() -> None:
    template = (
        "{% if tools %}{% endif %}{{ messages[0].tool_calls[0].id }} {{ messages[1].tool_call_id }} "
        "{{ messages[2].tool_call_id }}"
    )
    other = ChatMessage("tool", "x", tool_call_id="abc123XYZ")
    first, second, third = render(template, CALLS, RESULT, other, tool_format=MISTRAL).split(" ")
    assert first == second
    assert len(first) == 9
    assert first.isalnum()
    assert third == "abc123XYZ"


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_without_a_template_for_it_everything_is_said_in_words(
    tool_format: ToolFormat, shows: Callable[..., None]
) -> None:
    shows("*", "tools", "in words")
    messages = (ChatMessage("system", (TextPart("Be brief."),)), USER, CALLS, RESULT)
    system, user, called, result = described_in_words(messages, (WEATHER, TIME), tool_format)
    text = "\n".join(part.text for part in system.content if isinstance(part, TextPart))
    assert text.startswith("Be brief.\n\n# Tools")
    assert tool_format.call_head("<function name>") in text
    described = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line)["function"]["name"] for line in described] == ["weather", "get_time"]
    assert user is USER
    assert not called.tool_calls
    assert isinstance(called.content, tuple)
    assert called.content[0].text == tool_format.written(CALLS.tool_calls)
    assert result.role == "user"


def test_without_a_system_prompt_there_is_one() -> None:
    system, user = described_in_words((USER,), (WEATHER,), HERMES)
    assert system.role == "system"
    assert user is USER
    assert described_in_words((USER,), (), HERMES) == (USER,)


SEVERAL = [tool_format for tool_format in FORMATS.values() if not tool_format.calls_once]


def choosing(mode: str, *tools: Tool, name: str | None = None, parallel: bool = True) -> ChatPrompt:
    choice = ToolChoice(mode, name, parallel)  # type: ignore[arg-type]
    return ChatPrompt(messages=(USER,), tools=tools, tool_choice=choice)


@lru_cache(maxsize=8)
def byte_matcher(text: str) -> llguidance.LLMatcher:
    tokenizer = llguidance.LLTokenizer(byte_tokenizer().to_str(), eos_token=256)
    matcher = llguidance.LLMatcher(tokenizer, text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the grammar lets the whole text through, and lets it end there."""
    matcher = byte_matcher(grammar_text(grammar, {})).deep_copy()
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


@pytest.mark.parametrize("tool_format", SEVERAL, ids=lambda each: each.name)
def test_the_grammar_of_a_format_is_what_it_writes(tool_format: ToolFormat) -> None:
    rome, time = ToolCall("1", "weather", '{"city": "Rome"}'), ToolCall("2", "get_time", "{}")
    required = tool_grammar(choosing("required", WEATHER, TIME), tool_format)
    named = tool_grammar(choosing("named", WEATHER, TIME, name="get_time"), tool_format)
    single = tool_grammar(choosing("required", WEATHER, TIME, parallel=False), tool_format)
    assert required is not None
    assert named is not None
    assert single is not None
    assert accepts(required, tool_format.written((rome,)))
    assert accepts(required, tool_format.written((rome, time)))
    assert not accepts(required, tool_format.written((ToolCall("1", "weather", '{"town": 1}'),)))
    assert not accepts(required, "Hello")
    assert accepts(named, tool_format.written((time,)))
    assert not accepts(named, tool_format.written((rome,)))
    assert accepts(single, tool_format.written((rome,)))
    assert not accepts(single, tool_format.written((rome, time)))


@pytest.mark.parametrize("tool_format", SEVERAL, ids=lambda each: each.name)
def test_forced_calls_come_to_an_end(tool_format: ToolFormat) -> None:
    required = tool_grammar(choosing("required", WEATHER, TIME), tool_format)
    assert required is not None
    calls = [ToolCall(str(index), "get_time", "{}") for index in range(MAX_FORCED_CALLS + 1)]
    assert accepts(required, tool_format.written(tuple(calls[:-1])))
    assert not accepts(required, tool_format.written(tuple(calls)))


@pytest.mark.parametrize("tool_format", SEVERAL, ids=lambda each: each.name)
@pytest.mark.parametrize("num_calls", [1, 2, MAX_FORCED_CALLS])
def test_a_model_that_must_call_may_stop_behind_a_call_and_behind_its_separator(
    tool_format: ToolFormat, num_calls: int
) -> None:
    required = tool_grammar(choosing("required", WEATHER, TIME), tool_format)
    named = tool_grammar(choosing("named", WEATHER, TIME, name="get_time"), tool_format)
    assert required is not None
    assert named is not None
    calls = tuple(ToolCall(str(index), "get_time", "{}") for index in range(num_calls))
    written = tool_format.written(calls).removesuffix(tool_format.list_end)
    for end in ("", tool_format.separator, tool_format.separator + tool_format.list_end):
        assert accepts(required, written + end)
        parsed = parse_calls(tool_format, written + end)
        assert (parsed.calls, parsed.text) == ([("get_time", "{}")] * num_calls, "")
    assert accepts(named, tool_format.written(calls[:1]).removesuffix(tool_format.list_end))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tool_format", SEVERAL, ids=lambda each: each.name)
def test_text_behind_forced_calls_may_begin_but_holds_no_calls(
    tool_format: ToolFormat, *, special: bool
) -> None:
    tokenizer = byte_tokenizer()
    if special:
        tokenizer.add_tokens([text for text in tool_format.control_texts if len(text) > 1])
    card = model_card(tokenizer=tokenizer)
    time, rome = ToolCall("1", "get_time", "{}"), ToolCall("2", "weather", '{"city": "Rome"}')
    written, another = tool_format.written((time,)), tool_format.written((time, rome))
    grammar = tool_grammar(choosing("required", WEATHER, TIME), tool_format)
    assert grammar is not None
    allows = token_matcher(grammar, card)
    for text in ("\nIt is", "\n\nIt is", tool_format.separator + "It is", "\n<tool_response>"):
        assert allows(tokenizer.encode(written + text).ids)
        assert parse_calls(tool_format, written + text).calls == [("get_time", "{}")]
    assert allows(tokenizer.encode(another).ids)
    assert not allows(tokenizer.encode(another.replace("city", "town")).ids)
    assert not allows(tokenizer.encode(f"{written} and {written}").ids)
    assert not allows(tokenizer.encode(written + "\n" + "." * (MAX_TEXT_BEHIND + 1)).ids)
    single = tool_grammar(choosing("required", WEATHER, TIME, parallel=False), tool_format)
    assert single is not None
    assert not token_matcher(single, card)(tokenizer.encode(f"{written}\nIt is").ids)


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_a_forced_call_has_no_arguments_but_those_of_its_tool(tool_format: ToolFormat) -> None:
    required = tool_grammar(choosing("required", WEATHER, TIME), tool_format)
    assert required is not None
    for name, arguments in (("weather", '{"city": "Rome", "mood": 1}'), ("get_time", '{"zone": "UTC"}')):
        assert not accepts(required, tool_format.written((ToolCall("1", name, arguments),)))


def test_a_turn_in_harmony_has_one_call() -> None:
    rome, time = ToolCall("1", "weather", '{"city": "Rome"}'), ToolCall("2", "get_time", "{}")
    required = tool_grammar(choosing("required", WEATHER, TIME), HARMONY)
    assert required is not None
    assert accepts(required, HARMONY.written((rome,)))
    assert not accepts(required, HARMONY.written((rome, time)))
    assert not accepts(required, HARMONY.written((ToolCall("1", "weather", '{"town": 1}'),)))


TYPED = Tool(
    "typed",
    None,
    {
        "type": "object",
        "properties": {
            "mood": {"enum": ["good", "bad"]},
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        },
        "required": ["count"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    },
)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "minimax_m2", "deepseek_v32"])
def test_forced_parameters_have_the_types_of_their_schema(name: str, *, special: bool) -> None:
    tool_format = FORMATS[name]
    tokenizer = byte_tokenizer()
    if special:
        tokenizer.add_tokens([text for text in tool_format.control_texts if len(text) > 1])
    grammar = tool_grammar(choosing("named", TYPED, name="typed"), tool_format)
    assert grammar is not None
    allows = token_matcher(grammar, model_card(tokenizer=tokenizer))

    def allowed(arguments: str) -> bool:
        return allows(tokenizer.encode(tool_format.written((ToolCall("1", "typed", arguments),))).ids)

    assert allowed('{"count": 5}')
    assert allowed('{"mood": "bad", "text": "a < b\\n\\nc", "count": 5, "places": [{"x": 1}]}')
    assert not allowed('{"text": "a"}')
    assert not allowed('{"count": "five"}')
    assert not allowed('{"mood": "odd", "count": 5}')
    assert not allowed('{"count": 5, "places": [{"x": "y"}]}')
    assert not allowed('{"count": 5, "other": 1}')


def test_strict_tools_leave_the_rest_of_an_answer_free() -> None:
    strict = Tool(WEATHER.name, WEATHER.description, WEATHER.parameters, strict=True)
    grammar = tool_grammar(choosing("auto", strict, TIME), HERMES)
    assert grammar is not None
    call = HERMES.written((ToolCall("1", "weather", '{"city": "Rome"}'),))
    assert accepts(grammar, "Just words.")
    assert accepts(grammar, f"Let me see. {call}")
    assert not accepts(grammar, call.replace("city", "town"))
    assert tool_grammar(choosing("auto", WEATHER, TIME), HERMES) is None


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_json_or_a_call_instead_of_it(tool_format: ToolFormat) -> None:
    schema = Grammar(
        "json_schema", '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'
    )
    begins_as_json = tool_format.head.startswith("{") and not tool_format.list_start
    if begins_as_json or tool_format is HARMONY:
        assert not leaves_room_for_calls(schema, tool_format)
        return
    assert leaves_room_for_calls(schema, tool_format)
    grammar = tool_grammar(choosing("auto", WEATHER), tool_format, schema)
    assert grammar is not None
    assert accepts(grammar, '{"x": 1}')
    assert accepts(grammar, tool_format.written((ToolCall("1", "weather", '{"city": "Rome"}'),)))
    assert not accepts(grammar, '{"y": 1}')
    assert not accepts(grammar, "Words.")


async def test_an_answers_own_grammar_and_tools() -> None:
    model = ServedModel(engine_ready(model_card(max_model_len=4096)), GatewayConfig())
    with_json = (await model.prepare(choosing("auto", WEATHER), Grammar("json"))).form
    assert with_json is not None
    assert with_json.grammar is not None
    assert (await model.prepare(choosing("auto", WEATHER), Grammar("regex", "a+"))).form is None
    forced = (await model.prepare(choosing("required", WEATHER), Grammar("regex", "a+"))).form
    assert forced is not None


async def test_a_server_that_parses_no_calls_cannot_force_them() -> None:
    model = ServedModel(engine_ready(model_card(max_model_len=4096)), GatewayConfig(tool_call_parser="none"))
    assert (await model.prepare(choosing("auto", WEATHER))).form is None
    with pytest.raises(InvalidRequest):
        await model.prepare(choosing("required", WEATHER))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("internlm", {"<|action_start|>", "<|plugin|>", "<|action_end|>"}),
        ("gigachat3", {"<|function_call|>", "<|role_sep|>"}),
        ("hy_v3", {"<tool_call:opensource>", "<tool_sep:opensource>", "<arg_key:opensource>"}),
        ("solar_open", {"<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"}),
        ("minicpm5", {"<function", "</param>"}),
        ("mistral_args", {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}),
        ("minimax_m3", {"]<]minimax[>["}),
    ],
)
def test_tokens_within_markers_are_shown_to_the_parser(name: str, tokens: set[str]) -> None:
    assert tokens <= set(FORMATS[name].control_texts)


async def test_markers_that_are_control_tokens_reach_the_parser() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<|eom|>"])
    card = model_card(
        tokenizer=tokenizer, chat_template=CHAT_TEMPLATE + "{# [TOOL_CALLS] #}", max_model_len=4096
    )
    model = ServedModel(engine_ready(card), GatewayConfig())
    prepared = await model.prepare(choosing("auto", WEATHER))
    assert prepared.form is not None
    marker, other = tokenizer.token_to_id("[TOOL_CALLS]"), tokenizer.token_to_id("<|eom|>")
    assert prepared.form.shown_token_ids == {marker}
    detokenizer = model.tokenizer.detokenizer((), prepared.form.shown_token_ids)
    assert detokenizer.push((marker, other, 97)) == "[TOOL_CALLS]a"
    assert model.tokenizer.detokenizer(()).push((marker, other, 97)) == "a"
    assert (await model.prepare(choosing("none", WEATHER))).form is None


@pytest.mark.parametrize("opens", [True, False])
async def test_thoughts_are_bounded_where_tokens_mark_them(*, opens: bool) -> None:
    def thinking(*tools: Tool) -> ChatPrompt:
        return ChatPrompt(messages=(USER,), tools=tools, thinks=True, max_thinking_tokens=4)

    template = CHAT_TEMPLATE + ("<think>" if opens else "{# <think> #}")
    as_text = ServedModel(
        engine_ready(model_card(chat_template=template, max_model_len=4096)), GatewayConfig()
    )
    form = (await as_text.prepare(thinking())).form
    assert form is not None
    assert form.grammar is None
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    card = model_card(tokenizer=tokenizer, chat_template=template, max_model_len=4096)
    model = ServedModel(engine_ready(card), GatewayConfig())
    start, end = ([tokenizer.token_to_id(marker)] for marker in ("<think>", "</think>"))
    strict = Tool(WEATHER.name, WEATHER.description, WEATHER.parameters, strict=True)
    opening = [] if opens else start
    for tools in ((), (WEATHER,), (strict,)):
        form = (await model.prepare(thinking(*tools))).form
        assert form is not None
        assert form.grammar is not None
        allows = token_matcher(form.grammar, card)
        assert allows(opening + tokenizer.encode("hm, é").ids[:4] + end + tokenizer.encode("Hi.").ids)
        assert allows(opening + end)
        assert not allows([*opening, *b"12345", *end])
        called = HERMES.written((ToolCall("1", "weather", '{"city": "Rome"}'),))
        assert not tools or allows(opening + end + tokenizer.encode(called).ids)
        assert opens or allows(list(b"No thoughts."))
        unbound = msgspec.structs.replace(thinking(*tools), max_thinking_tokens=None)
        free = (await model.prepare(unbound)).form
        assert free is not None
        assert (free.grammar is None) == (strict not in tools)


def token_matcher(grammar: Grammar, card: ModelCard, eos: int = 256) -> Callable[[list[int]], bool]:
    tokenizer_json = card.tokenizer_json
    tokenizer = llguidance.LLTokenizer(with_unspellable_tokens(tokenizer_json), eos_token=eos)
    text = grammar_text(grammar, token_ids_by_number(tokenizer_json))
    compiled = llguidance.LLMatcher(tokenizer, text, log_level=0)
    assert not compiled.is_error(), compiled.get_error()

    def allows(token_ids: list[int]) -> bool:
        matcher = compiled.deep_copy()
        return all(map(matcher.consume_token, token_ids)) and bool(matcher.is_accepting())

    return allows


ANSWERS = [
    (Grammar("json"), '{"x": 1}', "x"),
    (
        Grammar("json_schema", '{"type": "object", "properties": {"x": {"type": "integer"}}}'),
        '{"x": 1}',
        '{"x": "y"}',
    ),
    (Grammar("regex", "[a-c]+"), "abc", "abd"),
    (Grammar("choice", '["yes", "no"]'), "yes", "maybe"),
    (Grammar("ebnf", 'start: word "!"\nword: /[a-z]+/'), "hey!", "hey"),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), ANSWERS, ids=[each.kind for each, _, _ in ANSWERS])
@pytest.mark.parametrize("opens", [True, False])
async def test_a_bound_answer_comes_behind_the_thoughts(
    grammar: Grammar, right: str, wrong: str, *, opens: bool
) -> None:
    template = CHAT_TEMPLATE + (
        "{% if enable_thinking is not false %}<think>{% endif %}" if opens else "{# <think> #}"
    )
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    card = model_card(tokenizer=tokenizer, chat_template=template, max_model_len=4096)
    model = ServedModel(engine_ready(card), GatewayConfig())
    prompt = ChatPrompt(messages=(USER,), max_thinking_tokens=6)
    form = (await model.prepare(prompt, grammar)).form
    assert form is not None
    assert form.grammar is not None
    allows = token_matcher(form.grammar, card)
    start = [] if opens else [tokenizer.token_to_id("<think>")]
    end = tokenizer.token_to_id("</think>")
    for space in ("", "\n\n"):
        assert allows([*start, *b"hm", end, *(space + right).encode()])
        assert not allows([*start, *b"hm", end, *(space + wrong).encode()])
    assert not allows([*start, *b"too long", end, *right.encode()])
    assert allows([*right.encode()]) != opens
    recorder = Recorder()
    feed(form.parser(recorder), [*("" if opens else "<think>"), "hm</think>\n\n", right])
    assert recorder == Recorder(reasoning="hm", text=right)
    calm = msgspec.structs.replace(prompt, thinks=False)
    plain = (await model.prepare(calm, grammar)).form
    assert plain is not None
    assert plain.grammar == grammar
    await model.with_checked_grammar(SamplingParams(max_tokens=1, grammar=form.grammar), "w")


async def test_thoughts_and_bound_answers_have_channels_in_harmony() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    card = model_card(
        tokenizer=tokenizer, chat_template=CHAT_TEMPLATE + "{# <|channel|> #}", max_model_len=4096
    )
    model = ServedModel(engine_ready(card), GatewayConfig())
    prompt = ChatPrompt(messages=(USER,), max_thinking_tokens=20)
    form = (await model.prepare(prompt, Grammar("regex", "[a-c]+"))).form
    assert form is not None
    assert form.grammar is not None
    allows = token_matcher(form.grammar, card)
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>abc"
    for text, is_right in (
        (thoughts + final, True),
        (final, True),
        (thoughts + final + "d", False),
        ("abc", False),
        (thoughts.replace("Hm.", "Hm." * 10) + final, False),
    ):
        assert allows(tokenizer.encode(text).ids) == is_right, text
    recorder = Recorder()
    feed(form.parser(recorder), list(thoughts + final))
    assert recorder == Recorder(reasoning="Hm.", text="abc")
    bound = (await model.prepare(prompt)).form
    assert bound is not None
    assert bound.grammar is not None
    allows = token_matcher(bound.grammar, card, eos=260)  # <|end|> ends no answers in this format
    assert allows(tokenizer.encode(thoughts + "<|channel|>final<|message|>Anything.").ids)
    assert not allows(tokenizer.encode(thoughts.replace("Hm.", "Hm." * 10)).ids)
    forced = (await model.prepare(choosing("required", WEATHER))).form
    assert forced is not None
    assert forced.grammar is not None
    allows = token_matcher(forced.grammar, card)
    call = HARMONY.written((ToolCall("1", "weather", '{"city": "Rome"}'),))
    assert allows(tokenizer.encode(thoughts + call).ids)
    assert allows(tokenizer.encode(call).ids)
    assert not allows(tokenizer.encode(thoughts + final).ids)
    shown = {tokenizer.token_to_id(each) for each in CONTROL_TOKENS} - {256}
    assert bound.shown_token_ids >= shown


async def test_a_budget_for_thoughts_that_only_text_marks_is_refused() -> None:
    card = model_card(chat_template=CHAT_TEMPLATE + "{# <think> #}", max_model_len=4096)
    model = ServedModel(engine_ready(card), GatewayConfig())
    asked = GenerationRequest(
        prompts=(ChatPrompt(messages=(USER,), max_thinking_tokens=5),), sampling=SamplingOptions()
    )
    with pytest.raises(InvalidRequest, match="cannot be bounded"):
        model.check(asked)
