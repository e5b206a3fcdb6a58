"""The formats in which families of models write tool calls and reasoning, and which format a model uses.

A model's chat template tells the family of the model, because the template repeats the model's own calls. A new
family is an entry in `FORMATS`, and in `_SIGNS` if its template has a sign of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.grammar_text import ParameterText
from penstock.core.messages import ModelCard
from penstock.gateway.prompts import Tool, ToolCall
from penstock.gateway.tools import harmony
from penstock.gateway.tools.call_parser import CallMarkers, CallParser
from penstock.gateway.tools.parser import THINK, AnswerSink, OutputParser, ReasoningMarks
from penstock.gateway.tools.tagged_calls import ParameterTags, TaggedCallParser, TaggedCalls

AUTO = "auto"
NO_PARSER = "none"

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_NAME = "NAME"


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a call of a model family: `head` with the function's name for `NAME`, the arguments, `call_tail`.
    Several are separated by `separator` and surrounded by `list_start` and `list_end`."""

    name: str
    markers: CallMarkers | TaggedCalls | None  # None: harmony, which has a parser of its own
    head: str
    call_tail: str = ""
    separator: str = "\n"
    list_start: str = ""
    list_end: str = ""
    short_call_ids: bool = False  # its templates insist on ids of nine letters and digits
    calls_once: bool = False  # a turn has one call
    parameters: ParameterText | None = None  # None: the arguments are one JSON object

    def call_head(self, name: str) -> str:
        """Return a call up to its arguments."""
        return self.head.replace(_NAME, json.dumps(name)[1:-1])

    @property
    def trigger(self) -> str | None:
        """Return the text with which a call, and nothing else, begins."""
        return next((marker for marker in self.opening if self.head.startswith(marker)), None)

    @property
    def opening(self) -> tuple[str, ...]:
        """Return the texts that calls, and nothing else, begin with."""
        return (harmony.CHANNEL, harmony.START) if self.markers is None else self.markers.opening

    @property
    def triggers(self) -> tuple[str, ...]:
        """Return the texts that tell calls from words behind other calls."""
        start = self.head.partition(_NAME)[0]
        has_own_start = self.parameters is not None and not start.startswith(self.opening)
        return (*self.opening, "{", *((start,) if has_own_start else ()))

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Texts that a parser must see even where they are control tokens."""
        return harmony.CONTROL_TOKENS if self.markers is None else self.markers.texts

    def parser(self, sink: AnswerSink, schemas: Mapping[str, Mapping[str, Any]]) -> OutputParser:
        """Return a parser of answers that may call the functions in `schemas`, which has their parameters."""
        if self.markers is None:
            return harmony.HarmonyParser(sink, frozenset(schemas))
        if isinstance(self.markers, TaggedCalls):
            return TaggedCallParser(sink, self.markers, schemas)
        return CallParser(sink, self.markers, frozenset(schemas))

    def written(self, calls: tuple[ToolCall, ...]) -> str:
        """Calls as the model would have written them."""
        written = (
            self.call_head(call.name) + self._arguments(call.arguments) + self.call_tail for call in calls
        )
        return self.list_start + self.separator.join(written) + self.list_end

    def _arguments(self, arguments: str) -> str:
        if self.parameters is None:
            return arguments or "{}"
        try:
            given = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return ""
        return "".join(self.parameters.written(name, value) for name, value in given.items())

    def instructions(self, tools: tuple[Tool, ...]) -> str:
        """Return the instructions about tools for a model whose template does not support them."""
        signatures = "\n".join(json.dumps(tool_schema(tool), ensure_ascii=False) for tool in tools)
        arguments = "<arguments as a JSON object>"
        if self.parameters is not None:
            arguments = self.parameters.written("<name of an argument>", "<its value>")
        example = f"{self.call_head('<function name>')}{arguments}{self.call_tail}"
        return (
            "# Tools\n\nYou may call one or more functions to help with the user's request. Their signatures:\n"
            f"<tools>\n{signatures}\n</tools>\n\n"
            f"To call a function, answer with nothing but its name and arguments, like this:\n"
            f"{self.list_start}{example}{self.list_end}\n"
            "Repeat this for every call. The results come back in <tool_response></tool_response>."
        )


HERMES = ToolFormat(
    name="hermes",
    markers=CallMarkers(opening=("<tool_call>",), closing="</tool_call>"),
    head=f'<tool_call>\n{{"name": "{_NAME}", "arguments": ',
    call_tail="}\n</tool_call>",
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    markers=CallMarkers(opening=("<|python_tag|>",), bare="{", hides_markers=True),
    head=f'{{"name": "{_NAME}", "parameters": ',
    call_tail="}",
    separator="; ",
)
_MISTRAL_MARKERS = CallMarkers(opening=("[TOOL_CALLS]",), name_end="[ARGS]", hides_markers=True)
MISTRAL = ToolFormat(
    name="mistral",
    markers=_MISTRAL_MARKERS,
    head=f'{{"name": "{_NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="[TOOL_CALLS][",
    list_end="]",
    short_call_ids=True,
)
MISTRAL_ARGS = ToolFormat(  # Mistral's newer models
    name="mistral_args",
    markers=_MISTRAL_MARKERS,
    head=f"[TOOL_CALLS]{_NAME}[ARGS]",
    separator="",
    short_call_ids=True,
)
GEMMA = ToolFormat(
    name="gemma",
    markers=CallMarkers(
        opening=("```tool_code", "```tool_call", "```json"), closing="```", bare="{[", writes_python=True
    ),
    head=f'```tool_code\n{{"name": "{_NAME}", "parameters": ',
    call_tail="}\n```",
)
PYTHONIC = ToolFormat(  # Llama 3.2 and 4
    name="pythonic",
    markers=CallMarkers(
        opening=("<|python_start|>",),
        closing="<|python_end|>",
        bare="[{",
        writes_python=True,
        hides_markers=True,
    ),
    head=f'{{"name": "{_NAME}", "parameters": ',
    call_tail="}",
    separator="; ",
)
GRANITE = ToolFormat(  # Granite 3; Granite 4 writes as Hermes does
    name="granite",
    markers=CallMarkers(opening=("<|tool_call|>", "<tool_call>"), bare="", hides_markers=True),
    head=f'{{"name": "{_NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<|tool_call|>[",
    list_end="]",
)
_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK = TaggedCalls(
    opening=("<｜tool▁calls▁begin｜>",),
    closing="<｜tool▁calls▁end｜>",
    head=rf"(?:function{_SEPARATOR})?(?P<name>[\w.-]+)(?:{_SEPARATOR})?\s*(?:```(?:json)?)?\s*",
    call_start="<｜tool▁call▁begin｜>",
    ignored=("<｜tool▁call▁end｜>", "```"),
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    markers=_DEEPSEEK,
    head=f"<｜tool▁call▁begin｜>function{_SEPARATOR}{_NAME}\n```json\n",
    call_tail="\n```<｜tool▁call▁end｜>",
    list_start="<｜tool▁calls▁begin｜>",
    list_end="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    markers=_DEEPSEEK,
    head=f"<｜tool▁call▁begin｜>{_NAME}{_SEPARATOR}",
    call_tail="<｜tool▁call▁end｜>",
    separator="",
    list_start="<｜tool▁calls▁begin｜>",
    list_end="<｜tool▁calls▁end｜>",
)
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    markers=TaggedCalls(
        opening=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        closing="<|tool_calls_section_end|>",
        head=r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        call_start="<|tool_call_begin|>",
        ignored=("<|tool_call_end|>",),
    ),
    head=f"<|tool_call_begin|>functions.{_NAME}:0<|tool_call_argument_begin|>",
    call_tail="<|tool_call_end|>",
    separator="",
    list_start="<|tool_calls_section_begin|>",
    list_end="<|tool_calls_section_end|>",
)
GLM = ToolFormat(
    name="glm45",
    markers=TaggedCalls(
        opening=("<tool_call>",),
        closing="</tool_call>",
        head=r"(?P<name>[\w.-]+)\s*",
        head_ends=("<arg_key>", "</tool_call>"),
        parameters=ParameterTags("<arg_key>", "<arg_value>", "</arg_value>", name_end="</arg_key>"),
        hides_markers=False,
    ),
    head=f"<tool_call>{_NAME}\n",
    call_tail="</tool_call>",
    parameters=ParameterText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
_FUNCTION_TAGS = TaggedCalls(
    opening=("<tool_call>",),
    closing="</tool_call>",
    head=r"<function=(?P<name>[\w.-]+)>",
    head_ends=(">",),
    keeps_head_end=False,
    parameters=ParameterTags("<parameter=", ">", "</parameter>", call_end="</function>", trims_lines=True),
    hides_markers=False,
)
_FUNCTION_TEXT = ParameterText("<parameter=", ">\n", "\n</parameter>\n")
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    markers=_FUNCTION_TAGS,
    head=f"<tool_call>\n<function={_NAME}>\n",
    call_tail="</function>\n</tool_call>",
    parameters=_FUNCTION_TEXT,
)
SEED_OSS = ToolFormat(
    name="seed_oss",
    markers=msgspec.structs.replace(
        _FUNCTION_TAGS, opening=("<seed:tool_call>",), closing="</seed:tool_call>"
    ),
    head=f"<seed:tool_call>\n<function={_NAME}>\n",
    call_tail="</function>\n</seed:tool_call>",
    parameters=_FUNCTION_TEXT,
)
LFM2 = ToolFormat(
    name="lfm2",
    markers=CallMarkers(
        opening=("<|tool_call_start|>",), closing="<|tool_call_end|>", writes_python=True, hides_markers=True
    ),
    head=f'{{"name": "{_NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<|tool_call_start|>[",
    list_end="]<|tool_call_end|>",
)
NEMOTRON = ToolFormat(  # Llama Nemotron and Nemotron Nano 2; Nemotron 3 writes as Qwen3-Coder does
    name="nemotron",
    markers=CallMarkers(opening=("<TOOLCALL>",), closing="</TOOLCALL>", hides_markers=True),
    head=f'{{"name": "{_NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<TOOLCALL>[",
    list_end="]</TOOLCALL>",
)
GEMMA4 = ToolFormat(
    name="gemma4",
    markers=TaggedCalls(
        opening=("<|tool_call>",),
        closing="<tool_call|>",
        head=r"call:(?P<name>[\w.-]+)",
        quote='<|"|>',
    ),
    head=f"<|tool_call>call:{_NAME}",
    call_tail="<tool_call|>",
    separator="",
)
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    markers=TaggedCalls(
        opening=("<minimax:tool_call>",),
        closing="</minimax:tool_call>",
        head=r"<invoke name=\"(?P<name>[\w.-]+)\">",
        head_ends=(">",),
        keeps_head_end=False,
        parameters=ParameterTags(
            '<parameter name="', '">', "</parameter>", call_end="</invoke>", trims_lines=True
        ),
        hides_markers=False,
    ),
    head=f'<minimax:tool_call>\n<invoke name="{_NAME}">\n',
    call_tail="</invoke>\n</minimax:tool_call>",
    parameters=ParameterText('<parameter name="', '">', "</parameter>\n"),
)
_DSML = "<｜DSML｜"
DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32",
    markers=TaggedCalls(
        opening=(f"{_DSML}function_calls>", f"{_DSML}tool_calls>"),
        closing="</｜DSML｜function_calls>",
        head=rf"{_DSML}invoke name=\"(?P<name>[\w.-]+)\">",
        head_ends=(">",),
        keeps_head_end=False,
        ignored=("</｜DSML｜tool_calls>",),
        parameters=ParameterTags(
            f'{_DSML}parameter name="',
            '">',
            "</｜DSML｜parameter>",
            call_end="</｜DSML｜invoke>",
            text_mark='" string="true',
            value_mark='" string="false',
        ),
        hides_markers=False,
        tokens=("｜DSML｜",),
    ),
    head=f'{_DSML}invoke name="{_NAME}">\n',
    call_tail="</｜DSML｜invoke>",
    list_start=f"{_DSML}function_calls>\n",
    list_end="\n</｜DSML｜function_calls>",
    parameters=ParameterText(
        f'{_DSML}parameter name="',
        '" string="false">',
        "</｜DSML｜parameter>\n",
        text_middle='" string="true">',
    ),
)
COMMAND = ToolFormat(  # Command R7B and Command A
    name="command",
    markers=CallMarkers(opening=("<|START_ACTION|>",), closing="<|END_ACTION|>", hides_markers=True),
    head=f'{{"tool_call_id": "0", "tool_name": "{_NAME}", "parameters": ',
    call_tail="}",
    separator=",\n    ",
    list_start="<|START_ACTION|>[\n    ",
    list_end="\n]<|END_ACTION|>",
)
JAMBA = ToolFormat(  # Jamba and Hunyuan
    name="jamba",
    markers=CallMarkers(opening=("<tool_calls>",), closing="</tool_calls>"),
    head=f'{{"name": "{_NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<tool_calls>[",
    list_end="]</tool_calls>",
)
OLMO3 = ToolFormat(
    name="olmo3",
    markers=CallMarkers(opening=("<function_calls>",), closing="</function_calls>", writes_python=True),
    head=f'{{"name": "{_NAME}", "arguments": ',
    call_tail="}",
    list_start="<function_calls>\n",
    list_end="\n</function_calls>",
)
APERTUS = ToolFormat(
    name="apertus",
    markers=TaggedCalls(
        opening=("<|tools_prefix|>",),
        closing="<|tools_suffix|>",
        head=r"\s*\"(?P<name>[\w.-]+)\"\s*:",
        head_ends=(":",),
        keeps_head_end=False,
        call_start="{",
        ignored=("[", "]", "}", ","),
    ),
    head=f'{{"{_NAME}": ',
    call_tail="}",
    separator=", ",
    list_start="<|tools_prefix|>[",
    list_end="]<|tools_suffix|>",
)
HARMONY = ToolFormat(  # gpt-oss
    name="harmony",
    markers=None,
    head=f"<|channel|>commentary to=functions.{_NAME} <|constrain|>json<|message|>",
    separator="<|end|><|start|>assistant",
    calls_once=True,
)
FORMATS = {
    each.name: each
    for each in (
        *(HERMES, LLAMA3_JSON, PYTHONIC, MISTRAL, MISTRAL_ARGS, GEMMA, GRANITE, DEEPSEEK_V3, DEEPSEEK_V31),
        *(KIMI_K2, GLM, QWEN3_CODER, MINIMAX_M2, HARMONY, SEED_OSS, LFM2, NEMOTRON, GEMMA4),
        *(DEEPSEEK_V32, COMMAND, JAMBA, OLMO3, APERTUS),
    )
}
# Other servers' names for the same formats.
ALIASES = {
    "llama4_pythonic": PYTHONIC,
    "llama4_json": LLAMA3_JSON,
    "openai": HARMONY,
    "qwen3_xml": QWEN3_CODER,
    "glm47": GLM,
    "hunyuan_a13b": JAMBA,
    "cohere_command3": COMMAND,
}

# What only one family's template contains, looked for in this order.
_SIGNS = (
    ("｜DSML｜", DEEPSEEK_V32),
    ("<|tool_calls_section_begin|>", KIMI_K2),
    ("<minimax:tool_call>", MINIMAX_M2),
    ("<arg_key>", GLM),
    ("<seed:tool_call>", SEED_OSS),
    ("<function=", QWEN3_CODER),
    ("<|START_ACTION|>", COMMAND),
    ("<|tools_prefix|>", APERTUS),
    ("<function_calls>", OLMO3),
    ("<tool_calls>", JAMBA),
    ("<|channel|>", HARMONY),
    ("<|tool_call>", GEMMA4),
    ("<|tool_call_start|>", LFM2),
    ("<|tool_list_start|>", LFM2),
    ("<TOOLCALL>", NEMOTRON),
    ("<|tool_call|>", GRANITE),
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_start|>", PYTHONIC),
    ("<|python_tag|>", LLAMA3_JSON),
    ("ipython", LLAMA3_JSON),  # the role of its tools
)

# Of models whose template shows no calls, or that come without a template.
_BY_ARCHITECTURE = (("gemma", GEMMA), ("deepseek_v32", DEEPSEEK_V32))

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
}
_THINKING_SIGNS = (
    *("harmony", "gemma4", "seed_oss", "mistral", "granite", "command", "apertus", "hunyuan", "think"),
)


def tool_schema(tool: Tool) -> dict[str, object]:
    """Return a tool as chat templates expect it."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or NO_PARAMETERS
    return {"type": "function", "function": function}


def tool_format_of(card: ModelCard, setting: str = AUTO) -> ToolFormat | None:
    """Return the format that a model writes calls in: as configured, else as its template or architecture shows. None
    when calls are not to be parsed at all."""
    if setting == NO_PARSER:
        return None
    if setting != AUTO:
        return ALIASES[setting] if setting in ALIASES else FORMATS[setting]
    template = card.chat_template or ""
    if _DEEPSEEK.opening[0] in template and "｜DSML｜" not in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    for sign, tool_format in _SIGNS:
        if sign in template:
            return tool_format
    return next(
        (each for name, each in _BY_ARCHITECTURE if card.architecture.lower().startswith(name)), HERMES
    )


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
        if (marks.start in template and wraps) or (name == "harmony" and harmony.CHANNEL in template):
            return marks
    # Templates of DeepSeek R1 only take the thoughts out of earlier turns.
    return THINK if THINK.end in template else None
