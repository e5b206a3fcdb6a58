"""Translates a `Grammar` into the language of the matcher. Knows neither the matcher nor a tokenizer.

The gateway checks the same text that the engine compiles. This module validates only what it needs; the matcher's
compiler validates the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.core.closed_schema import closed
from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar

_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_PIECES = re.compile(r"\\.|\(\?<?[=!]|.", re.DOTALL)
_LOOK_AROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
_BOUNDARIES = (r"\b", r"\B")


def for_matcher(pattern: str) -> str:
    r"""Rewrite a client's regular expression for the matcher, whose dialect is Rust's. `\d` and `\w` mean ASCII, as
    in JSON Schema; the matcher's default is the digits and letters of all scripts. `[` in a character class is a
    bracket, not a class inside a class."""
    return "".join(
        r"\[" if piece == "[" and in_class else _ASCII.get(piece, piece)
        for piece, in_class in _pieces(pattern)
    )


def without_assertions(pattern: str) -> str:
    """Return the pattern without look-aheads, look-behinds and word boundaries, which no grammar can enforce. The
    result matches everything that the pattern matches, and more."""
    kept: list[str] = []
    depth = 0  # of nested groups inside an assertion that is skipped
    for piece, in_class in _pieces(pattern):
        if depth:
            depth += 0 if in_class else piece.startswith("(") - (piece == ")")
        elif not in_class and piece in _LOOK_AROUNDS:
            depth = 1
        elif in_class or piece not in _BOUNDARIES:
            kept.append(piece)
    return "".join(kept)


def _pieces(pattern: str) -> Iterator[tuple[str, bool]]:
    """Split a pattern into characters, each with a flag for those inside a character class. An escape, the opening of
    a look-around, and a named class such as `[[:alpha:]]` are one piece each."""
    class_start: int | None = None
    for match in _PIECES.finditer(pattern):
        piece = match[0]
        opens_named = piece == "[" and pattern.startswith(":", match.end())
        yield piece, class_start is not None and not opens_named
        if class_start is None and piece == "[":
            class_start = match.end()
        elif (
            class_start is not None and piece == "]" and pattern[class_start : match.start()] not in ("", "^")
        ):
            class_start = None


# A model may repeat spaces forever; this many spaces in a row are enough for any indentation.
MAX_JSON_SPACES = 40
MAX_TEXT_BEHIND = 64  # characters, after the last structure of an answer that `stops_at_text`
_OPTIONS = "x-guidance"  # the matcher's options in a schema
_LENIENT = "lenient"
# Parts of Lark's notation that may contain angle brackets, and a token's name in angle brackets.
_LARK_PIECES = re.compile(
    r"""//[^\n]*|"(?:\\.|[^"\\\n])*"|(?P<regex>/(?:\\.|[^/\\\n])+/)|(?P<token><[^<>\[\]\s"]+>)"""
)


class ParameterText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of parameters that are not written as a JSON object: `start`, the name, `middle`, the value, `end`.
    Strings are written without quotes, other values as JSON."""

    start: str
    middle: str
    end: str
    text_middle: str | None = None  # in place of `middle`, in front of strings

    def head(self, name: str, *, is_text: bool) -> str:
        middle = self.text_middle if is_text and self.text_middle is not None else self.middle
        return f"{self.start}{name}{middle}"

    def written(self, name: str, value: Any) -> str:
        is_text = isinstance(value, str)
        shown = value if is_text else json.dumps(value, ensure_ascii=False)
        return f"{self.head(name, is_text=is_text)}{shown}{self.end}"


class TaggedText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A structure from `begin` to `end`, with JSON of this schema in between, or with the schema's properties as
    `parameters`."""

    begin: str
    schema: dict[str, Any] = {}
    end: str = ""
    parameters: ParameterText | None = None


class ThinkingBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thoughts from `start` to `end` before the answer, at most `max_tokens` long; then `end`, a single token, is
    forced. The model may skip its thoughts unless the prompt has written `start` (`is_open`). A bound answer has
    `answer_start` before it after thoughts, and `answer_alone` without thoughts."""

    max_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None
    start: str
    end: str
    is_open: bool = False
    answer_start: str = ""
    answer_alone: str = ""
    others: tuple[str, ...] = ()  # possible beginnings of an answer without thoughts; empty: any


class StructuralTags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Free text in which certain openings start a structure: the contents of `Grammar.text` for this kind.

    An opening that begins with one of the `triggers` must continue as one of the `structures`. With `at_least_one`
    there is no free text at all: the answer is `prefix`, at most `max_structures` structures with `separator` between
    them, and `suffix`; or instead JSON of the schema `otherwise`, if there is one. With `stops_at_text` the model may
    write free text, without any of the `triggers`, after a structure. No structure follows such text: the parser of
    the answer stops at the text, and the grammar ends the answer soon after.
    """

    structures: tuple[TaggedText, ...]
    triggers: tuple[str, ...]
    at_least_one: bool = False
    stops_at_text: bool = False
    stop_after_first: bool = False
    max_structures: Annotated[int, Meta(ge=1, le=1000)] | None = None
    prefix: str = ""
    separator: str = ""
    suffix: str = ""
    otherwise: dict[str, Any] | None = None
    thinking: ThinkingBudget | None = None  # before everything else
    answer: Grammar | None = None  # after thoughts, instead of structures; with neither, the text is free


decode_tags = msgspec.json.Decoder(StructuralTags).decode


def grammar_text(grammar: Grammar, special_token_ids: Mapping[str, int]) -> str:
    """Return the matcher's text of a grammar. Raises InvalidRequest when the grammar's own text cannot be read.
    `special_token_ids` are the tokens that have no text of their own."""
    match grammar.kind:
        case "json":
            return _json_grammar({"type": "object"})
        case "json_schema":
            return _json_grammar(_decode(grammar.text, "JSON schema"))
        case "regex":
            return _lark(f"start: {_regex(grammar.text)}")
        case "ebnf":
            return _lark(_numbered(grammar.text, special_token_ids))
        case "choice":
            return _lark("start: " + " | ".join(_literal(choice, {}) for choice in _choices(grammar.text)))
        case "structural_tag":
            try:
                tags = decode_tags(grammar.text)
            except (msgspec.DecodeError, RecursionError) as error:
                raise InvalidRequest(f"The structural tags cannot be read: {error}.") from None
            return _lark(_tags(tags, special_token_ids))


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _json_grammar(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": _with_options(schema)}]})


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with an option to skip keywords that no grammar can enforce, instead of refusing them."""
    return {**schema, _OPTIONS: {_LENIENT: True}}


def is_lenient(schema: Any) -> bool:
    given = schema.get(_OPTIONS) if isinstance(schema, dict) else None
    return isinstance(given, dict) and given.get(_LENIENT) is True


def without_options(schema: Any) -> Any:
    """Return the schema as the client wrote it."""
    if not isinstance(schema, dict):
        return schema
    return {keyword: value for keyword, value in schema.items() if keyword != _OPTIONS}


def _with_options(schema: Any) -> Any:
    """Return the schema with closed objects and our options. They replace the options in a client's schema, except
    for the option that `lenient` sets."""
    if not isinstance(schema, dict):
        return schema
    pattern = f"[ \\n]{{1,{MAX_JSON_SPACES}}}"
    return {**closed(schema), _OPTIONS: {"whitespace_pattern": pattern, _LENIENT: is_lenient(schema)}}


def _decode(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The {what} is not JSON: {error}.") from None


def _choices(text: str) -> list[str]:
    choices = _decode(text, "list of choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise InvalidRequest("The choices must be a list of at least one string.")
    return choices


def _regex(pattern: str) -> str:
    """Return the pattern as a literal between slashes, on one line. Escaped characters stay as they are."""
    return "/" + re.sub(r"\\.|/|\n", _escape, for_matcher(pattern), flags=re.DOTALL) + "/"


def _escape(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0])


def _numbered(lark: str, special_token_ids: Mapping[str, int]) -> str:
    """Return a client's own grammar with numbers in place of the names of tokens."""

    def replaced(match: re.Match[str]) -> str:
        if match["regex"] is not None:
            return for_matcher(match["regex"])
        token_id = special_token_ids.get(match["token"] or "")
        return match[0] if token_id is None else f"<[{token_id}]>"

    return _LARK_PIECES.sub(replaced, lark)


def _literal(text: str, special_token_ids: Mapping[str, int]) -> str:
    """Return quoted text, with special tokens by number."""
    if not text:
        return '""'
    if not special_token_ids:
        return json.dumps(text, ensure_ascii=False)
    longest_first = sorted(special_token_ids, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return " ".join(
        f"<[{special_token_ids[part]}]>"
        if part in special_token_ids
        else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def _tags(tags: StructuralTags, special_token_ids: Mapping[str, int]) -> str:
    if tags.thinking is not None:
        return _thinking_first(tags, tags.thinking, special_token_ids)
    if not tags.structures:
        raise InvalidRequest("Structural tags must name at least one structure.")
    rules = []
    for index, structure in enumerate(tags.structures):
        end = f" {_literal(structure.end, special_token_ids)}" if structure.end else ""
        if structure.parameters is None:
            rules.append(f"body_{index}: %json {json.dumps(_with_options(structure.schema))}")
        else:
            rules.append(_parameters(index, structure.schema, structure.parameters, special_token_ids))
        rules.append(f"closed_{index}: body_{index}{end}")
    names = range(len(tags.structures))
    if tags.at_least_one:
        start = _only_structures(tags, special_token_ids)
        if tags.stops_at_text and not tags.stop_after_first:
            rules.append(_text_behind(tags))
        if tags.otherwise is not None:
            start = f"{start} | otherwise"
            rules.append(f"otherwise: %json {json.dumps(_with_options(tags.otherwise))}")
    else:
        rules += [_triggered(index, tags, special_token_ids) for index in names]
        any_of = " | ".join(f"tag_{index}" for index in names)
        start = f"{any_of} | free_text" if tags.stop_after_first else f"({any_of})* free_text"
        rules.append("free_text: FREE_TEXT\nFREE_TEXT: /(.|\\n)*/")
    return "\n".join([f"start: {start}", *rules])


def _parameters(
    index: int, schema: dict[str, Any], tags: ParameterText, special_token_ids: Mapping[str, int]
) -> str:
    """Return the rule `body_{index}`: the properties of a schema in order, optional unless required."""
    properties = schema.get("properties")
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules, body = [], []
    end = _literal(tags.end, special_token_ids)
    for place, (name, given) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        rule = f"parameter_{index}_{place}"
        start, text_start = (
            _literal(tags.head(name, is_text=is_text), special_token_ids) for is_text in (False, True)
        )
        body.append(rule if name in required else f"{rule}?")
        if isinstance(given, dict) and given.get("type") == "string" and "enum" not in given:
            start = text_start
            if end.startswith("<["):
                rules.append(f"{rule}: {start} TEXT_{index} {end}\nTEXT_{index}: /(.|\\n)*/")
            else:
                rules.append(f"{rule}: {start} value_{index}_{place}")
                rules.append(f"value_{index}_{place}[lazy]: TEXT_{index} {end}\nTEXT_{index}: /(.|\\n)*/")
            continue
        values = given.get("enum") if isinstance(given, dict) else None
        if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
            rules.append(f"{rule}: {text_start} ({' | '.join(_literal(each, {}) for each in values)}) {end}")
            continue
        inner = {**given, **definitions} if isinstance(given, dict) else given
        if is_lenient(schema) and isinstance(inner, dict):
            inner = lenient(inner)
        rules.append(f"{rule}: {start} %json {json.dumps(_with_options(inner))} {end}")
    lines = dict.fromkeys(line for rule in rules for line in rule.split("\n"))
    return "\n".join([f"body_{index}: {' '.join(body) or _EMPTY}", *lines])


_EMPTY = '""'


def _thinking_first(
    tags: StructuralTags, budget: ThinkingBudget, special_token_ids: Mapping[str, int]
) -> str:
    end = special_token_ids.get(budget.end)
    start = _literal(budget.start, special_token_ids)
    first = re.match(r"<\[(\d+)\]>", start)
    if end is None or first is None:
        raise InvalidRequest("The model marks its thoughts with text, so their length cannot be bounded.")
    times = "*" if budget.max_tokens is None else f"{{0,{budget.max_tokens}}}"
    rules = f"thoughts_: <[^{end}]>{times}"
    thoughts = f"thoughts_ <[{end}]>" if budget.is_open else f"{start} thoughts_ <[{end}]>"
    if not tags.structures and tags.answer is None:
        if budget.others:  # thoughts begin with several tokens, of which the first may begin something else
            others = " | ".join(f"{_literal(each, special_token_ids)} free_" for each in budget.others)
            return f"start: {thoughts} free_ | {others}\n{rules}\nfree_: <[*]>*"
        before = f"({thoughts}) free_" if budget.is_open else f"free_ ({thoughts})? free_"
        return f"start: {before}\n{rules}\nfree_: <[^{first[1]}]>*"
    behind, alone = (
        f"{_literal(text, special_token_ids)} " if text else ""
        for text in (budget.answer_start, budget.answer_alone)
    )
    start_rule = f"{thoughts} SPACE_? {behind}answer_"
    if not budget.is_open:
        start_rule += f" | SPACE_? {alone}answer_"
    rules += "\nSPACE_: /[ \\n\\r\\t]{1,8}/"
    return f"start: {start_rule}\n{rules}\n{_lark_of(tags, special_token_ids)}"


def _lark_of(tags: StructuralTags, special_token_ids: Mapping[str, int]) -> str:
    """Return rules; the rule `answer_` describes the answer after thoughts."""
    grammar = tags.answer
    if grammar is None:
        return _tags(msgspec.structs.replace(tags, thinking=None), special_token_ids).replace(
            "start:", "answer_:", 1
        )
    match grammar.kind:
        case "json":
            return f"answer_: %json {json.dumps(_with_options({'type': 'object'}))}"
        case "json_schema":
            return f"answer_: %json {json.dumps(_with_options(_decode(grammar.text, 'JSON schema')))}"
        case "regex":
            return f"answer_: {_regex(grammar.text)}"
        case "choice":
            return "answer_: " + " | ".join(_literal(choice, {}) for choice in _choices(grammar.text))
        case "ebnf":
            own, count = re.subn(r"(?m)^start(?=\s*:)", "answer_", _numbered(grammar.text, special_token_ids))
            if not count:
                raise InvalidRequest("The grammar has no rule with the name start.")
            return own
        case "structural_tag":
            return _tags(decode_tags(grammar.text), special_token_ids).replace("start:", "answer_:", 1)


def _only_structures(tags: StructuralTags, special_token_ids: Mapping[str, int]) -> str:
    def any_behind(before: str) -> str:
        return " | ".join(
            f"{_literal(before + structure.begin, special_token_ids)} closed_{index}"
            for index, structure in enumerate(tags.structures)
        )

    prefix = f"{_literal(tags.prefix, special_token_ids)} " if tags.prefix else ""
    end = f" {_literal(tags.suffix, special_token_ids)}" if tags.suffix else ""
    if tags.stops_at_text and end:
        end = f" ({end})?"
    if tags.stop_after_first:
        return f"{prefix}({any_behind('')}){end}"
    if tags.stops_at_text:
        end += " text_behind?"
    times = "*" if tags.max_structures is None else f"{{0,{tags.max_structures - 1}}}"
    # A separator and the text after it are one literal: a separator alone would match as free text.
    return f"{prefix}({any_behind('')}) ({any_behind(tags.separator)}){times}{end}"


def _text_behind(tags: StructuralTags) -> str:
    holding = "|".join(map(re.escape, tags.triggers))
    without = " & ~" + _regex(rf"(.|\n)*({holding})(.|\n)*") if holding else ""
    return f"text_behind: TEXT_BEHIND\nTEXT_BEHIND: /(.|\\n){{1,{MAX_TEXT_BEHIND}}}/{without}"


def _triggered(index: int, tags: StructuralTags, special_token_ids: Mapping[str, int]) -> str:
    begin = tags.structures[index].begin
    trigger = next((trigger for trigger in tags.triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise InvalidRequest(f"No trigger opens the structural tag {begin[:40]!r}.")
    rest = begin[len(trigger) :]
    opened = f" {_literal(rest, special_token_ids)}" if rest else ""
    if trigger in special_token_ids:
        return f"tag_{index}: FREE_TEXT <[{special_token_ids[trigger]}]>{opened} closed_{index}"
    quoted = json.dumps(trigger, ensure_ascii=False)
    return f"opening_{index}[lazy]: FREE_TEXT {quoted}\ntag_{index}: opening_{index}{opened} closed_{index}"


def special_token_ids(tokenizer_json: bytes) -> dict[str, int]:
    """Return the special tokens of a `tokenizers` file, which stand for no text, by name."""
    added = _decode_tokenizer(tokenizer_json).added_tokens
    return {token.content: token.id for token in added if token.special}


def token_ids_by_number(tokenizer_json: bytes) -> dict[str, int]:
    """Return the tokens that a grammar cannot spell out: special tokens, and all added tokens in angle brackets, such
    as `<tool_call>`, which the matcher always takes for special."""
    added = _decode_tokenizer(tokenizer_json).added_tokens
    return {
        token.content: token.id
        for token in added
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


# Built at import: msgspec describes a class when a decoder of it is built, and two threads must not do that at once.
_decode_tokenizer = msgspec.json.Decoder(_TokenizerFile).decode
