"""Finds tool calls in an answer, whatever marks them, and tells them from text that only looks like one.

A *section* is the part of an answer that may hold calls: the text between an opening and a closing marker. For models
that write calls without a marker, the whole answer is a section if it begins like a call. A section that holds no
call is passed on as text, with its marker.

`HarmonyParser` reads answers in the harmony format of gpt-oss: messages on channels, of which some are addressed to
functions. The channel `analysis` holds reasoning, `commentary` text before calls, and `final` the answer. A message
to `functions.NAME` is a call. An answer without channels is text.
"""

from __future__ import annotations

import ast
import re
from typing import ClassVar, Literal

import msgspec

from penstock.gateway.tools.json_calls import CallReader, ValueSpan
from penstock.gateway.tools.parser import AnswerSink, SectionParser, SteppedParser, first_marker, held_length

_BETWEEN_CALLS = frozenset(" \t\r\n,;[]")
_NAME = re.compile(r"[\w.-]+")


class CallMarkers(msgspec.Struct, frozen=True, kw_only=True):
    """The markers of calls of a family of models."""

    opening: tuple[str, ...] = ()  # none is the beginning of another
    closing: str | None = None  # None: a section reaches to the end of the answer
    name_end: str | None = None  # where calls may be written as a name, this and the arguments
    id_mark: str | None = None  # between such a name and its end: this and the id of the call
    bare: str = ""  # characters with which an answer begins that is a call without a marker
    writes_python: bool = False  # besides JSON
    hides_markers: bool = False  # they are control tokens, which do not belong into a text

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of which some may be control tokens; a marker may be such a token and more."""
        markers = [*self.opening, self.closing, self.name_end, self.id_mark]
        texts = [text for text in markers if text is not None]
        return (*texts, *(token for text in texts for token in re.findall(r"<[^<>\s]+>", text)))


class CallParser(SectionParser):
    def __init__(self, sink: AnswerSink, markers: CallMarkers, known_names: frozenset[str]) -> None:
        steps = {
            "start": self._step_start,
            "section": self._step_section,
            "call": self._step_call,
            "name": self._step_name,
            "arguments": self._step_arguments,
            "python": self._step_python,
            "rest": self._step_rest,
        }
        super().__init__(sink, markers.opening, steps, hides_markers=markers.hides_markers)
        self._state = "start"
        self._markers = markers
        self._known_names = known_names
        self._reader = CallReader(sink, known_names)
        self._span = ValueSpan()  # of arguments that follow a name

    def finish(self) -> None:
        if self._state == "python":
            self._end_python(self._buffer)
        elif self._state == "rest":
            self._sink.add_arguments(self._buffer)
        elif self._state in ("start", "text"):
            self._end_text()
        elif not self._had_any_call:
            self._fall_back(self._buffer)
        self._buffer = ""

    def _step_start(self) -> bool:
        begun = self._buffer.lstrip()
        if not begun:
            return False
        if self._markers.bare and begun[0] in self._markers.bare:
            self._raw = [self._take(len(self._buffer) - len(begun))]
            self._state = "section"
        else:
            self._state = "text"
        return True

    def _step_section(self) -> bool:
        """Between the calls of a section."""
        if not self._skip_to_call():
            return False
        body, closing = self._buffer, self._markers.closing
        if body[0] == "{":
            self._reader = CallReader(self._sink, self._known_names)
            self._state = "call"
        elif self._markers.name_end is not None and _NAME.match(body):
            self._state = "name"
        elif closing is not None and body.startswith(closing):
            self._pass_over(len(closing), is_call=self._had_call)
            self._leave_section()
        elif closing is not None and closing.startswith(body):
            return False
        elif self._markers.writes_python and not self._had_call and (name := _NAME.match(body)):
            if name.end() == len(body):
                return False
            is_call = body[name.end()] == "(" and (name[0] in self._known_names or name[0] == "print")
            if is_call:
                self._state = "python"
            else:
                self._leave_section()
        else:
            self._leave_section()
        return True

    def _skip_to_call(self) -> bool:
        """Pass over what may stand between calls, a repeated opening included. False asks for more text."""
        while self._buffer:
            again = None
            if self._had_call:
                again = next((text for text in self._markers.opening if self._buffer.startswith(text)), None)
                if again is None and any(text.startswith(self._buffer) for text in self._markers.opening):
                    return False
            if again is None and self._buffer[0] not in _BETWEEN_CALLS:
                return True
            self._pass_over(len(again or " "), is_call=self._had_call)
        return False

    def _step_call(self) -> bool:
        reader = self._reader
        self._pass_over(reader.consume(self._buffer, 0), is_call=reader.has_begun)
        if reader.is_complete:
            self._note_call()
            self._state = "section"
        elif reader.is_broken and reader.has_begun:
            self._note_call()
            self._state = "rest"
        elif reader.is_broken:
            self._leave_section()
        return bool(self._buffer)

    def _step_name(self) -> bool:
        """Read the name of a function, after which its arguments follow."""
        found, name_end = _NAME.match(self._buffer), self._markers.name_end
        assert found is not None
        assert name_end is not None
        behind = found.end()
        if (length := self._id_length(self._buffer[behind:])) is None:
            return False
        behind += length
        rest = self._buffer[behind:]
        if not rest or (rest != name_end and name_end.startswith(rest)):
            return False
        is_call = rest.startswith(("{", name_end)) and found[0] in self._known_names
        if not is_call:
            self._leave_section()
            return True
        self._take(behind + (0 if rest[0] == "{" else len(name_end)))
        self._raw = []
        self._note_call()
        self._sink.begin_call(found[0])
        self._span = ValueSpan()
        self._state = "arguments"
        return True

    def _id_length(self, rest: str) -> int | None:
        """Return the length of the id of a call behind its name, 0 without one; None asks for more text."""
        mark = self._markers.id_mark
        if mark is None or not rest.startswith(mark):
            return None if mark is not None and (not rest or mark.startswith(rest)) else 0
        call_id = _NAME.match(rest, len(mark))
        end = len(mark) if call_id is None else call_id.end()
        return None if end == len(rest) else end

    def _step_arguments(self) -> bool:
        span = self._span
        end = span.consume(self._buffer, 0)
        self._sink.add_arguments(self._take(end))
        if span.is_broken:
            self._state = "rest"
        elif span.is_complete:
            self._state = "section"
        return bool(self._buffer)

    def _step_python(self) -> bool:
        closing = self._markers.closing
        position = -1 if closing is None else self._buffer.find(closing)
        if position < 0 or closing is None:
            return False
        source = self._take(position)
        self._take(len(closing))
        self._end_python(source, closing)
        return True

    def _step_rest(self) -> bool:
        """Arguments that went wrong, up to the end of the section."""
        closing = self._markers.closing
        if closing is None:
            self._sink.add_arguments(self._take(len(self._buffer)))
            return False
        position = self._buffer.find(closing)
        if position < 0:
            self._sink.add_arguments(self._take(len(self._buffer) - held_length(self._buffer, (closing,))))
            return False
        self._sink.add_arguments(self._take(position))
        self._take(len(closing))
        self._leave_section()
        return True

    def _end_python(self, source: str, closing: str = "") -> None:
        calls = python_calls("".join(self._raw_body()) + source, self._known_names)
        if calls is None:
            self._fall_back(source + closing)
            return
        for call in calls:
            self._sink.begin_call(call.name)
            self._sink.add_arguments(call.arguments)
        self._note_call()
        self._raw = []
        self._leave_section()

    def _raw_body(self) -> list[str]:
        """Return the text since the opening marker, such as the bracket of a list."""
        return self._raw[1:]

    def _fall_back(self, rest: str) -> None:
        self._raw.append(rest)
        self._leave_section()

    def _pass_over(self, length: int, *, is_call: bool) -> None:
        """Take from the buffer what belongs to the section; kept, because it may have to go back to the text, until
        it is known to belong to a call."""
        taken = self._take(length)
        if is_call:
            self._raw = []
        else:
            self._raw.append(taken)


_MAX_CHARS = 65_536  # ast takes time and stack with the length of what it reads


class PythonCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON


def python_calls(source: str, known_names: frozenset[str]) -> list[PythonCall] | None:
    """Return the calls in `source`; None if it holds anything else, or calls an unknown tool."""
    if len(source) > _MAX_CHARS:
        return None
    try:
        statements = ast.parse(source.strip()).body
        calls: list[PythonCall] = []
        for statement in statements:
            if not isinstance(statement, ast.Expr | ast.Assign):
                return None
            calls += [_call(node, known_names) for node in _call_nodes(statement.value)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


def _call_nodes(expression: ast.expr) -> list[ast.expr]:
    """Return the calls that an expression consists of: itself, those in a list, or what it prints."""
    if isinstance(expression, ast.List | ast.Tuple):
        return [node for element in expression.elts for node in _call_nodes(element)]
    if (
        isinstance(expression, ast.Call)
        and isinstance(expression.func, ast.Name)
        and expression.func.id == "print"
        and len(expression.args) == 1
    ):
        return _call_nodes(expression.args[0])
    return [expression]


class _JSONNames(ast.NodeTransformer):
    """Writes JSON's constants as Python's: models mix them up."""

    _constants: ClassVar[dict[str, bool | None]] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._constants[node.id]) if node.id in self._constants else node


_JSON_NAMES = _JSONNames()


def _call(node: ast.expr, known_names: frozenset[str]) -> PythonCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call by keywords")
    name = ast.unparse(node.func)
    if name not in known_names:
        raise ValueError(f"{name} is no known tool")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments must be named")
        arguments[keyword.arg] = ast.literal_eval(_JSON_NAMES.visit(keyword.value))
    return PythonCall(name, msgspec.json.encode(arguments).decode())


CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
CONTROL_TOKENS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)
MAX_HEADER_CHARS = 512

_ENDS = (END, CALL, RETURN, START)
_HEADER_STARTS = (CHANNEL, " to=")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(SteppedParser):
    """`known_names` are the functions that may be called. Messages to other recipients are text."""

    def __init__(self, sink: AnswerSink, known_names: frozenset[str]) -> None:
        steps = {
            "start": self._step_start,
            "header": self._step_header,
            "content": self._step_content,
            "between": self._step_between,
        }
        super().__init__("start", steps)
        self._sink = sink
        self._known_names = known_names
        self._kind: Literal["reasoning", "text", "call"] = "text"
        self._span = ValueSpan()  # of a call's arguments
        self._has_text_behind = False  # the arguments

    @property
    def is_reasoning(self) -> bool:
        return self._state == "content" and self._kind == "reasoning"

    def finish(self) -> None:
        if self._state == "content" or (self._state == "start" and self._buffer):
            self._add(self._buffer)
        self._buffer = ""

    def _step_start(self) -> bool:
        """The prompt ends where the header of a message continues; a plain text has none."""
        if self._buffer.startswith(_HEADER_STARTS):
            self._state = "header"
        elif any(start.startswith(self._buffer) for start in _HEADER_STARTS):
            return False
        else:
            self._state = "content"
        return True

    def _step_header(self) -> bool:
        position = self._buffer.find(MESSAGE)
        if position < 0:
            if len(self._buffer) <= MAX_HEADER_CHARS:
                return False
            self._kind, self._state = "text", "content"
            return True
        header = self._take(position)
        self._take(len(MESSAGE))
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        if recipient is not None and recipient[1] in self._known_names:
            self._kind, self._span, self._has_text_behind = "call", ValueSpan(), False
            self._sink.begin_call(recipient[1])
        self._state = "content"
        return True

    def _step_content(self) -> bool:
        found = first_marker(self._buffer, _ENDS)
        if found is None:
            self._add(self._take(len(self._buffer) - held_length(self._buffer, _ENDS)))
            return False
        position, marker = found
        self._add(self._take(position))
        if marker != START:
            self._take(len(marker))
        self._state = "between"
        return True

    def _step_between(self) -> bool:
        """Between messages, where the next header begins. Anything else is text."""
        if self._buffer.startswith(START):
            self._take(len(START))
            self._state = "header"
        elif START.startswith(self._buffer):
            return False
        else:
            self._kind, self._state = "text", "content"
        return True

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._kind == "reasoning":
            self._sink.add_reasoning(text)
        elif self._kind == "call":
            self._add_arguments(text)
        else:
            self._sink.add_text(text)

    def _add_arguments(self, text: str) -> None:
        """Arguments end with their last bracket. The rest is text, unless the arguments are broken."""
        span = self._span
        if not span.is_complete and not span.is_broken:
            end = span.consume(text, 0)
            if end:
                self._sink.add_arguments(text[:end])
            text = text[end:]
        if text and span.is_broken:
            self._sink.add_arguments(text)
        elif text := text if self._has_text_behind else text.lstrip():
            self._has_text_behind = True
            self._sink.add_text(text)
