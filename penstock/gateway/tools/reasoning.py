"""The marks around the thoughts of families of models, and which marks a model uses."""

from __future__ import annotations

from penstock.core.messages import ModelCard
from penstock.gateway.tools import harmony
from penstock.gateway.tools.parser import THINK, ReasoningMarks
from penstock.gateway.tools.tool_format import AUTO, NO_PARSER

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


# Of templates that put the marks together from parts.
_OTHER_SIGNS = {"harmony": harmony.CHANNEL, "hy_v3": ":opensource"}


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
