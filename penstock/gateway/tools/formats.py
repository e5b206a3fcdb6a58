"""The formats in which families of models write tool calls, and which format a model uses.

A model's chat template tells the family of the model, because the template repeats the model's own calls. A new
family is an entry in `FORMATS`, and in `_SIGNS` if its template has a sign of its own.
"""

from __future__ import annotations

import msgspec

from penstock.core.grammar_text import ParameterText
from penstock.core.messages import ModelCard
from penstock.gateway.tools.call_parser import CallMarkers
from penstock.gateway.tools.tagged_calls import ParameterTags, TaggedCalls
from penstock.gateway.tools.tool_format import AUTO, NAME, NO_PARSER, ToolFormat

# fmt: off
HERMES = ToolFormat(
    name="hermes", markers=CallMarkers(opening=("<tool_call>",), closing="</tool_call>"),
    head=f'<tool_call>\n{{"name": "{NAME}", "arguments": ', call_tail="}\n</tool_call>",
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    markers=CallMarkers(opening=("<|python_tag|>",), bare="{[", writes_python=True, hides_markers=True),
    head=f'{{"name": "{NAME}", "parameters": ', call_tail="}", separator="; ",
)
_MISTRAL_MARKERS = CallMarkers(
    opening=("[TOOL_CALLS]",), name_end="[ARGS]", id_mark="[CALL_ID]", hides_markers=True,
)
MISTRAL = ToolFormat(
    name="mistral", markers=_MISTRAL_MARKERS, head=f'{{"name": "{NAME}", "arguments": ', call_tail="}",
    separator=", ", list_start="[TOOL_CALLS][", list_end="]", short_call_ids=True,
)
MISTRAL_ARGS = ToolFormat(  # Mistral's newer models
    name="mistral_args", markers=_MISTRAL_MARKERS, head=f"[TOOL_CALLS]{NAME}[ARGS]", separator="",
    short_call_ids=True,
)
GEMMA = ToolFormat(
    name="gemma",
    markers=CallMarkers(
        opening=("```tool_code", "```tool_call", "```json"), closing="```", bare="{[", writes_python=True,
    ),
    head=f'```tool_code\n{{"name": "{NAME}", "parameters": ', call_tail="}\n```",
)
PYTHONIC = ToolFormat(  # Llama 3.2 and 4
    name="pythonic",
    markers=CallMarkers(
        opening=("<|python_start|>",), closing="<|python_end|>", bare="[{", writes_python=True,
        hides_markers=True,
    ),
    head=f'{{"name": "{NAME}", "parameters": ', call_tail="}", separator="; ",
)
GRANITE = ToolFormat(  # Granite 3; Granite 4 writes as Hermes does
    name="granite",
    markers=CallMarkers(
        opening=("<|tool_call|>", "<tool_call>", "<function_call>"), bare="", hides_markers=True,
    ),
    head=f'{{"name": "{NAME}", "arguments": ', call_tail="}", separator=", ", list_start="<|tool_call|>[",
    list_end="]",
)
LFM2 = ToolFormat(
    name="lfm2",
    markers=CallMarkers(
        opening=("<|tool_call_start|>",), closing="<|tool_call_end|>", writes_python=True, hides_markers=True,
    ),
    head=f'{{"name": "{NAME}", "arguments": ', call_tail="}", separator=", ", list_start="<|tool_call_start|>[",
    list_end="]<|tool_call_end|>",
)
NEMOTRON = ToolFormat(  # Llama Nemotron and Nemotron Nano 2; Nemotron 3 writes as Qwen3-Coder does
    name="nemotron", markers=CallMarkers(opening=("<TOOLCALL>",), closing="</TOOLCALL>", hides_markers=True),
    head=f'{{"name": "{NAME}", "arguments": ', call_tail="}", separator=", ", list_start="<TOOLCALL>[",
    list_end="]</TOOLCALL>",
)
COMMAND = ToolFormat(  # Command R7B and Command A
    name="command",
    markers=CallMarkers(opening=("<|START_ACTION|>",), closing="<|END_ACTION|>", hides_markers=True),
    head=f'{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": ', call_tail="}", separator=",\n    ",
    list_start="<|START_ACTION|>[\n    ", list_end="\n]<|END_ACTION|>",
)
JAMBA = ToolFormat(  # Jamba, Hunyuan and MiniMax M1
    name="jamba", markers=CallMarkers(opening=("<tool_calls>",), closing="</tool_calls>"),
    head=f'{{"name": "{NAME}", "arguments": ', call_tail="}", separator=", ", list_start="<tool_calls>[",
    list_end="]</tool_calls>",
)
OLMO3 = ToolFormat(
    name="olmo3",
    markers=CallMarkers(opening=("<function_calls>",), closing="</function_calls>", writes_python=True),
    head=f'{{"name": "{NAME}", "arguments": ', call_tail="}", list_start="<function_calls>\n",
    list_end="\n</function_calls>",
)
INTERNLM2 = ToolFormat(
    name="internlm",
    markers=CallMarkers(opening=("<|action_start|><|plugin|>",), closing="<|action_end|>", hides_markers=True),
    head=f'<|action_start|><|plugin|>\n{{"name": "{NAME}", "parameters": ', call_tail="}<|action_end|>",
    separator="",
)
PHI4 = ToolFormat(  # Phi 4 mini
    name="phi4_mini",
    markers=CallMarkers(opening=("<|tool_call|>", "functools"), closing="<|/tool_call|>", hides_markers=True),
    head=f'{{"name": "{NAME}", "arguments": ', call_tail="}", separator=", ", list_start="<|tool_call|>[",
    list_end="]<|/tool_call|>",
)
GIGACHAT3 = ToolFormat(
    name="gigachat3",
    markers=CallMarkers(opening=("<|function_call|>", "function call<|role_sep|>"), hides_markers=True),
    head=f'<|function_call|>{{"name": "{NAME}", "arguments": ', call_tail="}", separator="", calls_once=True,
)
LONGCAT = ToolFormat(
    name="longcat", markers=CallMarkers(opening=("<longcat_tool_call>",), closing="</longcat_tool_call>"),
    head=f'<longcat_tool_call>\n{{"name": "{NAME}", "arguments": ', call_tail="}\n</longcat_tool_call>",
)
COMMAND_R = ToolFormat(  # the first Command R and R+
    name="command_r",
    markers=CallMarkers(opening=("Action: ```json", "Action:```json", "Action:\n```json"), closing="```"),
    head=f'{{\n        "tool_name": "{NAME}",\n        "parameters": ', call_tail="\n    }",
    separator=",\n    ", list_start="Action: ```json\n[\n    ", list_end="\n]```",
)
HARMONY = ToolFormat(  # gpt-oss
    name="harmony", markers=None,
    head=f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
    separator="<|end|><|start|>assistant", calls_once=True,
)
_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_TAGS = TaggedCalls(
    opening=("<｜tool▁calls▁begin｜>",), closing="<｜tool▁calls▁end｜>",
    head=rf"(?:function{_SEPARATOR})?(?P<name>[\w.-]+)(?:{_SEPARATOR})?\s*(?:```(?:json)?)?\s*",
    call_start="<｜tool▁call▁begin｜>", ignored=("<｜tool▁call▁end｜>", "```"),
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3", markers=DEEPSEEK_TAGS, head=f"<｜tool▁call▁begin｜>function{_SEPARATOR}{NAME}\n```json\n",
    call_tail="\n```<｜tool▁call▁end｜>", list_start="<｜tool▁calls▁begin｜>", list_end="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31", markers=DEEPSEEK_TAGS, head=f"<｜tool▁call▁begin｜>{NAME}{_SEPARATOR}",
    call_tail="<｜tool▁call▁end｜>", separator="", list_start="<｜tool▁calls▁begin｜>",
    list_end="<｜tool▁calls▁end｜>",
)
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    markers=TaggedCalls(
        opening=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        closing="<|tool_calls_section_end|>",
        head=r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        call_start="<|tool_call_begin|>", ignored=("<|tool_call_end|>",),
    ),
    head=f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>", call_tail="<|tool_call_end|>",
    separator="", list_start="<|tool_calls_section_begin|>", list_end="<|tool_calls_section_end|>",
)
GLM = ToolFormat(
    name="glm45",
    markers=TaggedCalls(
        opening=("<tool_call>",), closing="</tool_call>", head=r"(?P<name>[\w.-]+)\s*",
        head_ends=("<arg_key>", "</tool_call>"),
        parameters=ParameterTags("<arg_key>", "<arg_value>", "</arg_value>", name_end="</arg_key>"),
        hides_markers=False,
    ),
    head=f"<tool_call>{NAME}\n", call_tail="</tool_call>",
    parameters=ParameterText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
_FUNCTION_TAGS = TaggedCalls(
    opening=("<tool_call>",), closing="</tool_call>", head=r"<function=(?P<name>[\w.-]+)>", head_ends=(">",),
    keeps_head_end=False,
    parameters=ParameterTags("<parameter=", ">", "</parameter>", call_end="</function>", trims_lines=True),
    hides_markers=False,
)
_FUNCTION_TEXT = ParameterText("<parameter=", ">\n", "\n</parameter>\n")
QWEN3_CODER = ToolFormat(
    name="qwen3_coder", markers=_FUNCTION_TAGS, head=f"<tool_call>\n<function={NAME}>\n",
    call_tail="</function>\n</tool_call>", parameters=_FUNCTION_TEXT,
)
SEED_OSS = ToolFormat(
    name="seed_oss",
    markers=msgspec.structs.replace(_FUNCTION_TAGS, opening=("<seed:tool_call>",), closing="</seed:tool_call>"),
    head=f"<seed:tool_call>\n<function={NAME}>\n", call_tail="</function>\n</seed:tool_call>",
    parameters=_FUNCTION_TEXT,
)
GEMMA4 = ToolFormat(
    name="gemma4",
    markers=TaggedCalls(
        opening=("<|tool_call>",), closing="<tool_call|>", head=r"call:(?P<name>[\w.-]+)", quote='<|"|>',
    ),
    head=f"<|tool_call>call:{NAME}", call_tail="<tool_call|>", separator="",
)
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    markers=TaggedCalls(
        opening=("<minimax:tool_call>",), closing="</minimax:tool_call>",
        head=r"<invoke name=\"(?P<name>[\w.-]+)\">", head_ends=(">",), keeps_head_end=False,
        parameters=ParameterTags(
            '<parameter name="', '">', "</parameter>", call_end="</invoke>", trims_lines=True,
        ),
        hides_markers=False,
    ),
    head=f'<minimax:tool_call>\n<invoke name="{NAME}">\n', call_tail="</invoke>\n</minimax:tool_call>",
    parameters=ParameterText('<parameter name="', '">', "</parameter>\n"),
)
_DSML = "<｜DSML｜"
_DSML_CALLS = TaggedCalls(
    opening=(f"{_DSML}function_calls>", f"{_DSML}tool_calls>"), closing="</｜DSML｜function_calls>",
    head=rf"{_DSML}invoke name=\"(?P<name>[\w.-]+)\">", head_ends=(">",), keeps_head_end=False,
    ignored=("</｜DSML｜tool_calls>",),
    parameters=ParameterTags(
        f'{_DSML}parameter name="', '">', "</｜DSML｜parameter>", call_end="</｜DSML｜invoke>",
        text_mark='" string="true', value_mark='" string="false',
    ),
    hides_markers=False, tokens=("｜DSML｜",),
)
DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32",
    markers=_DSML_CALLS,
    head=f'{_DSML}invoke name="{NAME}">\n', call_tail="</｜DSML｜invoke>", list_start=f"{_DSML}function_calls>\n",
    list_end="\n</｜DSML｜function_calls>",
    parameters=ParameterText(
        f'{_DSML}parameter name="', '" string="false">', "</｜DSML｜parameter>\n", text_middle='" string="true">',
    ),
)
DEEPSEEK_V4 = msgspec.structs.replace(
    DEEPSEEK_V32, name="deepseek_v4", list_start=f"{_DSML}tool_calls>\n", list_end="\n</｜DSML｜tool_calls>",
    markers=msgspec.structs.replace(
        _DSML_CALLS, opening=_DSML_CALLS.opening[::-1], closing="</｜DSML｜tool_calls>",
        ignored=("</｜DSML｜function_calls>",),
    ),
)
APERTUS = ToolFormat(
    name="apertus",
    markers=TaggedCalls(
        opening=("<|tools_prefix|>",), closing="<|tools_suffix|>", head=r"\s*\"(?P<name>[\w.-]+)\"\s*:",
        head_ends=(":",), keeps_head_end=False, call_start="{", ignored=("[", "]", "}", ","),
    ),
    head=f'{{"{NAME}": ', call_tail="}", separator=", ", list_start="<|tools_prefix|>[",
    list_end="]<|tools_suffix|>",
)
_MINIMAX_MARK = "]<]minimax[>["
MINIMAX_M3 = ToolFormat(  # written with JSON where calls are forced, which its parser reads, too
    name="minimax_m3",
    markers=TaggedCalls(
        opening=(f"{_MINIMAX_MARK}<tool_call>",), closing=f"{_MINIMAX_MARK}</tool_call>",
        head=r"(?P<name>[\w.-]+)\">", head_ends=(">",), keeps_head_end=False,
        call_start=f'{_MINIMAX_MARK}<invoke name="', tree_mark=_MINIMAX_MARK, hides_markers=False,
    ),
    head=f'{_MINIMAX_MARK}<invoke name="{NAME}">', call_tail=f"{_MINIMAX_MARK}</invoke>",
    list_start=f"{_MINIMAX_MARK}<tool_call>\n", list_end=f"\n{_MINIMAX_MARK}</tool_call>",
)
FUNCTION_GEMMA = ToolFormat(
    name="functiongemma",
    markers=TaggedCalls(
        opening=("<start_function_call>",), closing="<end_function_call>", head=r"call:(?P<name>[\w.-]+)",
        quote="<escape>",
    ),
    head=f"<start_function_call>call:{NAME}", call_tail="<end_function_call>", separator="",
)
FUNCTION_TAGS = ToolFormat(  # Functionary 3.1, and tools of one's own with Llama 3.1
    name="functionary",
    markers=TaggedCalls(
        opening=("<function=",), closing="</function>", head=r"(?P<name>[\w.-]+)>\s*", hides_markers=False,
    ),
    head=f"<function={NAME}>", call_tail="</function>", separator="",
)
MINICPM5 = ToolFormat(
    name="minicpm5",
    markers=TaggedCalls(
        opening=('<function name="',), closing="</function>", head=r"(?P<name>[\w.-]+)\">", head_ends=(">",),
        keeps_head_end=False,
        parameters=ParameterTags('<param name="', '">', "</param>", literal=("<![CDATA[", "]]>")),
        hides_markers=False, tokens=("<function", "</function>", "<param", "</param>"),
    ),
    head=f'<function name="{NAME}">', call_tail="</function>",
    parameters=ParameterText('<param name="', '">', "</param>"),
)
HUNYUAN3 = ToolFormat(
    name="hy_v3",
    markers=TaggedCalls(
        opening=("<tool_calls:opensource>",), closing="</tool_calls:opensource>",
        head=r"\s*(?P<name>[\w.-]+)\s*<tool_sep:opensource>", head_ends=("<tool_sep:opensource>",),
        keeps_head_end=False, call_start="<tool_call:opensource>",
        parameters=ParameterTags(
            "<arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>",
            name_end="</arg_key:opensource>", call_end="</tool_call:opensource>",
        ),
        hides_markers=False,
        tokens=tuple(
            ( f"<{name}:opensource>" for name in ("/tool_call", "arg_key", "/arg_key", "arg_value", "/arg_value") ),
        ),
    ),
    head=f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n", call_tail="</tool_call:opensource>",
    list_start="<tool_calls:opensource>\n", list_end="\n</tool_calls:opensource>",
    parameters=ParameterText(
        "<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>\n",
    ),
)
SOLAR_OPEN = ToolFormat(
    name="solar_open",
    markers=TaggedCalls(
        opening=("<|tool_calls|>",), closing="<|calls|>",
        head=r"[\w-]*<\|tool_call:name\|>(?P<name>[\w.-]+)<\|tool_call:args\|>\s*",
        call_start="<|tool_call:begin|>", ignored=("<|tool_call:end|>",),
    ),
    head=f"<|tool_call:begin|>0<|tool_call:name|>{NAME}<|tool_call:args|>", call_tail="<|tool_call:end|>",
    separator="", list_start="<|tool_calls|>",
)
# fmt: on
FORMATS = {
    each.name: each
    for each in (
        *(HERMES, LLAMA3_JSON, PYTHONIC, MISTRAL, MISTRAL_ARGS, GEMMA, GRANITE, DEEPSEEK_V3, DEEPSEEK_V31),
        *(KIMI_K2, GLM, QWEN3_CODER, MINIMAX_M2, HARMONY, SEED_OSS, LFM2, NEMOTRON, GEMMA4),
        *(
            DEEPSEEK_V32,
            DEEPSEEK_V4,
            COMMAND,
            JAMBA,
            OLMO3,
            APERTUS,
            FUNCTION_GEMMA,
            FUNCTION_TAGS,
            MINICPM5,
            HUNYUAN3,
        ),
        *(SOLAR_OPEN, MINIMAX_M3, INTERNLM2, PHI4, GIGACHAT3, LONGCAT, COMMAND_R),
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
    "granite-20b-fc": GRANITE,
    "phi4_mini_json": PHI4,
    "minicpm5xml": MINICPM5,
    "xlam": LLAMA3_JSON,
    "cohere_command3": COMMAND,
}

# Strings that only one family's template contains, looked for in this order.
# fmt: off
_SIGNS = (
    ("｜DSML｜", DEEPSEEK_V32), ("<|tool_calls_section_begin|>", KIMI_K2), ("<minimax:tool_call>", MINIMAX_M2),
    ("]<]minimax[>[", MINIMAX_M3), ("<arg_key>", GLM), ("<seed:tool_call>", SEED_OSS),
    ("<parameter=", QWEN3_CODER), ("<function=", FUNCTION_TAGS), ('<function name="', MINICPM5),
    ("<start_function_call>", FUNCTION_GEMMA),
    (":opensource", HUNYUAN3),  # its template adds this to the names of tags
    ("<|tool_call:begin|>", SOLAR_OPEN), ("<longcat_tool_call>", LONGCAT), ("<|plugin|>", INTERNLM2),
    ("<|role_sep|>", GIGACHAT3), ("functools[", PHI4), ("<|/tool|>", PHI4), ("directly-answer", COMMAND_R),
    ("<|START_ACTION|>", COMMAND), ("<|tools_prefix|>", APERTUS), ("<function_calls>", OLMO3),
    ("<tool_calls>", JAMBA), ("<|channel|>", HARMONY), ("<|tool_call>", GEMMA4), ("<|tool_call_start|>", LFM2),
    ("<|tool_list_start|>", LFM2), ("<TOOLCALL>", NEMOTRON), ("<|tool_call|>", GRANITE),
    ("<function_call>", GRANITE), ("<tool_call>", HERMES), ("[ARGS]", MISTRAL_ARGS), ("[TOOL_CALLS]", MISTRAL),
    ("<|python_start|>", PYTHONIC), ("<|python_tag|>", LLAMA3_JSON),
    ("ipython", LLAMA3_JSON),  # the role of its tools
)
# fmt: on

# Formats of models whose template shows no calls, or that come without a template.
_BY_ARCHITECTURE = (
    ("gemma", GEMMA),
    ("deepseek_v32", DEEPSEEK_V32),
    ("deepseek_v4", DEEPSEEK_V4),
    ("lfm", LFM2),
    ("internlm", INTERNLM2),
)


def tool_format_of(card: ModelCard, setting: str = AUTO) -> ToolFormat | None:
    """Return the format that a model writes calls in: as configured, else as its template or architecture shows. None
    when calls are not to be parsed at all."""
    if setting == NO_PARSER:
        return None
    if setting != AUTO:
        return ALIASES[setting] if setting in ALIASES else FORMATS[setting]
    template = card.named_templates.get("tool_use") or card.chat_template or ""
    if DEEPSEEK_TAGS.opening[0] in template and "｜DSML｜" not in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "｜DSML｜" in template and "function_calls" not in template:
        return DEEPSEEK_V4
    for sign, tool_format in _SIGNS:
        if sign in template:
            return tool_format
    return next(
        (each for name, each in _BY_ARCHITECTURE if card.architecture.lower().startswith(name)), HERMES
    )
