"""Finds the families of models. A family is a class of this package that has a name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from penstock.models.decoder import Decoder


def _families_of(module: str) -> Iterator[type[Decoder]]:
    for kind in vars(import_module(module)).values():
        is_own = isinstance(kind, type) and kind.__module__ == module
        if is_own and issubclass(kind, Decoder) and "name" in vars(kind):
            yield kind


FAMILIES: tuple[type[Decoder], ...] = tuple(
    family for file in iter_modules(__path__) for family in _families_of(f"{__name__}.{file.name}")
)
