"""The form of the answers to one prompt, decided once per prompt: how to parse them, and which grammar forces calls.

`required` and named tool choices allow nothing but calls. The arguments of strict tools follow their schema in every
call.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest, quoted
from penstock.core.grammar_text import StructuralTags, TaggedText, ThinkingBudget, decode_tags, lenient
from penstock.core.messages import ModelCard
from penstock.core.request import Grammar
from penstock.gateway.prompts import ChatPrompt, Tool
from penstock.gateway.tools.call_parser import CHANNEL, HarmonyParser
from penstock.gateway.tools.formats import HARMONY
from penstock.gateway.tools.parser import (
    THINK,
    AnswerSink,
    AnswerUnwrapper,
    OutputParser,
    PlainText,
    ReasoningMarks,
    ReasoningSplitter,
)
from penstock.gateway.tools.tool_format import AUTO, NO_PARAMETERS, NO_PARSER, ToolFormat

HARMONY_REASONING = ReasoningMarks(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    turn_start="<|start|>assistant",
    answer_start="<|start|>assistant<|channel|>final<|message|>",
    answer_alone="<|channel|>final<|message|>",
    others=("<|channel|>final", "<|channel|>commentary", " to="),
)
REASONING = {
    "think": THINK,
    "deepseek_r1": ReasoningMarks(THINK.start, THINK.end, is_open=True),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>"),
    "harmony": HARMONY_REASONING,
    "command": ReasoningMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        wrappers=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
    ),
    "apertus": ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>", stops=("<|tools_prefix|>",)),
    "responses": ReasoningMarks(THINK.start, THINK.end, wrappers=(("<response>", "</response>"),)),
    "minimax_m3": ReasoningMarks("<mm:think>", "</mm:think>"),
    "hy_v3": ReasoningMarks("<think:opensource>", "</think:opensource>"),
    "solar_open": ReasoningMarks(
        "<|think|>", "<|end|><|begin|>assistant", wrappers=(("<|content|>", "<|end|>"),)
    ),
    "apriel": ReasoningMarks(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", wrappers=(("", "[END FINAL RESPONSE]"),)
    ),
    "hunyuan": ReasoningMarks(THINK.start, THINK.end, wrappers=(("<answer>", "</answer>"),)),
}
_REASONING_ALIASES = {
    "qwen3": "think",
    "glm45": "think",
    "minimax_m2": "think",
    "kimi_k2": "think",
    "openai": "harmony",
    "olmo3": "think",
    "hunyuan_a13b": "hunyuan",
    "cohere_command3": "command",
    "ernie45": "responses",
}
_THINKING_SIGNS = (
    *("harmony", "gemma4", "seed_oss", "mistral", "granite", "command", "apertus", "hunyuan", "responses"),
    *("minimax_m3", "hy_v3", "solar_open", "apriel", "think"),
)


# Marks of templates that build them from parts.
_OTHER_SIGNS = {"harmony": CHANNEL, "hy_v3": ":opensource"}


def reasoning_of(card: ModelCard, setting: str = AUTO) -> ReasoningMarks | None:
    """Return the marks around a model's thoughts: as configured, else as its template shows. None for a model that
    does not think, or whose thoughts stay in the text."""
    if setting == NO_PARSER:
        return None
    if setting != AUTO:
        return REASONING[_REASONING_ALIASES.get(setting, setting)]
    template = card.chat_template or ""
    for name in _THINKING_SIGNS:
        marks = REASONING[name]
        wraps = not marks.wrappers or any(opening in template for opening, _ in marks.wrappers)
        sign = _OTHER_SIGNS.get(name, marks.start)
        if (marks.start in template or sign in template) and wraps:
            return marks
    # Templates of DeepSeek R1 only take the thoughts out of earlier turns.
    return THINK if THINK.end in template else None


# A model that must call, and may call again, would otherwise continue until its tokens run out.
MAX_FORCED_CALLS = 16
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def tool_grammar(
    prompt: ChatPrompt, tool_format: ToolFormat, answer: Grammar | None = None
) -> Grammar | None:
    """None leaves the model free: it may call, and write what it likes as arguments. `answer` binds what it says when
    it does not call; see `leaves_room_for_calls`."""
    mode, parallel = prompt.tool_choice.mode, prompt.tool_choice.parallel and not tool_format.calls_once
    if mode == "required":
        return _only_calls(prompt.tools, tool_format, parallel=parallel)
    if mode == "named":
        return _only_calls((_named(prompt),), tool_format, parallel=False)
    if answer is not None:
        schema = _ANY_OBJECT if answer.kind == "json" else msgspec.json.decode(answer.text)
        return _only_calls(prompt.tools, tool_format, parallel=parallel, otherwise=schema)
    if tool_format.trigger is not None and any(tool.strict for tool in prompt.tools):
        return _strict_when_called(prompt.tools, tool_format, tool_format.trigger)
    return None


def leaves_room_for_calls(answer: Grammar, tool_format: ToolFormat) -> bool:
    """JSON, or a call instead of it, can be said in one grammar if the first character tells them apart. Grammars of
    other kinds are the client's own."""
    is_json = answer.kind == "json" or (answer.kind == "json_schema" and answer.text.startswith("{"))
    if tool_format is HARMONY:  # calls and answers have channels of their own
        return False
    return is_json and not (tool_format.list_start + tool_format.head).startswith("{")


def _named(prompt: ChatPrompt) -> Tool:
    for tool in prompt.tools:
        if tool.name == prompt.tool_choice.name:
            return tool
    raise InvalidRequest(
        f"tool_choice names {quoted(prompt.tool_choice.name)}, which is not among the tools.",
        param="tool_choice",
    )


def _only_calls(
    tools: tuple[Tool, ...],
    tool_format: ToolFormat,
    *,
    parallel: bool,
    otherwise: dict[str, Any] | None = None,
) -> Grammar:
    return _grammar(
        StructuralTags(
            structures=_structures(tools, tool_format),
            triggers=tool_format.triggers,
            at_least_one=True,
            stops_at_text=True,
            stop_after_first=not parallel,
            max_structures=MAX_FORCED_CALLS,
            prefix=tool_format.list_start,
            separator=tool_format.separator,
            suffix=tool_format.list_end,
            otherwise=otherwise,
        )
    )


def _strict_when_called(tools: tuple[Tool, ...], tool_format: ToolFormat, trigger: str) -> Grammar:
    structures = tuple(
        structure if tool.strict else msgspec.structs.replace(structure, schema=_ANY_OBJECT)
        for tool, structure in zip(tools, _structures(tools, tool_format), strict=True)
    )
    return _grammar(StructuralTags(structures=structures, triggers=(trigger,)))


def _structures(tools: tuple[Tool, ...], tool_format: ToolFormat) -> tuple[TaggedText, ...]:
    return tuple(
        TaggedText(
            begin=tool_format.call_head(tool.name),
            schema=_schema(tool),
            end=tool_format.call_tail,
            parameters=tool_format.parameters,
        )
        for tool in tools
    )


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments. For a tool that is not strict, it lacks the keywords that cannot be
    enforced. A tool without parameters takes no arguments."""
    schema = tool.parameters or NO_PARAMETERS
    return schema if tool.strict else lenient(schema)


def with_thinking(grammar: Grammar | None, budget: ThinkingBudget) -> Grammar:
    """Return the grammar of an answer, if there is one, behind thoughts."""
    tags = StructuralTags(structures=(), triggers=(), answer=grammar)
    if grammar is not None and grammar.kind == "structural_tag":
        tags = decode_tags(grammar.text)
    return _grammar(msgspec.structs.replace(tags, thinking=budget))


def _grammar(tags: StructuralTags) -> Grammar:
    return Grammar("structural_tag", msgspec.json.encode(tags).decode())


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that may hold reasoning (`reasoning` is not None), tool calls (`tools` is not empty), or both."""

    tool_format: ToolFormat | None = None
    tools: dict[str, dict[str, Any]] = {}  # the parameters of the functions that may be called, by name
    parallel: bool = True
    stops_at_text: bool = False  # behind a call: the grammar lets nothing but calls through
    reasoning: ReasoningMarks | None = None
    reasoning_is_open: bool = False  # the prompt ends inside the reasoning
    grammar: Grammar | None = None  # replaces the request's own
    shown_token_ids: frozenset[int] = frozenset()  # control tokens that the parser must see

    def parser(self, sink: AnswerSink) -> OutputParser:
        if self.reasoning is HARMONY_REASONING or (self.tool_format is HARMONY and self.tools):
            return HarmonyParser(sink, frozenset(self.tools))
        parser: OutputParser = PlainText(sink)
        if self.tool_format is not None and self.tools:
            parser = self.tool_format.parser(sink, self.tools)
        if self.reasoning is not None and self.reasoning.wrappers:
            parser = AnswerUnwrapper(parser, self.reasoning.wrappers)
        if self.reasoning is not None:
            is_open = self.reasoning_is_open or self.reasoning.is_open
            parser = ReasoningSplitter(sink, parser, is_open=is_open, marks=self.reasoning)
        return parser


def forces_calls(prompt: ChatPrompt) -> bool:
    return bool(prompt.tools) and prompt.tool_choice.mode in ("required", "named")


def offers_tools(prompt: ChatPrompt) -> bool:
    return bool(prompt.tools) and prompt.tool_choice.mode != "none"


def answer_form(
    prompt: ChatPrompt,
    tool_format: ToolFormat | None,
    *,
    reasoning: ReasoningMarks | None,
    reasoning_is_open: bool,
    shown_token_ids: frozenset[int],
    grammar: Grammar | None,
    bounds_thinking: bool = False,
) -> AnswerForm | None:
    """None for plain text, which then costs nothing. `grammar` is what the request demands of answers. Thoughts can
    be bounded, and go before a bound answer (`bounds_thinking`), where tokens of the model's vocabulary mark them."""
    may_call = tool_format is not None and _may_call(prompt, tool_format, grammar)
    if not may_call and reasoning is None:
        return None
    bound = grammar
    if may_call and tool_format is not None:
        bound = tool_grammar(prompt, tool_format, grammar)
    if reasoning is not None and bounds_thinking and prompt.thinks is not False:
        lead = (reasoning.turn_start, "") if may_call else (reasoning.answer_start, reasoning.answer_alone)
        budget = ThinkingBudget(
            prompt.max_thinking_tokens,
            reasoning.start,
            reasoning.end,
            reasoning_is_open,
            *lead,
            reasoning.others,
        )
        if bound is not None or budget.max_tokens is not None:
            bound = with_thinking(bound, budget)
    return AnswerForm(
        tool_format=tool_format if may_call else None,
        tools={tool.name: tool.parameters for tool in prompt.tools} if may_call else {},
        parallel=prompt.tool_choice.parallel,
        stops_at_text=may_call and (forces_calls(prompt) or grammar is not None),
        reasoning=reasoning,
        reasoning_is_open=reasoning_is_open,
        grammar=bound,
        shown_token_ids=shown_token_ids,
    )


def _may_call(prompt: ChatPrompt, tool_format: ToolFormat, grammar: Grammar | None) -> bool:
    if not offers_tools(prompt):
        return False
    return grammar is None or forces_calls(prompt) or leaves_room_for_calls(grammar, tool_format)
