"""Cache marks on chats become token positions that the next request computes alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.gateway_config import GatewayConfig
from penstock.core.messages import EngineStats
from penstock.core.plan import CacheUse, TokenEvent
from penstock.core.request import CacheBreakpoint, FinishReason, Request
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.served_model import PreparedPrompt, ServedModel
from penstock.gateway.prompts import (
    CacheMark,
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SamplingOptions,
    TextPart,
    Tool,
    ToolCall,
)
from penstock.gateway.text.caching import (
    MAX_PIECES_BACK,
    MAX_RENDERINGS,
    PromptCacheSettings,
    locate,
    marked_pieces,
)
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card

SHORT, LONG = CacheMark(300.0), CacheMark(3600.0)

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS_FIRST = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + CHATML
SYSTEM_FIRST = (
    "<|system|>{{ messages[0].content }}\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>"
    "{% for message in messages[1:] %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
)
TRIMMING = CHATML.replace("message.content", "message.content | trim")
SYSTEM_LAST = (
    "{% for message in messages[1:] %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|system|>{{ messages[0].content }}<|end|>"
)
COUNTING = CHATML.replace("message.content", "message.content }}{{ message.content | length")
ALTERNATING = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('a user must speak last') }}{% endif %}"
    + COUNTING
)


def marked(text: str, mark: CacheMark | None = SHORT) -> tuple[TextPart, ...]:
    return (TextPart(text, mark),)


def chat(*messages: ChatMessage, tools: tuple[Tool, ...] = (), **settings: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages, tools=tools, **settings)


def served(template: str = CHATML) -> ServedModel:
    return ServedModel(engine_ready(model_card(chat_template=template, max_model_len=65536)), GatewayConfig())


def kept_texts(prompt: ChatPrompt, template: str = CHATML) -> list[str]:
    """The prefixes of the rendered chat that its marks keep."""
    model = served(template)

    def render(variant: ChatPrompt) -> str:
        return model.template.render(variant).text

    text = render(prompt)
    return [text[: prefix.end] for prefix in locate(prompt, marked_pieces(prompt), text, render)]


def prepare(prompt: ChatPrompt, template: str = CHATML) -> PreparedPrompt:
    return asyncio.run(served(template).prepare(prompt))


SYSTEM = ChatMessage("system", marked("Be brief."))
USER = ChatMessage("user", "Hello there")


def test_a_chat_without_marks_has_no_pieces() -> None:
    assert marked_pieces(chat(ChatMessage("system", (TextPart("x"),)), USER, tools=(Tool("f"),))) == []
    assert prepare(chat(USER)).breakpoints == ()


def test_a_marked_text_is_kept_to_its_end() -> None:
    assert kept_texts(chat(SYSTEM, USER)) == ["<|system|>Be brief."]


def test_positions_are_tokens_and_tokens_are_those_of_the_whole_prompt() -> None:
    prepared = prepare(chat(SYSTEM, USER))
    assert prepared.token_ids == prepare(chat(ChatMessage("system", "Be brief."), USER)).token_ids
    assert prepared.breakpoints == (CacheBreakpoint(1 + len("Be brief."), 300.0),)


@pytest.mark.parametrize("template", [CHATML, TRIMMING, COUNTING, TOOLS_FIRST])
@pytest.mark.parametrize(
    "after",
    [
        (USER,),
        (ChatMessage("user", "Something else, and longer"), ChatMessage("assistant", "Yes"), USER),
        (ChatMessage("user", (TextPart("one"), TextPart("two", SHORT))),),
    ],
)
def test_what_follows_a_mark_does_not_move_it(template: str, after: tuple[ChatMessage, ...]) -> None:
    first = kept_texts(chat(SYSTEM, USER), template)[0]
    assert kept_texts(chat(SYSTEM, *after), template)[0] == first
    assert "Be brief." in first


def test_a_mark_inside_a_turn_keeps_its_first_part_only() -> None:
    turn = ChatMessage("user", (TextPart("The document.", SHORT), TextPart("The question?")))
    assert kept_texts(chat(turn)) == ["<|user|>The document."]


def test_a_mark_on_a_turn_is_one_on_its_last_part() -> None:
    turn = ChatMessage("user", (TextPart("one"), TextPart("two")), cache=SHORT)
    assert kept_texts(chat(turn)) == ["<|user|>one\ntwo"]


def test_white_space_that_a_template_trims_moves_nothing() -> None:
    system = ChatMessage("system", marked("  Be brief. \n"))
    assert kept_texts(chat(system, USER), TRIMMING) == ["<|system|>Be brief."]


def test_a_template_that_looks_at_content_falls_back_to_where_texts_part() -> None:
    assert kept_texts(chat(SYSTEM, USER), COUNTING) == ["<|system|>Be brief.9<|end|>\n"]
    assert kept_texts(chat(SYSTEM, USER), ALTERNATING) == [], "nothing is known, so nothing is kept"


def test_a_template_that_moves_a_marked_text_behind_later_ones_keeps_nothing() -> None:
    assert kept_texts(chat(SYSTEM, USER), SYSTEM_LAST) == []


def test_a_call_can_be_marked() -> None:
    template = (
        "{% for turn in messages %}{{ turn.role }}:{{ turn.content }}"
        "{% for call in turn.tool_calls %}{{ call | tojson }}{% endfor %};{% endfor %}{{ tools }}"
    )
    calls = (ToolCall("1", "look", '{"at": "sky"}', SHORT), ToolCall("2", "look", '{"at": "sea"}'))
    prompt = chat(USER, ChatMessage("assistant", "", tool_calls=calls))
    (kept,) = kept_texts(prompt, template)
    assert "sky" in kept
    assert "sea" not in kept


@pytest.mark.parametrize("last", [0, 1])
def test_tools_before_the_system_prompt_are_kept_alone(last: int) -> None:
    tools = (
        Tool("alpha", "First.", cache=SHORT if last == 0 else None),
        Tool("beta", cache=LONG if last else None),
    )
    (kept,) = kept_texts(chat(ChatMessage("system", "Be brief."), USER, tools=tools), TOOLS_FIRST)
    assert "alpha" in kept
    assert ("beta" in kept) == (last == 1)
    assert "Be brief" not in kept


def test_tools_behind_the_system_prompt_are_kept_with_it() -> None:
    tools = (Tool("alpha", cache=SHORT),)
    (kept,) = kept_texts(chat(ChatMessage("system", "Be brief."), USER, tools=tools), SYSTEM_FIRST)
    assert "Be brief" in kept
    assert "alpha" in kept
    assert "Hello" not in kept


def test_changed_tools_invalidate_everything_wherever_the_template_puts_them() -> None:
    def salt(*tools: Tool, mark: CacheMark | None = SHORT) -> str:
        system = ChatMessage("system", (TextPart("Be brief.", mark),))
        return prepare(chat(system, USER, tools=tools), SYSTEM_FIRST).cache_salt

    alpha = Tool("alpha")
    assert salt(alpha) == salt(Tool("alpha", cache=SHORT)), "a mark that moves changes nothing"
    assert len({salt(), salt(alpha), salt(Tool("alpha", "does it")), salt(alpha, Tool("beta"))}) == 4
    assert salt(alpha, mark=None) == "", "chats without marks share what they can"


def test_tools_that_are_not_shown_keep_nothing() -> None:
    tools = (Tool("alpha", cache=SHORT),)
    assert kept_texts(chat(SYSTEM, USER, tools=tools), TOOLS_FIRST.replace("tool |", "1 |")) == [
        "1\n<|system|>Be brief."
    ]


def test_earlier_positions_are_those_of_the_pieces_before_a_mark() -> None:
    turns = [ChatMessage("user", f"turn {n:02}") for n in range(30)]
    turns[-1] = ChatMessage("user", marked("turn 29"))
    prepared = prepare(chat(*turns))
    (breakpoint,) = prepared.breakpoints
    assert len(breakpoint.earlier) == MAX_PIECES_BACK
    for n, position in zip(range(9, 29), breakpoint.earlier, strict=True):
        turns_before = [*turns[:n], ChatMessage("user", marked(f"turn {n:02}"))]
        assert prepare(chat(*turns_before)).breakpoints[0].num_tokens == position


@pytest.mark.parametrize(
    ("changed", "still_equal"),
    [
        ({}, [True, True, True]),
        ({"question": "Another one?"}, [True, True, False]),
        ({"system": "Be verbose."}, [True, False, False]),
        ({"tool": "another"}, [False, False, False]),
    ],
)
def test_a_change_invalidates_what_comes_after_it(changed: dict[str, str], still_equal: list[bool]) -> None:
    def prefixes(
        tool: str = "look", system: str = "Be brief.", question: str = "Why?"
    ) -> list[tuple[int, ...]]:
        turns = (ChatMessage("system", marked(system)), ChatMessage("user", marked(question)))
        prepared = prepare(chat(*turns, tools=(Tool(tool, cache=SHORT),)), TOOLS_FIRST)
        return [prepared.token_ids[: breakpoint.num_tokens] for breakpoint in prepared.breakpoints]

    pairs = zip(prefixes(), prefixes(**changed), strict=True)
    assert [before == after for before, after in pairs] == still_equal


def test_a_control_token_spelled_out_is_counted_as_the_text_it_is() -> None:
    system = ChatMessage("system", marked("The token <|end|> ends a turn."))
    prepared = prepare(chat(system, USER))
    assert prepared.breakpoints[0].num_tokens == 1 + len("The token <|end|> ends a turn.")


def test_a_private_use_character_in_a_prompt_is_no_sign() -> None:
    system = ChatMessage("system", marked("Odd \U00100003 text."))
    assert kept_texts(chat(system, USER)) == ["<|system|>Odd \U00100003 text."]


@pytest.mark.parametrize(
    ("template", "most"),
    [(CHATML, 2), ("{{ messages[0].content | length }}" + CHATML, 1 + MAX_RENDERINGS)],
)
def test_a_chat_is_rendered_a_few_times_only(template: str, most: int) -> None:
    """Also when it holds signs itself, and when the template cannot be told by signs."""
    turns = [
        ChatMessage("user" if index % 2 else "assistant", f"turn {index} \U00100000") for index in range(80)
    ]
    turns = [ChatMessage("system", "Be brief."), *turns]
    for index in (20, 40, 60, 80):
        turns[index] = ChatMessage(turns[index].role, marked(f"turn {index} \U00100000"))
    prompt = chat(*turns)
    model = served(template)
    num_renderings = 0

    def render(variant: ChatPrompt) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return model.template.render(variant).text

    assert len(locate(prompt, marked_pieces(prompt), render(prompt), render)) == 4
    assert num_renderings <= most


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ((SHORT,) * 5, "has 5"),
        ((SHORT, LONG), "longer ttl"),
        ((LONG, SHORT, LONG), "longer ttl"),
    ],
)
def test_marks_against_the_rules_are_refused(marks: Sequence[CacheMark], message: str) -> None:
    turns = [ChatMessage("user", marked("x", mark)) for mark in marks]
    with pytest.raises(InvalidRequest, match=message):
        marked_pieces(chat(*turns))


def test_the_order_of_times_to_live_is_tools_then_turns() -> None:
    tools = (Tool("alpha", cache=SHORT),)
    with pytest.raises(InvalidRequest, match="longer ttl"):
        marked_pieces(chat(ChatMessage("system", marked("x", LONG)), tools=tools))
    assert marked_pieces(chat(ChatMessage("system", marked("x", LONG)), ChatMessage("user", marked("y"))))


def test_two_marks_at_one_place_are_one_that_lasts_longer() -> None:
    hides_calls = CHATML + "{{ tools }}{# tool_calls are left out #}"
    calls = (ToolCall("1", "look", "{}", LONG), ToolCall("2", "look", "{}", SHORT))
    prepared = prepare(chat(USER, ChatMessage("assistant", "Looking.", tool_calls=calls), USER), hides_calls)
    assert [breakpoint.ttl_s for breakpoint in prepared.breakpoints] == [3600.0]


def test_a_blank_text_keeps_nothing_of_its_own() -> None:
    turn = ChatMessage("user", (TextPart("text", LONG), TextPart(" ", SHORT)))
    assert kept_texts(chat(turn)) == ["<|user|>text"]


def test_an_answer_that_the_model_is_to_go_on_with_can_be_marked() -> None:
    begun = ChatMessage("assistant", marked("The answer is"))
    prompt = chat(USER, begun, continues_last=True, add_generation_prompt=False)
    assert kept_texts(prompt) == ["<|user|>Hello there<|end|>\n<|assistant|>The answer is"]


async def test_usage_tells_what_the_engine_said(make_gateway: Callable[..., Gateway]) -> None:
    def script(request: Request) -> list[TokenEvent]:
        assert [breakpoint.ttl_s for breakpoint in request.cache_breakpoints] == [3600.0, 300.0]
        first = TokenEvent(
            request.id, (65,), num_cached_tokens=48, queue_s=0.0, cache_use=CacheUse(32, (16, 64))
        )
        return [first, TokenEvent(request.id, (66,), finish_reason=FinishReason.STOP)]

    gateway = make_gateway(script)
    prompt = chat(ChatMessage("system", marked("x" * 60, LONG)), ChatMessage("user", marked("y" * 60)))
    request = GenerationRequest(prompts=(prompt,), sampling=SamplingOptions(max_tokens=4), n=2)
    answer = await gateway.submit(request)
    await answer.collect()
    usage = answer.usage
    assert (usage.cached_tokens, usage.cache_read_tokens) == (48, 32)
    assert (usage.cache_write_1h_tokens, usage.cache_write_5m_tokens) == (16, 64)


async def test_the_minimum_goes_with_requests_that_have_marks(make_gateway: Callable[..., Gateway]) -> None:
    minimums: list[int | None] = []

    def script(request: Request) -> list[TokenEvent]:
        minimums.append(request.min_cacheable_tokens)
        return [TokenEvent(request.id, (65,), finish_reason=FinishReason.LENGTH)]

    gateway = make_gateway(script)
    for prompt in (chat(ChatMessage("user", marked("y" * 60))), chat(USER)):
        for min_tokens in (None, 32):
            gateway.prompt_cache = PromptCacheSettings(min_tokens=min_tokens)
            request = GenerationRequest(prompts=(prompt,), sampling=SamplingOptions(max_tokens=1))
            await (await gateway.submit(request)).collect()
    assert minimums == [None, 32, None, None]


async def test_usage_without_marks_has_no_cache_reads(make_gateway: Callable[..., Gateway]) -> None:
    def script(request: Request) -> list[TokenEvent]:
        assert request.cache_breakpoints == ()
        return [TokenEvent(request.id, (65,), num_cached_tokens=16, finish_reason=FinishReason.LENGTH)]

    answer = await make_gateway(script).submit(
        GenerationRequest(prompts=(chat(USER),), sampling=SamplingOptions(max_tokens=1))
    )
    await answer.collect()
    assert (answer.usage.cached_tokens, answer.usage.cache_read_tokens) == (16, 0)


def test_metrics_show_what_the_engine_reports() -> None:
    engine = FakeEngine()
    engine.stats = EngineStats(
        num_pinned_blocks=7, num_pins_demoted=3, num_host_blocks=9, cache_read_tokens=64
    )
    lines = Gateway(engine, GatewayConfig()).render_own_metrics().decode().splitlines()
    for line in (
        'penstock_kv_pinned_blocks{model_name="bytes"} 7.0',
        'penstock_kv_pins_demoted_total{model_name="bytes"} 3.0',
        'penstock_kv_host_blocks{model_name="bytes"} 9.0',
        'penstock_cache_read_tokens_total{model_name="bytes"} 64.0',
    ):
        assert line in lines


@pytest.fixture
def make_gateway() -> Callable[..., Gateway]:
    def make(script: Any) -> Gateway:
        return Gateway(FakeEngine(script), GatewayConfig())

    return make
