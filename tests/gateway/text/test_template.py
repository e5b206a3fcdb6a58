from __future__ import annotations

import json
import threading

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.core.errors import InvalidRequest, ModelLoadError
from penstock.gateway.prompts import ChatMessage, ChatPrompt, TextPart, Tool, ToolCall
from penstock.gateway.text import template_sandbox
from penstock.gateway.text.template import (
    DIRECT_RENDER_CHARACTERS,
    DIRECT_RENDER_MESSAGES,
    ChatTemplate,
    RenderedChat,
)
from tests.gateway.fake_engine import model_card

HELLO = (ChatMessage("user", "hello"),)


def render(template: str, messages: tuple[ChatMessage, ...] = HELLO, **options: object) -> str:
    prompt = ChatPrompt(messages=messages, template_options=options)
    return ChatTemplate(model_card(chat_template=template)).render(prompt).text


def test_messages_special_tokens_and_generation_prompt() -> None:
    template = ChatTemplate(model_card())
    messages = (ChatMessage("system", "be kind"), *HELLO)
    assert template.render(ChatPrompt(messages=messages)).text == (
        "<|system|>be kind<|end|><|user|>hello<|end|><|assistant|>"
    )
    assert not template.render(ChatPrompt(messages=messages, add_generation_prompt=False)).text.endswith(
        "<|assistant|>"
    )


@pytest.mark.parametrize(
    ("thinks", "expected"), [(True, "True enabled"), (False, "False disabled"), (None, "- -")]
)
def test_templates_know_by_several_names_whether_to_think(thinks: bool | None, expected: str) -> None:
    template = "{{ enable_thinking | default('-') }} {{ thinking_mode | default('-') }}"
    prompt = ChatPrompt(messages=HELLO, thinks=thinks)
    assert ChatTemplate(model_card(chat_template=template)).render(prompt).text == expected


def test_text_parts_are_joined() -> None:
    assert (
        render("{{ messages[0].content }}", (ChatMessage("user", (TextPart("a"), TextPart("b"))),)) == "a\nb"
    )


def test_name_is_given_only_when_there_is_one() -> None:
    template = "{% for message in messages %}{{ message.name if 'name' in message else '-' }}{% endfor %}"
    assert render(template, (ChatMessage("user", "x", "Ada"), ChatMessage("user", "x"))) == "Ada-"


def test_blocks_are_trimmed_and_loops_may_break() -> None:
    template = (
        "{% for message in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\nx\n{% endfor %}"
    )
    assert render(template, HELLO * 3) == "x\n"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ value | tojson }}", value={"a": "<é>"}) == '{"a": "<é>"}'


def test_helpers_of_the_hub_are_there() -> None:
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hello"


def test_template_refusals_and_failures_are_the_clients_errors() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="TypeError") as error:
        render("{{ messages[0].content + 1 }}")
    assert error.value.param == "messages"


def test_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidRequest):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        render("{{ messages.extend([1]) }}")


def test_lists_may_grow_and_nothing_else_may_change() -> None:
    """A template for Kimi K2 that comes with llama.cpp does so; transformers refuses it."""
    growing = "{% set queue = namespace(ids=[]) %}{% for each in messages %}{% set _ = queue.ids.append(each.role) %}"
    assert render(growing + "{% endfor %}{{ queue.ids[0] }}") == "user"
    for change in ("messages.clear()", "messages[0].update({})", "messages.insert(0, 1)"):
        with pytest.raises(InvalidRequest):
            render("{{ " + change + " }}")


def test_model_without_a_template_says_so() -> None:
    template = ChatTemplate(model_card(chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template") as error:
        template.render(ChatPrompt(messages=HELLO))
    assert "/v1/completions" in (error.value.hint or "")


def test_unreadable_template_is_the_operators_error() -> None:
    with pytest.raises(ModelLoadError):
        ChatTemplate(model_card(chat_template="{% if %}"))


def test_options_take_the_place_of_nothing_that_is_checked_elsewhere() -> None:
    options = {
        "eos_token": "<|system|>",
        "tools": ["x"],
        "messages": [],
        "add_generation_prompt": False,
        "tone": "dry<|system|>",
    }
    template = (
        "{{ eos_token }}|{{ tools is none }}|{{ messages | length }}|{{ add_generation_prompt }}|{{ tone }}"
    )
    rendered = ChatTemplate(model_card(chat_template=template)).render(
        ChatPrompt(messages=HELLO, template_options=options)
    )
    assert rendered.text == "<|end|>|True|1|True|dry<|system|>"
    ((start, end),) = rendered.plain_ranges  # and none of it is read as a control token
    assert rendered.text[start:end] == "<|system|>"


CALL = ToolCall("1", "f", "{}")


async def test_a_chat_of_many_turns_is_written_off_the_event_loop() -> None:
    seen: list[bool] = []

    class Watched(ChatTemplate):
        def render(self, prompt: ChatPrompt) -> RenderedChat:
            seen.append(threading.current_thread() is threading.main_thread())
            return super().render(prompt)

    template = Watched(model_card())
    short = await template.render_later(ChatPrompt(messages=HELLO))
    long = await template.render_later(ChatPrompt(messages=HELLO * (DIRECT_RENDER_MESSAGES + 1)))
    assert seen == [True, False]
    assert len(long.text) > len(short.text) * DIRECT_RENDER_MESSAGES / 2
    much = "x" * (DIRECT_RENDER_CHARACTERS + 1)
    for changed in (
        ChatPrompt(messages=(ChatMessage("assistant", "", tool_calls=(ToolCall("1", "f", much),)),)),
        ChatPrompt(messages=(ChatMessage("assistant", "", reasoning=much),)),
        ChatPrompt(messages=HELLO, tools=(Tool("f", parameters={"description": much}),)),
        ChatPrompt(messages=HELLO, template_options={"option": much}),
        ChatPrompt(messages=HELLO, tools=(Tool("f"),) * DIRECT_RENDER_MESSAGES),
        ChatPrompt(messages=(ChatMessage("assistant", "", tool_calls=(CALL,) * DIRECT_RENDER_MESSAGES),)),
        ChatPrompt(messages=(ChatMessage("user", (TextPart("x"),) * (DIRECT_RENDER_MESSAGES + 1)),)),
    ):
        await template.render_later(changed)
    assert seen == [True] + [False] * 8


TOOLS = (Tool("wetter", "Tells <it>.", {"type": "object", "properties": {"ort": {"type": "string"}}}),)
WIRE_TOOLS = [
    {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }
    for tool in TOOLS
]
CHAT = (
    ChatMessage("system", "Be kind."),
    ChatMessage("user", "Wetter in Köln?"),
    ChatMessage(
        "assistant",
        "",
        tool_calls=(ToolCall("call_1", "wetter", '{"ort": "Köln", "tage": 2}'),),
        reasoning="Look it up.",
    ),
    ChatMessage("tool", "Regen", "wetter", tool_call_id="call_1"),
)
WIRE_CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Wetter in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Look it up.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "wetter", "arguments": {"ort": "Köln", "tage": 2}},
            }
        ],
    },
    {"role": "tool", "content": "Regen", "tool_call_id": "call_1", "name": "wetter"},
]
TURNS = (
    "{%- for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}{{ m.tool_calls | default('', true) | length }}"
    "{%- endfor %}"
)
# What the templates of known families do, in small.
FAMILIES = {
    "glm": "{% for tool in tools %}\n{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}" + TURNS,
    "kimi": "{{ tools | tojson(separators=(',', ':')) }}{{ tools | tojson(sort_keys=true, indent=2) }}"
    + TURNS,
    "minimax": "{%- for m in messages if m.tool_calls %}{%- for call in m.tool_calls %}"
    '{%- for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">'
    "{{ value | tojson(ensure_ascii=False) if value is not string else value }}</parameter>{%- endfor %}"
    "{%- endfor %}{%- endfor %}",
    "qwen3": "{%- set ns = namespace(last=-1) %}{%- for m in messages[::-1] %}"
    "{%- if m.role == 'user' and ns.last < 0 %}{%- set ns.last = loop.revindex0 %}{%- endif %}{%- endfor %}"
    "{{ ns.last }}{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}",
    "gpt-oss": "{%- macro render(m, extra='') %}{% if 'thinking' in m %}[{{ m.thinking }}]{% endif %}"
    "{{ m.content | trim ~ extra }}"
    "{{ '+' if m.tool_calls }}{% endmacro %}{% for m in messages %}{{ render(m, extra='.') }}{% endfor %}",
    "command": "{% if documents %}{% for d in documents %}{{ loop.index }}:{{ d.title }}{% endfor %}{% endif %}"
    "{% if tools is not none %}{{ tools | length }}{% endif %}" + TURNS,
    "llama": "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if tools is not none %}{{ tools[0] | tojson(indent=4) }}{%- endif %}{{ messages[0]['content'] | trim }}",
    "loops": "{% for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "{% generation %}{{ m.role | upper }}{% endgeneration %}\n{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% endfor %}{{ dict(a=1) | items | list }}",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"enable_thinking": False, "documents": [{"title": "T", "text": "x"}]}]
)
def test_templates_of_known_families_render_as_in_transformers(
    family: str, options: dict[str, object]
) -> None:
    template = "{% if tools %}{% endif %}" + FAMILIES[family]
    (expected,), _ = render_jinja_template(
        [WIRE_CHAT], tools=WIRE_TOOLS, chat_template=template, add_generation_prompt=True, **options
    )
    prompt = ChatPrompt(messages=CHAT, tools=TOOLS, template_options=options)
    assert ChatTemplate(model_card(chat_template=template)).render(prompt).text == expected


def test_an_answer_goes_on_where_the_last_message_ends_as_in_transformers() -> None:
    template = TURNS + "<end>{% if add_generation_prompt %}<assistant>{% endif %}"
    chat = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    (expected,), _ = render_jinja_template([chat], chat_template=template, continue_final_message=True)
    messages = tuple(ChatMessage(each["role"], each["content"]) for each in chat)
    prompt = ChatPrompt(messages=messages, continues_last=True)
    assert ChatTemplate(model_card(chat_template=template)).render(prompt).text == expected


def test_one_of_several_templates_is_taken_by_name_or_for_tools() -> None:
    card = model_card(
        chat_template="plain", named_templates={"tool_use": "{{ tools[0].function.name }}", "rag": "rag"}
    )
    template = ChatTemplate(card)

    def text(**fields: object) -> str:
        return template.render(ChatPrompt(messages=HELLO, **fields)).text  # type: ignore[arg-type]

    assert text() == "plain"
    assert text(tools=TOOLS) == "wetter"
    assert text(template_name="rag", tools=TOOLS) == "rag"
    assert text(template_name="default", tools=TOOLS) == "plain"
    with pytest.raises(InvalidRequest, match="no chat template with the name") as error:
        text(template_name="{{ messages }}")
    assert error.value.param == "chat_template"


def test_thoughts_give_way_where_a_template_takes_no_thoughts_beside_text_and_calls() -> None:
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}{% if m.content and m.thinking %}"
        "{{ raise_exception('both') }}{% endif %}{{ m.content }}{{ '+' if m.tool_calls }}{% endfor %}"
    )
    call = ToolCall("call_1", "wetter", "{}")
    prompt = ChatPrompt(messages=(ChatMessage("assistant", "So:", tool_calls=(call,), reasoning="Hm."),))
    assert ChatTemplate(model_card(chat_template=template)).render(prompt).text == "So:+"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 2 ** 100000000 }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ lipsum() }}",
    ],
)
def test_templates_are_bounded_in_time_and_size(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_S", 0.05)
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_CHARACTERS", 1 << 20)
    with pytest.raises(InvalidRequest):
        render(template)


def test_json_options_reach_the_text() -> None:
    value = {"b": "é", "a": [1]}
    template = "{{ value | tojson(ensure_ascii=True, indent=1, sort_keys=True) }}"
    assert render(template, value=value) == json.dumps(value, ensure_ascii=True, indent=1, sort_keys=True)
