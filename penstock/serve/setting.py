"""One setting: its type, its description, and the sentence that explains a wrong value. Knows no setting by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect as types

from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Section:
    """One struct of settings: a table in the file, a heading in `--help`."""

    table: str
    title: str
    struct: type[msgspec.Struct]


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    section: Section
    annotation: Any  # the type that msgspec.convert checks a value against
    value_type: types.Type  # the same without None and metadata
    description: str
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def has_default(self) -> bool:
        """Whether there is a default to show in `--help`."""
        return self.default not in (None, ())

    @property
    def is_list(self) -> bool:
        """Whether the flag can be repeated."""
        return isinstance(self.value_type, types.VarTupleType)

    @property
    def expectation(self) -> str:
        """Describe valid values, as the end of a sentence that begins `--flag must be`."""
        match self.value_type:
            case types.LiteralType(values=values):
                return str(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, values))}"
            case types.BoolType():
                return "true or false"
            case types.IntType() | types.FloatType() as number:
                noun = "a whole number" if isinstance(number, types.IntType) else "a number"
                return f"{noun}{_bounds(number)}"
            case types.VarTupleType():
                return "a list of texts"
            case _:
                return "a text"

    @property
    def metavar(self) -> str:
        match self.value_type:
            case types.LiteralType(values=values):
                return "|".join(map(str, values))
            case types.IntType():
                return "N"
            case types.FloatType():
                return "NUMBER"
            case _:
                return "TEXT"

    def check(self, value: Any, label: str, *, from_text: bool) -> Any:
        """Return `value` in the type of the setting. Raises a ConfigError that calls the value `label`."""
        try:
            return msgspec.convert(value, self.annotation, strict=not from_text)
        except msgspec.ValidationError:
            raise ConfigError(
                f"{label} must be {self.expectation}, not {value!r}.", hint=self.description
            ) from None


def unwrapped(declared: types.Type) -> tuple[types.Type, str]:
    """Return the declared type without None and metadata, and the description in the metadata."""
    if isinstance(declared, types.UnionType):
        declared = next(member for member in declared.types if not isinstance(member, types.NoneType))
    description = ""
    while isinstance(declared, types.Metadata):
        description = (declared.extra_json_schema or {}).get("description", description)
        declared = declared.type
    return declared, description


def _bounds(number: types.IntType | types.FloatType) -> str:
    """Return ` from 0 to 1`, ` above 0`, or an empty string."""
    if number.ge is not None and number.le is not None:
        return f" from {number.ge:,} to {number.le:,}"
    limits = (("above", number.gt), ("of at least", number.ge), ("below", number.lt), ("at most", number.le))
    words = [f"{word} {limit:,}" for word, limit in limits if limit is not None]
    return " " + " and ".join(words) if words else ""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or an empty string if no choice is similar."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
