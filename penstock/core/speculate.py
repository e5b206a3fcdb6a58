"""The setting `--speculate`: which drafter an engine uses."""

from __future__ import annotations

from typing import Literal, TypeAlias, cast, get_args

import msgspec

from penstock.core.errors import ConfigError

SpeculateKind: TypeAlias = Literal["auto", "off", "lookup", "draft", "heads"]

# What must follow the kind and an equals sign.
_ARGUMENTS = {"draft": "MODEL", "heads": "FOLDER"}


class Speculate(msgspec.Struct, frozen=True):
    kind: SpeculateKind
    argument: str = ""  # the model of `draft`, the folder of `heads`


def parse_speculate(text: str) -> Speculate:
    """Read the setting. Raises ConfigError for any other text than those that the error lists."""
    kind, equals, argument = text.partition("=")
    if kind in get_args(SpeculateKind) and bool(equals) == bool(argument) == (kind in _ARGUMENTS):
        return Speculate(cast(SpeculateKind, kind), argument)
    forms = [f"{kind}={_ARGUMENTS[kind]}" if kind in _ARGUMENTS else kind for kind in get_args(SpeculateKind)]
    raise ConfigError(f"--speculate must be {', '.join(forms[:-1])} or {forms[-1]}, not '{text}'.")
