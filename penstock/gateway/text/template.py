"""Chat messages and tools to prompt text, by the template that came with the model.

Templates are untrusted code from a checkpoint: they run in a sandbox that cannot change its inputs. The text of
clients is untrusted too: a message that spells out a control token, `<|im_end|>` for example, must not end its own
turn and speak as another role. `PlainTextMarks` replaces such spellings by marks that no tokenizer knows before a
template is rendered, puts them back afterwards, and remembers their places, which are tokenized as plain text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from jinja2 import Template, TemplateError, meta

from penstock.core.errors import InvalidRequest, ModelLoadError
from penstock.core.grammar_text import special_token_ids
from penstock.core.messages import ModelCard
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    ImagePart,
    TextPart,
    Tool,
    ToolCall,
    num_template_characters,
)
from penstock.gateway.text.template_sandbox import BoundedEnvironment
from penstock.gateway.tools.answer_form import offers_tools
from penstock.gateway.tools.formats import HERMES
from penstock.gateway.tools.tool_format import ToolFormat, tool_schema
from penstock.gateway.turns import in_thread


def described_in_words(
    messages: Sequence[ChatMessage],
    tools: tuple[Tool, ...],
    tool_format: ToolFormat,
    *,
    has_system: bool = True,
) -> tuple[ChatMessage, ...]:
    """Describe tools at the end of the system prompt, or, for templates without such a turn, at the beginning of the
    user's first turn. Earlier calls stand in the model's turns as the model would write them, and results come back
    as a user's turn."""
    told: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            _add_result(told, message)
        elif message.tool_calls:
            told.append(_with_written_calls(message, tool_format))
        else:
            told.append(message)
    if tools:
        _instruct(told, tool_format.instructions(tools), has_system=has_system)
    return tuple(told)


def with_single_calls(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Give each call a turn of its own, as if the call had waited for the result of the call before."""
    told: list[ChatMessage] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        if len(message.tool_calls) < 2:
            told.append(message)
            continue
        results = []
        while rest and rest[0].role == "tool":
            results.append(rest.popleft())
        content = message.content
        for call in message.tool_calls:
            told.append(msgspec.structs.replace(message, content=content, tool_calls=(call,)))
            told += [result for result in results if result.tool_call_id == call.id]
            content = ""
        ids = {call.id for call in message.tool_calls}
        told += [result for result in results if result.tool_call_id not in ids]
    return tuple(told)


def _instruct(told: list[ChatMessage], instructions: str, *, has_system: bool) -> None:
    if told and told[0].role == "user" and not has_system:
        told[0] = msgspec.structs.replace(told[0], content=(TextPart(instructions + "\n"), *told[0].parts))
    elif told and told[0].role == "system":
        system = told[0]
        told[0] = msgspec.structs.replace(
            system, content=(*system.parts, TextPart("\n" + instructions)), cache=None
        )
    else:
        told.insert(0, ChatMessage("system", instructions))


def _with_written_calls(message: ChatMessage, tool_format: ToolFormat) -> ChatMessage:
    written = TextPart(tool_format.written(message.tool_calls))
    parts = (*message.parts, written)
    return msgspec.structs.replace(message, content=parts, tool_calls=())


def _add_result(told: list[ChatMessage], message: ChatMessage) -> None:
    """Results of parallel calls share a turn, because many templates want turns to alternate."""
    body = "\n".join(part.text for part in message.parts)
    images = tuple(part for part in message.parts if isinstance(part, ImagePart))
    result = TextPart(f"<tool_response>\n{body}\n</tool_response>", message.cache)
    last = told[-1] if told else None
    if last is not None and last.role == "user" and last.tool_call_id is not None:
        told[-1] = msgspec.structs.replace(last, content=(*last.parts, result, *images))
    else:
        told.append(ChatMessage("user", (result, *images), tool_call_id=message.tool_call_id or ""))


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
    """Return a pattern for the longest of them. Some models have hundreds of control tokens, and texts in HTML as
    many `<`: so the pattern decides by the first two characters before it looks at each."""
    groups: dict[str, list[str]] = {}
    for spelling in spellings:  # longest first
        groups.setdefault(spelling[:2], []).append(re.escape(spelling[2:]))
    ordered = sorted(groups.items(), key=lambda group: -len(group[0]))
    return "|".join(f"{re.escape(start)}(?:{'|'.join(rests)})" for start, rests in ordered)


DIRECT_RENDER_MESSAGES = 200  # with their parts, calls and tools, which cost as much
DIRECT_RENDER_CHARACTERS = 1 << 16
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"  # as the hub names several templates of one model
_SHORT_ID_LENGTH = 9
_LAST_WORD = "\U0010ffff"  # never a character; stands where an answer is to continue


class _Compiled(msgspec.Struct, frozen=True):
    template: Template
    knows_tools: bool
    loops_over_parts: bool = False  # of a turn with images
    needs_parts: bool = False  # takes no plain text
    writes_calls: bool = True  # of earlier turns


# Templates of vision-language models loop over the parts of a turn; some of them take no plain text any more.
_LOOPS_OVER_PARTS = re.compile(r"""in\s+\w+(\[['"]content['"]\]|\.content)""")
_TAKES_TEXT = re.compile(r"is\s+(not\s+)?(string|iterable)")


_ENVIRONMENT = BoundedEnvironment()


@functools.lru_cache(maxsize=64)
def _template_and_variables(text: str) -> tuple[Template, frozenset[str]]:
    """Compile a template, once for all models and adapters that have it. Raises TemplateError."""
    template = _ENVIRONMENT.from_string(text)
    template.globals = dict(template.globals)  # every rendering copies them
    return template, frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(text)))


class ChatTemplate:
    """The templates of one model, compiled once. A model without a template refuses chats with a hint."""

    def __init__(self, card: ModelCard, tool_format: ToolFormat | None = None) -> None:
        self._model_name = card.name
        self._special_tokens = card.special_tokens
        self._tool_format = tool_format or HERMES
        self._image_token = card.vision.template_token if card.vision is not None else ""
        # Some templates write images as a word that is no token of the model.
        self._marks = PlainTextMarks([*special_token_ids(card.tokenizer_json), self._image_token])
        self._default = None if card.chat_template is None else self._compiled(card.chat_template)
        self._named = {name: self._compiled(text) for name, text in card.named_templates.items()}

    def render(self, prompt: ChatPrompt) -> RenderedChat:
        chosen = self._chosen(prompt)
        try:
            return self._render(chosen, prompt)
        except InvalidRequest:
            # Some templates go through tools without a look whether there are any.
            if not offers_tools(prompt):
                with contextlib.suppress(InvalidRequest):
                    return self._render(chosen, prompt, says_none=False)
            if offers_tools(prompt) and not chosen.knows_tools:  # some templates refuse a turn of the system
                with contextlib.suppress(InvalidRequest):
                    return self._render(chosen, prompt, has_system=False)
            for retold, arguments_as_text in self._retold(chosen, prompt):
                with contextlib.suppress(InvalidRequest):
                    return self._render(chosen, retold, arguments_as_text=arguments_as_text)
            raise

    def _compiled(self, text: str) -> _Compiled:
        try:
            template, variables = _template_and_variables(text)
        except TemplateError as error:
            raise ModelLoadError(
                f"The chat template of {self._model_name} cannot be read: {error}"
            ) from error
        loops = bool(self._image_token) and _LOOPS_OVER_PARTS.search(text) is not None
        needs_parts = loops and _TAKES_TEXT.search(text) is None
        writes_calls = "tool_calls" in text or "function_call" in text
        return _Compiled(template, "tools" in variables, loops, needs_parts, writes_calls)

    def _chosen(self, prompt: ChatPrompt) -> _Compiled:
        """Return the template that the client names; else, with tools, the model's template for tools; else the
        default."""
        name = prompt.template_name
        if name is not None and name != DEFAULT_TEMPLATE:
            if name not in self._named:
                raise InvalidRequest(
                    f"The model {self._model_name} has no chat template with the name {name[:40]!r}.",
                    param="chat_template",
                    hint=f"Known: {', '.join((DEFAULT_TEMPLATE, *self._named))}. Templates of requests are not run.",
                )
            return self._named[name]
        chosen = self._named.get(TOOL_TEMPLATE) if name is None and offers_tools(prompt) else None
        chosen = chosen or self._default
        if chosen is None:
            raise InvalidRequest(
                f"The model {self._model_name} has no chat template.",
                param="messages",
                hint="Use /v1/completions with a plain prompt.",
            )
        return chosen

    async def render_later(self, prompt: ChatPrompt) -> RenderedChat:
        """As `render`; a chat of many turns, parts, calls or tools, or of much text, which may take seconds, is
        written off the event loop."""
        num_inner = sum([len(message.tool_calls) + max(1, len(message.parts)) for message in prompt.messages])
        is_short = num_inner + len(prompt.tools) <= DIRECT_RENDER_MESSAGES
        if is_short and num_template_characters(prompt) <= DIRECT_RENDER_CHARACTERS:
            return self.render(prompt)
        return await in_thread(self.render, prompt)

    def _retold(self, chosen: _Compiled, prompt: ChatPrompt) -> Iterator[tuple[ChatPrompt, bool]]:
        """Other forms of earlier calls: some templates take arguments as text only, some take only one call
        in a turn, and some take no thoughts beside a text and a call."""
        if not chosen.knows_tools or not any(message.tool_calls for message in prompt.messages):
            return
        single = msgspec.structs.replace(prompt, messages=with_single_calls(prompt.messages))
        yield from ((prompt, True), (single, False), (single, True))
        if any(message.reasoning for message in prompt.messages):
            messages = tuple(
                msgspec.structs.replace(message, reasoning=None) if message.tool_calls else message
                for message in prompt.messages
            )
            yield msgspec.structs.replace(prompt, messages=messages), False

    def _render(
        self,
        chosen: _Compiled,
        prompt: ChatPrompt,
        *,
        arguments_as_text: bool = False,
        says_none: bool = True,
        has_system: bool = True,
    ) -> RenderedChat:
        try:
            variables = self._variables(
                chosen, prompt, arguments_as_text=arguments_as_text, has_system=has_system
            )
            if not says_none:
                variables = {name: value for name, value in variables.items() if value is not None}
            text = _ENVIRONMENT.render(chosen.template, variables)
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

    def _variables(
        self, chosen: _Compiled, prompt: ChatPrompt, *, arguments_as_text: bool, has_system: bool
    ) -> dict[str, Any]:
        messages: Sequence[ChatMessage] = prompt.messages
        tools = prompt.tools if offers_tools(prompt) else ()
        variables: dict[str, Any] = {"documents": None}
        if prompt.thinks is not None:  # templates know it by one of these names
            mode = "enabled" if prompt.thinks else "disabled"
            variables |= {"enable_thinking": prompt.thinks, "thinking": prompt.thinks, "thinking_mode": mode}
        # Variables of a client must not replace special tokens, tools or messages, which are checked elsewhere.
        variables |= _marked(prompt.template_options, self._marks.mark) | self._special_tokens
        variables["tools"] = None  # absent tools are None, as transformers has them
        if not chosen.knows_tools:
            messages = described_in_words(messages, tools, self._tool_format, has_system=has_system)
        elif tools:
            variables["tools"] = _marked([tool_schema(tool) for tool in tools], self._marks.mark)
        as_dict = _TurnWriter(
            self._marks.mark,
            short_call_ids=self._tool_format.short_call_ids,
            arguments_as_text=arguments_as_text,
            content=partial(self._content, chosen),
        )
        variables["messages"] = [as_dict.turn(message) for message in messages]
        if prompt.continues_last:
            _add_last_word(variables["messages"][-1])
        variables["add_generation_prompt"] = prompt.add_generation_prompt and not prompt.continues_last
        return variables

    def _content(self, chosen: _Compiled, message: ChatMessage) -> str | list[dict[str, str]]:
        """Return the content of a turn: one text, or parts where there are images or the template wants nothing
        else."""
        if message.tool_calls and not chosen.writes_calls:
            message = _with_written_calls(message, self._tool_format)
        mark, content = self._marks.mark, message.content
        parts = (TextPart(content),) if isinstance(content, str) else content
        has_images = any(isinstance(part, ImagePart) for part in parts)
        if chosen.needs_parts or (has_images and chosen.loops_over_parts):
            return [
                {"type": "image"}
                if isinstance(part, ImagePart)
                else {"type": "text", "text": mark(part.text)}
                for part in parts
            ]
        if isinstance(content, str):
            return mark(content)
        return "\n".join(
            self._image_token or mark(part.stand_in) if isinstance(part, ImagePart) else mark(part.text)
            for part in content
        )


def _add_last_word(turn: dict[str, Any]) -> None:
    """Mark the place where an answer is to continue."""
    if isinstance(turn["content"], str):
        turn["content"] += _LAST_WORD
    elif turn["content"] and "text" in turn["content"][-1]:
        turn["content"][-1]["text"] += _LAST_WORD
    else:
        turn["content"].append({"type": "text", "text": _LAST_WORD})


class _TurnWriter:
    """Turns as templates know them from the Hugging Face hub. One per chat: a result learns from the call that it
    answers which tool it comes from."""

    def __init__(
        self,
        mark: Callable[[str], str],
        *,
        short_call_ids: bool,
        arguments_as_text: bool,
        content: Callable[[ChatMessage], str | list[dict[str, str]]],
    ) -> None:
        self._mark = mark
        self._content = content
        self._arguments_as_text = arguments_as_text
        self._short_call_ids = short_call_ids
        self._tool_names: dict[str, str] = {}

    def turn(self, message: ChatMessage) -> dict[str, Any]:
        mark = self._mark
        turn: dict[str, Any] = {"role": message.role, "content": self._content(message)}
        name = message.name
        if message.role == "tool" and message.tool_call_id is not None:
            turn["tool_call_id"] = mark(self._call_id(message.tool_call_id))
            name = name or self._tool_names.get(message.tool_call_id)
        if name is not None:
            turn["name"] = mark(name)
        if message.reasoning is not None:
            turn["reasoning_content"] = turn["thinking"] = mark(message.reasoning)  # templates read either
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
    """Return the same JSON value with every text in it marked."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, list):
        return [_marked(item, mark) for item in value]
    if isinstance(value, dict):
        return {mark(str(key)): _marked(item, mark) for key, item in value.items()}
    return value
