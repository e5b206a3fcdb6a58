"""Structured output, from what clients write to a core `Grammar`, with every bound and every refusal.

Knows no model, and only those names of wire formats that several APIs share. Before a request leaves the gateway, a
thread compiles its grammar with the compiler of the matcher, to find out whether that is possible.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from penstock.core.errors import InvalidRequest, Overloaded, quoted
from penstock.core.grammar_text import decode_tags, grammar_text, is_lenient, lenient, without_assertions
from penstock.core.lru import LruCache
from penstock.core.request import Grammar
from penstock.gateway.prompts import RequestWarning
from penstock.gateway.text.terminals import expanded_size

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 128 << 10
MAX_EBNF_BYTES = 16 << 10
MAX_REGEX_CHARACTERS = 4096
MAX_CHOICES = 1000
MAX_SCHEMA_DEPTH = 64  # of brackets
MAX_SCHEMA_VALUES = 20_000  # keys and values of all levels
MAX_NOTE_CHARS = 400  # of one warning
MAX_SOFTENED_PATTERNS = 100  # each is compiled to find out whether it can be
CHECK_TIMEOUT_S = 10.0
MAX_TERMINAL_CHARACTERS = 4_000_000  # of a grammar in Lark, written out
MAX_MULTIPLE = 20_000
MAX_MULTIPLE_DIGITS = 400  # of one number, written without an exponent
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)')
_ESCAPE = re.compile(r"\\u00([0-7][0-9a-fA-F])")
_MAX_REMEMBERED_BYTES = 16 << 20
_CHECK_THREADS = 2
_GBNF_MARK = "::="
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})  # of schemas; they hold no schemas
# The fields that grammars come from, mostly; where a particular one came from is no longer known.
_USUAL_PARAMS = {
    "json": "response_format",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "choice": "structured_outputs",
    "ebnf": "structured_outputs",
    "structural_tag": "tools",
}


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of several ways to say what an answer looks like, under the names vLLM gave them."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None

    def to_grammar(self, param: str) -> Grammar | None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise InvalidRequest(f"{param} may have only one of {', '.join(given)}.", param=param)
        if not given:
            return None
        name = f"{param}.{given[0]}"
        if self.json is not None and self.json is not False:
            schema = _decoded(self.json, name) if isinstance(self.json, str) else self.json
            return json_schema(schema, param=name)
        if self.regex is not None:
            return regex(self.regex, param=name)
        if self.choice is not None:
            return choice(self.choice, param=name)
        if self.grammar is not None:
            return ebnf(self.grammar, param=name)
        if self.structural_tag is not None:
            return structural_tag(self.structural_tag, param=name)
        return Grammar("json")


class JsonSchemaFormat(msgspec.Struct):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format` as OpenAI's chat completions write it, with one more type: structural_tag. Other servers take
    a schema beside the type (llama.cpp, Together, Fireworks: `schema`; text-generation-inference: `value`)."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | str | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def to_grammar(self, param: str = "response_format") -> Grammar | None:
        match self.type:
            case "text":
                return None
            case "json_object" | "json":
                return self._schema_beside(param) or Grammar("json")
            case "json_schema":
                return self._schema_grammar(param)
            case "regex" if isinstance(self.value, str):
                return regex(self.value, param=f"{param}.value")
            case "structural_tag":
                tags = {"structures": self.structures or [], "triggers": self.triggers or []}
                return structural_tag(tags, param=param)
        raise InvalidRequest(
            f"{param}.type is {quoted(self.type)}, which is none of text, json_object, json_schema, structural_tag.",
            param=f"{param}.type",
        )

    def _schema_beside(self, param: str) -> Grammar | None:
        """Return the grammar of a schema that stands beside the type."""
        for name, given in (("schema", self.schema), ("value", self.value)):
            if given is not None:
                schema = _decoded(given, f"{param}.{name}") if isinstance(given, str) else given
                return json_schema(schema, strict=False, param=f"{param}.{name}")
        return None

    def _schema_grammar(self, param: str) -> Grammar:
        if self.json_schema is None:
            if (beside := self._schema_beside(param)) is not None:
                return beside
            raise InvalidRequest(
                f"{param}.json_schema is required for the type json_schema.", param=f"{param}.json_schema"
            )
        if self.json_schema.schema is None:
            return Grammar("json")
        return json_schema(
            self.json_schema.schema, strict=bool(self.json_schema.strict), param=f"{param}.json_schema.schema"
        )


def json_schema(schema: dict[str, Any] | bool, *, strict: bool = True, param: str) -> Grammar:
    """A schema that is not strict may use keywords that cannot be enforced; they are then left out."""
    if not strict and isinstance(schema, dict):
        schema = lenient(schema)
    return Grammar("json_schema", _bounded_json(schema, param))


def regex(pattern: str, *, param: str) -> Grammar:
    if len(pattern) > MAX_REGEX_CHARACTERS:
        raise InvalidRequest(
            f"{param} has {len(pattern)} characters; at most {MAX_REGEX_CHARACTERS} are allowed.", param=param
        )
    return Grammar("regex", pattern)


def choice(choices: list[str], *, param: str) -> Grammar:
    if not choices or "" in choices:
        raise InvalidRequest(f"{param} must have at least one choice, and none of them empty.", param=param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(
            f"{param} has {len(choices)} entries; at most {MAX_CHOICES} are allowed.", param=param
        )
    return Grammar("choice", _bounded_json(choices, param))


def ebnf(text: str, *, param: str) -> Grammar:
    """Lark's notation, or GBNF's (`root ::= …`), which `GrammarChecker.check` translates."""
    if len(text.encode()) > MAX_EBNF_BYTES:
        raise InvalidRequest(f"{param} is larger than {MAX_EBNF_BYTES} bytes.", param=param)
    return Grammar("ebnf", text)


def structural_tag(tags: dict[str, Any] | str, *, param: str) -> Grammar:
    text = tags if isinstance(tags, str) else _bounded_json(tags, param)
    try:
        decode_tags(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} cannot be read: {error}.", param=param) from None
    return Grammar("structural_tag", text)


class CheckedGrammar(msgspec.Struct, frozen=True):
    """A grammar as an engine takes it. The warnings name what it does not enforce of a schema that is not strict."""

    grammar: Grammar
    warnings: tuple[RequestWarning, ...] = ()


class GrammarChecker:
    """Finds out whether grammars can be compiled, without making the event loop wait. Remembers those that can.

    A workspace has one check at a time and workspaces take turns, so that the others wait for one slow grammar of a
    workspace, however many it sends."""

    def __init__(self) -> None:
        # One lock per workspace, for as long as a request of the workspace has it or waits for it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._free_threads = asyncio.Semaphore(_CHECK_THREADS)
        self._pool = ThreadPoolExecutor(_CHECK_THREADS, thread_name_prefix="grammar-check")
        # By the workspace and what it asked.
        self._good = LruCache[tuple[str, Grammar], CheckedGrammar](_MAX_REMEMBERED_BYTES, _num_bytes)

    async def check(
        self, grammar: Grammar, special_token_ids: Mapping[str, int], workspace_id: str = "default"
    ) -> CheckedGrammar:
        """Raises InvalidRequest when no engine could compile the grammar, and Overloaded when too many wait."""
        key = grammar.owner(workspace_id), grammar
        if (known := self._good.get(key)) is not None:
            return known
        param, timeout_s = _USUAL_PARAMS[grammar.kind], CHECK_TIMEOUT_S
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"The grammar is larger than {MAX_GRAMMAR_BYTES} bytes.", param=param)
        has_begun = asyncio.Event()
        checking = asyncio.create_task(self._check_in_turn(key, special_token_ids, has_begun))
        checking.add_done_callback(_note_seen)
        beginning = asyncio.create_task(has_begun.wait())
        try:
            await asyncio.wait((checking, beginning), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not has_begun.is_set() and not checking.done():
                raise Overloaded("Too many grammars are being checked.", retry_after_s=1.0)
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(checking)
        except TimeoutError:
            raise InvalidRequest(
                f"The grammar takes more than {timeout_s:g} s to compile.", param=param
            ) from None
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param) from None
        finally:
            beginning.cancel()
            if not has_begun.is_set():
                checking.cancel()

    async def _check_in_turn(
        self, key: tuple[str, Grammar], special_token_ids: Mapping[str, int], has_begun: asyncio.Event
    ) -> CheckedGrammar:
        """Check a grammar when it is the turn of its workspace. The turn and the thread are taken for as long as the
        thread works, even if the caller has gone. Otherwise a workspace with grammars that take minutes would have
        all threads."""
        workspace_id, grammar = key
        turn = self._turns.setdefault(workspace_id, asyncio.Lock())
        async with turn:
            if (known := self._good.get(key)) is not None:  # the request before had the same
                return known
            async with self._free_threads:
                has_begun.set()
                loop = asyncio.get_running_loop()
                good = await loop.run_in_executor(self._pool, _checked, grammar, special_token_ids)
        self._good.put(key, good)
        return good


def _note_seen(checking: asyncio.Task[CheckedGrammar]) -> None:
    """Retrieve an error for which no caller waits; asyncio would log it."""
    if not checking.cancelled():
        checking.exception()


def _num_bytes(key: tuple[str, Grammar], good: CheckedGrammar) -> int:
    """Return the memory that a remembered grammar takes, roughly."""
    return sys.getsizeof(key[1].text) + sys.getsizeof(good.grammar.text) + 1024


def _checked(grammar: Grammar, special_token_ids: Mapping[str, int]) -> CheckedGrammar:
    """Runs in a thread. The matcher's limits, which count its operations, bound how long."""
    if grammar.kind == "ebnf" and _GBNF_MARK in grammar.text:
        try:
            grammar = Grammar("ebnf", any_to_lark(grammar.text))
        except Exception as error:
            raise InvalidRequest(f"The grammar cannot be read: {_first_line(str(error))}.") from None
    notes: list[str] = []
    if _least_common_multiple(grammar.text) > MAX_MULTIPLE:
        softened = _with_softer_schemas(grammar, notes, _without_multiples)
        if _least_common_multiple(softened.text) > MAX_MULTIPLE:
            raise InvalidRequest(
                "multipleOf cannot be enforced: the least common multiple of its numbers is more than "
                f"{MAX_MULTIPLE}."
            )
        grammar = softened
    reason, skipped = _compiled(grammar_text(grammar, special_token_ids))
    if reason is not None:
        softened = grammar
        if grammar.text.count('"pattern') <= MAX_SOFTENED_PATTERNS:
            softened = _with_softer_schemas(grammar, notes, _softened)
        still, skipped = _compiled(grammar_text(softened, special_token_ids))
        if softened == grammar or still is not None:
            raise InvalidRequest(f"The grammar cannot be compiled: {reason}.")
        grammar = softened
    notes += (f"The schema is not enforced completely: {_first_line(each)}." for each in skipped)
    told = list(dict.fromkeys(note[:MAX_NOTE_CHARS] for note in notes))
    for note in told:
        logger.warning("%s", note)
    param = _USUAL_PARAMS[grammar.kind]
    return CheckedGrammar(grammar, tuple(RequestWarning("schema_not_enforced", note, param) for note in told))


class _LarkGrammar(msgspec.Struct):
    lark_grammar: str = ""


class _MatcherGrammars(msgspec.Struct):
    """The part of a matcher's text in which clients can write Lark."""

    grammars: list[_LarkGrammar]


_decode_grammars = msgspec.json.Decoder(_MatcherGrammars).decode


def _compiled(text: str) -> tuple[str | None, list[str]]:
    """Return the error of a grammar, or what the matcher says about parts of it that it skips."""
    for each in _decode_grammars(text).grammars:
        if expanded_size(each.lark_grammar, MAX_TERMINAL_CHARACTERS) > MAX_TERMINAL_CHARACTERS:
            raise InvalidRequest(
                "The grammar's terminals have too many parts: written out, they have more than "
                f"{MAX_TERMINAL_CHARACTERS:,} characters."
            )
    limits = LLParserLimits(verbose_errors=False)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, None, limits=limits)
    return (_first_line("".join(messages[:1])), []) if is_error else (None, messages)


def _least_common_multiple(text: str) -> int:
    """Return the least common multiple of all numbers that schemas name by `multipleOf`, as whole numbers. A matcher
    may need that many states, if a schema combines its demands, but few for zeros at the end. A grammar may spell the
    keyword by escapes."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
    result = 1
    for found in _MULTIPLE.finditer(plain):
        digits = f"{Decimal(found[1]):f}"[:MAX_MULTIPLE_DIGITS].replace(".", "").lstrip("0") or "1"
        short = digits.rstrip("0")
        result = math.lcm(result, int(short if len(short) <= 2 else digits))
        if result > MAX_MULTIPLE:
            break
    return result


def _without_multiples(schema: Any, notes: list[str]) -> Any:
    if isinstance(schema, list):
        return [_without_multiples(each, notes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    softened: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "multipleOf" and isinstance(value, int | float):
            notes.append(
                f"The keyword multipleOf ({str(value)[:40]}) is not enforced: the numbers are too large."
            )
        else:
            softened[keyword] = value if keyword in _DATA_KEYWORDS else _without_multiples(value, notes)
    return softened


def _with_softer_schemas(
    grammar: Grammar, notes: list[str], soften: Callable[[Any, list[str]], Any]
) -> Grammar:
    """Return the grammar without what its lenient schemas demand and no grammar can enforce. `notes` gets a sentence
    about each demand that `soften` leaves out."""
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        if not is_lenient(schema):
            return grammar
        return Grammar(grammar.kind, json.dumps(soften(schema, notes), ensure_ascii=False))
    if grammar.kind != "structural_tag":
        return grammar
    tags = decode_tags(grammar.text)
    structures = tuple(
        msgspec.structs.replace(each, schema=soften(each.schema, notes)) if is_lenient(each.schema) else each
        for each in tags.structures
    )
    otherwise = soften(tags.otherwise, notes) if is_lenient(tags.otherwise) else tags.otherwise
    softened = msgspec.structs.replace(tags, structures=structures, otherwise=otherwise)
    return Grammar(grammar.kind, msgspec.json.encode(softened).decode())


def _softened(schema: Any, notes: list[str]) -> Any:
    """Return a schema with patterns that can be enforced: a pattern loses its assertions, or goes as a whole."""
    if isinstance(schema, list):
        return [_softened(each, notes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    softened: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            if (pattern := _enforceable(value, notes)) is not None:
                softened[keyword] = pattern
        elif keyword == "patternProperties" and isinstance(value, dict):
            known = ((_enforceable(pattern, notes), inner) for pattern, inner in value.items())
            softened[keyword] = {
                pattern: _softened(inner, notes) for pattern, inner in known if pattern is not None
            }
        else:
            softened[keyword] = value if keyword in _DATA_KEYWORDS else _softened(value, notes)
    return softened


def _enforceable(pattern: str, notes: list[str]) -> str | None:
    for softer in (pattern, without_assertions(pattern)):
        schema = {"type": "string", "pattern": softer}
        if _compiled(grammar_text(Grammar("json_schema", json.dumps(schema)), {}))[0] is None:
            if softer != pattern:
                notes.append(
                    f"The pattern {quoted(pattern)} is enforced without its assertions, as {quoted(softer)}."
                )
            return softer
    notes.append(f"The pattern {quoted(pattern)} is not enforced, because no grammar can express it.")
    return None


def _decoded(text: str, param: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}.", param=param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{param} must be a JSON schema: an object.", param=param)
    return schema


def _bounded_json(value: Any, param: str) -> str:
    _check_shape(value, param)
    # The standard library's writer is ten times slower, and a body may be many megabytes large.
    try:
        is_small = len(msgspec.json.encode(value)) <= MAX_GRAMMAR_BYTES
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds half of a surrogate pair.", param=param) from None
    text = json.dumps(value, ensure_ascii=False) if is_small else ""
    if not is_small or len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is larger than {MAX_GRAMMAR_BYTES} bytes.", param=param)
    return text


def _check_shape(value: Any, param: str) -> None:
    """Depth and size, without recursion: the value is a client's."""
    level, num_values = [value], 0
    for _ in range(MAX_SCHEMA_DEPTH):
        num_values += len(level)
        if num_values > MAX_SCHEMA_VALUES:
            raise InvalidRequest(f"{param} has more than {MAX_SCHEMA_VALUES} values.", param=param)
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each.values())
            elif isinstance(each, list | tuple):
                inner.extend(each)
        if not inner:
            return
        level = inner
    raise InvalidRequest(f"{param} is nested more than {MAX_SCHEMA_DEPTH} levels deep.", param=param)


def _first_line(error: str) -> str:
    return next(iter(error.strip().splitlines()), "unknown error").rstrip(" .:")
