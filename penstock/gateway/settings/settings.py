"""Everything that may change while a gateway runs, in one document: limits, prices, safety policies, tiers, caches,
the scheduling objective and policy sets.

A document is a TOML file, or JSON from the database. It is checked as a whole: `parse_file` and `check_document` give
settings that every part can use, or a ConfigError that names the key, and the line in a file. `key_lines` finds the
lines: a statement is the fewest lines that parse on their own, so that strings and arrays over several lines need no
care. `live.LiveSettings` puts settings to use.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias

import msgspec
from msgspec import inspect as types

from penstock.core.errors import ConfigError
from penstock.core.identity import Principal
from penstock.core.objective import ObjectiveSettings, PolicySet, check_names
from penstock.core.request import Tier
from penstock.gateway.guards.policies import GuardPolicies
from penstock.gateway.guards.settings import GuardSettings
from penstock.gateway.ledger.prices import PriceSettings
from penstock.gateway.models.settings import ModelSettings
from penstock.gateway.prompts import GenerationRequest
from penstock.gateway.ratelimits.settings import LimitSettings
from penstock.gateway.reuse.replay import IdempotencySettings, ResponseCacheSettings
from penstock.gateway.reuse.reuse import SemanticCacheSettings
from penstock.gateway.reuse.shared_cache import EmbeddingCacheSettings
from penstock.gateway.text.caching import PromptCacheSettings

_URGENCY = {tier: rank for rank, tier in enumerate(Tier)}  # most urgent first


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most urgent tier that is granted, whatever a key may claim: to all workspaces, or to one by its id."""

    best: Tier = Tier.PRIORITY
    workspaces: dict[str, Tier] = {}

    def granted(self, principal: Principal, asked: Tier) -> Tier:
        """Return the tier asked for, or the best that the settings and the caller's key allow."""
        best = self.workspaces.get(principal.workspace_id, self.best)
        return max(asked, best, principal.best_tier, key=_URGENCY.__getitem__)


Path: TypeAlias = tuple[str | int, ...]


def key_lines(text: str) -> dict[Path, int]:
    """Return the line, from 1, of every key and table in a text that parses. A name inside a value of several lines
    counts for the line on which the value begins."""
    found: dict[Path, int] = {}
    table: Path = ()
    lengths: dict[Path, int] = {}  # of arrays of tables
    for line, source in _statements(text):
        statement = tomllib.loads(source)
        if source.lstrip().startswith("["):
            table = _table_path(statement, lengths, is_array=source.lstrip().startswith("[["))
            for depth in range(1, len(table) + 1):
                found.setdefault(table[:depth], line)
        else:
            for path in _paths(statement):
                found.setdefault(table + path, line)
    return found


def nearest_line(lines: Mapping[Path, int], path: Sequence[str | int]) -> int | None:
    """Return the line of a key, or of the closest table around it."""
    for depth in range(len(path), 0, -1):
        line = lines.get(tuple(path[:depth]))
        if line is not None:
            return line
    return None


def _statements(text: str) -> Iterator[tuple[int, str]]:
    lines = text.splitlines()
    start = 0
    while start < len(lines):
        stripped = lines[start].strip()
        end = start + 1
        if stripped and not stripped.startswith("#"):
            while not _parses(source := "\n".join(lines[start:end])) and end < len(lines):
                end += 1
            yield start + 1, source
        start = end


def _parses(source: str) -> bool:
    try:
        tomllib.loads(source)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _table_path(statement: dict[str, Any], lengths: dict[Path, int], *, is_array: bool) -> Path:
    """Return the path of a header. A step through an array of tables goes to its last element so far."""
    path: Path = ()
    inside: Any = statement
    while inside:
        if isinstance(inside, list):
            inside = inside[0]
            continue
        ((key, inside),) = inside.items()
        path += (key,)
        is_last = inside in ({}, [{}])
        if is_array and is_last:
            lengths[path] = lengths.get(path, 0) + 1
        if path in lengths:
            path += (lengths[path] - 1,)
    return path


def _paths(value: Any) -> Iterator[Path]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, inside in items:
        yield (key,)
        for path in _paths(inside):
            yield (key, *path)


_PATH_STEP = re.compile(r"\.([A-Za-z0-9_]+)|\[(\d+)\]|(\[\.\.\.\])")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.+)`$")
_DOTTED = re.compile(r"[A-Za-z_]+(?:\.[\w*-]+)+")
_QUOTED = re.compile(r"'([^']+)'")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field per table of the file."""

    limits: LimitSettings = LimitSettings()
    prices: PriceSettings = PriceSettings()
    guards: GuardSettings = GuardSettings()
    tiers: TierSettings = TierSettings()
    models: ModelSettings = ModelSettings()
    prompt_cache: PromptCacheSettings = PromptCacheSettings()
    response_cache: ResponseCacheSettings = ResponseCacheSettings()
    semantic_cache: SemanticCacheSettings = SemanticCacheSettings()
    embedding_cache: EmbeddingCacheSettings = EmbeddingCacheSettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    policies: dict[str, PolicySet] = {}

    def check(self) -> None:
        """Raise ConfigError for mistakes that the types do not catch."""
        self.limits.check()
        self.prices.check()
        self.models.check()
        self.semantic_cache.check()
        check_names(self.policies)
        GuardPolicies(_ask_nobody).apply(self.guards)  # also compiles patterns, and forgets the result


async def _ask_nobody(request: GenerationRequest) -> NoReturn:
    raise AssertionError("settings that are only checked ask no model")


Document: TypeAlias = dict[str, Any]  # what was said, without the defaults; fractions are Decimal


def parse_settings(text: str, file_name: str) -> Settings:
    return parse_file(text, file_name)[1]


def parse_file(text: str, file_name: str) -> tuple[Document, Settings]:
    try:
        document = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file_name} is not valid TOML: {error}.") from error
    return document, check_document(document, file_name, text)


def check_document(document: Document, file_name: str, text: str = "") -> Settings:
    """Return the settings of a document. Raises ConfigError with the key, and with the line in `text`, if there is
    one."""
    try:
        settings = msgspec.convert(document, Settings)
    except msgspec.ValidationError as error:
        raise _refusal(document, text, file_name, str(error)) from error
    try:
        settings.check()
    except ConfigError as error:
        place = _place(file_name, _mentioned_line(error, text))
        raise ConfigError(f"{place}: {error.message}", hint=error.hint, param=error.param) from error
    return settings


def changed_settings(before: Settings, after: Settings) -> list[str]:
    """One line per setting that differs. Numbers are shown; texts, which may be private, are not."""
    old, new = (dict(_leaves(_builtins(settings))) for settings in (before, after))
    changes = []
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path):
            continue
        shown = [_shown(values.get(path)) for values in (old, new)]
        changes.append(f"{path}: {' → '.join(shown)}" if None not in shown else f"{path} changed")  # type: ignore[arg-type]
    return changes


def _refusal(document: dict[str, Any], text: str, file_name: str, message: str) -> ConfigError:
    what, _, place = message.partition(" - at ")
    path = _resolve(document, place, message)
    unknown = _UNKNOWN_FIELD.match(what)
    if unknown is not None:
        path = (*path, unknown[1])
        close = difflib.get_close_matches(unknown[1], _field_names(), n=1)
        sentence = f"there is no setting '{_dotted(path)}'."
        hint = f"Did you mean '{close[0]}'?" if close else None
    else:
        sentence, hint = f"{_dotted(path)} is wrong: {what[:1].lower()}{what[1:]}.", None
    return ConfigError(
        f"{_place(file_name, nearest_line(key_lines(text), path))}: {sentence}",
        hint=hint,
        param=_dotted(path),
    )


def _resolve(document: dict[str, Any], place: str, message: str) -> Path:
    """Return the path that a validation error is about. The error writes `[...]` in place of a dictionary's key; that
    key is found by validating each entry of the dictionary alone, until one gives the same error."""
    path: Path = ()
    inside: Any = document
    for name, index, unnamed in _PATH_STEP.findall(place):
        step: str | int = name or (int(index) if index else "")
        if unnamed:
            step = next(key for key in inside if _fails_alone(document, path, key, message))
        path += (step,)
        inside = inside[step]
    return path


def _fails_alone(document: dict[str, Any], path: Path, key: str, message: str) -> bool:
    try:
        msgspec.convert(_with_only(document, path, key), Settings)
    except msgspec.ValidationError as error:
        return str(error) == message
    return False


def _with_only(value: Any, path: Path, key: str) -> Any:
    """Return a copy in which the dict at `path` has one key."""
    if not path:
        return {key: value[key]}
    copy: Any = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = _with_only(copy[path[0]], path[1:], key)
    return copy


def _mentioned_line(error: ConfigError, text: str) -> int | None:
    """Return where the error of a part's own check points: to a key it names, or else to the first place of a word it
    quotes."""
    lines = key_lines(text)
    for dotted in [error.param or "", *_DOTTED.findall(error.message)]:
        path = _known_path(dotted, lines)
        if path:
            return nearest_line(lines, path)
    for word in _QUOTED.findall(error.message):
        for number, line in enumerate(text.splitlines(), start=1):
            if word in line:
                return number
    return None


def _known_path(dotted: str, lines: dict[Path, int]) -> Path | None:
    """Return the longest key that `dotted` begins with. Names may hold dots themselves."""
    known = [path for path in lines if f"{dotted}.".startswith(f"{_dotted(path)}.")]
    return max(known, key=len, default=None)


def _field_names() -> list[str]:
    names: set[str] = set()
    waiting: list[types.Type] = [types.type_info(Settings)]
    while waiting:
        match waiting.pop():
            case types.StructType(fields=fields):
                names.update(field.encode_name for field in fields)
                waiting += [field.type for field in fields]
            case types.UnionType(types=members):
                waiting += members
            case types.DictType(value_type=inside) | types.Metadata(type=inside):
                waiting.append(inside)
            case types.VarTupleType(item_type=inside) | types.ListType(item_type=inside):
                waiting.append(inside)
    return sorted(names)


def _place(file_name: str, line: int | None) -> str:
    return file_name if line is None else f"{file_name}, line {line}"


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _builtins(settings: Settings) -> Any:
    return msgspec.to_builtins(settings, builtin_types=(Decimal,))


def _leaves(value: Any, path: Path = ()) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not path):
        return [leaf for key, inside in value.items() for leaf in _leaves(inside, (*path, key))]
    return [(_dotted(path), value)]


def _shown(value: Any) -> str | None:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool | int | float | Decimal) else None


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(document: Document) -> str:
    """Write a settings document as TOML, so that what the database holds can be edited as a file and applied again.
    `tomllib` reads the same document from the text."""
    return "\n".join(_table(document, ())).lstrip("\n")


def _table(table: Document, path: tuple[str, ...]) -> Iterator[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    if path and (values or not tables):
        yield ""
        yield f"[{'.'.join(map(_key, path))}]"
    for key, value in values.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, inside in tables.items():
        yield from _table(inside, (*path, key))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Decimal):
        text = format(value, "f")
        return text if "." in text else f"{text}.0"  # a fraction stays one
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_key(key)} = {_value(inside)}" for key, inside in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return str(value)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML wants DEL escaped as well.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
