"""Defines how a family of models writes a tool call, and how tools are shown to the model; and the formats of calls
between tags: a name, and arguments as JSON or as tagged parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.grammar_text import ParameterText
from penstock.gateway.prompts import Tool, ToolCall
from penstock.gateway.tools import harmony
from penstock.gateway.tools.call_parser import CallMarkers, CallParser
from penstock.gateway.tools.parser import AnswerSink, OutputParser
from penstock.gateway.tools.tagged_calls import ParameterTags, TaggedCallParser, TaggedCalls

AUTO = "auto"
NO_PARSER = "none"

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

NAME = "NAME"


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
        return self.head.replace(NAME, json.dumps(name)[1:-1])

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
        start = self.head.partition(NAME)[0]
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


def tool_schema(tool: Tool) -> dict[str, object]:
    """Return a tool as chat templates expect it."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or NO_PARAMETERS
    return {"type": "function", "function": function}


_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_TAGS = TaggedCalls(
    opening=("<｜tool▁calls▁begin｜>",),
    closing="<｜tool▁calls▁end｜>",
    head=rf"(?:function{_SEPARATOR})?(?P<name>[\w.-]+)(?:{_SEPARATOR})?\s*(?:```(?:json)?)?\s*",
    call_start="<｜tool▁call▁begin｜>",
    ignored=("<｜tool▁call▁end｜>", "```"),
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    markers=DEEPSEEK_TAGS,
    head=f"<｜tool▁call▁begin｜>function{_SEPARATOR}{NAME}\n```json\n",
    call_tail="\n```<｜tool▁call▁end｜>",
    list_start="<｜tool▁calls▁begin｜>",
    list_end="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    markers=DEEPSEEK_TAGS,
    head=f"<｜tool▁call▁begin｜>{NAME}{_SEPARATOR}",
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
    head=f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>",
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
    head=f"<tool_call>{NAME}\n",
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
    head=f"<tool_call>\n<function={NAME}>\n",
    call_tail="</function>\n</tool_call>",
    parameters=_FUNCTION_TEXT,
)
SEED_OSS = ToolFormat(
    name="seed_oss",
    markers=msgspec.structs.replace(
        _FUNCTION_TAGS, opening=("<seed:tool_call>",), closing="</seed:tool_call>"
    ),
    head=f"<seed:tool_call>\n<function={NAME}>\n",
    call_tail="</function>\n</seed:tool_call>",
    parameters=_FUNCTION_TEXT,
)
GEMMA4 = ToolFormat(
    name="gemma4",
    markers=TaggedCalls(
        opening=("<|tool_call>",), closing="<tool_call|>", head=r"call:(?P<name>[\w.-]+)", quote='<|"|>'
    ),
    head=f"<|tool_call>call:{NAME}",
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
    head=f'<minimax:tool_call>\n<invoke name="{NAME}">\n',
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
    head=f'{_DSML}invoke name="{NAME}">\n',
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
    head=f'{{"{NAME}": ',
    call_tail="}",
    separator=", ",
    list_start="<|tools_prefix|>[",
    list_end="]<|tools_suffix|>",
)
_MINIMAX_MARK = "]<]minimax[>["
MINIMAX_M3 = ToolFormat(  # written with JSON where calls are forced, which its parser reads, too
    name="minimax_m3",
    markers=TaggedCalls(
        opening=(f"{_MINIMAX_MARK}<tool_call>",),
        closing=f"{_MINIMAX_MARK}</tool_call>",
        head=r"(?P<name>[\w.-]+)\">",
        head_ends=(">",),
        keeps_head_end=False,
        call_start=f'{_MINIMAX_MARK}<invoke name="',
        tree_mark=_MINIMAX_MARK,
        hides_markers=False,
    ),
    head=f'{_MINIMAX_MARK}<invoke name="{NAME}">',
    call_tail=f"{_MINIMAX_MARK}</invoke>",
    list_start=f"{_MINIMAX_MARK}<tool_call>\n",
    list_end=f"\n{_MINIMAX_MARK}</tool_call>",
)
FUNCTION_GEMMA = ToolFormat(
    name="functiongemma",
    markers=TaggedCalls(
        opening=("<start_function_call>",),
        closing="<end_function_call>",
        head=r"call:(?P<name>[\w.-]+)",
        quote="<escape>",
    ),
    head=f"<start_function_call>call:{NAME}",
    call_tail="<end_function_call>",
    separator="",
)
FUNCTION_TAGS = ToolFormat(  # Functionary 3.1, and tools of one's own with Llama 3.1
    name="functionary",
    markers=TaggedCalls(
        opening=("<function=",), closing="</function>", head=r"(?P<name>[\w.-]+)>\s*", hides_markers=False
    ),
    head=f"<function={NAME}>",
    call_tail="</function>",
    separator="",
)
MINICPM5 = ToolFormat(
    name="minicpm5",
    markers=TaggedCalls(
        opening=('<function name="',),
        closing="</function>",
        head=r"(?P<name>[\w.-]+)\">",
        head_ends=(">",),
        keeps_head_end=False,
        parameters=ParameterTags('<param name="', '">', "</param>", literal=("<![CDATA[", "]]>")),
        hides_markers=False,
        tokens=("<function", "</function>", "<param", "</param>"),
    ),
    head=f'<function name="{NAME}">',
    call_tail="</function>",
    parameters=ParameterText('<param name="', '">', "</param>"),
)
HUNYUAN3 = ToolFormat(
    name="hy_v3",
    markers=TaggedCalls(
        opening=("<tool_calls:opensource>",),
        closing="</tool_calls:opensource>",
        head=r"\s*(?P<name>[\w.-]+)\s*<tool_sep:opensource>",
        head_ends=("<tool_sep:opensource>",),
        keeps_head_end=False,
        call_start="<tool_call:opensource>",
        parameters=ParameterTags(
            "<arg_key:opensource>",
            "<arg_value:opensource>",
            "</arg_value:opensource>",
            name_end="</arg_key:opensource>",
            call_end="</tool_call:opensource>",
        ),
        hides_markers=False,
        tokens=tuple(
            f"<{name}:opensource>"
            for name in ("/tool_call", "arg_key", "/arg_key", "arg_value", "/arg_value")
        ),
    ),
    head=f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n",
    call_tail="</tool_call:opensource>",
    list_start="<tool_calls:opensource>\n",
    list_end="\n</tool_calls:opensource>",
    parameters=ParameterText(
        "<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>\n"
    ),
)
SOLAR_OPEN = ToolFormat(
    name="solar_open",
    markers=TaggedCalls(
        opening=("<|tool_calls|>",),
        closing="<|calls|>",
        head=r"[\w-]*<\|tool_call:name\|>(?P<name>[\w.-]+)<\|tool_call:args\|>\s*",
        call_start="<|tool_call:begin|>",
        ignored=("<|tool_call:end|>",),
    ),
    head=f"<|tool_call:begin|>0<|tool_call:name|>{NAME}<|tool_call:args|>",
    call_tail="<|tool_call:end|>",
    separator="",
    list_start="<|tool_calls|>",
)
