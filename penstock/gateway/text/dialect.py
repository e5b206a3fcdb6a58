"""How one model speaks: the format of its tool calls, and whether it thinks before it answers.

Decides for every chat what its answers may hold, and keeps a model from thinking where a grammar leaves no room
for it.
"""

from __future__ import annotations

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.gateway_config import GatewayConfig
from penstock.core.messages import ModelCard
from penstock.core.request import CacheBreakpoint, Grammar
from penstock.gateway.prompts import ChatPrompt
from penstock.gateway.text.template import RenderedChat
from penstock.gateway.text.tokenizer import TextTokenizer
from penstock.gateway.tools.answer_form import AnswerForm, answer_form, forces_calls
from penstock.gateway.tools.formats import reasons, tool_format_of
from penstock.gateway.tools.parser import THINK_END, THINK_START


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A prompt in tokens, which prefixes of it to keep, and what its answers consist of; None for nothing but
    text."""

    token_ids: tuple[int, ...]
    form: AnswerForm | None = None
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    cache_salt: str = ""


class Dialect:
    def __init__(self, card: ModelCard, tokenizer: TextTokenizer, config: GatewayConfig) -> None:
        self.tool_format = tool_format_of(card, config.tool_call_parser)
        self.reasons = reasons(card, config.reasoning_parser)
        self._shown_token_ids: frozenset[int] = frozenset()
        if self.tool_format is not None:
            self._shown_token_ids = tokenizer.special_ids_of(self.tool_format.markers.texts)

    def without_thinking_where_held(self, prompt: ChatPrompt, grammar: Grammar | None) -> ChatPrompt:
        """A grammar describes the whole answer, so the model must not begin with its thoughts."""
        if self.reasons and (grammar is not None or forces_calls(prompt)):
            return msgspec.structs.replace(prompt, thinks=False)
        return prompt

    def close_thinking(self, prompt: ChatPrompt, rendered: RenderedChat) -> RenderedChat:
        """Some templates open the reasoning whatever they are told."""
        if prompt.thinks is False and self._opens_thinking(rendered):
            return msgspec.structs.replace(rendered, text=f"{rendered.text.rstrip()}\n{THINK_END}\n\n")
        return rendered

    def answer_form(
        self, prompt: ChatPrompt, rendered: RenderedChat, grammar: Grammar | None
    ) -> AnswerForm | None:
        if self.tool_format is None and forces_calls(prompt):
            raise InvalidRequest("This server does not parse tool calls.", param="tool_choice")
        return answer_form(
            prompt,
            self.tool_format,
            reasons=self.reasons,
            reasoning_is_open=self._opens_thinking(rendered),
            shown_token_ids=self._shown_token_ids,
            grammar=grammar,
        )

    def _opens_thinking(self, rendered: RenderedChat) -> bool:
        return self.reasons and rendered.text.rstrip().endswith(THINK_START)
