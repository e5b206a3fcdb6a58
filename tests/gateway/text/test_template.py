from __future__ import annotations

import threading

import pytest

from penstock.core.errors import InvalidRequest, ModelLoadError
from penstock.gateway.prompts import ChatMessage, ChatPrompt, TextPart
from penstock.gateway.text.template import DIRECT_RENDER_MESSAGES, ChatTemplate, RenderedChat
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
        render("{{ messages.append(1) }}")


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
    template = "{{ eos_token }}|{{ tools is defined }}|{{ messages | length }}|{{ add_generation_prompt }}|{{ tone }}"
    rendered = ChatTemplate(model_card(chat_template=template)).render(
        ChatPrompt(messages=HELLO, template_options=options)
    )
    assert rendered.text == "<|end|>|False|1|True|dry<|system|>"
    ((start, end),) = rendered.plain_ranges  # and none of it is read as a control token
    assert rendered.text[start:end] == "<|system|>"


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
