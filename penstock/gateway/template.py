"""Chat messages to prompt text, by the template that came with the model.

Templates are untrusted code from a checkpoint: they run in a sandbox that cannot change what it is given.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.core.errors import InvalidRequest, ModelLoadError
from penstock.core.messages import ModelCard
from penstock.gateway.prompts import ChatMessage, ChatPrompt


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's words for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (declared by jinja2 as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja2's own filter this does not escape for HTML, which would spoil a prompt."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """Compiled once per model. A model without a template refuses chats with a hint."""

    def __init__(self, card: ModelCard) -> None:
        self._model_name = card.name
        self._special_tokens = card.special_tokens
        self._template = None
        if card.chat_template is not None:
            try:
                self._template = _environment().from_string(card.chat_template)
            except TemplateError as error:
                raise ModelLoadError(f"The chat template of {card.name} cannot be read: {error}") from error

    def render(self, prompt: ChatPrompt) -> str:
        if self._template is None:
            raise InvalidRequest(
                f"The model {self._model_name} has no chat template.",
                param="messages",
                hint="Use /v1/completions with a plain prompt.",
            )
        variables = {
            **self._special_tokens,
            **prompt.template_options,
            "messages": [_as_dict(message) for message in prompt.messages],
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except TemplateError as error:
            raise InvalidRequest(
                f"The model's chat template refused the messages: {error.message}", param="messages"
            ) from error
        except Exception as error:  # whatever an expression in the template ran into
            raise InvalidRequest(
                f"The model's chat template failed on the messages ({type(error).__name__}).",
                param="messages",
            ) from error


def _as_dict(message: ChatMessage) -> dict[str, str]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    turn = {"role": message.role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    return turn
