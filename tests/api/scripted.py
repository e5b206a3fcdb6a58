"""Engines that answer a chat by what stands in its prompt, with a context large enough for tools."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from tests.gateway.fake_engine import (
    CHAT_TEMPLATE,
    FakeEngine,
    byte_tokenizer,
    engine_ready,
    model_card,
    script_text,
)

# A template of the Hermes family that knows tools, and one that lets the model think.
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING_TEMPLATE = CHAT_TEMPLATE + "{% if enable_thinking is not false %}<think>\n{% endif %}"

_tokenizer = byte_tokenizer()


def prompt_of(request: Request) -> str:
    text: str = _tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    return text


def scripted(
    answer: str | Callable[[Request], str], *, template: str | None = CHAT_TEMPLATE, max_model_len: int = 8192
) -> FakeEngine:
    def script(request: Request) -> list[TokenEvent]:
        text = answer if isinstance(answer, str) else answer(request)
        return list(script_text(text, num_cached_tokens=2)(request))  # type: ignore[arg-type]

    card = model_card(chat_template=template, max_model_len=max_model_len)
    return FakeEngine(script, engine_ready(card, max_output_tokens=max_model_len))
