"""The formats in which families of models write tool calls, and which format a model uses.

A model's chat template tells the family of the model, because the template repeats the model's own calls. A new
family is an entry in `FORMATS`, and in `_SIGNS` if its template has a sign of its own.
"""

from __future__ import annotations

from penstock.core.messages import ModelCard
from penstock.gateway.tools.call_parser import CallMarkers
from penstock.gateway.tools.tool_format import (
    APERTUS,
    AUTO,
    DEEPSEEK_TAGS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FUNCTION_GEMMA,
    FUNCTION_TAGS,
    GEMMA4,
    GLM,
    HUNYUAN3,
    KIMI_K2,
    MINICPM5,
    MINIMAX_M2,
    MINIMAX_M3,
    NAME,
    NO_PARSER,
    QWEN3_CODER,
    SEED_OSS,
    SOLAR_OPEN,
    ToolFormat,
)

HERMES = ToolFormat(
    name="hermes",
    markers=CallMarkers(opening=("<tool_call>",), closing="</tool_call>"),
    head=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
    call_tail="}\n</tool_call>",
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    markers=CallMarkers(opening=("<|python_tag|>",), bare="{[", writes_python=True, hides_markers=True),
    head=f'{{"name": "{NAME}", "parameters": ',
    call_tail="}",
    separator="; ",
)
_MISTRAL_MARKERS = CallMarkers(
    opening=("[TOOL_CALLS]",), name_end="[ARGS]", id_mark="[CALL_ID]", hides_markers=True
)
MISTRAL = ToolFormat(
    name="mistral",
    markers=_MISTRAL_MARKERS,
    head=f'{{"name": "{NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="[TOOL_CALLS][",
    list_end="]",
    short_call_ids=True,
)
MISTRAL_ARGS = ToolFormat(  # Mistral's newer models
    name="mistral_args",
    markers=_MISTRAL_MARKERS,
    head=f"[TOOL_CALLS]{NAME}[ARGS]",
    separator="",
    short_call_ids=True,
)
GEMMA = ToolFormat(
    name="gemma",
    markers=CallMarkers(
        opening=("```tool_code", "```tool_call", "```json"), closing="```", bare="{[", writes_python=True
    ),
    head=f'```tool_code\n{{"name": "{NAME}", "parameters": ',
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
    head=f'{{"name": "{NAME}", "parameters": ',
    call_tail="}",
    separator="; ",
)
GRANITE = ToolFormat(  # Granite 3; Granite 4 writes as Hermes does
    name="granite",
    markers=CallMarkers(
        opening=("<|tool_call|>", "<tool_call>", "<function_call>"), bare="", hides_markers=True
    ),
    head=f'{{"name": "{NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<|tool_call|>[",
    list_end="]",
)
LFM2 = ToolFormat(
    name="lfm2",
    markers=CallMarkers(
        opening=("<|tool_call_start|>",), closing="<|tool_call_end|>", writes_python=True, hides_markers=True
    ),
    head=f'{{"name": "{NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<|tool_call_start|>[",
    list_end="]<|tool_call_end|>",
)
NEMOTRON = ToolFormat(  # Llama Nemotron and Nemotron Nano 2; Nemotron 3 writes as Qwen3-Coder does
    name="nemotron",
    markers=CallMarkers(opening=("<TOOLCALL>",), closing="</TOOLCALL>", hides_markers=True),
    head=f'{{"name": "{NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<TOOLCALL>[",
    list_end="]</TOOLCALL>",
)
COMMAND = ToolFormat(  # Command R7B and Command A
    name="command",
    markers=CallMarkers(opening=("<|START_ACTION|>",), closing="<|END_ACTION|>", hides_markers=True),
    head=f'{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": ',
    call_tail="}",
    separator=",\n    ",
    list_start="<|START_ACTION|>[\n    ",
    list_end="\n]<|END_ACTION|>",
)
JAMBA = ToolFormat(  # Jamba, Hunyuan and MiniMax M1
    name="jamba",
    markers=CallMarkers(opening=("<tool_calls>",), closing="</tool_calls>"),
    head=f'{{"name": "{NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<tool_calls>[",
    list_end="]</tool_calls>",
)
OLMO3 = ToolFormat(
    name="olmo3",
    markers=CallMarkers(opening=("<function_calls>",), closing="</function_calls>", writes_python=True),
    head=f'{{"name": "{NAME}", "arguments": ',
    call_tail="}",
    list_start="<function_calls>\n",
    list_end="\n</function_calls>",
)
INTERNLM2 = ToolFormat(
    name="internlm",
    markers=CallMarkers(
        opening=("<|action_start|><|plugin|>",), closing="<|action_end|>", hides_markers=True
    ),
    head=f'<|action_start|><|plugin|>\n{{"name": "{NAME}", "parameters": ',
    call_tail="}<|action_end|>",
    separator="",
)
PHI4 = ToolFormat(  # Phi 4 mini
    name="phi4_mini",
    markers=CallMarkers(opening=("<|tool_call|>", "functools"), closing="<|/tool_call|>", hides_markers=True),
    head=f'{{"name": "{NAME}", "arguments": ',
    call_tail="}",
    separator=", ",
    list_start="<|tool_call|>[",
    list_end="]<|/tool_call|>",
)
GIGACHAT3 = ToolFormat(
    name="gigachat3",
    markers=CallMarkers(opening=("<|function_call|>", "function call<|role_sep|>"), hides_markers=True),
    head=f'<|function_call|>{{"name": "{NAME}", "arguments": ',
    call_tail="}",
    separator="",
    calls_once=True,
)
LONGCAT = ToolFormat(
    name="longcat",
    markers=CallMarkers(opening=("<longcat_tool_call>",), closing="</longcat_tool_call>"),
    head=f'<longcat_tool_call>\n{{"name": "{NAME}", "arguments": ',
    call_tail="}\n</longcat_tool_call>",
)
COMMAND_R = ToolFormat(  # the first Command R and R+
    name="command_r",
    markers=CallMarkers(opening=("Action: ```json", "Action:```json", "Action:\n```json"), closing="```"),
    head=f'{{\n        "tool_name": "{NAME}",\n        "parameters": ',
    call_tail="\n    }",
    separator=",\n    ",
    list_start="Action: ```json\n[\n    ",
    list_end="\n]```",
)
HARMONY = ToolFormat(  # gpt-oss
    name="harmony",
    markers=None,
    head=f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
    separator="<|end|><|start|>assistant",
    calls_once=True,
)
FORMATS = {
    each.name: each
    for each in (
        *(HERMES, LLAMA3_JSON, PYTHONIC, MISTRAL, MISTRAL_ARGS, GEMMA, GRANITE, DEEPSEEK_V3, DEEPSEEK_V31),
        *(KIMI_K2, GLM, QWEN3_CODER, MINIMAX_M2, HARMONY, SEED_OSS, LFM2, NEMOTRON, GEMMA4),
        *(DEEPSEEK_V32, COMMAND, JAMBA, OLMO3, APERTUS, FUNCTION_GEMMA, FUNCTION_TAGS, MINICPM5, HUNYUAN3),
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

# What only one family's template contains, looked for in this order.
_SIGNS = (
    ("｜DSML｜", DEEPSEEK_V32),
    ("<|tool_calls_section_begin|>", KIMI_K2),
    ("<minimax:tool_call>", MINIMAX_M2),
    ("]<]minimax[>[", MINIMAX_M3),
    ("<arg_key>", GLM),
    ("<seed:tool_call>", SEED_OSS),
    ("<parameter=", QWEN3_CODER),
    ("<function=", FUNCTION_TAGS),
    ('<function name="', MINICPM5),
    ("<start_function_call>", FUNCTION_GEMMA),
    (":opensource", HUNYUAN3),  # its template adds this to the names of tags
    ("<|tool_call:begin|>", SOLAR_OPEN),
    ("<longcat_tool_call>", LONGCAT),
    ("<|plugin|>", INTERNLM2),
    ("<|role_sep|>", GIGACHAT3),
    ("functools[", PHI4),
    ("<|/tool|>", PHI4),
    ("directly-answer", COMMAND_R),
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
    ("<function_call>", GRANITE),
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_start|>", PYTHONIC),
    ("<|python_tag|>", LLAMA3_JSON),
    ("ipython", LLAMA3_JSON),  # the role of its tools
)

# Of models whose template shows no calls, or that come without a template.
_BY_ARCHITECTURE = (("gemma", GEMMA), ("deepseek_v32", DEEPSEEK_V32), ("lfm", LFM2), ("internlm", INTERNLM2))


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
    for sign, tool_format in _SIGNS:
        if sign in template:
            return tool_format
    return next(
        (each for name, each in _BY_ARCHITECTURE if card.architecture.lower().startswith(name)), HERMES
    )
