"""Chat messages and tools to prompt text, by the template that came with the model.

Templates are untrusted code from a checkpoint: they run in a sandbox that cannot change what it is given. The text of
clients is untrusted too: a message that spells out a control token, `<|im_end|>` for example, must not end its own
turn and speak as another role. `PlainTextMarks` replaces such spellings by marks that no tokenizer knows before a
template is rendered, puts them back afterwards, and remembers their places, which are tokenized as plain text.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.core.errors import InvalidRequest, ModelLoadError
from penstock.core.grammar_text import special_token_ids
from penstock.core.messages import ModelCard
from penstock.gateway.prompts import ChatMessage, ChatPrompt, ToolCall, num_characters
from penstock.gateway.tools.answer_form import offers_tools
from penstock.gateway.tools.formats import (
    HERMES,
    ToolFormat,
    described_in_words,
    tool_schema,
    with_single_calls,
)

# Unicode promises that these are never characters. A text that holds the first one all the same is marked itself.
_MARK = "\U0010fffe"
_NUMBERS_FROM = 0xF0000  # private use: one code point for each control token


class RenderedChat(msgspec.Struct, frozen=True):
    text: str
    plain_ranges: tuple[tuple[int, int], ...] = ()  # where the text spells control tokens that are none


class PlainTextMarks:
    def __init__(self, control_tokens: Iterable[str]) -> None:
        self._spellings = sorted({*control_tokens, _MARK} - {""}, key=lambda text: (-len(text), text))
        self._numbers = {spelling: number for number, spelling in enumerate(self._spellings)}
        self._spelled = re.compile(_any_of(self._spellings))
        self._marked = re.compile(f"{_MARK}([\U000f0000-\U000ffffd])")

    def mark(self, text: str) -> str:
        if self._spelled.search(text) is None:
            return text
        return self._spelled.sub(lambda found: _MARK + chr(_NUMBERS_FROM + self._numbers[found[0]]), text)

    def restore(self, rendered: str) -> RenderedChat:
        if _MARK not in rendered:
            return RenderedChat(rendered)
        pieces: list[str] = []
        ranges: list[tuple[int, int]] = []
        length = end = 0
        for found in self._marked.finditer(rendered):
            number = ord(found[1]) - _NUMBERS_FROM
            if number >= len(self._spellings):
                continue
            before, spelling = rendered[end : found.start()], self._spellings[number]
            pieces += (before, spelling)
            start = length + len(before)
            length = start + len(spelling)
            ranges.append((start, length))
            end = found.end()
        pieces.append(rendered[end:])
        return RenderedChat("".join(pieces), tuple(ranges))


def _any_of(spellings: Sequence[str]) -> str:
    """A pattern for the longest of them. Some models have hundreds of control tokens, and texts in HTML as many `<`:
    so the pattern decides by the first two characters before it looks at each."""
    groups: dict[str, list[str]] = {}
    for spelling in spellings:  # longest first
        groups.setdefault(spelling[:2], []).append(re.escape(spelling[2:]))
    ordered = sorted(groups.items(), key=lambda group: -len(group[0]))
    return "|".join(f"{re.escape(start)}(?:{'|'.join(rests)})" for start, rests in ordered)


DIRECT_RENDER_MESSAGES = 200
DIRECT_RENDER_CHARACTERS = 1 << 16
_SHORT_ID_LENGTH = 9
_LAST_WORD = "\U0010ffff"  # never a character; stands where an answer is to go on


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

    def __init__(self, card: ModelCard, tool_format: ToolFormat | None = None) -> None:
        self._model_name = card.name
        self._special_tokens = card.special_tokens
        self._tool_format = tool_format or HERMES
        self._marks = PlainTextMarks(special_token_ids(card.tokenizer_json))
        self._template = None
        self.knows_tools = False
        if card.chat_template is not None:
            environment = _environment()
            try:
                self._template = environment.from_string(card.chat_template)
                self._template.globals = dict(self._template.globals)  # every rendering copies them
                variables = meta.find_undeclared_variables(environment.parse(card.chat_template))
            except TemplateError as error:
                raise ModelLoadError(f"The chat template of {card.name} cannot be read: {error}") from error
            self.knows_tools = "tools" in variables

    def render(self, prompt: ChatPrompt) -> RenderedChat:
        if self._template is None:
            raise InvalidRequest(
                f"The model {self._model_name} has no chat template.",
                param="messages",
                hint="Use /v1/completions with a plain prompt.",
            )
        try:
            return self._render(self._template, prompt)
        except InvalidRequest:
            for retold, arguments_as_text in self._retold(prompt):
                with contextlib.suppress(InvalidRequest):
                    return self._render(self._template, retold, arguments_as_text=arguments_as_text)
            raise

    async def render_later(self, prompt: ChatPrompt) -> RenderedChat:
        """As `render`; a chat of many turns or much text, which may take seconds, is written off the event loop."""
        is_short = len(prompt.messages) <= DIRECT_RENDER_MESSAGES
        if is_short and num_characters(prompt) <= DIRECT_RENDER_CHARACTERS:
            return self.render(prompt)
        return await asyncio.to_thread(self.render, prompt)

    def _retold(self, prompt: ChatPrompt) -> Iterator[tuple[ChatPrompt, bool]]:
        """Other ways to tell of earlier calls: some templates take arguments as text only, some take only one call
        in a turn."""
        if self.knows_tools and any(message.tool_calls for message in prompt.messages):
            yield prompt, True
            single = msgspec.structs.replace(prompt, messages=with_single_calls(prompt.messages))
            yield single, False
            yield single, True

    def _render(
        self, template: Template, prompt: ChatPrompt, *, arguments_as_text: bool = False
    ) -> RenderedChat:
        try:
            text = template.render(self._variables(prompt, arguments_as_text=arguments_as_text))
            if prompt.continues_last:  # what closes the turn is not to be written
                text = text[: text.rindex(_LAST_WORD)]
            return self._marks.restore(text)
        except TemplateError as error:
            raise InvalidRequest(
                f"The model's chat template refused the messages: {error.message}", param="messages"
            ) from error
        except Exception as error:  # whatever an expression in the template ran into
            raise InvalidRequest(
                f"The model's chat template failed on the messages ({type(error).__name__}).",
                param="messages",
            ) from error

    def _variables(self, prompt: ChatPrompt, *, arguments_as_text: bool) -> dict[str, Any]:
        messages: Sequence[ChatMessage] = prompt.messages
        tools = prompt.tools if offers_tools(prompt) else ()
        variables: dict[str, Any] = {}
        if prompt.thinks is not None:  # templates know it by either name
            variables = {"enable_thinking": prompt.thinks, "thinking": prompt.thinks}
        # What a client adds must not take the place of what is checked elsewhere: special tokens, tools, messages.
        variables |= _marked(prompt.template_options, self._marks.mark) | self._special_tokens
        variables.pop("tools", None)
        if not self.knows_tools:
            messages = described_in_words(messages, tools, self._tool_format)
        elif tools:
            variables["tools"] = _marked([tool_schema(tool) for tool in tools], self._marks.mark)
        as_dict = _TurnWriter(
            self._marks.mark,
            short_call_ids=self._tool_format.short_call_ids,
            arguments_as_text=arguments_as_text,
        )
        variables["messages"] = [as_dict.turn(message) for message in messages]
        if prompt.continues_last:
            variables["messages"][-1]["content"] += _LAST_WORD
        variables["add_generation_prompt"] = prompt.add_generation_prompt and not prompt.continues_last
        return variables


class _TurnWriter:
    """Turns as templates know them from the Hugging Face hub. One per chat: a result learns from the call that it
    answers which tool it comes from."""

    def __init__(self, mark: Callable[[str], str], *, short_call_ids: bool, arguments_as_text: bool) -> None:
        self._mark = mark
        self._arguments_as_text = arguments_as_text
        self._short_call_ids = short_call_ids
        self._tool_names: dict[str, str] = {}

    def turn(self, message: ChatMessage) -> dict[str, Any]:
        mark = self._mark
        content = message.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        turn: dict[str, Any] = {"role": message.role, "content": mark(content)}
        name = message.name
        if message.role == "tool" and message.tool_call_id is not None:
            turn["tool_call_id"] = mark(self._call_id(message.tool_call_id))
            name = name or self._tool_names.get(message.tool_call_id)
        if name is not None:
            turn["name"] = mark(name)
        if message.reasoning is not None:
            turn["reasoning_content"] = mark(message.reasoning)
        if message.tool_calls:
            turn["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return turn

    def _call(self, call: ToolCall) -> dict[str, Any]:
        self._tool_names[call.id] = call.name
        arguments: Any = call.arguments or "{}"
        if not self._arguments_as_text:
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                arguments = msgspec.json.decode(arguments)
        function = {"name": call.name, "arguments": arguments}
        return _marked(  # type: ignore[no-any-return]
            {"id": self._call_id(call.id), "type": "function", "function": function}, self._mark
        )

    def _call_id(self, call_id: str) -> str:
        if not self._short_call_ids or (len(call_id) == _SHORT_ID_LENGTH and call_id.isalnum()):
            return call_id
        return hashlib.blake2b(call_id.encode()).hexdigest()[:_SHORT_ID_LENGTH]


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    """The same JSON value with every text in it marked."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, list):
        return [_marked(item, mark) for item in value]
    if isinstance(value, dict):
        return {mark(str(key)): _marked(item, mark) for key, item in value.items()}
    return value
